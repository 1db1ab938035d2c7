"""Bytes per second: a limit that many transfers share and that lets more urgent ones go first, and how people write it.

Over any time t at most ``rate * (t + BURST_S)`` bytes pass and one piece; without a limit nothing ever waits. What passed
and how long was waited is counted either way.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from dataclasses import dataclass, field

from subnet.errors import ConfigError
from subnet.timing import SYSTEM_CLOCK, Clock

BURST_S = 0.05
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*(?:/\s*s|ps)?\s*")
_FACTORS = {
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}
_BIT_FACTORS = {f"{prefix}bit": 1000**power / 8 for power, prefix in enumerate(("", "k", "m", "g"))}


def num_bytes(text: str, flag: str) -> int:
    """``6GiB``, ``500MB`` or a bare number of bytes; :class:`ConfigError` names the flag."""
    return round(_amount(text, flag, _FACTORS, "such as 6GiB, 500MB"))


def bytes_per_s(text: str, flag: str) -> float:
    """``12.5MB``, ``100Mbit``, ``1GiB/s`` or a bare number of bytes per second."""
    return _amount(text, flag, _FACTORS | _BIT_FACTORS, "such as 12.5MB or 100Mbit, each second")


def _amount(text: str, flag: str, factors: dict[str, float], hint: str) -> float:
    found = _AMOUNT.fullmatch(text)
    unit = found[2].lower().removesuffix("ps") if found is not None else ""
    factor = factors.get(unit or "b")
    if found is None or factor is None or float(found[1]) <= 0:
        raise ConfigError(f"{flag} = {text!r} is not allowed", hint=hint)
    return float(found[1]) * factor


@dataclass(order=True)
class _Waiter:
    priority: int
    serial: int
    size_bytes: int = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class RateLimit:
    """Shared by everything that goes one way; ``bytes_per_s`` None: no limit, only counting. For one event loop."""

    def __init__(self, bytes_per_s: float | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigError(f"a limit of {bytes_per_s} bytes per second", hint="above 0")
        self.bytes_per_s = bytes_per_s
        self.used_bytes = 0
        self.waited_s = 0.0
        """Time during which at least one transfer waited for this limit."""
        self._clock = clock
        self._free_at_s = 0.0
        self._waiters: list[_Waiter] = []
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since_s: float | None = None

    def change(self, bytes_per_s: float | None) -> None:
        """Another limit from now on; who waits goes on under it, and what was owed under the old one is forgiven."""
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigError(f"a limit of {bytes_per_s} bytes per second", hint="above 0")
        self.bytes_per_s = bytes_per_s
        self._free_at_s = min(self._free_at_s, self._clock.now_s())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiters:
            self._arm(self._clock.now_s())

    @property
    def piece_bytes(self) -> int:
        """How much to take at once, so that something urgent waits 20 ms at most."""
        if self.bytes_per_s is None:
            return 1 << 20
        return max(4 << 10, min(256 << 10, int(self.bytes_per_s * 0.02)))

    async def take(self, size_bytes: int, priority: int = 3) -> None:
        """Wait until so many bytes may pass; lower numbers first, then first come first served."""
        now_s = self._clock.now_s()
        if self.bytes_per_s is None or (not self._waiters and self._free_at_s - now_s <= BURST_S):
            self._pass(size_bytes, now_s)
            return
        self._serial += 1
        waiter = _Waiter(priority, self._serial, size_bytes, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiters, waiter)
        self._start_waiting(now_s)
        self._arm(now_s)
        await waiter.granted

    def spend(self, size_bytes: int) -> float:
        """So many bytes have come already; for how many seconds to take no more."""
        now_s = self._clock.now_s()
        self._pass(size_bytes, now_s)
        if self.bytes_per_s is None:
            return 0.0
        wait_s = max(0.0, self._free_at_s - now_s - BURST_S)
        self.waited_s += wait_s
        return wait_s

    def _pass(self, size_bytes: int, now_s: float) -> None:
        self.used_bytes += size_bytes
        if self.bytes_per_s is not None:
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s

    def _start_waiting(self, now_s: float) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s

    def _arm(self, now_s: float) -> None:
        if self._timer is None:
            delay_s = max(0.0, self._free_at_s - now_s - BURST_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._grant)

    def _grant(self) -> None:
        self._timer = None
        now_s = self._clock.now_s()
        while self._waiters and (self._waiters[0].granted.done() or self._free_at_s - now_s <= BURST_S):
            waiter = heapq.heappop(self._waiters)
            if not waiter.granted.done():  # else its sender gave up
                self._pass(waiter.size_bytes, now_s)
                waiter.granted.set_result(None)
        if self._waiters:
            self._arm(now_s)
        elif self._waiting_since_s is not None:
            self.waited_s += now_s - self._waiting_since_s
            self._waiting_since_s = None
