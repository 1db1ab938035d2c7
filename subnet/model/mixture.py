"""Rows of several sources in given shares: any row's source and place by arithmetic, the same order for a seed. No torch.

Of every 1,024 consecutive rows each source gives the same whole number, its share rounded by largest remainders, at least
one; so a share is kept to 1/1,024 within each 1,024 rows. A source that is used up begins again, shuffled anew.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Sequence

from blake3 import blake3

PERIOD = 1024
"""Rows within which each source's number is exact. Part of the run's data: changing it changes every mixed run."""

Permute = Callable[[int, int, int, int], int]
"""(index, size, seed, epoch) to a place: :func:`subnet.model.data.permute`."""


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Rows of each source in a period: at least one, in all :data:`PERIOD`, ties to the earlier source."""
    exact = [PERIOD * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in order[: max(0, PERIOD - sum(counts))]:
        counts[i] += 1
    while sum(counts) > PERIOD:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


class Mixture:
    """Which row of which source is the n-th of a run."""

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], seed: int, permute: Permute) -> None:
        """``sizes``: rows that each source has."""
        self.quotas, self._sizes, self._seed, self._permute = quotas(weights), tuple(sizes), seed, permute
        self._ends = tuple(itertools.accumulate(self.quotas))
        self._seeds = [_seed(seed, number) for number in range(len(sizes) + 1)]

    def row(self, number: int) -> tuple[int, int]:
        """(source, row within it)."""
        period, at = divmod(number, PERIOD)
        slot = self._permute(at, PERIOD, self._seeds[-1], period)
        source = bisect.bisect_right(self._ends, slot)
        quota, size = self.quotas[source], self._sizes[source]
        nth = period * quota + slot - (self._ends[source] - quota)
        return source, self._permute(nth % size, size, self._seeds[source], nth // size)


def _seed(seed: int, number: int) -> int:
    digest = blake3(b"iota/mixture/1\0" + struct.pack("<QQ", seed, number)).digest()
    return int.from_bytes(digest[:8], "little")
