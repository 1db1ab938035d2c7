"""What this validator found out itself, entered into a run's scores: its own audits, and the leader's cases that it replayed.

Each fact has the number of records that were folded when it was found out, and enters the book at that number: live, and when
the records are folded again after a restart. The leader's own audits and convictions count for nothing here
(:class:`subnet.score.book.RunBook` without them): who is convicted was convicted by the leader *and* found out by a replay here,
or failed two audits of this validator's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from subnet.protocol.follow_api import CaseVerdict, OwnAudit
from subnet.run import events as ev
from subnet.run.state import RunState
from subnet.score.book import RunBook

FAILURES_TO_CONVICT = 2
"""Partials of one hotkey that failed this validator's audits: one may be a fault."""


class _Case(msgspec.Struct, array_like=True):
    hotkey: str
    convicted: bool = False
    """By the leader, and not taken back."""
    confirmed: bool = False
    entered: bool = False


class _Data(msgspec.Struct):
    num_audits: int = 0
    num_verdicts: int = 0
    cases: dict[int, _Case] = {}
    failures: dict[str, int] = {}


_decoder = msgspec.msgpack.Decoder(_Data)


class Judging:
    """``audits`` and ``verdicts`` grow at their ends; their numbers never fall."""

    def __init__(self, book: RunBook, audits: Sequence[OwnAudit], verdicts: Sequence[CaseVerdict]) -> None:
        self._book, self._audits, self._verdicts = book, audits, verdicts
        self._data = _Data()

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        self._data = _decoder.decode(data)

    def look(self, state: RunState, event: ev.AnyEvent) -> None:
        """Each record, before it is folded."""
        cases = self._data.cases
        match event:
            case ev.CaseOpened():
                cases[event.case] = _Case(event.hotkey)
            case ev.CaseClosed() if event.case in cases:
                cases[event.case].convicted = event.outcome == "convicted"
            case ev.Appealed() if event.case in cases and not event.upheld:
                cases[event.case].convicted = False
            case _:
                return

    def reach(self, number: int, time_ns: int) -> None:
        """``number`` records are folded: what was found out by then counts from here on."""
        data = self._data
        while data.num_audits < len(self._audits) and self._audits[data.num_audits].number <= number:
            self._enter(self._audits[data.num_audits])
            data.num_audits += 1
        while data.num_verdicts < len(self._verdicts) and self._verdicts[data.num_verdicts].number <= number:
            verdict = self._verdicts[data.num_verdicts]
            data.cases.setdefault(verdict.case, _Case(verdict.hotkey)).confirmed = verdict.confirmed
            data.num_verdicts += 1
        for case, found in data.cases.items():
            guilty = found.convicted and found.confirmed
            if guilty and not found.entered:
                self._book.convict(time_ns, found.hotkey, f"case {case}, replayed here")
            elif found.entered and not guilty:
                self._book.clear(time_ns, found.hotkey)
            found.entered = guilty

    def _enter(self, audit: OwnAudit) -> None:
        closed = ev.AuditClosed(0, audit.passed, audit.failed, (*audit.undecided, *audit.refused))
        self._book.judge(audit.time_ns, audit.step, audit.stage, closed)
        for member in audit.failed:
            count = self._data.failures[member.hotkey] = self._data.failures.get(member.hotkey, 0) + 1
            if count == FAILURES_TO_CONVICT:
                self._book.convict(audit.time_ns, member.hotkey, f"failed {count} audits of this validator")
