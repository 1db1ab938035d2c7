"""A fold of somebody else's journal: takes stretches of it in any order, follows new terms, never skips an event.

A leader only sends what no later term can take back, except the stretch behind the last acknowledged quorum event. A
new term rewinds to the end of what the log store had; so a follower keeps a copy of its fold at a quorum event, which
was acknowledged before it was sent, and the records since.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from subnet.run.apply import apply_record
from subnet.run.events import QUORUM_EVENTS, Record
from subnet.run.invariants import require
from subnet.run.state import RunState, new_state
from subnet.run.state_codec import dump_state, load_state
from subnet.words import Cursor

RECORDS_BETWEEN_COPIES = 2048


class Took(enum.Enum):
    """What became of a stretch: ``NOTHING`` (old, or a gap before it), ``RECORDS``, or ``NEW_TERM``."""

    NOTHING = "nothing"
    RECORDS = "records"
    NEW_TERM = "new_term"
    """Every incarnation is void: drop accumulators, take a new boot id, say hello again."""


class Follower:
    """``state`` is the fold of everything taken; ask for the stretch after :attr:`cursor`."""

    def __init__(self) -> None:
        self.state: RunState = new_state()
        self.term = 0
        self._copy: bytes | None = None
        self._copy_number = 0
        self._since_copy: list[Record] = []

    @property
    def number(self) -> int:
        """Records folded, the number of the next one."""
        return self.state.number

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.term, self.number)

    def take(self, term: int, first_number: int, records: Sequence[Record]) -> Took:
        """Takes a stretch of the journal that a leader of ``term`` sent.

        Raises :class:`InvariantBroken` where it can't follow what was folded before.
        """
        if term < self.term or first_number > self.number:
            return Took.NOTHING
        new_term = term > self.term
        if new_term:
            self.term = term
            self._rewind(first_number)
        before = self.number
        for record in records[self.number - first_number :]:
            apply_record(self.state, record)
            self._since_copy.append(record)
            if isinstance(record.event, QUORUM_EVENTS) and len(self._since_copy) >= RECORDS_BETWEEN_COPIES:
                self._copy, self._copy_number = dump_state(self.state), self.number
                self._since_copy = []
        if new_term:
            return Took.NEW_TERM
        return Took.RECORDS if self.number > before else Took.NOTHING

    def start_from(self, term: int, data: bytes) -> None:
        """Starts from a leader's copy of the state at a quorum event instead of from the first record."""
        state = load_state(data)
        require(self.number == 0, "a fold that has begun can't start from a copy")
        self.state, self.term = state, term
        self._copy, self._copy_number, self._since_copy = data, state.number, []

    def _rewind(self, number: int) -> None:
        if number >= self.number:
            return
        require(number >= self._copy_number, f"a new term takes back record {number}, which was final")
        kept = self._since_copy[: number - self._copy_number]
        self.state = load_state(self._copy) if self._copy is not None else new_state()
        for record in kept:
            apply_record(self.state, record)
        self._since_copy = kept
