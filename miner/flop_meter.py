"""FLOPs of training that this process has done, and their share of what the device could (MFU), over the last minute.

Counted are forward and backward of items, each once: what is computed again for memory's sake doesn't count. The peak is
measured by matrix products in the run's precision (:func:`miner.hardware.matmul_flops`).
"""

from __future__ import annotations

from collections import deque

import msgspec

WINDOW_S = 60.0
FORWARD_SHARE = 1 / 3
"""Of an item's FLOPs; the backward has the other two thirds."""


class Speed(msgspec.Struct, frozen=True):
    """``mfu`` is ``flops_per_s`` by ``peak_flops_per_s``; None where the peak isn't known."""

    flops_per_s: float
    peak_flops_per_s: float
    mfu: float | None


class FlopMeter:
    """Fed with how many forwards and backwards were ever done, and what an item of the stage costs."""

    def __init__(self) -> None:
        self._flops = 0.0
        self._last: dict[str, int] = {}
        self._seen: deque[tuple[float, float]] = deque()
        self.peak_flops_per_s = 0.0

    def note(self, now_s: float, counts: dict[str, int], item_flops: float, *, last_stage: bool) -> None:
        """``counts``: jobs done by kind; fewer than before are those of a new run."""
        if any(counts.get(kind, 0) < before for kind, before in self._last.items()):
            self._last = {}
        done = {kind: counts.get(kind, 0) - self._last.get(kind, 0) for kind in ("forward", "backward")}
        self._last = {kind: counts.get(kind, 0) for kind in done}
        if last_stage:  # does both in one job
            self._flops += item_flops * done["backward"]
        else:
            self._flops += item_flops * (FORWARD_SHARE * done["forward"] + (1 - FORWARD_SHARE) * done["backward"])
        self._seen.append((now_s, self._flops))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    def speed(self) -> Speed:
        rate = 0.0
        if len(self._seen) >= 2 and self._seen[-1][0] > self._seen[0][0]:
            (began_s, began), (end_s, end) = self._seen[0], self._seen[-1]
            rate = (end - began) / (end_s - began_s)
        peak = self.peak_flops_per_s
        return Speed(rate, peak, rate / peak if peak > 0 else None)
