"""What was sealed, as long as it can be audited: a pure projection of the journal, the same for whoever folds the same records.

The fold forgets an open step's items once it is sealed; an audit needs them later. A :class:`WorkLedger` is told of each event
*before* it is applied and keeps: per sealed (step, stage) the evidence to build a case from, until the step's window is
audited (:func:`subnet.run.audits.evidence_from`); the roots that replicas agreed on, as far back as the log reaches; and a
small record of each partial, back to the rewind horizon. Nothing is kept of a run without audits.
"""

from __future__ import annotations

import msgspec

from subnet.audit.case import FingerprintValues, MergedCase
from subnet.run import audits
from subnet.run import events as ev
from subnet.run.state import (
    RunState,
    StepWork,
    agreed_root,
    config,
    group_shape,
    num_counted,
    num_stages,
    partitions_of,
)
from subnet.words import Commitment, Member

PASSED, FAILED, UNDECIDED, UNOPENED = "passed", "failed", "undecided", "unopened"
_RANK = {"": 0, UNDECIDED: 1, UNOPENED: 2, PASSED: 3, FAILED: 4}
"""A later outcome of a partial replaces an earlier one of at most its rank; only a closed case takes back ``failed``."""


class SealedItem(msgspec.Struct, frozen=True, array_like=True):
    """One item of a sealed stage. ``x`` and ``gradient`` are the hashes its neighbours had receipted when the stage was sealed:
    redoing them later can't change what an honest member was given. "" at the ends of the pipeline."""

    x: str
    gradient: str
    forward: str
    backward: str
    loss_bits: int | None


class SealedStage(msgspec.Struct, frozen=True, array_like=True):
    """A stage's part of a group's seal: what a case is made of."""

    step: int
    stage: int
    group: int
    version: int
    seed: str
    entries: tuple[Commitment, ...]
    """Of this stage alone, in the manifest's order."""
    fingerprints: dict[Member, FingerprintValues]
    items: dict[int, SealedItem]
    merged: tuple[MergedCase, ...]
    """The partitions that the stage holds."""
    total_items: int
    skipped: tuple[int, ...]
    unchecked: bool
    """Whether all live replicas of the stage belonged to one coldkey."""


class PartialRecord(msgspec.Struct, frozen=True, array_like=True):
    """One member's sealed sum of (step, stage). ``branch`` is that of the run when it was sealed."""

    step: int
    stage: int
    member: Member
    num_items: int
    unchecked: bool
    branch: int
    outcome: str = ""
    """"" not audited (yet), ``passed``, ``failed``, ``undecided`` (evidence lost) or ``unopened`` (evidence refused)."""


class _Open(msgspec.Struct, frozen=True, array_like=True):
    step: int
    stage: int
    number: int


class _Data(msgspec.Struct):
    sealed: dict[int, dict[int, SealedStage]] = {}
    """By step and stage."""
    partials: dict[int, dict[int, list[PartialRecord]]] = {}
    """By step and stage, of the present branch."""
    old: list[PartialRecord] = []
    """Of earlier branches."""
    roots: dict[int, dict[int, str]] = {}
    """By number of updates and stage."""
    open: dict[int, _Open] = {}
    cases: dict[int, tuple[int, int, Member]] = {}
    windows: dict[int, tuple[int, int]] = {}
    """By closed window: its last step, and the branch in which it was closed."""
    branch: int = 0


_decoder = msgspec.msgpack.Decoder(_Data)


class WorkLedger:
    """Feed it every event before it is applied; ask it what was sealed and what has been audited."""

    def __init__(self) -> None:
        self._data = _Data()

    def dump(self) -> bytes:
        """Everything, for :meth:`load`."""
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        """In place; feed it on from the record that :meth:`dump` was made before."""
        self._data = _decoder.decode(data)

    # --- the fold ------------------------------------------------------------------------------------------------

    def note(self, state: RunState, event: ev.AnyEvent) -> None:
        """``state`` is the fold that ``event`` is about to be applied to."""
        if not isinstance(event, _NOTED) or state.run is None or not state.run.config.audit.on:
            return
        match event:
            case ev.StageSealed():
                self._stage_sealed(state, event)
            case ev.StepSealed():
                self._note_roots(state)
                self._drop(state)
            case ev.RunFinished():
                self._note_roots(state)
            case ev.AuditOpened():
                if event.by == state.leader:  # what another validator finds isn't journaled as an audit's outcome
                    self._data.open[event.audit] = _Open(event.step, event.stage, event.number)
            case ev.AuditClosed():
                self._audit_closed(event)
            case ev.WindowClosed():
                self._data.windows[event.window] = (event.last_step, self._data.branch)
            case ev.TermStarted():
                self._data.open = {audit: found for audit, found in self._data.open.items() if not found.number}
            case ev.CaseOpened():
                if event.charge == audits.PARTIAL:
                    self._data.cases[event.case] = (event.step, event.stage, event.member)
            case ev.CaseClosed():
                if event.outcome == "cleared":
                    self._cleared(event.case)
            case ev.Appealed():
                if not event.upheld:
                    self._cleared(event.case)
            case ev.Rewound():
                self._rewound(event)

    def _stage_sealed(self, state: RunState, event: ev.StageSealed) -> None:
        work = state.work
        if work is None:
            return
        merge, group = work.merges[event.group], event.group
        for stage in group_shape(state, group).stages:
            entries = tuple(entry for entry in event.entries if entry.stage == stage)
            parts = {p: merge.merged[p] for p in partitions_of(state, group, stage)}
            sealed = SealedStage(
                step=event.step,
                stage=stage,
                group=group,
                version=event.version,
                seed=merge.seed,
                entries=entries,
                fingerprints={
                    e.member: merge.fingerprints[e.member] for e in entries if e.member in merge.fingerprints
                },
                items={
                    m: _sealed_item(state, work, stage, m) for m in sorted(m for e in entries for m in e.microbatches)
                },
                merged=tuple(
                    MergedCase(p, merge.owners[p], part.hash, part.blob, part.size_bytes, part.squares)
                    for p, part in parts.items()
                ),
                total_items=num_counted(work),
                skipped=tuple(sorted(m for m in work.skipped if m < work.num_training)),
                unchecked=stage in event.unchecked_stages,
            )
            self._data.sealed.setdefault(event.step, {})[stage] = sealed
            self._data.partials.setdefault(event.step, {})[stage] = [
                PartialRecord(
                    event.step,
                    stage,
                    entry.member,
                    len(entry.microbatches),
                    sealed.unchecked,
                    self._data.branch,
                    PASSED if entry.member in merge.passed else "",
                )
                for entry in entries
            ]

    def _note_roots(self, state: RunState) -> None:
        """Replicas have reported all they will of the state that the run leaves now."""
        known = {stage: agreed_root(state, stage) for stage in range(num_stages(state))}
        self._data.roots[state.next_step] = {stage: root for stage, root in known.items() if root}

    def _drop(self, state: RunState) -> None:
        """At each step's end: what no audit, no rewind and no restored state can ask for any more."""
        data, evidence = self._data, audits.evidence_from(state)
        horizon = min(evidence, state.next_step - config(state).audit.horizon_steps)
        log = min(min(state.sealed, default=state.next_step), evidence)
        for step in [step for step in data.sealed if step < evidence]:
            del data.sealed[step]
        for step in [step for step in data.partials if step < horizon]:
            del data.partials[step]
        for step in [step for step in data.roots if step < log]:
            del data.roots[step]
        data.old = [record for record in data.old if record.step >= horizon]
        for window in [window for window, (last, _) in data.windows.items() if last < evidence]:
            del data.windows[window]
        for case in [case for case, (step, _, _) in data.cases.items() if step < horizon]:
            del data.cases[case]

    def _audit_closed(self, event: ev.AuditClosed) -> None:
        """Of sealed work. What passed before its seal is in the merge when that comes."""
        opened = self._data.open.pop(event.audit, None)
        if opened is None or opened.number:
            return
        for outcome, members in ((PASSED, event.passed), (FAILED, event.failed), (UNDECIDED, event.undecided)):
            for member in members:
                self._mark(opened.step, opened.stage, member, outcome)
        for member in event.unopened:
            for stage in self._data.partials.get(opened.step, ()):
                self._mark(opened.step, stage, member, UNOPENED)

    def _cleared(self, case: int) -> None:
        found = self._data.cases.get(case)
        if found is not None:
            self._mark(*found, PASSED, anyway=True)

    def _mark(self, step: int, stage: int, member: Member, outcome: str, *, anyway: bool = False) -> None:
        records = self._data.partials.get(step, {}).get(stage, [])
        for index, record in enumerate(records):
            if record.member == member and (anyway or _RANK[outcome] >= _RANK[record.outcome]):
                records[index] = msgspec.structs.replace(record, outcome=outcome)

    def _rewound(self, event: ev.Rewound) -> None:
        """What was sealed from ``event.step`` on will be done again: it can't be audited any more."""
        data, first = self._data, event.step
        for step in sorted(step for step in data.partials if step >= first):
            for _, records in sorted(data.partials.pop(step).items()):
                data.old += records
        data.sealed = {step: found for step, found in data.sealed.items() if step < first}
        data.roots = {version: found for version, found in data.roots.items() if version <= first}
        data.open = {audit: found for audit, found in data.open.items() if found.step < first}
        data.windows = {window: found for window, found in data.windows.items() if found[0] < first}
        data.branch = event.branch

    # --- what is asked of it -------------------------------------------------------------------------------------

    @property
    def branch(self) -> int:
        return self._data.branch

    def branch_of(self, window: int) -> int:
        """The branch in which the window was closed, whatever has been rewound behind it since: its draws don't change."""
        return self._data.windows.get(window, (0, self._data.branch))[1]

    def sealed(self, step: int, stage: int) -> SealedStage | None:
        """The evidence of a sealed stage; None before its seal, and once its window is done with."""
        return self._data.sealed.get(step, {}).get(stage)

    def partials(self, step: int, stage: int | None = None) -> tuple[PartialRecord, ...]:
        """Sealed partials of the step in the present branch, by stage and in the manifest's order."""
        found = self._data.partials.get(step, {})
        stages = sorted(found) if stage is None else [stage]
        return tuple(record for s in stages for record in found.get(s, ()))

    def old_partials(self) -> tuple[PartialRecord, ...]:
        """Of earlier branches: honest work that was undone with a lie. It stays paid."""
        return tuple(self._data.old)

    def audited(self, step: int, stage: int, member: Member) -> str:
        """How the audit of this sealed partial ended; "" if there was none (yet)."""
        return next((r.outcome for r in self.partials(step, stage) if r.member == member), "")

    def unaudited(self, hotkey: str) -> int | None:
        """The oldest step with a sealed partial of this hotkey that nobody has found to be right; None if there is none."""
        return min(
            (
                step
                for step, stages in self._data.partials.items()
                if any(r.member.hotkey == hotkey and r.outcome != PASSED for found in stages.values() for r in found)
            ),
            default=None,
        )

    def roots(self, step: int, stage: int) -> str:
        """The stage root after ``step`` updates that its replicas agreed on; "" where it isn't known (yet, or any more)."""
        return self._data.roots.get(step, {}).get(stage, "")

    def maker(self, step: int, stage: int, microbatch: int) -> Member | None:
        """Whose item it is in the seal: who has to show what it receipted."""
        sealed = self.sealed(step, stage)
        entries = () if sealed is None else sealed.entries
        return next((entry.member for entry in entries if microbatch in entry.microbatches), None)


_NOTED = (
    ev.StageSealed
    | ev.StepSealed
    | ev.TermStarted
    | ev.RunFinished
    | ev.AuditOpened
    | ev.AuditClosed
    | ev.WindowClosed
    | ev.CaseOpened
    | ev.CaseClosed
    | ev.Appealed
    | ev.Rewound
)


def _sealed_item(state: RunState, work: StepWork, stage: int, microbatch: int) -> SealedItem:
    item = work.items[stage][microbatch]
    x, gradient = inputs_of(state, work, stage, microbatch)
    return SealedItem(x, gradient, item.forward_hash, item.backward_hash, item.loss_bits)


def inputs_of(state: RunState, work: StepWork, stage: int, microbatch: int) -> tuple[str, str]:
    """Hashes of an open item's inputs as its neighbours have receipted them last; "" where there is none (yet).

    A neighbour's item that is being done again has said what comes out: should that change, whoever used it is void.
    """
    below = work.items[stage - 1][microbatch] if stage > 0 else None
    above = work.items[stage + 1][microbatch] if stage < num_stages(state) - 1 else None
    x = "" if below is None else below.forward_hash or below.said_forward
    gradient = "" if above is None else above.backward_hash or above.said_backward
    return x, gradient
