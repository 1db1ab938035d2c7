"""Who is gone, who has the wrong state, which hardware class the run has, and who moves to another stage."""

from __future__ import annotations

from math import inf

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import Member
from validator.decision import Decision, because
from validator.policy import Policy
from validator.replicas import decide_moves
from validator.watch import Watch


def decide_members(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    if watch.index is not None:
        watch.index.sync(state)
    watch.keep_members(state.members)
    return (
        decide_lost(now_s, state, watch, policy)
        or _wrong_roots(now_s, state, watch, policy)
        or _hardware_class(state, watch, policy)
        or decide_moves(now_s, state, watch, policy)
    )


def decide_lost(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Members whose connection was reset and whose probe failed, who weren't heard for too long, or who hang."""
    lost: list[Decision] = []
    index = watch.index.sync(state) if watch.index is not None else None
    if index is not None and now_s < index.lost_look_s and index.lost_looked == index.membership:
        return []
    look_s = inf
    for member in sorted(state.members) if index is None else index.members:
        if index is not None:
            limits = (policy.silence_s, policy.hung_s, policy.probe_quiet_s)
            look_s = min(look_s, watch.lost_look_s(member, now_s, *limits))
        silent_s, hung_s = watch.silent_for(member, now_s), watch.hung_for(member, now_s)
        if watch.is_lost(member, now_s, policy.probe_quiet_s):
            reason = because("reset_and_probe_failed", silent_s=silent_s)
        elif silent_s >= policy.silence_s:
            reason = because("silent", silent_s=silent_s)
        elif hung_s >= policy.hung_s:
            reason = because("main_process_hangs", hung_s=hung_s)
        else:
            continue
        lost.append(Decision(ev.Gone(member, "lost"), reason))
    if index is not None:
        index.lost_look_s, index.lost_looked = look_s, index.membership
    return lost


def _wrong_roots(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Members whose state isn't what more coldkeys have: they have to restore it. Of equals the first goes on where
    nobody audits; else the log is asked (:mod:`validator.decide_roots`)."""
    wrong: list[Decision] = []
    if all(len(votes) < 2 for votes in state.roots.values()):
        return wrong  # whoever is at this step has reported one of these
    for member, info in sorted(state.members.items()):
        agreed = st.agreed_root(state, info.stage)
        if info.version != state.next_step or agreed is None or info.root == agreed:
            continue
        votes = state.roots[info.stage]
        age_s = watch.age(("root", member), now_s)
        if len(votes[info.root]) < len(votes[agreed]) or age_s >= policy.check_s:
            reason = because("root_differs", root=info.root, agreed=agreed, age_s=age_s)
            wrong.append(Decision(ev.Gone(member, "checksum"), reason))
    return wrong


def _hardware_class(state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    if state.hardware_class is not None:
        return []
    for hashes, coldkeys in sorted(watch.class_votes.items()):
        if len(coldkeys) >= policy.class_coldkeys:
            names = ",".join(sorted(coldkeys))
            return [Decision(ev.HardwareClassSet(hashes, names), because("coldkeys_agree", num_coldkeys=len(coldkeys)))]
    return []


def silent_outcome(
    state: RunState, stage: int, member: Member, code: str, age_s: float, step: int | None = None
) -> Decision:
    """A member didn't answer in time: its partial (of the step that is merged, or ``step``) is void.

    The second time in a step it is gone.
    """
    step = state.next_step if step is None else step
    work = st.work_at(state, step)
    reason = because(code, stage=stage, age_s=age_s)
    if work is not None and is_second_silence(work, member):
        return Decision(ev.Gone(member, "silent"), reason)
    return Decision(ev.Voided(step, stage, member, "silent"), reason)


def is_second_silence(work: st.StepWork, member: Member) -> bool:
    return work.silences.get(member, 0) >= 1
