"""How much one hotkey may ask of a server: requests and bytes a second, each with a burst; more is refused as ``rate_limited``.

A hotkey counts once it has proved itself, so nobody can use up another's share. While it is over its limit, the connections
on which it was refused are answered late and unread, so that a flood costs the server next to nothing; a connection that
keeps on is closed. The share shrinks as more hotkeys ask, to what one core can serve all of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgspec

from subnet.errors import Busy, ConfigError
from subnet.timing import SYSTEM_CLOCK, Clock

MAX_WAIT_S = 1.0
"""A refusal is held back no longer than this: it keeps its connection busy meanwhile."""
ACTIVE_S = 10.0
"""Who asked within this time is one of those who share."""
STRIKES = 8
"""Refusals in a row after which a connection is closed."""


class RateLimited(Busy):
    """This hotkey asks too much of the server; ``retry_after_s`` says when it may ask again."""

    code, http_status = "rate_limited", 429


class LimitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Of one hotkey, a second; bursts are what may come at once after a rest."""

    requests_per_s: float = 400.0
    requests_burst: float = 800.0
    bytes_per_s: float = 8 << 20
    bytes_burst: float = 64 << 20
    shared_requests_per_s: float = 5000.0
    """Of all hotkeys together: each may have ``shared / active``, if that is less, but never less than
    ``least_requests_per_s``."""
    least_requests_per_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"limits.{name} = {getattr(self, name)!r} is not allowed", hint="allowed: above 0")


@dataclass(slots=True)
class _Bucket:
    """What is left of both, as of ``at_s``."""

    requests: float
    size_bytes: float
    at_s: float


@dataclass(slots=True)
class _Held:
    """A connection on which a hotkey was refused: until when, and how often in a row."""

    until_s: float
    strikes: int


class RequestLimits:
    """Ask ``before`` a request is read, and ``take`` once its hotkey is proved; both raise :class:`RateLimited`."""

    def __init__(self, policy: LimitPolicy | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.policy = policy or LimitPolicy()
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._held: WeakKeyDictionary[asyncio.BaseTransport, _Held] = WeakKeyDictionary()
        self._tidied_s = clock.now_s()
        self.num_refused = 0

    def requests_per_s(self) -> float:
        """What each hotkey may ask now."""
        policy = self.policy
        share = policy.shared_requests_per_s / max(1, len(self._buckets))
        return min(policy.requests_per_s, max(policy.least_requests_per_s, share))

    async def before(self, transport: asyncio.BaseTransport) -> None:
        """A connection on which a hotkey was refused a moment ago is refused unread."""
        held = self._held.get(transport) if self._held else None
        if held is None:
            return
        wait_s = held.until_s - self._clock.now_s()
        if wait_s > 0:
            await self._refuse(transport, held, wait_s, "this connection")

    async def take(self, hotkey: str, size_bytes: int, transport: asyncio.BaseTransport) -> None:
        """One request of a proved hotkey."""
        wait_s = self.wait_s(hotkey, size_bytes)
        if wait_s <= 0:
            if self._held:
                self._held.pop(transport, None)
            return
        held = self._held.setdefault(transport, _Held(0.0, 0))
        held.until_s = self._clock.now_s() + wait_s
        await self._refuse(transport, held, wait_s, hotkey)

    async def _refuse(self, transport: asyncio.BaseTransport, held: _Held, wait_s: float, who: str) -> None:
        self.num_refused += 1
        held.strikes += 1
        await asyncio.sleep(min(wait_s, MAX_WAIT_S))
        if held.strikes >= STRIKES:
            asyncio.get_running_loop().call_later(0.1, transport.close)  # after the answer
        policy = self.policy
        raise RateLimited(
            f"{who} asks too much: allowed are {self.requests_per_s():.0f} requests "
            f"and {policy.bytes_per_s / 1e6:.0f} MB a second",
            hint="wait as long as retry_after says; put claims together into one report",
            retry_after_s=round(max(0.1, wait_s), 3),
        )

    def has_room(self, hotkey: str, size_bytes: int) -> bool:
        """Whether a request of so many bytes would be taken now; takes nothing, so it may be asked of an unproved name."""
        bucket = self._buckets.get(hotkey)
        if bucket is None:
            return True
        policy, rate = self.policy, self.requests_per_s()
        passed_s = self._clock.now_s() - bucket.at_s
        enough = size_bytes <= bucket.size_bytes + passed_s * policy.bytes_per_s
        return bucket.requests + passed_s * rate >= 1 and enough

    def wait_s(self, hotkey: str, size_bytes: int) -> float:
        """Take one request of so many bytes, if that is allowed now (0); else the seconds until it will be."""
        policy, now_s, rate = self.policy, self._clock.now_s(), self.requests_per_s()
        self._tidy(now_s)
        bucket = self._buckets.get(hotkey)
        if bucket is None:
            bucket = self._buckets[hotkey] = _Bucket(policy.requests_burst, policy.bytes_burst, now_s)
        passed_s, bucket.at_s = now_s - bucket.at_s, now_s
        burst = policy.requests_burst * rate / policy.requests_per_s
        bucket.requests = min(burst, bucket.requests + passed_s * rate)
        bucket.size_bytes = min(policy.bytes_burst, bucket.size_bytes + passed_s * policy.bytes_per_s)
        lacks_s = max((1 - bucket.requests) / rate, (size_bytes - bucket.size_bytes) / policy.bytes_per_s)
        if lacks_s > 0:
            return lacks_s
        bucket.requests -= 1
        bucket.size_bytes -= size_bytes
        return 0.0

    def _tidy(self, now_s: float) -> None:
        """Who hasn't asked for a while is full again, and forgotten, unless its bytes still fill up."""
        if now_s < self._tidied_s + 1.0:
            return
        self._tidied_s = now_s
        policy = self.policy

        def is_idle(bucket: _Bucket) -> bool:
            rest_s = now_s - bucket.at_s
            return rest_s > ACTIVE_S and bucket.size_bytes + rest_s * policy.bytes_per_s >= policy.bytes_burst

        self._buckets = {hotkey: bucket for hotkey, bucket in self._buckets.items() if not is_idle(bucket)}
