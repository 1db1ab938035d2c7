"""A run's steps as columns, kept up to date step by step, and thinned out for a picture: at most so many points, whatever
the length, each with the mean, the least and the greatest of what it stands for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from subnet.protocol.api import StepView
from validator.history import History
from validator.marks import Mark

MAX_POINTS = 2_000
MAX_HOLDOUTS = 500
MAX_MARK_BUCKETS = 300

F64 = NDArray[np.float64]


class MarkBucket(msgspec.Struct, frozen=True, array_like=True):
    """Marks of one kind that lie close together: how many, the step of the first, and the words of the last."""

    step: int
    kind: str
    count: int
    text: str


class Holdout(msgspec.Struct, frozen=True, array_like=True):
    """Hold-out loss of the state before update ``step``."""

    step: int
    time_s: float
    tokens: int
    loss: float


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of equal length, a bucket of steps each; a bucket is named by its last step. Losses that are no number are null."""

    num_steps: int
    """Of the range that was asked for, before thinning."""
    epoch: int
    """Another epoch: steps were undone, so that what was read before no longer holds."""
    num_marks: int
    step: list[int]
    time_s: list[float]
    """Since the run's first step was planned, pauses included."""
    tokens: list[int]
    """Trained on so far."""
    loss: list[float]
    loss_min: list[float]
    loss_max: list[float]
    norm: list[float]
    tokens_per_s: list[float]
    holdout: list[Holdout]
    marks: list[MarkBucket]


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    """One step, for who already has the curve before it."""

    step: int
    time_s: float
    tokens: int
    loss: float
    norm: float
    tokens_per_s: float
    holdout: float | None


class Curve:
    """``sync`` takes over what is new in a history; it costs what is new, unless steps were undone."""

    def __init__(self) -> None:
        self.epoch = 0
        self._last: StepView | None = None
        self._clear()

    def _clear(self) -> None:
        self.step = array("q")
        self.time_s = array("d")
        self.tokens = array("q")
        self.loss = array("d")
        self.norm = array("d")
        self.seconds = array("d")
        self.holdouts: list[Holdout] = []

    def __len__(self) -> int:
        return len(self.step)

    def sync(self, history: History) -> None:
        steps = history.steps
        if not steps:
            if self._last is not None:
                self._begin_again()
            return
        fresh: list[StepView] = []
        for step in reversed(steps):
            if step is self._last:
                break
            fresh.append(step)
        else:
            if self._last is not None:
                self._begin_again()
        for step in reversed(fresh):
            self._add(step)
        self._last = steps[-1]

    def _begin_again(self) -> None:
        self._clear()
        self.epoch += 1
        self._last = None

    def _add(self, step: StepView) -> None:
        time_s = (self.time_s[-1] if self.time_s else 0.0) + step.seconds
        tokens = (self.tokens[-1] if self.tokens else 0) + step.tokens
        if step.holdout_loss is not None:
            self.holdouts.append(Holdout(step.step, round(time_s, 2), tokens, round(step.holdout_loss, 5)))
        self.step.append(step.step)
        self.time_s.append(time_s)
        self.tokens.append(tokens)
        self.loss.append(step.loss)
        self.norm.append(step.norm)
        self.seconds.append(step.seconds)

    def since(self, step: int, most: int) -> list[StepPoint]:
        """The steps behind ``step``, the last ``most`` of them."""
        first = max(bisect_right(self.step, step), len(self) - most)
        held = {found.step: found.loss for found in self.holdouts[-most:]}
        return [self._point(index, held.get(self.step[index])) for index in range(first, len(self))]

    def _point(self, index: int, holdout: float | None) -> StepPoint:
        before, seconds = (self.tokens[index - 1] if index else 0), self.seconds[index]
        return StepPoint(
            self.step[index],
            round(self.time_s[index], 2),
            self.tokens[index],
            round(self.loss[index], 5),
            round(self.norm[index], 5),
            round((self.tokens[index] - before) / seconds, 1) if seconds > 0 else 0.0,
            holdout,
        )

    def view(self, history: History, num_points: int, first: int = 0, last: int = 1 << 62) -> HistoryView:
        """Steps ``first`` to ``last`` in at most ``num_points`` buckets of equally many steps."""
        start, end = bisect_left(self.step, first), bisect_right(self.step, last)
        if start >= end:
            return self._empty(history)
        edges = _edges(end - start, num_points)
        starts, ends = edges[:-1] + start, edges[1:] + start - 1
        times, tokens = np.frombuffer(self.time_s)[:end], np.frombuffer(self.tokens, dtype=np.int64)[:end]
        loss, norm = np.frombuffer(self.loss)[:end], np.frombuffer(self.norm)[:end]
        counts = np.diff(edges)
        marks = [mark for mark in history.marks if first <= mark.step <= last]
        return HistoryView(
            num_steps=end - start,
            epoch=self.epoch,
            num_marks=history.num_marks,
            step=np.frombuffer(self.step, dtype=np.int64)[ends].tolist(),
            time_s=_rounded(times[ends], 2),
            tokens=tokens[ends].tolist(),
            loss=_rounded(_reduce(np.add, loss, starts) / counts, 5),
            loss_min=_rounded(_reduce(np.fmin, loss, starts), 5),
            loss_max=_rounded(_reduce(np.fmax, loss, starts), 5),
            norm=_rounded(_reduce(np.add, norm, starts) / counts, 5),
            tokens_per_s=_rounded(_speeds(times, tokens, starts, ends), 1),
            holdout=_thinned([found for found in self.holdouts if first <= found.step <= last], MAX_HOLDOUTS),
            marks=mark_buckets(marks, MAX_MARK_BUCKETS),
        )

    def _empty(self, history: History) -> HistoryView:
        marks = mark_buckets(list(history.marks), MAX_MARK_BUCKETS)
        return HistoryView(
            num_steps=0,
            epoch=self.epoch,
            num_marks=history.num_marks,
            step=[],
            time_s=[],
            tokens=[],
            loss=[],
            loss_min=[],
            loss_max=[],
            norm=[],
            tokens_per_s=[],
            holdout=[],
            marks=marks,
        )


def _edges(count: int, num_points: int) -> NDArray[np.int64]:
    """``num_points + 1`` or fewer, from 0 to ``count``, rising."""
    buckets = min(count, num_points)
    return np.unique(np.linspace(0, count, buckets + 1).astype(np.int64))


def _reduce(how: np.ufunc, values: F64, starts: NDArray[np.int64]) -> F64:
    return how.reduceat(values, starts)


def _rounded(values: F64, digits: int) -> list[float]:
    return np.round(values, digits).tolist()


def _speeds(times: F64, tokens: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> F64:
    """Tokens a second over each bucket, from the end of the one before."""
    before = starts - 1
    none = before < 0
    at = np.where(none, 0, before)
    seconds = times[ends] - np.where(none, 0.0, times[at])
    counted = tokens[ends] - np.where(none, 0, tokens[at])
    return np.divide(counted, seconds, out=np.zeros(len(ends)), where=seconds > 0)


def _thinned(found: Sequence[Holdout], most: int) -> list[Holdout]:
    """Evenly many of them, the last one always."""
    if len(found) <= most:
        return list(found)
    return [found[(index + 1) * len(found) // most - 1] for index in range(most)]


def mark_buckets(marks: Sequence[Mark], most: int) -> list[MarkBucket]:
    """By kind and place: at most about ``most`` of them, in the order of their steps."""
    if not marks:
        return []
    low, high = min(mark.step for mark in marks), max(mark.step for mark in marks)
    kinds = len({mark.kind for mark in marks})
    places = max(1, min(high - low + 1, most // kinds))
    edges = [low + (high - low + 1) * index // places for index in range(places + 1)]
    spans = list(pairwise(edges))
    found: dict[tuple[int, str], tuple[int, int, str]] = {}
    for mark in marks:
        place = min(len(spans) - 1, bisect_right(edges, mark.step) - 1)
        step, count, _ = found.get((place, mark.kind), (mark.step, 0, ""))
        found[place, mark.kind] = min(step, mark.step), count + 1, mark.text
    return [MarkBucket(step, kind, count, text) for (_, kind), (step, count, text) in sorted(found.items())]
