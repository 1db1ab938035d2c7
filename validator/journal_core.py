"""What of a journal may be seen outside, and who leads: pure bookkeeping over numbers, for the shell that has the disk.

- Nothing at or after an unacknowledged quorum event leaves the coordinator (:attr:`JournalCore.effective_end`).
- A term speaks to nobody before its own ``TermStarted`` is acknowledged (:attr:`JournalCore.may_speak`).
- Segments are write-once. On "exists" the writer reads the segment back: a prefix of its own journal counts as
  acknowledged (the acknowledgement was lost), anything else means that somebody else leads.
- A member under an older term goes on from where the journals may differ (:meth:`JournalCore.resume`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from subnet.run.events import QUORUM_EVENTS, AnyEvent, TermStarted
from subnet.words import Cursor


class Segment(enum.Enum):
    """What an answer of the log store meant."""

    ACKNOWLEDGED = "acknowledged"
    IGNORED = "ignored"
    DEPOSED = "deposed"


@dataclass(frozen=True)
class SegmentDue:
    """Records ``[start, end)`` are to be put as segment ``index``."""

    index: int
    start: int
    end: int


@dataclass
class JournalCore:
    """Numbers of one leader's journal. ``acknowledged``: records below it are in the log store."""

    term: int
    acknowledged: int = 0
    num_segments: int = 0
    length: int = 0
    own_term_number: int = -1
    """Number of the last ``TermStarted``, this leader's own."""
    terms: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(term, number of its ``TermStarted``), rising."""
    quorum: deque[int] = field(default_factory=deque[int])
    """Numbers of unacknowledged quorum events."""

    @staticmethod
    def of(
        term: int,
        events: Iterable[AnyEvent],
        acknowledged: int,
        num_segments: int,
        *,
        first: int = 0,
        terms: Sequence[tuple[int, int]] = (),
    ) -> JournalCore:
        """The core of a journal that is on disk already: ``events`` from number ``first`` on, ``terms`` of those before."""
        core = JournalCore(term, acknowledged, num_segments, first, terms=list(terms))
        core.own_term_number = terms[-1][1] if terms else -1
        for event in events:
            core.appended(event)
        return core

    def appended(self, event: AnyEvent) -> None:
        """The event is on disk as the next record."""
        if isinstance(event, TermStarted):
            self.terms.append((event.number, self.length))
            self.own_term_number = self.length
        if isinstance(event, QUORUM_EVENTS) and self.length >= self.acknowledged:
            self.quorum.append(self.length)
        self.length += 1

    @property
    def may_speak(self) -> bool:
        return self.acknowledged > self.own_term_number

    @property
    def effective_end(self) -> int:
        """Records below this may be sent to anybody."""
        return self.quorum[0] if self.quorum else self.length

    @property
    def first_unacknowledged(self) -> int | None:
        """The first quorum event that holds up what is behind it."""
        return self.quorum[0] if self.quorum else None

    def segment_due(self) -> SegmentDue | None:
        """The segment to put next: all unacknowledged records, as soon as one of them is a quorum event."""
        return SegmentDue(self.num_segments, self.acknowledged, self.length) if self.quorum else None

    def answered(self, index: int, *, stored: bool, segment: Sequence[object], own: Sequence[object]) -> Segment:
        """The log store has ``segment`` as number ``index``; ``stored``: because this leader just put it.

        ``own``: this journal's records from ``acknowledged`` on, at least as many as the segment has.
        """
        if index != self.num_segments:
            return Segment.IGNORED
        if not stored and not is_own_prefix(segment, own):
            return Segment.DEPOSED
        if not stored and not counts_as_acknowledged():
            return Segment.IGNORED
        self.acknowledged += len(segment)
        self.num_segments += 1
        while self.quorum and self.quorum[0] < self.acknowledged:
            self.quorum.popleft()
        return Segment.ACKNOWLEDGED

    def resume(self, cursor: Cursor) -> int | None:
        """Where a member at ``cursor`` goes on; None: it has seen a higher term, so this leader is deposed.

        Records a member has of an older term are also this journal's up to the first later ``TermStarted``.
        """
        if cursor.term > self.term:
            return None
        later = (number for term, number in self.terms if term > cursor.term)
        return min(cursor.number, next(later, cursor.number))


def is_own_prefix(segment: Sequence[object], own: Sequence[object]) -> bool:
    """Whether the segment that was read back is how this journal goes on."""
    return list(segment) == list(own[: len(segment)])


def counts_as_acknowledged() -> bool:
    """A segment of one's own that is found in the log store is acknowledged: only the answer was lost."""
    return True


def term_started(term: int, hotkey: str, nonce: str) -> TermStarted:
    """The first record of a term. The nonce is fresh for each process: two leaders never write the same segment."""
    return TermStarted(number=term, hotkey=hotkey, nonce=nonce)
