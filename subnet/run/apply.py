"""``apply(state, event)``: one exhaustive match; the only way a :class:`RunState` changes.

It works in place on a state that has one owner and returns that same state. An event that can't follow the state raises
:class:`InvariantBroken` and leaves the fold unusable; events are numbered, so that a duplicate or a gap raises too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never

from subnet.run import audit_folds
from subnet.run import events as ev
from subnet.run.audits import all_audited, may_plan
from subnet.run.config import RunConfig
from subnet.run.control import apply_run_controlled
from subnet.run.invariants import InvariantBroken, require
from subnet.run.members import apply_gone, apply_joined, apply_updated, drop_replaced, verify_snapshots
from subnet.run.merges import (
    apply_checked,
    apply_committed,
    apply_fingerprinted,
    apply_frozen,
    apply_owner_failed,
    apply_partition_merged,
    apply_reduce_ordered,
    apply_seed_revealed,
    apply_stage_sealed,
    apply_store_routed,
    apply_trace_started,
)
from subnet.run.state import (
    CALIBRATION_STEP,
    GroupSeal,
    Item,
    Merge,
    RunState,
    StepLog,
    StepWork,
    StoredSnapshot,
    config,
    end_step,
    evaluation_settled,
    may_open_ahead,
    new_state,
    num_stages,
    plan,
    stage_settled,
    update_delay,
    works,
)
from subnet.run.work import (
    apply_backwarded,
    apply_forwarded,
    apply_item_failed,
    apply_leased,
    apply_microbatch_skipped,
    apply_not_accumulated,
    apply_parts_made,
    apply_replay_leased,
    apply_revoking,
    apply_voided,
    open_work,
    reopen,
    reset_merge,
)


def fold(records: Iterable[ev.Record]) -> RunState:
    """The state after these records, which start at number 0."""
    state = new_state()
    for record in records:
        apply_record(state, record)
    return state


def apply_record(state: RunState, record: ev.Record) -> RunState:
    """Applies the next record; a duplicate or a gap raises."""
    require(record.number == state.number, f"record {record.number} where {state.number} is due")
    return apply(state, record.event)


def apply(state: RunState, event: ev.AnyEvent) -> RunState:
    """Applies one event, in place."""
    if not isinstance(event, ev.RunPlanned):
        require(state.run is not None, f"{type(event).__name__} before RunPlanned")
    if not isinstance(event, ev.TermStarted | ev.Gone | ev.Appealed):
        require(state.finished is None, f"{type(event).__name__} after RunFinished")
    _dispatch(state, event)
    state.number += 1
    return state


def _dispatch(state: RunState, event: ev.AnyEvent) -> None:
    match event:  # what comes most often first
        case ev.Leased():
            apply_leased(state, event)
        case ev.Forwarded():
            apply_forwarded(state, event)
        case ev.Backwarded():
            apply_backwarded(state, event)
        case ev.RunPlanned():
            apply_run_planned(state, event)
        case ev.TermStarted():
            apply_term_started(state, event)
        case ev.HardwareClassSet():
            state.hardware_class = event
        case ev.Joined():
            apply_joined(state, event)
        case ev.Gone():
            apply_gone(state, event)
        case ev.Updated():
            apply_updated(state, event)
        case ev.StepPlanned():
            apply_step_planned(state, event)
        case ev.ReplayLeased():
            apply_replay_leased(state, event)
        case ev.Revoking():
            apply_revoking(state, event)
        case ev.NotAccumulated():
            apply_not_accumulated(state, event)
        case ev.PartsMade():
            apply_parts_made(state, event)
        case ev.Voided():
            apply_voided(state, event)
        case ev.ItemFailed():
            apply_item_failed(state, event)
        case ev.MicrobatchSkipped():
            apply_microbatch_skipped(state, event)
        case ev.Frozen():
            apply_frozen(state, event)
        case ev.Committed():
            apply_committed(state, event)
        case ev.ReduceOrdered():
            apply_reduce_ordered(state, event)
        case ev.StoreRouted():
            apply_store_routed(state, event)
        case ev.OwnerFailed():
            apply_owner_failed(state, event)
        case ev.PartitionMerged():
            apply_partition_merged(state, event)
        case ev.SeedRevealed():
            apply_seed_revealed(state, event)
        case ev.Fingerprinted():
            apply_fingerprinted(state, event)
        case ev.Checked():
            apply_checked(state, event)
        case ev.TraceStarted():
            apply_trace_started(state, event)
        case ev.StageSealed():
            apply_stage_sealed(state, event)
        case ev.StepSealed():
            apply_step_sealed(state, event)
        case ev.SnapshotOrdered():
            apply_snapshot_ordered(state, event)
        case ev.SnapshotStored():
            apply_snapshot_stored(state, event)
        case ev.RunFinished():
            apply_run_finished(state, event)
        case ev.RunControlled():
            apply_run_controlled(state, event)
        case ev.PolicyChanged():
            pass  # it is about scores, and the run goes on as before
        case _:
            _dispatch_audits(state, event)


def _dispatch_audits(state: RunState, event: ev.AuditEvent) -> None:
    match event:
        case ev.AuditOpened():
            audit_folds.apply_audit_opened(state, event)
        case ev.AuditClosed():
            audit_folds.apply_audit_closed(state, event)
        case ev.WindowClosed():
            audit_folds.apply_window_closed(state, event)
        case ev.WindowAudited():
            audit_folds.apply_window_audited(state, event)
        case ev.CaseOpened():
            audit_folds.apply_case_opened(state, event)
        case ev.WitnessAsked():
            audit_folds.apply_witness_asked(state, event)
        case ev.WitnessSaid():
            audit_folds.apply_witness_said(state, event)
        case ev.CaseClosed():
            audit_folds.apply_case_closed(state, event)
        case ev.Appealed():
            audit_folds.apply_appealed(state, event)
        case ev.Rewound():
            audit_folds.apply_rewound(state, event)
        case _:
            _unknown(event)


def _unknown(event: Never) -> None:
    raise InvariantBroken(f"{type(event).__name__} is no event of this version")


def apply_run_planned(state: RunState, event: ev.RunPlanned) -> None:
    require(state.run is None, "a second RunPlanned")
    stages = [stage for group in event.groups for stage in group.stages]
    require(sorted(stages) == list(range(len(event.cuts))), f"groups cover stages {sorted(stages)}")
    state.run = event


def apply_term_started(state: RunState, event: ev.TermStarted) -> None:
    """Every incarnation ends, and with them everything of the open steps that isn't sealed."""
    require(event.number > state.term, f"term {event.number} after term {state.term}")
    audit_folds.end_audits_before_seal(state, event.hotkey)
    state.term, state.leader, state.nonce = event.number, event.hotkey, event.nonce
    state.members, state.boots, state.orders = {}, {}, {}
    groups = plan(state).groups
    for work in works(state):
        for group, merge in enumerate(work.merges):
            for stage in groups[group].stages:
                void_stage(work, stage, sealed=work is state.work and group in state.seals)
            reset_merge(merge)
        work.held, work.epochs, work.silences, work.replays = {}, {}, {}, {}


def void_stage(work: StepWork, stage: int, *, sealed: bool) -> None:
    """Opens all items of a stage; where it is sealed, only evaluation items. Failures are forgotten."""
    for m, found in work.items[stage].items():
        found.failures = ()
        if found.status != 0 and not (sealed and m < work.num_training):
            reopen(work, stage, m)
        found.member = found.member if found.status else None


def apply_step_planned(state: RunState, event: ev.StepPlanned) -> None:
    ahead = state.work is not None
    require(not ahead or may_open_ahead(state), "a step is planned while another is open")
    due = state.next_step + ahead
    require(event.step == due, f"step {event.step} is planned where {due} is due")
    run: RunConfig = config(state)
    last = end_step(state)
    wanted = 0 if event.step == last else run.num_items
    require(event.step <= last, f"step {event.step} is beyond the run")
    require(not state.paused, f"step {event.step} is planned while the run is paused")
    require(may_plan(state, event.step), f"step {event.step} is planned before its audits have kept up")
    require(event.num_training == wanted, f"step {event.step} has {event.num_training} microbatches, not {wanted}")
    require((event.scalars is None) == (event.step == CALIBRATION_STEP or wanted == 0), "scalars where none belong")
    first = run.num_items
    names = [*range(event.num_training), *range(first, first + event.num_evaluation)]
    stages = range(num_stages(state))
    work = StepWork(
        step=event.step,
        num_training=event.num_training,
        num_evaluation=event.num_evaluation,
        scalars=event.scalars,
        items=[{m: Item() for m in names} for _ in stages],
        undealt=[set(names) for _ in stages],
        live=[set() for _ in stages],
        done=[0 for _ in stages],
        evaluated=[0 for _ in stages],
        merges=[Merge() for _ in plan(state).groups],
    )
    if ahead:
        state.ahead = work
    else:
        state.work = work


def apply_step_sealed(state: RunState, event: ev.StepSealed) -> None:
    """The step is final; replicas update once this is effective."""
    work = open_work(state, event.step)
    settled = all(stage_settled(work, stage) for stage in range(num_stages(state)))
    require(settled, f"step {event.step} is sealed with work to do")
    require(evaluation_settled(state), f"step {event.step} is sealed before its evaluation")
    seal_step(state, event)


def seal_step(state: RunState, event: ev.StepSealed) -> None:
    """As far as it can be told without every stage's items (:mod:`subnet.run.views`)."""
    work = open_work(state, event.step)
    require(event.step == state.next_step, f"step {event.step} is sealed where {state.next_step} is due")
    require(work.num_training > 0, f"step {event.step} only evaluates: nothing to seal")
    groups = range(len(plan(state).groups))
    require(set(groups) == set(state.seals), f"step {event.step} is sealed before its groups")
    seals: tuple[GroupSeal, ...] = tuple(state.seals[group] for group in groups)
    state.sealed[event.step] = StepLog(work.scalars, event.num_counted, event.coefficient_bits, seals)
    state.next_step += 1
    state.work, state.ahead, state.seals, state.roots, state.orders = state.ahead, None, {}, {}, {}
    if update_delay(state) or config(state).audit.on or config(state).snapshot.keep_steps:
        drop_replaced(state)  # what was kept for the step that is sealed now


def apply_snapshot_ordered(state: RunState, event: ev.SnapshotOrdered) -> None:
    require(event.step == state.next_step, f"a snapshot of {event.step} is ordered at {state.next_step}")
    info = state.members.get(event.member)
    require(info is not None and info.stage == event.stage, f"{event.member} can't store stage {event.stage}")
    state.orders[event.stage] = event.member


def apply_snapshot_stored(state: RunState, event: ev.SnapshotStored) -> None:
    require(event.step == state.next_step, f"a snapshot of {event.step} is stored at {state.next_step}")
    info = state.members.get(event.member)
    require(info is not None and info.stage == event.stage, f"{event.member} can't store stage {event.stage}")
    assert info is not None
    stored = state.snapshots.setdefault(event.stage, [])
    require(not stored or stored[-1].step < event.step, f"stage {event.stage} is stored at {event.step} already")
    stored.append(
        StoredSnapshot(event.step, event.manifest, event.root, event.member.hotkey, info.coldkey, verified=False)
    )
    state.orders.pop(event.stage, None)
    verify_snapshots(state, event.stage)


def apply_run_finished(state: RunState, event: ev.RunFinished) -> None:
    require(evaluation_settled(state), "the run ends before its evaluation")
    finish_run(state, event)


def finish_run(state: RunState, event: ev.RunFinished) -> None:
    """As far as it can be told without every stage's items."""
    require(state.finished is None, "a second RunFinished")
    require(all_audited(state), "the run ends before it is audited")
    require(event.step == state.next_step == end_step(state), f"the run ends at {event.step}")
    state.finished, state.work = event, None
