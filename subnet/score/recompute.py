"""Anybody's check of a validator's scores: the same numbers from the journal's records and the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from subnet.run.events import Record
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.score import Score, Tally, scores_of
from subnet.score.timeline import Fading, Timeline


def book_of(records: Iterable[Record], policy: ScorePolicy | Timeline | None, *, own_policy: bool = False) -> RunBook:
    """The book of one run, from its record 0 on; ``own_policy``: whatever changes of it the journal has."""
    book = RunBook(policy, own_policy=own_policy)
    for record in records:
        book.note(record)
    return book


def recompute(
    records: Iterable[Record], policy: ScorePolicy | Timeline | None, now_s: float, *, own_policy: bool = False
) -> dict[str, Score]:
    """Everybody's score at ``now_s`` from one run's records: to the bit what a validator that began with this policy and has this
    run alone has."""
    book = book_of(records, policy, own_policy=own_policy)
    return combined([book], book.timeline, now_s)


def combined(books: Iterable[RunBook], policy: Fading, now_s: float) -> dict[str, Score]:
    """Several runs added up by hotkey; the score is made by the policy that is in force at ``now_s``."""
    tallies: dict[str, list[Tally]] = {}
    for book in books:
        for hotkey, tally in book.tallies(now_s).items():
            tallies.setdefault(hotkey, []).append(tally)
    found: Mapping[str, list[Tally]] = tallies
    return scores_of(policy.at(now_s), found, policy)
