"""What of a run's journal a follower still has to redo: windows to draw from, cases to replay with what the journal knew of them.

Pure, and part of each copy of the fold. A case is held against the journal as it stood when it was opened: a bundle that says
of the accused what the journal doesn't is no evidence, whatever its replay gives.
"""

from __future__ import annotations

import msgspec

from subnet.audit import build
from subnet.audit.case import Case, MergeCase, PartialCase
from subnet.audit.ledger import WorkLedger
from subnet.errors import NotFound
from subnet.run import audits
from subnet.run import events as ev
from subnet.run.state import RunState


class DueWindow(msgspec.Struct, frozen=True, array_like=True):
    event: ev.WindowClosed
    branch: int


class DueCase(msgspec.Struct, frozen=True, array_like=True):
    """``partial``: the accused's work as the journal has it; ``merge``: with whose partitions it was merged. None: unknown."""

    event: ev.CaseOpened
    partial: PartialCase | None
    merge: MergeCase | None
    root: str = ""
    """The root that the accused has reported, where the case is about that."""

    @property
    def is_known(self) -> bool:
        """Whether the journal says what the accused claimed."""
        if self.event.charge == audits.ROOT:
            return bool(self.root)
        return (self.merge if self.event.charge == "merge" else self.partial) is not None

    def differs(self, case: Case) -> str:
        """In what the bundle's case isn't the journal's; empty where it is."""
        event = self.event
        if (case.step, case.stage) != (event.step, event.stage):
            return f"the bundle is of step {case.step} stage {case.stage}, the case of {event.step} and {event.stage}"
        if event.charge == audits.ROOT:
            same = bool(self.root) and case.roots == ((event.member, self.root),)
            return "" if same else "the bundle's root isn't what the accused has reported by the journal"
        if event.charge == "merge":
            if self.merge is None or case.merge is None or _manifest(case.merge) != _manifest(self.merge):
                return "the bundle's merge isn't the journal's"
            return ""
        partial = next((partial for partial in case.partials if partial.member == event.member), None)
        if self.partial is None or partial is None:
            return "what the accused claimed isn't known from the journal"
        if (partial.commitment, partial.items) != (self.partial.commitment, self.partial.items):
            return "the bundle's claims aren't those that the journal has"
        return ""


def _manifest(merge: MergeCase) -> object:
    return (merge.group, merge.version, merge.seed, merge.total_items, merge.merged)


class _Data(msgspec.Struct):
    windows: dict[int, DueWindow] = {}
    cases: dict[int, DueCase] = {}


_decoder = msgspec.msgpack.Decoder(_Data)


class Todo:
    """``look`` before each event is folded."""

    def __init__(self) -> None:
        self._data = _Data()

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        self._data = _decoder.decode(data)

    def look(self, state: RunState, ledger: WorkLedger, event: ev.AnyEvent) -> None:
        data = self._data
        match event:
            case ev.WindowClosed():
                data.windows[event.window] = DueWindow(event, audits.branch(state))
            case ev.CaseOpened() if event.charge == audits.ROOT:
                info = state.members.get(event.member)
                due = info is not None and (info.version, info.stage) == (event.step + 1, event.stage)
                data.cases[event.case] = DueCase(event, None, None, info.root if info is not None and due else "")
            case ev.CaseOpened() if event.bundle:
                partial, merge = _known(state, ledger, event)
                data.cases[event.case] = DueCase(event, partial, merge)
            case ev.Rewound():
                kept = {n: due for n, due in data.windows.items() if due.event.last_step < event.step}
                data.windows = kept
            case _:
                return

    @property
    def windows(self) -> tuple[DueWindow, ...]:
        return tuple(self._data.windows[n] for n in sorted(self._data.windows))

    @property
    def cases(self) -> tuple[DueCase, ...]:
        return tuple(self._data.cases[n] for n in sorted(self._data.cases))

    def window_done(self, due: DueWindow) -> None:
        """Unless the run was rewound meanwhile and the window closed anew."""
        if self._data.windows.get(due.event.window) == due:
            del self._data.windows[due.event.window]

    def case_done(self, number: int) -> None:
        self._data.cases.pop(number, None)


def _known(state: RunState, ledger: WorkLedger, event: ev.CaseOpened) -> tuple[PartialCase | None, MergeCase | None]:
    """Of the accused's work: from the open step, else from what was sealed."""
    made = None
    for make in (build.case_after_seal, build.case_before_seal) if event.sealed else (build.case_before_seal,):
        try:
            made = make(state, ledger, event.step, event.stage, _members(state, ledger, event))
        except NotFound:
            continue
        if made is not None:
            break
    if made is None:
        return None, None
    return next((partial for partial in made.partials if partial.member == event.member), None), made.merge


def _members(state: RunState, ledger: WorkLedger, event: ev.CaseOpened) -> tuple[ev.Member, ...]:
    """For a sum its author; for a merge everybody whose sum is in it."""
    if event.charge != "merge":
        return (event.member,)
    sealed = ledger.sealed(event.step, event.stage)
    return () if sealed is None else tuple(entry.member for entry in sealed.entries)
