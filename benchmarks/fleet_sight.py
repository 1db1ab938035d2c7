"""A few simulated miners fold their own stream as real ones do; what they see must be what the whole stream shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.fleet_members import SimMember
from miner.directives import Directives
from subnet.net.client import SignedClient
from subnet.run.state import RunState
from subnet.run.views import seen_bytes

LOOK_S = 0.2


class ViewChecker:
    """Whenever a sample stands where the whole fold (``whole()``) stands, both are compared."""

    def __init__(self, url: str, receiver: str, run: str, num_samples: int, whole: Any) -> None:
        self._url, self._receiver, self._run, self._num_samples = url, receiver, run, num_samples
        self._whole = whole
        self._folds: dict[str, Directives] = {}
        self._looked_s = 0.0
        self.num_compared = 0
        self.different: list[str] = []

    def is_sample(self, sim: SimMember) -> bool:
        return sim.signer.hotkey in self._folds

    def taker(self, sim: SimMember) -> Any:
        """What takes the frames of this member's stream, if it is one of the samples."""
        hotkey = sim.signer.hotkey
        if len(self._folds) >= self._num_samples and hotkey not in self._folds:
            return None
        directives = Directives(SignedClient(self._url, sim.signer, self._receiver), self._run)
        self._folds[hotkey] = directives

        def take(frame: bytes) -> None:
            directives.take(frame)
            self.look()

        return take

    def look(self, *, now: bool = False) -> None:
        if not self._folds or (not now and time.monotonic() < self._looked_s + LOOK_S):
            return
        whole: RunState = self._whole()
        for hotkey, directives in self._folds.items():
            if directives.cursor.number == whole.number and directives.view is not None:
                self._looked_s = time.monotonic()
                self.num_compared += 1
                if seen_bytes(directives.state, directives.view) != seen_bytes(whole, directives.view):
                    self.different.append(f"{hotkey} at {whole.number}")


def percentiles(what: str, seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    return {f"{what}_p50_ms": at(0.5), f"{what}_p99_ms": at(0.99), f"{what}_max_ms": round(1000 * ordered[-1], 2)}
