"""What this validator found out itself, entered into a run's scores: its own audits, and the leader's cases that it replayed.

Each fact has the number of records that were folded when it was found out, and enters the book at that number: live, and when
the records are folded again after a restart. The leader's own audits and convictions count for nothing here
(:class:`subnet.score.book.RunBook` without them). Unpaid is what failed an audit here, or a replay here of a closed case's bundle;
convicted is who failed two of these, or one for which the leader convicted it too. What the leader says otherwise (it passed what
is wrong, cleared who lied, convicted who was right, has nothing opened) is said as a breach.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from subnet.protocol.follow_api import CaseVerdict, OwnAudit
from subnet.run import events as ev
from subnet.run.audits import MERGE, ROOT, branch
from subnet.run.state import RunState
from subnet.score.book import RunBook
from subnet.words import Member
from validator.follow_checks import Found

FAILURES_TO_CONVICT = 2
"""Partials of one hotkey that were found wrong here: one may be a fault."""
REFUSED_MAX = 3
"""Partials that the leader may leave unopened before nothing of the run counts any more."""
UNTRUSTED_MAX = 2
"""Audits that found the run's state not to be what its log leads to; the first may be this machine's fault."""


class _Case(msgspec.Struct, array_like=True):
    member: Member
    branch: int
    step: int
    stage: int
    charge: str
    outcome: str = ""
    """As the leader closed it, or ``overturned``."""
    verdict: str = ""
    """What the replay here gave: ``wrong``, ``right``, or ``foreign`` (its bundle isn't the journal's); empty: nothing."""
    believed: bool = False
    """The book was told that the leader is right about it."""
    convicted: bool = False
    """Here."""
    said: str = ""
    """The breach that was said of it."""


class _Data(msgspec.Struct):
    num_audits: int = 0
    num_verdicts: int = 0
    cases: dict[int, _Case] = {}
    failures: dict[str, set[tuple[int, int, int]]] = {}
    """By hotkey: (branch, step, stage)."""
    num_refused: int = 0
    num_untrusted: int = 0


_decoder = msgspec.msgpack.Decoder(_Data)


class Judging:
    """``audits`` and ``verdicts`` grow at their ends; their numbers never fall."""

    def __init__(self, book: RunBook, audits: Sequence[OwnAudit], verdicts: Sequence[CaseVerdict]) -> None:
        self._book, self._audits, self._verdicts = book, audits, verdicts
        self._data, self._changed = _Data(), False
        """And whether a case may have got another meaning since they were last looked at."""

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        self._data, self._changed = _decoder.decode(data), True

    def look(self, state: RunState, event: ev.AnyEvent) -> None:
        """Each record, before it is folded."""
        cases = self._data.cases
        match event:
            case ev.CaseOpened():
                cases[event.case] = _Case(event.member, branch(state), event.step, event.stage, event.charge)
            case ev.CaseClosed() if event.case in cases:
                cases[event.case].outcome = event.outcome
            case ev.Appealed() if event.case in cases and not event.upheld:
                cases[event.case].outcome = "overturned"
            case _:
                return
        self._changed = True

    def reach(self, number: int, time_ns: int) -> list[Found]:
        """``number`` records are folded: what was found out by then counts from here on. Returns what is to be said of it."""
        data, found = self._data, list[Found]()
        while data.num_audits < len(self._audits) and self._audits[data.num_audits].number <= number:
            found += self._enter(self._audits[data.num_audits])
            data.num_audits += 1
        while data.num_verdicts < len(self._verdicts) and self._verdicts[data.num_verdicts].number <= number:
            self._take(self._verdicts[data.num_verdicts])
            data.num_verdicts += 1
            self._changed = True
        if self._changed:
            self._changed = False
            for case, kept in data.cases.items():
                found += self._case(time_ns, case, kept)
        return found

    # --- own audits ----------------------------------------------------------------------------------------------

    def _enter(self, audit: OwnAudit) -> list[Found]:
        place = audit.branch, audit.step, audit.stage
        new = tuple(m for m in audit.failed if place not in self._data.failures.get(m.hotkey, ()))
        closed = ev.AuditClosed(0, audit.passed, new, (*audit.undecided, *audit.refused))
        self._book.judge(audit.time_ns, audit.step, audit.stage, closed)
        for member in new:
            self._failed(audit.time_ns, member.hotkey, place)
        where = f"step {audit.step} stage {audit.stage}"
        found = [Found("vouched", f"{where}: {m} was passed by the leader, and is wrong") for m in audit.vouched]
        return [*found, *self._refused(audit, where), *self._untrusted(audit, where)]

    def _failed(self, time_ns: int, hotkey: str, place: tuple[int, int, int]) -> None:
        failures = self._data.failures.setdefault(hotkey, set())
        failures.add(place)
        if len(failures) == FAILURES_TO_CONVICT:
            self._book.convict(time_ns, hotkey, f"{FAILURES_TO_CONVICT} sums found wrong by this validator")

    def _refused(self, audit: OwnAudit, where: str) -> list[Found]:
        if not audit.refused:
            return []
        before, self._data.num_refused = self._data.num_refused, self._data.num_refused + len(audit.refused)
        names = ", ".join(map(str, audit.refused))
        found = [Found("refused", f"{where}: the leader has no evidence opened of {names}: {audit.why}")]
        if before <= REFUSED_MAX < self._data.num_refused:
            found.append(Found("unverifiable", f"the leader has refused to open {self._data.num_refused} sums"))
        return found

    def _untrusted(self, audit: OwnAudit, where: str) -> list[Found]:
        if not audit.untrusted:
            return []
        self._data.num_untrusted += 1
        found = [Found("state", f"{where}: {audit.untrusted}")]
        if self._data.num_untrusted == UNTRUSTED_MAX:
            found.append(Found("unverifiable", f"the run's state isn't what its log leads to: {audit.untrusted}"))
        return found

    # --- cases of the leader -------------------------------------------------------------------------------------

    def _take(self, verdict: CaseVerdict) -> None:
        kept = self._data.cases.get(verdict.case)
        if kept is not None:
            kept.verdict = _verdict(verdict)

    def _case(self, time_ns: int, case: int, kept: _Case) -> list[Found]:
        hotkey, wrong = kept.member.hotkey, kept.verdict == "wrong"
        guilty, place = wrong and kept.outcome == "convicted", (kept.branch, kept.step, kept.stage)
        if wrong and kept.outcome in ("convicted", "fault") and not kept.believed:
            kept.believed = True
            self._book.believe(time_ns, case)
            self._failed(time_ns, hotkey, place)
        elif wrong and kept.outcome and place not in self._data.failures.get(hotkey, ()):
            self._unpaid(time_ns, kept)
            self._failed(time_ns, hotkey, place)
        if guilty and not kept.convicted:
            self._book.convict(time_ns, hotkey, f"case {case}, replayed here", case)
        elif kept.convicted and not guilty:
            self._book.clear(time_ns, hotkey, case)
            self._unpaid(time_ns, kept)
        kept.convicted = guilty
        code = _said(kept)
        if not code or kept.said == code:
            return []
        kept.said = code
        gave = {"wrong": "its work is wrong", "right": "its work is right"}.get(
            kept.verdict, "the bundle isn't the journal's"
        )
        return [Found(code, f"case {case}: {hotkey} was {kept.outcome}, and {gave}")]

    def _unpaid(self, time_ns: int, kept: _Case) -> None:
        """Its sum; whoever merged wrongly, or reported another root, has its own sum paid."""
        if kept.charge not in (MERGE, ROOT):
            self._book.judge(time_ns, kept.step, kept.stage, ev.AuditClosed(0, failed=(kept.member,)))


def _verdict(verdict: CaseVerdict) -> str:
    if verdict.foreign:
        return "foreign"
    return "wrong" if verdict.confirmed else "right" if verdict.digest else ""


def _said(case: _Case) -> str:
    """The leader's word against what its own bundle gave here."""
    if case.verdict == "wrong" and case.outcome in ("cleared", "overturned"):
        return "cleared"
    if case.verdict in ("right", "foreign") and case.outcome == "convicted":
        return "framed"
    return ""
