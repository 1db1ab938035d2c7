"""The scores of one validator: a book for each of its runs, added up by hotkey and registration.

The formula is in :mod:`subnet.score.score`, what is counted in :mod:`subnet.score.book`; both fold journal records alone, so that
anyone recomputes the same numbers (:mod:`subnet.score.recompute`). Pure: no clock, no disk.
"""

from __future__ import annotations

from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy as ScorePolicy
from subnet.score.recompute import combined
from subnet.score.score import Score as Score
from subnet.score.score import Unpaid, whole_worth
from subnet.score.terms import Term, terms_of
from subnet.score.timeline import Counting, Timeline


class ScoreBook:
    """``policy``: what counts when, here. The book of a run that is led begins with the default, and learns from its journal what
    counts (``PolicyChanged``). ``leader_audits`` False: of a validator that follows, believes only what it redid itself, and
    counts every run with its own policy."""

    def __init__(self, policy: ScorePolicy | Timeline | None = None, *, leader_audits: bool = True) -> None:
        self.timeline = policy if isinstance(policy, Timeline) else Timeline.of(policy)
        self._begins = self.timeline if not isinstance(policy, Timeline) or not leader_audits else Timeline.of()
        self._leader_audits = leader_audits
        self._books: dict[str, RunBook] = {}

    def policy_at(self, now_s: float) -> ScorePolicy:
        return self.timeline.at(now_s)

    def change(self, counting: Counting, *, told: str = "") -> None:
        """Another policy from its time on. ``told``: id of the run whose journal tells it to the book itself."""
        self.timeline = self.timeline.changed(counting)
        if not self._leader_audits:
            self._begins = self.timeline
        for run_id, book in self._books.items():
            if run_id != told:
                book.change(counting)

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(sorted(self._books))

    def run(self, run_id: str) -> RunBook:
        """The book of this run; an empty one when it is first asked for."""
        book = self._books.get(run_id)
        if book is None:
            book = self._books[run_id] = RunBook(self._begins, leader_audits=self._leader_audits)
        return book

    def begin(self, run_id: str) -> RunBook:
        """An empty book of this run, in place of the one that there may be: its records are noted from the start."""
        self._books.pop(run_id, None)
        return self.run(run_id)

    def catch_up(self, run_id: str) -> None:
        """The book of a run that has finished: with what the policy was changed to since."""
        book = self.run(run_id)
        last_s = book.timeline.entries[-1].since_s
        for counting in self.timeline.entries:
            if counting.since_s > last_s:
                book.change(counting)

    def scores(self, now_s: float) -> dict[str, Score]:
        """Everybody's score at ``now_s``, by hotkey in alphabetical order. Changes nothing."""
        return combined((self._books[run_id] for run_id in self.runs), self.timeline, now_s)

    def unpaid(self, hotkey: str) -> tuple[Unpaid, ...]:
        """The last sealed partials of the hotkey that weren't paid, oldest first."""
        found = [unpaid for book in self._books.values() for unpaid in book.unpaid(hotkey)]
        return tuple(sorted(found, key=lambda unpaid: (unpaid.time_s, unpaid.run, unpaid.step)))

    def explain(self, hotkey: str, now_s: float) -> tuple[Term, ...]:
        """The score term by term, so that a miner can redo the sum; empty for a hotkey without one."""
        scores = self.scores(now_s)
        score = scores.get(hotkey)
        return () if score is None else terms_of(self.policy_at(now_s), score, whole_worth(scores))
