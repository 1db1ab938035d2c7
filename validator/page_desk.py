"""Answers the page's questions about runs and scores: read-only, bounded, and remembered for a moment, since anyone may ask."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from subnet.errors import Busy, InputError
from subnet.protocol.api import RunSummary
from subnet.protocol.audit_api import CaseView
from subnet.score.api import ScoreDetail
from subnet.score.score import Score
from subnet.timing import Clock
from validator.curve import MAX_POINTS, Curve, HistoryView
from validator.journal_text import MAX_LINES, SCANNED_AT_ONCE, JournalPage, checked_query, page_of
from validator.marks import Mark
from validator.page_sight import ActiveSight, Overview, RunSight, StoredSight, cases_of, overview_of, read_finished
from validator.run_registry import RunEntry
from validator.score_api import ScoreDesk

if TYPE_CHECKING:
    from validator.node import ValidatorNode

FRESH_S = 0.9
"""Answers that cost something are at most this old."""
MAX_SEARCHES = 2
"""At a time: each reads records in a thread of its own."""
COSTLY_PER_S = 30
"""Views of a curve that are made anew, and searches, of all who ask together: each costs up to 15 ms."""
MAX_STORED = 2
"""Finished runs whose journal is kept in memory."""
MAX_CURVES = 8
MAX_VIEWS = 32
MAX_SCORES = 1_000
MAX_MARKS_PAGE = 200

V = TypeVar("V")


class DisruptionPage(msgspec.Struct, frozen=True):
    """Newest first. ``before``: where an older page begins; None: there is none."""

    marks: tuple[tuple[int, float, str, str, str], ...]
    """(step, wall time in seconds, kind, who, words)."""
    before: int | None
    total: int


class ScoreRow(msgspec.Struct, frozen=True, array_like=True):
    hotkey: str
    total: float
    work: float
    rate: float
    reliability: float
    uptime: float
    deadlines: float
    audits: float
    items: int
    convicted: str


class ScoreRows(msgspec.Struct, frozen=True):
    """Best first, at most :data:`MAX_SCORES`."""

    time_s: float
    num_scores: int
    half_life_s: float
    weights: str
    rows: tuple[ScoreRow, ...]


class _Fresh(Generic[V]):
    """The last few answers by key, each for ``FRESH_S``."""

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock, self._most = clock, most
        self._kept: OrderedDict[object, tuple[float, V]] = OrderedDict()

    def has(self, key: object) -> bool:
        found = self._kept.get(key)
        return found is not None and 0 <= self._clock.now_s() - found[0] < FRESH_S

    def get(self, key: object, make: Callable[[], V]) -> V:
        now_s = self._clock.now_s()
        found = self._kept.get(key)
        if found is not None and 0 <= now_s - found[0] < FRESH_S:
            return found[1]
        value = make()
        self._kept[key] = now_s, value
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return value


class PageDesk:
    """``find``: an active or queued run's sight by name, or the entry of one that has finished and is to be read."""

    def __init__(
        self,
        find: Callable[[str], RunSight | RunEntry],
        runs: Callable[[], tuple[RunSummary, ...]],
        scores: ScoreDesk,
        weights: Callable[[], str],
        clock: Clock,
    ) -> None:
        self._find, self._runs, self._scores, self._weights, self.clock = find, runs, scores, weights, clock
        self._stored: OrderedDict[str, StoredSight] = OrderedDict()
        self._reading, self._searches = asyncio.Lock(), 0
        self._costly_since_s, self._costly = clock.now_s(), 0
        self._curves: OrderedDict[str, Curve] = OrderedDict()
        self._overviews = _Fresh[Overview](clock, MAX_CURVES)
        self._views = _Fresh[HistoryView](clock, MAX_VIEWS)
        self._score_rows = _Fresh[ScoreRows](clock, 1)

    async def sight(self, run: str) -> RunSight:
        """:class:`~subnet.errors.NotFound` where no run has that name."""
        found = self._find(run)
        if not isinstance(found, RunEntry):
            return found
        async with self._reading:  # a journal is read once, however many ask
            if run not in self._stored:
                self._stored[run] = await asyncio.to_thread(read_finished, found, self.clock)
            self._stored.move_to_end(run)
            while len(self._stored) > MAX_STORED:
                self._stored.popitem(last=False)
            return self._stored[run]

    def runs(self) -> tuple[RunSummary, ...]:
        return self._runs()

    def overview(self, sight: RunSight) -> Overview:
        return self._overviews.get(sight.run_id, lambda: overview_of(sight))

    def curve(self, sight: RunSight) -> Curve:
        run = sight.run_id
        curve = self._curves.setdefault(run, Curve())
        self._curves.move_to_end(run)
        while len(self._curves) > MAX_CURVES:
            self._curves.popitem(last=False)
        curve.sync(sight.history)
        return curve

    def history(self, sight: RunSight, num_points: int, first: int, last: int) -> HistoryView:
        if not 1 <= num_points <= MAX_POINTS:
            raise InputError(f"points={num_points} is not allowed", hint=f"allowed: 1 to {MAX_POINTS}")
        key = (sight.run_id, num_points, first, last)
        if not self._views.has(key):
            self._take_costly()
        return self._views.get(key, lambda: self.curve(sight).view(sight.history, num_points, first, last))

    def disruptions(self, sight: RunSight, before: int | None, limit: int) -> DisruptionPage:
        """``before`` counts all marks that ever were."""
        if not 1 <= limit <= MAX_MARKS_PAGE:
            raise InputError(f"limit={limit} is not allowed", hint=f"allowed: 1 to {MAX_MARKS_PAGE}")
        history = sight.history
        total, kept = history.num_marks, list(history.marks)
        oldest = total - len(kept)
        end = max(oldest, min(total, total if before is None else before))
        first = max(oldest, end - limit)
        page = reversed(kept[first - oldest : end - oldest])
        return DisruptionPage(tuple(_plain(mark) for mark in page), first if first > oldest else None, total)

    async def journal(self, sight: RunSight, before: int | None, limit: int, query: str) -> JournalPage:
        if not 1 <= limit <= MAX_LINES:
            raise InputError(f"limit={limit} is not allowed", hint=f"allowed: 1 to {MAX_LINES}")
        query = checked_query(query)
        if self._searches >= MAX_SEARCHES:
            raise Busy(f"{MAX_SEARCHES} others search journals just now", hint="try again", retry_after_s=1.0)
        self._take_costly()
        oldest, length = sight.journal_span()
        end = max(oldest, min(length, length if before is None else before))
        first = max(oldest, end - SCANNED_AT_ONCE)
        records = sight.records(first, end)
        self._searches += 1
        try:
            return await asyncio.to_thread(
                page_of, records, first, length=length, oldest=oldest, limit=limit, query=query
            )
        finally:
            self._searches -= 1

    def _take_costly(self) -> None:
        """One more answer that costs something; :class:`~subnet.errors.Busy` where there were enough this second."""
        now_s = self.clock.now_s()
        if not 0 <= now_s - self._costly_since_s < 1.0:
            self._costly_since_s, self._costly = now_s, 0
        if self._costly >= COSTLY_PER_S:
            raise Busy(f"curves and journals were asked for {COSTLY_PER_S} times this second", hint="try again")
        self._costly += 1

    def cases(self, sight: RunSight) -> tuple[CaseView, ...]:
        return cases_of(sight)

    def scores(self) -> ScoreRows:
        return self._score_rows.get("", self._make_scores)

    def _make_scores(self) -> ScoreRows:
        found = self._scores.list()
        rows = tuple(_score_row(score) for score in found.scores[:MAX_SCORES])
        return ScoreRows(found.time_s, len(found.scores), found.policy.half_life_s, self._weights(), rows)

    def score(self, hotkey: str) -> ScoreDetail:
        return self._scores.detail(hotkey)


def _plain(mark: Mark) -> tuple[int, float, str, str, str]:
    return mark.step, mark.time_ns / 1e9, mark.kind, mark.who, mark.text


def _score_row(score: Score) -> ScoreRow:
    return ScoreRow(
        score.hotkey,
        score.total,
        score.work,
        score.rate,
        score.reliability,
        score.uptime,
        score.deadlines,
        score.audits,
        score.sealed_items,
        score.convicted,
    )


def desk_of(node: ValidatorNode) -> PageDesk:
    """Of a validator that leads runs."""

    def find(run: str) -> RunSight | RunEntry:
        entry, session = node.registry.get(run), node.session
        if session is not None and session.entry is entry:
            return ActiveSight(session, node.side.weights_said, node.registry.place_of(entry.name))
        if entry.finished:
            return entry
        summary = next(found for found in node.runs() if found.name == entry.name)
        return StoredSight(entry, summary, node.clock)

    return PageDesk(find, node.runs, node.score_desk, lambda: node.side.weights_said, node.clock)
