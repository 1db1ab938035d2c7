"""A ration of something that is dear to give and public: what is left grows with time, and who comes too early is told when.

Pure but for the clock that is given.
"""

from __future__ import annotations

from subnet.errors import Busy
from subnet.timing import SYSTEM_CLOCK, Clock


class Ration:
    """``per_s`` a second on average, ``most`` at once. What costs less than ``free`` is never refused, nor counted."""

    def __init__(self, what: str, per_s: float, most: float, *, free: float = 0.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._what, self._per_s, self._most, self._free, self._clock = what, per_s, most, free, clock
        self._left, self._seen_s = most, clock.now_s()

    def take(self, amount: float) -> None:
        """:class:`Busy` with the seconds until so much is there; nothing is taken then."""
        if amount <= self._free:
            return
        now_s = self._clock.now_s()
        self._left = min(self._most, self._left + (now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        wanted = min(amount, self._most)
        if wanted > self._left:
            raise Rationed(
                f"too many {self._what} are asked for at once",
                hint="ask for fewer",
                retry_after_s=round((wanted - self._left) / self._per_s + 0.05, 1),
            )
        self._left -= wanted


class Rationed(Busy):
    """A public answer that is dear: somebody else has just had it."""

    code, http_status = "rate_limited", 429
