"""What the page sees of a run: one view of an active run, of one that has finished, and of one that still waits in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import msgspec

from subnet.errors import NotFound
from subnet.model.plan import ModelUnits
from subnet.protocol.api import MemberView, RunStatus, RunSummary, StallView, StoreCosts
from subnet.protocol.audit_api import AuditCosts, CaseView
from subnet.run.apply import apply
from subnet.run.config import RunConfig
from subnet.run.state import RunState, end_step
from subnet.timing import Clock
from validator.audit_desk import case_view
from validator.copies import Copy
from validator.history import History
from validator.journal_store import JournalStore
from validator.merge_lines import MergeLine, MergeLines
from validator.run_registry import RunEntry

if TYPE_CHECKING:
    from validator.run_session import RunSession

SILENT_S = 3.0
NUM_NOTES = 40
KEPT_RECORDS = 20_000
"""Of a finished run's journal, the last."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is, from its run file and plan; never changes."""

    stages: tuple[tuple[int, int], ...]
    """First and last layer of each."""
    num_parameters: int
    microbatches: int
    tokens_per_step: int
    flops_per_token: float
    """Forward and backward."""
    boundaries: str
    boundary_code: str
    update_delay: int
    lanes: int
    """Of a round; 0: a merge each step."""
    inner_steps: int
    audits: str
    """In words."""


class MemberRow(msgspec.Struct, frozen=True, array_like=True):
    """A member as the page shows it; short, since there may be hundreds. ``state``: working, ready, behind, silent."""

    id: str
    hotkey: str
    stage: int
    state: str
    ready_for_step: int
    leases: int
    items_done: int
    seconds_per_item: float | None
    silent_s: int
    """0 up to :data:`SILENT_S`."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run but its curve and its journal. Times are wall times in seconds."""

    summary: RunSummary
    time_s: float
    facts: RunFacts
    tokens_per_s: float
    mfu: float | None
    """Useful FLOPs by what all members' devices could do, as they say; None where that isn't known."""
    num_merges: int
    num_voids: int
    num_gone: int
    num_joined: int
    num_members: int
    journal_length: int
    journal_head: str
    weights: str
    final_holdout_loss: float | None
    store_bytes: int
    store: StoreCosts | None
    audits: AuditCosts | None
    merges: tuple[MergeLine, ...]
    notes: tuple[str, ...]
    """The last noteworthy events, oldest first."""
    members: tuple[MemberRow, ...] = ()


class RunSight(Protocol):
    """Read-only; nothing here waits."""

    @property
    def run_id(self) -> str: ...

    @property
    def facts(self) -> RunFacts: ...

    @property
    def history(self) -> History: ...

    @property
    def state(self) -> RunState | None: ...

    def status(self) -> RunStatus: ...

    def peak_flops_per_s(self) -> float | None:
        """What all members' devices could do together, as they say; None where that isn't known."""
        ...

    def merges(self) -> tuple[MergeLine, ...]: ...

    def journal_span(self) -> tuple[int, int]:
        """Number of the oldest record that is kept, and of the next one."""
        ...

    def records(self, first: int, end: int) -> Sequence[bytes]: ...


# --- the three kinds -------------------------------------------------------------------------------------------------


@dataclass
class ActiveSight:
    session: RunSession
    weights: str
    place: int

    @property
    def run_id(self) -> str:
        return self.session.entry.stored.run_id

    @property
    def facts(self) -> RunFacts:
        return facts_of_entry(self.session.entry)

    @property
    def history(self) -> History:
        return self.session.coordinator.history

    @property
    def state(self) -> RunState | None:
        return self.session.coordinator.state

    def status(self) -> RunStatus:
        return self.session.status(0, weights=self.weights, place=self.place)

    def peak_flops_per_s(self) -> float | None:
        return self.session.peak_flops_per_s()

    def merges(self) -> tuple[MergeLine, ...]:
        return self.session.merges.lines()

    def journal_span(self) -> tuple[int, int]:
        return self.session.journal.base, len(self.session.journal)

    def records(self, first: int, end: int) -> Sequence[bytes]:
        return self.session.journal.records_between(first, end)


@dataclass
class StoredSight:
    """Of a run that isn't active: finished, or (with nothing but its entry) queued."""

    entry: RunEntry
    summary: RunSummary
    clock: Clock
    history: History = field(default_factory=History)
    state: RunState | None = None
    merge_lines: MergeLines = field(default_factory=MergeLines)
    kept: list[bytes] = field(default_factory=list[bytes])
    length: int = 0
    head: str = ""

    @property
    def run_id(self) -> str:
        return self.entry.stored.run_id

    @property
    def facts(self) -> RunFacts:
        return facts_of_entry(self.entry)

    def status(self) -> RunStatus:
        found = self.history
        return RunStatus(
            summary=self.summary,
            time_ns=self.clock.wall_ns(),
            members=(),
            steps=(),
            tokens_per_s=0.0,
            num_merges=found.num_merges,
            num_voids=found.num_voids,
            num_gone=found.num_gone,
            num_joined=found.num_joined,
            events=tuple(found.lines)[-NUM_NOTES:],
            journal_length=self.length,
            journal_head=self.head,
            store_bytes=0,
            final_holdout_loss=found.final_holdout,
            final_holdout_items=found.final_items,
        )

    def peak_flops_per_s(self) -> float | None:
        return None

    def merges(self) -> tuple[MergeLine, ...]:
        return self.merge_lines.lines()

    def journal_span(self) -> tuple[int, int]:
        return self.length - len(self.kept), self.length

    def records(self, first: int, end: int) -> Sequence[bytes]:
        base = self.length - len(self.kept)
        return self.kept[first - base : end - base]


def read_finished(entry: RunEntry, clock: Clock) -> StoredSight:
    """From the run's journal. Blocks as long as that takes to read: not on the event loop."""
    if not entry.has_journal:
        raise NotFound(f"run {entry.name} has no journal here", hint="was its directory moved away?")
    journal = JournalStore(entry.journal(), read_only=True)
    try:
        history, state, merges = _history_of(journal.copy), journal.start_state(), MergeLines()
        for record in journal.replay():
            history.fold(record)
            merges.note(record)
            apply(state, record.event)
        length = len(journal)
        kept = list(journal.records_between(max(journal.base, length - KEPT_RECORDS), length))
        summary = entry.ended or _finished_summary(entry, history, state)
        return StoredSight(entry, summary, clock, history, state, merges, kept, length, journal.head)
    finally:
        journal.close()


def _history_of(copy: Copy | None) -> History:
    return History() if copy is None else History.load(copy.load_beside().history)


def _finished_summary(entry: RunEntry, history: History, state: RunState) -> RunSummary:
    loss = history.steps[-1].loss if history.steps else None
    step, steps = max(0, state.next_step), entry.config.run.steps if state.run is None else end_step(state)
    return RunSummary(entry.name, entry.stored.run_id, "finished", 0, step, steps, loss, history.root)


# --- what is made of them --------------------------------------------------------------------------------------------


def overview_of(sight: RunSight) -> Overview:
    status = sight.status()
    next_step = sight.state.next_step if sight.state is not None else 0
    return Overview(
        summary=_without_path(status.summary),
        time_s=status.time_ns / 1e9,
        facts=sight.facts,
        tokens_per_s=round(status.tokens_per_s, 1),
        mfu=_mfu(status.tokens_per_s * sight.facts.flops_per_token, sight.peak_flops_per_s()),
        num_merges=status.num_merges,
        num_voids=status.num_voids,
        num_gone=status.num_gone,
        num_joined=status.num_joined,
        num_members=len(status.members),
        journal_length=status.journal_length,
        journal_head=status.journal_head,
        weights=status.weights,
        final_holdout_loss=status.final_holdout_loss,
        store_bytes=status.store_bytes,
        store=status.store,
        audits=status.audits,
        merges=sight.merges(),
        notes=status.events[-NUM_NOTES:],
        members=tuple(_row(member, next_step) for member in status.members),
    )


def _mfu(flops_per_s: float, peak_flops_per_s: float | None) -> float | None:
    return None if not peak_flops_per_s else float(f"{flops_per_s / peak_flops_per_s:.3g}")


def _without_path(summary: RunSummary) -> RunSummary:
    """Where the validator's files lie is nothing for the public."""
    stall = summary.stall
    if stall is None or not stall.dump:
        return summary
    return msgspec.structs.replace(
        summary, stall=StallView(stall.since_ns, stall.no_seal_s, stall.limit_s, stall.waits)
    )


def _row(member: MemberView, next_step: int) -> MemberRow:
    silent = member.heard_s_ago > SILENT_S
    behind = member.ready_for_step < next_step
    state = "silent" if silent else "working" if member.leases else "behind" if behind else "ready"
    speed = member.seconds_per_item
    return MemberRow(
        f"{member.hotkey}#{member.incarnation}",
        member.hotkey,
        member.stage,
        state,
        member.ready_for_step,
        member.leases,
        member.items_done,
        None if speed is None else float(f"{speed:.3g}"),
        round(member.heard_s_ago) if silent else 0,
    )


def facts_of_entry(entry: RunEntry) -> RunFacts:
    return facts_of(entry.config, entry.plan.cuts, entry.plan.units)


def facts_of(config: RunConfig, cuts: tuple[int, ...], units: ModelUnits) -> RunFacts:
    pipeline, audit = config.pipeline, config.audit
    audits = f"{100 * audit.rate:.3g} % of sealed sums; before the seal: {audit.before_seal}" if audit.on else "off"
    return RunFacts(
        stages=tuple((first, end - 1) for first, end in pairwise((*cuts, units.num_layers))),
        num_parameters=units.num_parameters,
        microbatches=pipeline.microbatches,
        tokens_per_step=config.tokens_per_step,
        flops_per_token=sum(units.unit_flops_per_token),
        boundaries=pipeline.boundaries,
        boundary_code=pipeline.boundary_code,
        update_delay=pipeline.update_delay,
        lanes=config.lanes.count if config.lanes.on else 0,
        inner_steps=config.lanes.inner_steps,
        audits=audits,
    )


def cases_of(sight: RunSight) -> tuple[CaseView, ...]:
    if sight.state is None:
        return ()
    return tuple(case_view(number, case) for number, case in sorted(sight.state.audits.cases.items()))
