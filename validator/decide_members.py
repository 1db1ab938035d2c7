"""Who is gone, who has the wrong state, which hardware class the run has, and who moves to a stage with nobody."""

from __future__ import annotations

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import Member
from validator.decision import Decision, because
from validator.policy import Policy
from validator.watch import Watch


def decide_members(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    watch.keep_members(set(state.members))
    return (
        decide_lost(now_s, state, watch, policy)
        or _wrong_roots(now_s, state, watch, policy)
        or _hardware_class(state, watch, policy)
        or _empty_stages(now_s, state, watch, policy)
    )


def decide_lost(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Members whose connection was reset and whose probe failed, or who weren't heard for too long."""
    lost: list[Decision] = []
    for member in sorted(state.members):
        silent_s = watch.silent_for(member, now_s)
        if watch.is_lost(member):
            lost.append(Decision(ev.Gone(member, "lost"), because("reset_and_probe_failed", silent_s=silent_s)))
        elif silent_s >= policy.silence_s:
            lost.append(Decision(ev.Gone(member, "lost"), because("silent", silent_s=silent_s)))
    return lost


def _wrong_roots(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Members whose state isn't what more coldkeys have: they have to restore it. Of equals the first goes on."""
    wrong: list[Decision] = []
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


def _empty_stages(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """A stage with nobody for long gets the newest replica of the fullest stage, if that keeps another one."""
    stages = range(st.num_stages(state))
    by_stage = {stage: st.members_of(state, stage) for stage in stages}
    for stage in stages:
        key = ("empty_stage", stage)
        if by_stage[stage]:
            watch.restart_clock(key, now_s)
            continue
        empty_s = watch.age(key, now_s)
        fullest = max(stages, key=lambda s: (len(by_stage[s]), -s))
        if empty_s >= policy.empty_stage_s and len(by_stage[fullest]) > 1:
            watch.restart_clock(key, now_s)
            moved = max(by_stage[fullest], key=lambda k: (k.term, k.number))
            reason = because("stage_is_empty", stage=stage, empty_s=empty_s, from_stage=fullest)
            return [Decision(ev.Gone(moved, "replaced"), reason)]
    return []


def silent_outcome(state: RunState, stage: int, member: Member, code: str, age_s: float) -> Decision:
    """A member didn't answer in time: its partial is void; the second time in a step it is gone."""
    work = state.work
    reason = because(code, stage=stage, age_s=age_s)
    if work is not None and is_second_silence(work, member):
        return Decision(ev.Gone(member, "silent"), reason)
    step = state.next_step
    return Decision(ev.Voided(step, stage, member, "silent"), reason)


def is_second_silence(work: st.StepWork, member: Member) -> bool:
    return work.silences.get(member, 0) >= 1
