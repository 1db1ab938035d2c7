"""Replicas of a stage that differ about its state, no root having more coldkeys than another: snapshot and log say who is right.

Nobody works at the stage meanwhile. The validator makes the state itself, twice where somebody reported another root, and
accuses whoever did; that one is out at once, so that the root of the others is the agreed one, while a third party runs the
bundle. Where it can't be made here, everybody who differs restores the state anew.
"""

from __future__ import annotations

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import Member
from validator.decision import Decision, RootResult, RunRoots, because
from validator.policy import Policy
from validator.watch import Watch


def decide_roots(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Stage by stage; nothing where nobody audits."""
    if not st.config(state).audit.on:
        return []
    known, version = watch.audits.roots, state.next_step
    for key in [key for key in known if key[0] != version]:
        del known[key]
    for stage, votes in sorted(state.roots.items()):
        if len(votes) < 2 or st.agreed_root(state, stage) is not None:
            continue
        reported = _reported(state, stage)
        if len({root for _, root in reported}) < 2:
            continue  # nobody is left of those who differed
        result = known.pop((version, stage), None)
        decided = _asked(now_s, state, stage, watch, policy) if result is None else _judged(state, result, watch, now_s)
        if decided:
            return decided
    return []


def _reported(state: RunState, stage: int) -> list[tuple[Member, str]]:
    members = sorted(state.members.items())
    return [(k, info.root) for k, info in members if (info.stage, info.version) == (stage, state.next_step)]


def _asked(now_s: float, state: RunState, stage: int, watch: Watch, policy: Policy) -> list[Decision]:
    """Once all have reported, or had the time to: one more may make a majority."""
    version = state.next_step
    age_s = watch.age(("roots", version, stage), now_s)
    behind = any(info.version != version for info in state.members.values() if info.stage == stage)
    pause, action = ("roots again", version, stage), RunRoots(version, stage)
    if (behind and age_s < policy.audit.roots_s) or action in watch.started:
        return []
    if watch.is_timed(pause) and watch.age(pause, now_s) < policy.audit.again_s:
        return []
    watch.started.add(action)
    return [Decision(action, because("roots_differ", stage=stage, num_roots=len(state.roots[stage])))]


def _judged(state: RunState, result: RootResult, watch: Watch, now_s: float) -> list[Decision]:
    """Cases against those that still say what was found to be wrong."""
    reported = dict(_reported(state, result.stage))
    if not result.root:
        return _restored(sorted(reported), "roots_cant_be_told")
    watch.restart_clock(("roots again", result.version, result.stage), now_s)
    decided: list[Decision] = []
    for accused in result.accused:
        hotkey = accused.member.hotkey
        gone = accused.member not in reported or reported[accused.member] == result.root
        if gone or hotkey in state.convicted or hotkey in state.audits.quarantined:
            continue
        event = ev.CaseOpened(
            case=state.audits.num_cases + 1 + len(decided),
            hotkey=hotkey,
            member=accused.member,
            step=result.version - 1,
            stage=result.stage,
            charge=au.ROOT,
            bundle=accused.bundle,
            digest=accused.digest,
            sealed=False,
            claimed=accused.claimed,
        )
        decided.append(Decision(event, because("root_is_another", root=result.root, stage=result.stage)))
    return decided


def _restored(members: list[Member], code: str) -> list[Decision]:
    return [Decision(ev.Gone(member, "checksum"), because(code)) for member in members]
