"""How many forwards a stage may have under way: enough to hide the way to the last stage and back, and no more.

    window = ceil(round trip / seconds of an item) + 1,  at least one more than the stages from here to the end,
             and one more than that where the way is longer than the stages

The round trip is the shortest of the last ones, from a forward's end to the arrival of its gradient. Each step begins with
an empty pipeline, so the shortest one has no queue in it, and a slow stage further on doesn't widen the window of those
before it.
"""

from __future__ import annotations

import math
from collections import deque

from miner.local_view import BoundaryKey
from subnet.words import ItemKey

REMEMBERED = 64
"""Round trips that the shortest is taken of; where a step has more microbatches, of the last two steps' worth."""
MAX_WINDOW = 64
_WEIGHT = 0.2


class FlightWindow:
    """Of items, or parts of lanes, by their keys. ``least``: the stages from this one to the last and one more, what fills a
    pipeline without any latency."""

    def __init__(self, least: int, num_microbatches: int) -> None:
        self._least = least
        self._trips_s: deque[float] = deque(maxlen=max(REMEMBERED, 2 * num_microbatches))
        self._left_s: dict[ItemKey | BoundaryKey, float] = {}
        self._forward_s = 0.0
        self._backward_s = 0.0

    def forwarded(self, item: ItemKey | BoundaryKey, now_s: float, compute_s: float) -> None:
        """A forward is done and its output leaves."""
        for stale in [key for key in self._left_s if key.step != item.step]:
            del self._left_s[stale]
        self._left_s[item] = now_s
        self._forward_s = _smoothed(self._forward_s, compute_s)

    def returned(self, item: ItemKey | BoundaryKey, now_s: float) -> None:
        """Its gradient is here."""
        left_s = self._left_s.pop(item, None)
        if left_s is not None:
            self._trips_s.append(now_s - left_s)

    def finished(self, compute_s: float) -> None:
        """A backward is done."""
        self._backward_s = _smoothed(self._backward_s, compute_s)

    @property
    def item_s(self) -> float:
        """Seconds of compute of one item, forward and backward; 0 until both have been measured."""
        return self._forward_s + self._backward_s if self._forward_s and self._backward_s else 0.0

    @property
    def round_trip_s(self) -> float:
        """The shortest of the last round trips; 0 until there is one."""
        return min(self._trips_s, default=0.0)

    @property
    def limit(self) -> int:
        if not self.item_s:
            return self._least
        needed = math.ceil(self.round_trip_s / self.item_s) + 1
        if needed > self._least:
            needed += 1  # for what jitters on the way: measured on links of 100 Mbit/s and 50 ms
        return max(self._least, min(MAX_WINDOW, needed))


def _smoothed(seen_s: float, new_s: float) -> float:
    return new_s if not seen_s else (1 - _WEIGHT) * seen_s + _WEIGHT * new_s
