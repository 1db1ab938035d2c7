"""Phases of a step, told from the fold at the very event that begins them, and who plays the role just then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import CALIBRATION_STEP, Member

if TYPE_CHECKING:
    from fault_sim import Cell, FaultSim


def step_of(cell: Cell, sim: FaultSim) -> int:
    """Which step the phase is looked for in: the first one, but for a maker, since its snapshot must be due.

    Where steps overlap it is the second, which has one before it and one behind it.
    """
    if cell.phase == "calibration":
        return CALIBRATION_STEP
    if cell.phase == "run end":
        return sim.num_steps - 1
    if sim.delay and cell.phase != "snapshot":
        return 1
    return 1 if cell.role == "maker" and cell.phase != "snapshot" else 0


def victim(cell: Cell, state: RunState, event: ev.AnyEvent, stage: int, sim: FaultSim) -> Any:
    """Whom the fault hits if this event begins the cell's phase; None if it doesn't, or nobody plays the role."""
    if state.run is None or stage < 0:
        return None
    phase = "snapshot" if cell.role == "maker" and cell.phase == "run end" else cell.phase
    begins = PHASES[phase](state, event, step_of(cell, sim), stage)
    if begins is None:
        return None
    return ROLES.get(cell.role, _server)(cell, state, stage, begins, sim)


# --- phases: None, or the members that are in the midst of it ------------------------------------------------------

Phase = Callable[[RunState, ev.AnyEvent, int, int], "list[Member] | None"]


def _members(state: RunState, stage: int) -> list[Member]:
    return st.members_of(state, stage)


def _holders(state: RunState, stage: int) -> list[Member]:
    held = st.holders(state, st.group_of(state, stage))
    return sorted(k for k in held if state.members[k].stage == stage)


def _calibration(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _backward(state, event, CALIBRATION_STEP, stage)


def _planned(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _members(state, stage) if isinstance(event, ev.StepPlanned) and event.step == step else None


def _forward(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """A forward of the step is receipted; the member has leases to go."""
    work = st.work_at(state, step)
    if not isinstance(event, ev.Forwarded) or event.step != step or work is None:
        return None
    if event.microbatch >= work.num_training or event.stage != min(stage, st.num_stages(state) - 2):
        return None
    items = work.items[stage]
    return sorted({k for m in work.live[stage] if (k := items[m].member) is not None}) or None


def _backward(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """A gradient is in a member's sum, and the stage isn't done."""
    work = st.work_at(state, step)
    if not isinstance(event, ev.Backwarded) or (event.step, event.stage) != (step, stage) or work is None:
        return None
    found = work.items[stage][event.microbatch]
    return None if st.stage_settled(work, stage) or found.member is None else [found.member]


def _of_group(state: RunState, event: Any, kind: type, step: int, stage: int) -> bool:
    return isinstance(event, kind) and event.step == step and event.group == st.group_of(state, stage)  # type: ignore[attr-defined]


def _freeze(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.Frozen, step, stage) else None


def _commit(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """Who has committed: its partial may be handed over from here on."""
    if not isinstance(event, ev.Committed) or not _of_group(state, event, ev.Committed, step, stage):
        return None
    return [event.commitment.member] if event.commitment.stage == stage else None


def _reduce(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.ReduceOrdered, step, stage) else None


def _slices(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """Some partitions are merged, others not: their slices are under way."""
    if not _of_group(state, event, ev.PartitionMerged, step, stage):
        return None
    merge = st.merge_of(state, step, st.group_of(state, stage))
    return _holders(state, stage) if merge is not None and len(merge.merged) < len(merge.owners) else None


def _merged(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """All partitions are merged, the seed isn't revealed."""
    if not _of_group(state, event, ev.PartitionMerged, step, stage):
        return None
    merge = st.merge_of(state, step, st.group_of(state, stage))
    return _holders(state, stage) if merge is not None and len(merge.merged) == len(merge.owners) else None


def _seed(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.SeedRevealed, step, stage) else None


def _fingerprint(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.Fingerprinted, step, stage) else None


def _check(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.Checked, step, stage) else None


def _trace(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.TraceStarted, step, stage) else None


def _stage_sealed(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    return _holders(state, stage) if _of_group(state, event, ev.StageSealed, step, stage) else None


def _step_sealed(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """In the coordinator's journal, not yet in the log store: nobody else has seen it."""
    return _members(state, stage) if isinstance(event, ev.StepSealed) and event.step == step else None


def _update(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """Somebody has the new state; these haven't said so."""
    if not isinstance(event, ev.Updated) or event.step != step + 1:
        return None
    return [k for k in _members(state, stage) if state.members[k].version != step + 1] or None


def _evaluation(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """An evaluation item is leased here."""
    if not isinstance(event, ev.Leased) or (event.step, event.stage) != (step, stage):
        return None
    return [event.member] if st.is_evaluation(state, event.microbatch) else None


def _snapshot(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    due = isinstance(event, ev.SnapshotOrdered) and event.step == step + 1 and event.stage == stage
    return _members(state, stage) if due else None


def _run_end(state: RunState, event: ev.AnyEvent, step: int, stage: int) -> list[Member] | None:
    """``RunFinished`` is in the coordinator's journal, not yet in the log store."""
    return _members(state, stage) if isinstance(event, ev.RunFinished) else None


PHASES: dict[str, Phase] = {
    "calibration": _calibration,
    "planned": _planned,
    "forward": _forward,
    "backward": _backward,
    "freeze": _freeze,
    "commit": _commit,
    "reduce": _reduce,
    "slices": _slices,
    "merged": _merged,
    "seed": _seed,
    "fingerprint": _fingerprint,
    "check": _check,
    "trace": _trace,
    "stage sealed": _stage_sealed,
    "step sealed": _step_sealed,
    "update": _update,
    "evaluation": _evaluation,
    "snapshot": _snapshot,
    "run end": _run_end,
}


# --- roles ---------------------------------------------------------------------------------------------------------


def _replica(cell: Cell, state: RunState, stage: int, begins: list[Member], sim: FaultSim) -> Member | None:
    honest = [k for k in begins if k.hotkey not in sim.liars and k in state.members]
    return honest[0] if honest else None


def _owner(cell: Cell, state: RunState, stage: int, begins: list[Member], sim: FaultSim) -> Member | None:
    """Owns a partition; while some aren't merged, one of those."""
    merge = state.work.merges[st.group_of(state, stage)] if state.work else None
    if merge is None:
        return None
    left = [owner for p, owner in enumerate(merge.owners) if p not in merge.merged]
    return _replica(cell, state, stage, left or list(merge.owners), sim)


def _contributor(cell: Cell, state: RunState, stage: int, begins: list[Member], sim: FaultSim) -> Member | None:
    merge = state.work.merges[st.group_of(state, stage)] if state.work else None
    if merge is None:
        return None
    return _replica(cell, state, stage, [e.member for e in merge.entries if e.member not in merge.owners], sim)


def _maker(cell: Cell, state: RunState, stage: int, begins: list[Member], sim: FaultSim) -> Member | None:
    ordered = state.orders.get(stage)
    return ordered if ordered in state.members else None


def _joiner(cell: Cell, state: RunState, stage: int, begins: list[Member], sim: FaultSim) -> Member | None:
    me = sim.joiner.me if sim.joiner else None
    info = state.members.get(me) if me else None
    return me if info is not None and info.version != state.next_step else None


def _server(cell: Cell, state: RunState, stage: int, begins: list[Member], sim: FaultSim) -> Any:
    return {"coordinator": sim.coordinator, "log": sim.log, "store": "store"}[cell.role]


ROLES: dict[str, Callable[[Cell, RunState, int, list[Member], FaultSim], Any]] = {
    "first": _replica,
    "middle": _replica,
    "last": _replica,
    "sole": _replica,
    "owner": _owner,
    "contributor": _contributor,
    "maker": _maker,
    "joiner": _joiner,
}
