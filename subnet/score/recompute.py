"""Anybody's check of a validator's scores: the same numbers from the journal's records and the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from subnet.run.events import Record
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.score import Score, Tally, scores_of


def book_of(records: Iterable[Record], policy: ScorePolicy) -> RunBook:
    """The book of one run, from its record 0 on."""
    book = RunBook(policy)
    for record in records:
        book.note(record)
    return book


def recompute(records: Iterable[Record], policy: ScorePolicy, now_s: float) -> dict[str, Score]:
    """Everybody's score at ``now_s`` from one run's records: to the bit what a validator with this policy and run alone has."""
    return combined([book_of(records, policy)], policy, now_s)


def combined(books: Iterable[RunBook], policy: ScorePolicy, now_s: float) -> dict[str, Score]:
    """Several runs added up by hotkey."""
    tallies: dict[str, list[Tally]] = {}
    for book in books:
        for hotkey, tally in book.tallies(now_s).items():
            tallies.setdefault(hotkey, []).append(tally)
    found: Mapping[str, list[Tally]] = tallies
    return scores_of(policy, found)
