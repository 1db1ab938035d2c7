"""A fold of somebody else's journal: takes stretches of it in any order, follows new terms, never skips an event.

A leader only sends what no later term can take back, except the stretch behind the last acknowledged quorum event. A
new term rewinds to the end of what the log store had; so a follower keeps a copy of its fold at a quorum event, which
was acknowledged before it was sent, and the records since. Where it can't follow (it is new, or too far behind, or a term
takes back what was final) it goes on from a leader's copy.

A follower of a view (:mod:`subnet.run.views`) takes only the view's records; a stretch then also says where it ends.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from subnet.run.apply import apply_record
from subnet.run.events import QUORUM_EVENTS, Record
from subnet.run.invariants import require
from subnet.run.state import RunState, new_state
from subnet.run.state_codec import dump_state, load_state
from subnet.run.views import View, apply_seen_record, view_of
from subnet.words import Cursor

RECORDS_BETWEEN_COPIES = 2048


class Took(enum.Enum):
    """What became of a stretch: ``NOTHING`` (old, or a gap before it), ``RECORDS``, or ``NEW_TERM``."""

    NOTHING = "nothing"
    RECORDS = "records"
    NEW_TERM = "new_term"
    """Every incarnation is void, by a new term or a rewind: drop accumulators, take a new boot id, say hello again."""


class Follower:
    """``state`` is the fold of everything taken; ask for the stretch after :attr:`cursor`.

    ``stage``: the view that it takes; None is the whole. It may be set as long as nothing or only a copy is folded.
    """

    def __init__(self, stage: int | None = None) -> None:
        self.stage = stage
        self._view: View | None = None
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

    @property
    def view(self) -> View | None:
        """The view it takes; None for the whole, and before the run is known."""
        if self.stage is None or self.state.run is None:
            return None
        if self._view is None or self._view.stage != self.stage:
            self._view = view_of(self.state.run, self.stage)
        return self._view

    def take(self, term: int, first_number: int, records: Sequence[Record], end: int | None = None) -> Took:
        """Takes a stretch of the journal that a leader of ``term`` sent; ``end``: of a view's, the number after it.

        Raises :class:`InvariantBroken` where it can't follow what was folded before.
        """
        if term < self.term or first_number > self.number:
            return Took.NOTHING
        new_term = term > self.term
        if new_term:
            self._rewind(first_number)
            self.term = term
        before, branch = self.number, self.state.audits.branch
        fresh = records[self.number - first_number :] if self.stage is None else _from(records, self.number)
        for record in fresh:
            self._apply(record)
            self._since_copy.append(record)
            if isinstance(record.event, QUORUM_EVENTS) and len(self._since_copy) >= RECORDS_BETWEEN_COPIES:
                self._copy, self._copy_number = dump_state(self.state), self.number
                self._since_copy = []
        if end is not None and end > self.number:
            self.state.number = end
        if new_term or self.state.audits.branch != branch:
            return Took.NEW_TERM
        return Took.RECORDS if self.number > before else Took.NOTHING

    def _apply(self, record: Record) -> None:
        view = self.view
        if view is None:
            apply_record(self.state, record)
        else:
            apply_seen_record(self.state, record, view)

    def start_from(self, term: int, data: bytes, loaded: RunState | None = None) -> Took:
        """Goes on from the copy of the state at a quorum event that a leader of ``term`` sent.

        In the same term a copy that is behind what is folded is old; a new term's replaces the fold whatever it held.
        ``loaded``: the state in ``data``, where the caller has loaded it already and gives it away.
        """
        state = loaded if loaded is not None else load_state(data)
        if term < self.term or (term == self.term and state.number < self.number):
            return Took.NOTHING
        new_term = term > self.term or state.audits.branch != self.state.audits.branch
        self.term, self.state = term, state
        self._copy, self._copy_number, self._since_copy = data, state.number, []
        return Took.NEW_TERM if new_term else Took.RECORDS

    def forget(self) -> None:
        """Back to no record at all, so that the next stretch or copy begins anew. Older terms stay refused."""
        self.state = new_state()
        self._copy, self._copy_number, self._since_copy = None, 0, []

    def _rewind(self, number: int) -> None:
        if number >= self.number:
            return
        require(number >= self._copy_number, f"a new term takes back record {number}, which was final")
        kept = [record for record in self._since_copy if record.number < number]
        self.state = load_state(self._copy) if self._copy is not None else new_state()
        for record in kept:
            self._apply(record)
        if self.stage is not None:
            self.state.number = number
        self._since_copy = kept


def _from(records: Sequence[Record], number: int) -> Sequence[Record]:
    return [record for record in records if record.number >= number]
