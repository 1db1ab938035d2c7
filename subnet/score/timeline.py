"""Which policy counts when: a validator's policy may be changed in the middle of a run (``PolicyChanged``).

What is counted at a time is counted with the policy of that time: what had faded by then stays faded, the rest fades with the
new half-life from then on, and a score at a time is made with the exponents, priors and shares of that time. A
:class:`ScorePolicy` by itself is a timeline without changes: wherever one is taken, so is the other.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from subnet.score.policy import ScorePolicy, WorkPolicy


class Counting(msgspec.Struct, frozen=True, array_like=True):
    """What counts from ``since_s`` (wall time) on."""

    since_s: float
    score: ScorePolicy = ScorePolicy()
    work: WorkPolicy = WorkPolicy()


class Timeline:
    """``entries``: rising; the first one counts for whatever was before it, too."""

    def __init__(self, entries: Iterable[Counting]) -> None:
        self.entries = tuple(entries)
        if not self.entries or any(a.since_s > b.since_s for a, b in zip(self.entries, self.entries[1:], strict=False)):
            raise ValueError("a timeline has entries, and they rise")

    @staticmethod
    def of(policy: ScorePolicy | None = None, work: WorkPolicy | None = None) -> Timeline:
        return Timeline((Counting(0.0, policy or ScorePolicy(), work or WorkPolicy()),))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def changed(self, entry: Counting) -> Timeline:
        """With one more; from its time on nothing older counts."""
        older = (old for old in self.entries[1:] if old.since_s < entry.since_s)
        return Timeline((self.entries[0], *older, entry))

    def counting(self, now_s: float) -> Counting:
        entries = self.entries
        if len(entries) == 1:
            return entries[0]
        return next((entry for entry in reversed(entries) if entry.since_s <= now_s), entries[0])

    def at(self, now_s: float) -> ScorePolicy:
        return self.counting(now_s).score

    def work_at(self, now_s: float) -> WorkPolicy:
        return self.counting(now_s).work

    def spans(self, from_s: float, to_s: float) -> tuple[tuple[float, float], ...]:
        """(end, half-life in seconds) of each stretch of one half-life between two times; empty where no time passes."""
        last = self.entries[-1]
        if len(self.entries) == 1 or from_s >= last.since_s:
            return last.score.spans(from_s, to_s)
        if to_s <= from_s:
            return ()
        inner = [entry for entry in self.entries[1:] if from_s < entry.since_s < to_s]
        halves = [self.at(from_s), *(entry.score for entry in inner)]
        ends = [*(entry.since_s for entry in inner), to_s]
        return tuple((end_s, policy.half_life_s) for end_s, policy in zip(ends, halves, strict=True))

    def halves(self, from_s: float, to_s: float) -> float:
        """Half-lives between two times; what isn't after the first counts 0 or less."""
        last = self.entries[-1]
        if len(self.entries) == 1 or from_s >= last.since_s:
            return last.score.halves(from_s, to_s)
        whole = 0.0
        for end_s, half_life_s in self.spans(from_s, to_s):
            whole += (end_s - from_s) / half_life_s
            from_s = end_s
        return whole


Fading = ScorePolicy | Timeline


def continues(found: Timeline, wanted: Timeline, counted_to_s: float) -> bool:
    """Whether what was counted with ``found`` up to this time is what ``wanted`` counts."""
    same = len(found.entries)
    return wanted.entries[:same] == found.entries and all(e.since_s >= counted_to_s for e in wanted.entries[same:])
