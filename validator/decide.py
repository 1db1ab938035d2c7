"""``decide(now, state, watch, policy, rng)``: what the coordinator does next, each with its reason; pure but for ages.

The shell appends and applies the events it gets, starts the actions, and calls again until nothing is returned: a later
part is asked only when the earlier ones have nothing to say, so decisions of one call never contradict each other.
"""

from __future__ import annotations

from subnet.numerics.owners import owners_of
from subnet.run import state as st
from subnet.run.events import Gone
from subnet.run.state import RunState
from validator.audit_words import waiting_for_audits, waiting_for_seal
from validator.decide_audits import decide_audits, decide_stale
from validator.decide_cases import decide_appeals, decide_rewind
from validator.decide_leases import decide_leases
from validator.decide_members import decide_lost, decide_members
from validator.decide_merges import decide_merges
from validator.decide_roots import decide_roots
from validator.decide_steps import decide_steps
from validator.decide_unusable import decide_unusable
from validator.decision import Action, Decision, FinishRun, ProbeSlices, Reason, RunAppeal, RunAudit, TraceVerdict
from validator.policy import Policy
from validator.randomness import Randomness
from validator.suspects import note_lost, waiting_for_suspect
from validator.watch import Watch

__all__ = [
    "Action",
    "Decision",
    "FinishRun",
    "Policy",
    "ProbeSlices",
    "Reason",
    "RunAppeal",
    "RunAudit",
    "TraceVerdict",
    "decide",
    "waiting_for",
]


def decide(now_s: float, state: RunState, watch: Watch, policy: Policy, rng: Randomness) -> list[Decision]:
    """Decisions that can all be carried out; empty when the coordinator can only wait."""
    if state.run is None:
        return []
    if state.finished is not None:
        return decide_lost(now_s, state, watch, policy) or decide_appeals(state, watch)
    watch.at_step(state.next_step, state.audits.branch)
    members = decide_members(now_s, state, watch, policy)
    for decision in members:
        if isinstance(decision.what, Gone) and decision.what.why == "lost":
            note_lost(now_s, state, watch, decision.what.member)
    return (
        members
        or decide_stale(state)
        or decide_roots(now_s, state, watch, policy)
        or decide_unusable(state, watch)
        or decide_rewind(state, watch)
        or decide_steps(now_s, state, watch, policy)
        or decide_leases(now_s, state, watch, policy, rng)
        or decide_merges(now_s, state, watch, policy, rng)
        or decide_audits(now_s, state, watch, policy)
    )


def waiting_for(state: RunState, watch: Watch, now_s: float, policy: Policy | None = None) -> str:
    """In plain words, what the run waits for; empty when it is finished."""
    if state.run is None:
        return "a run to be submitted"
    if state.finished is not None:
        return ""
    if watch.store.trouble:
        return f"the store ({watch.store.trouble})"
    if state.hardware_class is None:
        votes = max((len(keys) for keys in watch.class_votes.values()), default=0)
        return f"the run's hardware class to be settled ({votes} coldkeys agree so far)"
    stages = range(st.num_stages(state))
    empty = [stage for stage in stages if not st.members_of(state, stage)]
    if empty:
        return f"a miner for {_stages(empty)}"
    if not st.evaluation_settled(state) or state.work is not None:
        behind = [stage for stage in stages if not st.ready(state, stage)]
        if behind:
            names = ", ".join(str(k) for stage in behind for k in st.members_of(state, stage))
            return f"{_stages(behind)} to have the state of step {state.next_step} ({names})"
    if suspect := waiting_for_suspect(state, watch, policy or Policy()):
        return suspect
    audits = waiting_for_audits(state, watch)
    if state.work is None:
        if state.paused:
            return "its owner, who has paused it"
        if watch.held:
            return watch.held
        return _waiting_for_snapshots(state) or audits or f"step {state.next_step} to begin"
    return _waiting_for_work(state) or _waiting_for_snapshots(state) or audits or "the step's seal"


def _stages(stages: list[int]) -> str:
    return ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))


def _waiting_for_snapshots(state: RunState) -> str:
    if not st.snapshot_due(state):
        return ""
    asked = [f"{member} (stage {stage})" for stage, member in sorted(state.orders.items())]
    return f"the snapshot of step {state.next_step} by {', '.join(asked)}" if asked else ""


def _waiting_for_work(state: RunState) -> str:
    work = state.work
    if work is None:
        return ""
    for stage in range(st.num_stages(state)):
        group = st.group_of(state, stage)
        if group in state.seals and not work.live[stage] and not work.undealt[stage]:
            continue
        if work.live[stage] or work.undealt[stage]:
            return _waiting_for_items(state, work, stage)
        merge = work.merges[group]
        if merge.phase == st.FROZEN:
            names = sorted(str(k) for k in st.holders(state, group) - set(merge.commitments))
            return f"commitments of stage {stage} by {', '.join(names)}"
        if merge.phase == st.REDUCING:
            left = [p for p in range(len(merge.owners)) if p not in merge.merged]
            names = sorted({str(owner) for p in left for owner in owners_of(merge, p)})
            return f"{len(left)} merged partitions of stage {stage} by {', '.join(names)}"
        if merge.phase == st.REVEALED:
            return _waiting_for_checks(state, group, stage)
    if not st.evaluation_settled(state):
        return "the evaluation"
    return ""


def _waiting_for_items(state: RunState, work: st.StepWork, stage: int) -> str:
    items = work.items[stage]
    failing = [m for m in work.undealt[stage] if len(items[m].failures) > 1]
    if failing and st.num_counted(work) == 1:
        return (
            f"microbatch {failing[0]} of step {work.step}, the last one left, to succeed: {items[failing[0]].failures}"
        )
    names = sorted({str(items[m].member) for m in work.live[stage]})
    by = f" by {', '.join(names)}" if names else ""
    return f"{len(work.live[stage]) + len(work.undealt[stage])} items of stage {stage} at step {work.step}{by}"


def _waiting_for_checks(state: RunState, group: int, stage: int) -> str:
    assert state.work is not None
    merge = state.work.merges[group]
    if merge.tracing:
        return f"the trace of stage {stage}'s merge"
    late = [str(entry.member) for entry in merge.entries if entry.member not in merge.fingerprints]
    if late:
        return f"fingerprints of stage {stage} by {', '.join(late)}"
    unchecked = [
        str(k) for s in st.group_shape(state, group).stages for k in st.ready(state, s) if k not in merge.checks
    ]
    if unchecked:
        return f"checks of stage {stage} by {', '.join(unchecked)}"
    return waiting_for_seal(state, stage) or "all items of the step"
