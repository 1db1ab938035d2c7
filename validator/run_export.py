"""Where a run's states lie: snapshots by stage of one step, from the active fold or from a finished run's journal."""

from __future__ import annotations

import msgspec

from subnet.audit.build import state_ref
from subnet.audit.ledger import WorkLedger
from subnet.errors import NotFound
from subnet.protocol.api import ExportInfo, StageSnapshot
from subnet.run.apply import apply
from subnet.run.state import RunState, num_stages, restore_point, stored_snapshot
from validator.journal_store import JournalStore
from validator.run_registry import RunEntry


def finished_state(entry: RunEntry) -> RunState:
    """The fold of a run that isn't active; :class:`NotFound` if it never was. Reads the whole journal: not on the loop."""
    if not entry.has_journal:
        raise NotFound(f"run {entry.name} has not begun", hint="see iota run list for its place in the queue")
    journal = JournalStore(entry.journal(), read_only=True)
    try:
        state = journal.start_state()
        for record in journal.replay():
            apply(state, record.event)
        return state
    finally:
        journal.close()


def _states(entry: RunEntry, state: RunState, step: int) -> tuple[bytes, ...]:
    """Where the stages' states at a step without snapshots come from: a snapshot before it and the log."""
    steps = sorted({s.step for kept in state.snapshots.values() for s in kept})
    hint = f"0 to {max(state.next_step, 0)}; snapshots are kept of {steps}, and the log behind the newest"
    if not 0 <= step <= state.next_step:
        raise NotFound(f"run {entry.name} has no state after {step} updates", hint=hint)
    ledger = WorkLedger()
    try:
        refs = [state_ref(state, ledger, stage, step) for stage in range(num_stages(state))]
    except NotFound as error:
        raise NotFound(f"run {entry.name} has no state after {step} updates any more", hint=hint) from error
    return tuple(msgspec.msgpack.encode(ref) for ref in refs)


def export_info(entry: RunEntry, state: RunState, step: int | None) -> ExportInfo:
    """The newest step of which every stage has a snapshot, or the one asked for, whether it has snapshots or not."""
    if state.run is None:
        raise NotFound(f"run {entry.name} has not begun")
    stages = range(num_stages(state))
    wanted = step
    if wanted is None:
        stored = [{snapshot.step for snapshot in state.snapshots.get(stage, [])} for stage in stages]
        common = set[int].intersection(*stored)
        wanted = max(common) if common else min(restore_point(state, stage).version for stage in stages)
    found: list[StageSnapshot] = []
    states: tuple[bytes, ...] = ()
    for stage in stages:
        snapshot = stored_snapshot(state, stage, wanted)
        if snapshot is None:
            found, states = [], _states(entry, state, wanted)
            break
        found.append(StageSnapshot(stage, snapshot.manifest, snapshot.root, snapshot.verified))
    finished = state.finished
    return msgspec.structs.replace(
        plan_info(entry, state),
        step=wanted,
        snapshots=tuple(found),
        run_root=finished.root if finished is not None and wanted == state.next_step else None,
        states=states,
    )


def plan_info(entry: RunEntry, state: RunState | None) -> ExportInfo:
    """The run as its members compute it, without a state: of a queued run (None) and of one that has just begun as well."""
    submission = entry.stored.submission
    hardware_class = state.hardware_class if state is not None else None
    return ExportInfo(
        step=-1 if state is None else state.next_step,
        model_config=submission.model_config,
        config=msgspec.msgpack.encode(entry.config),
        tokenizer=submission.tokenizer,
        snapshots=(),
        run_root=None,
        unit_tensors=submission.unit_tensors,
        unit_flops_per_token=submission.unit_flops_per_token,
        tied=submission.tied,
        cuts=entry.plan.cuts,
        hardware_class=None if hardware_class is None else hardware_class.hashes,
        carried=submission.carried,
        data=submission.data,
    )
