"""Scores from sealed work and from nothing else, kept by hotkey and registration block, never by uid.

Formula. A step sealed at time t (seconds) that credits hotkey h with work w (FLOPs of its sealed microbatch-stage
items) adds w to h's *work*, which halves every ``half_life_s``:

    work_h(now) = sum over sealed steps of  w · 2^(-(now - t) / half_life_s)      [FLOPs]
    total_h     = work_h / sum over all hotkeys of work                             [0 to 1, sums to 1]

Work that isn't sealed counts nothing, however much of it there was; a hotkey that registers anew starts at zero.
Pure: no clock, no disk; the same sequence of calls gives the same floats, so a book is rebuilt from a journal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from subnet.errors import ConfigError
from subnet.words import short


class ScorePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    half_life_s: float = 3600.0
    """Seconds after which a piece of work counts half."""
    forget_after_half_lives: float = 30.0
    """A hotkey without sealed work for this long is dropped from the book: 2^-30 of its work is left."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.half_life_s) and self.half_life_s > 0):
            raise ConfigError(f"score.half_life_s = {self.half_life_s!r} is not allowed", hint="allowed: above 0")
        if not self.forget_after_half_lives >= 1:
            raise ConfigError(
                f"score.forget_after_half_lives = {self.forget_after_half_lives!r} is not allowed",
                hint="allowed: 1 or more",
            )


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one hotkey earned, with each number that led to it."""

    hotkey: str
    registered_at_block: int | None
    """Which registration earned it; None while the chain hasn't been read."""
    total: float
    """Share of all hotkeys' decayed work, 0 to 1."""
    work: float
    """Decayed work, FLOPs."""
    sealed_work: float
    """All work of this registration, undecayed, FLOPs."""
    sealed_steps: int
    last_sealed_s: float


@dataclass(slots=True)
class _Entry:
    work: float
    """Decayed to ``as_of_s``."""
    as_of_s: float
    sealed_work: float
    sealed_steps: int
    registered_at_block: int | None


class ScoreBook:
    """Sealed work by hotkey. Feed it every sealed step once, in order, and the registrations whenever they are read."""

    def __init__(self, policy: ScorePolicy | None = None) -> None:
        self.policy = policy if policy is not None else ScorePolicy()
        self._entries: dict[str, _Entry] = {}
        self._last_step: dict[str, int] = {}
        self._last_time_s = -math.inf

    def apply_sealed(self, step: int, time_s: float, work: Mapping[str, float], *, run: str = "") -> None:
        """Credit one sealed step: FLOPs by hotkey. ``time_s`` is the seal's own time, not the reader's.

        A step comes once and in order within its run. A time before the last one counts as the last one.
        """
        last = self._last_step.get(run)
        if last is not None and step <= last:
            raise ValueError(f"step {step} of run {run!r} came after step {last}")
        for hotkey, amount in work.items():
            if not (math.isfinite(amount) and amount >= 0):
                raise ValueError(f"work of {hotkey} in step {step} is {amount}")
        now_s = self._last_time_s = max(self._last_time_s, time_s)
        self._last_step[run] = step
        for hotkey in sorted(work):
            self._credit(hotkey, work[hotkey], now_s)
        horizon_s = now_s - self.policy.forget_after_half_lives * self.policy.half_life_s
        self._entries = {hotkey: entry for hotkey, entry in self._entries.items() if entry.as_of_s >= horizon_s}

    def apply_registrations(self, registered_at_block: Mapping[str, int]) -> None:
        """Tell the book which registration each hotkey has now; work of an earlier one is forgotten.

        A hotkey that isn't registered keeps its work: should it be the same registration, seen by a late reader, it
        counts again; weights go only to those who are registered.
        """
        for hotkey in [hotkey for hotkey in self._entries if hotkey in registered_at_block]:
            entry, block = self._entries[hotkey], registered_at_block[hotkey]
            if entry.registered_at_block is None:
                entry.registered_at_block = block
            elif entry.registered_at_block != block:
                del self._entries[hotkey]

    def restore(self, score: Score) -> None:
        """Take over an entry as ``scores(0.0)`` gave it, unless a later one of this hotkey is known."""
        known, entry = self._entries.get(score.hotkey), (score.last_sealed_s, score.sealed_work, score.sealed_steps)
        if known is None or known.as_of_s < score.last_sealed_s:
            self._entries[score.hotkey] = _Entry(score.work, *entry, score.registered_at_block)

    def scores(self, now_s: float) -> dict[str, Score]:
        """Everybody's score at ``now_s``, by hotkey in alphabetical order. Changes nothing."""
        decayed = {hotkey: self._decayed(self._entries[hotkey], now_s) for hotkey in sorted(self._entries)}
        whole = math.fsum(decayed.values())
        return {
            hotkey: self._score(hotkey, self._entries[hotkey], work, work / whole if whole > 0 else 0.0)
            for hotkey, work in decayed.items()
        }

    def explain(self, hotkey: str, now_s: float) -> tuple[str, ...]:
        """The score in words, a line for each term, so that a miner can redo the sum."""
        score = self.scores(now_s).get(hotkey)
        if score is None:
            return (f"{short(hotkey)} has no sealed work: score 0",)
        whole = math.fsum(other.work for other in self.scores(now_s).values())
        factor = score.work / score.sealed_work if score.sealed_work > 0 else 0.0
        registered = "not yet read" if score.registered_at_block is None else f"block {score.registered_at_block}"
        return (
            f"{short(hotkey)}, registered at {registered}",
            f"sealed work: {score.sealed_work:.4g} FLOPs in {score.sealed_steps} steps",
            f"decay (half every {self.policy.half_life_s:g} s, last sealed "
            f"{max(0.0, now_s - score.last_sealed_s):.0f} s ago): x {factor:.4f} = {score.work:.4g} FLOPs",
            f"share of all decayed work: {score.work:.4g} / {whole:.4g} = {score.total:.4f}",
        )

    def _credit(self, hotkey: str, amount: float, now_s: float) -> None:
        entry = self._entries.get(hotkey)
        if entry is None:
            if amount > 0:
                self._entries[hotkey] = _Entry(amount, now_s, amount, 1, None)
            return
        if amount > 0:
            entry.work = self._decayed(entry, now_s) + amount
            entry.as_of_s = now_s
            entry.sealed_work += amount
            entry.sealed_steps += 1

    def _decayed(self, entry: _Entry, now_s: float) -> float:
        age_s = max(0.0, now_s - entry.as_of_s)
        return entry.work * 2.0 ** (-age_s / self.policy.half_life_s)

    def _score(self, hotkey: str, entry: _Entry, work: float, share: float) -> Score:
        return Score(
            hotkey=hotkey,
            registered_at_block=entry.registered_at_block,
            total=share,
            work=work,
            sealed_work=entry.sealed_work,
            sealed_steps=entry.sealed_steps,
            last_sealed_s=entry.as_of_s,
        )
