"""A recorded run under another policy: who would have earned what, side by side.

Both books are folded from the same records by the code that validators count with (:mod:`subnet.score.book`); scores are read off
again and again, as validators read them when they set weights, and averaged. What a policy decides before anything is journaled
(audit rates, verdicts, who may join) is as it was recorded: a replay can't redo work.
"""

from __future__ import annotations

import math

import msgspec

from iota.incentives_source import read_records
from subnet.errors import InputError
from subnet.policy.policy import SubnetPolicy
from subnet.run import events as ev
from subnet.score.book import RunBook
from subnet.score.recompute import combined
from subnet.score.score import Score
from subnet.score.timeline import Timeline

FIRST_EVERY_S = 5.0
MAX_SAMPLES = 400
NOT_REPLAYED = ("audit.", "admission.")
"""Values that decide what is journaled, not what is paid for it."""


class Earned(msgspec.Struct, frozen=True):
    """One hotkey. Shares are of what miners' weights are paid, averaged over the run's time."""

    hotkey: str
    share_a: float
    share_b: float
    last_score_a: float
    last_score_b: float
    reliability_a: float
    reliability_b: float
    sealed_items: int
    convicted: str


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """``iota incentives replay --json``; the best under B first."""

    version: int
    run_id: str
    num_records: int
    head: str
    """Of the journal's hash chain."""
    seconds: float
    """From the first record to the last."""
    num_samples: int
    policy_a: str
    """Digest; A follows the changes that the journal tells of, B doesn't."""
    policy_b: str
    changed: dict[str, tuple[bool | int | float | str, bool | int | float | str]]
    not_replayed: tuple[str, ...]
    """Values that differ and that a replay can't apply."""
    burned_a: float
    burned_b: float
    earned: tuple[Earned, ...]


Sample = tuple[dict[str, Score], dict[str, Score]]


class _Sampler:
    """At most so many samples, evenly over the time, however long that gets."""

    def __init__(self, a: RunBook, b: RunBook) -> None:
        self.a, self.b = a, b
        self.samples: list[Sample] = []
        self.first_s = self.last_s = 0.0
        self.num_records = 0
        self._every_s, self._next_s = FIRST_EVERY_S, math.inf

    def see(self, record: ev.Record) -> None:
        now_s = record.time_ns / 1e9
        if not self.num_records:
            self.first_s, self._next_s = now_s, now_s + self._every_s
        if now_s >= self._next_s + 3600.0 * 24 * 366:
            raise InputError(
                f"record {record.number} is stamped {now_s - self.last_s:.0f} s after the one before",
                hint="this is no journal of one run",
            )
        while self._next_s <= now_s:
            self._take(self._next_s)
        self.a.note(record)
        self.b.note(record)
        self.num_records += 1
        self.last_s = max(self.last_s, now_s)

    def _take(self, now_s: float) -> None:
        sample = self.scores(now_s)
        if any(score.total > 0 for scores in sample for score in scores.values()):
            self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self.samples = self.samples[1::2]
            self._every_s *= 2.0
        self._next_s = now_s + self._every_s

    def scores(self, now_s: float) -> Sample:
        return combined([self.a], self.a.timeline, now_s), combined([self.b], self.b.timeline, now_s)


def replay(source: str, run: str, a: SubnetPolicy, b: SubnetPolicy) -> Replayed:
    """``a``: what the run began with. Errors as :func:`iota.incentives_source.read_records`."""
    sampler = _Sampler(RunBook(Timeline.of(a.score, a.work)), RunBook(Timeline.of(b.score, b.work), own_policy=True))
    read = read_records(source, run, sampler.see)
    last = sampler.scores(sampler.last_s)
    samples = sampler.samples or [last]
    values_a, values_b = a.values(), b.values()
    changed = {name: (value, values_b[name]) for name, value in values_a.items() if value != values_b[name]}
    earned = [_earned(hotkey, samples, last, a, b) for hotkey in sorted(last[0].keys() | last[1].keys())]
    return Replayed(
        version=1,
        run_id=read.run_id,
        num_records=read.num_records,
        head=read.head,
        seconds=sampler.last_s - sampler.first_s,
        num_samples=len(samples),
        policy_a=a.digest,
        policy_b=b.digest,
        changed=changed,
        not_replayed=tuple(name for name in changed if name.startswith(NOT_REPLAYED)),
        burned_a=a.weights.burn_share,
        burned_b=b.weights.burn_share,
        earned=tuple(sorted(earned, key=lambda one: (-one.share_b, one.hotkey))),
    )


def _earned(hotkey: str, samples: list[Sample], last: Sample, a: SubnetPolicy, b: SubnetPolicy) -> Earned:
    def share(which: int, burned: float) -> float:
        found = [sample[which][hotkey].total for sample in samples if hotkey in sample[which]]
        return math.fsum(found) / len(samples) * (1.0 - burned)

    in_a, in_b = last[0].get(hotkey), last[1].get(hotkey)
    either = in_b or in_a
    assert either is not None
    return Earned(
        hotkey=hotkey,
        share_a=share(0, a.weights.burn_share),
        share_b=share(1, b.weights.burn_share),
        last_score_a=in_a.total if in_a is not None else 0.0,
        last_score_b=in_b.total if in_b is not None else 0.0,
        reliability_a=in_a.reliability if in_a is not None else 0.0,
        reliability_b=in_b.reliability if in_b is not None else 0.0,
        sealed_items=either.sealed_items,
        convicted=either.convicted,
    )
