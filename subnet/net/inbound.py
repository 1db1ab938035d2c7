"""Frames being put together, one of each priority at a time: nothing is allocated that isn't allowed, bodies hash as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from blake3 import blake3

from subnet.errors import InputError, TooLarge
from subnet.net.base import Body, Priority, TransportLimits, share
from subnet.net.records import Amount, OverCredit


@dataclass
class _Partial:
    header: bytes
    body: Body
    hasher: blake3 | None
    filled: int = 0

    def took(self, num_bytes: int) -> bool:
        """Whether this was the last of it. Hashing while the bytes are in the cache costs less than a second pass."""
        if self.hasher is not None:
            with memoryview(self.body) as view:
                self.hasher.update(view[self.filled : self.filled + num_bytes])
        self.filled += num_bytes
        if self.filled < len(self.body):
            return False
        if self.hasher is not None:
            self.body.took(self.hasher.hexdigest())
        return True


@dataclass
class Lane:
    """What comes in one priority: the frame that has begun, those that wait for the handler, and what both hold."""

    partial: _Partial | None = None
    frames: deque[tuple[bytes, Body]] = field(default_factory=deque[tuple[bytes, Body]])
    held: Amount = field(default_factory=Amount)


class Inbound:
    def __init__(self, limits: TransportLimits, hashed: Collection[Priority]) -> None:
        self._limits, self._hashed = limits, frozenset(hashed)
        self.window = Amount(share(limits.inbound_bytes), share(limits.inbound_frames))
        """Of each priority."""
        self.lanes = [Lane() for _ in Priority]

    @property
    def unfinished(self) -> bool:
        return any(lane.partial is not None for lane in self.lanes)

    def start(self, priority: Priority, header: bytes, body_bytes: int) -> bool:
        """A frame begins; whether it is whole already."""
        lane, most = self.lanes[priority], self._limits.body_limit(priority)
        if lane.partial is not None:
            raise InputError("a frame began within another one")
        if len(header) > self._limits.header_bytes:
            raise TooLarge(f"a header of {len(header)} bytes, more than {self._limits.header_bytes}")
        if body_bytes > most:
            raise TooLarge(f"a body of {body_bytes} bytes, more than {most}")
        size_bytes = len(header) + body_bytes
        if not self.window.admits(lane.held, size_bytes):
            raise OverCredit(f"a frame of {size_bytes} bytes beside {lane.held.num_bytes}, over the credit given")
        lane.held.add(size_bytes)
        hasher = blake3() if priority in self._hashed else None
        lane.partial = _Partial(header, Body(body_bytes), hasher)
        return self.took(priority, 0) if not body_bytes else False

    def left_bytes(self, priority: Priority) -> int:
        partial = self.lanes[priority].partial
        if partial is None:
            raise InputError("bytes of a frame that hasn't begun")
        return len(partial.body) - partial.filled

    def target(self, priority: Priority, num_bytes: int) -> memoryview:
        """Where the next bytes of the body belong."""
        partial = self.lanes[priority].partial
        assert partial is not None
        return memoryview(partial.body)[partial.filled : partial.filled + num_bytes]

    def took(self, priority: Priority, num_bytes: int) -> bool:
        """So many bytes were put where :meth:`target` said; whether the frame is whole and waits for the handler."""
        lane = self.lanes[priority]
        assert lane.partial is not None
        if not lane.partial.took(num_bytes):
            return False
        lane.frames.append((lane.partial.header, lane.partial.body))
        lane.partial = None
        return True

    def cancel(self, priority: Priority) -> None:
        lane = self.lanes[priority]
        if lane.partial is None:
            raise InputError("the end of a frame that hasn't begun")
        lane.held.add(-len(lane.partial.header) - len(lane.partial.body), -1)
        lane.partial = None

    def handled(self, priority: Priority, size_bytes: int) -> None:
        self.lanes[priority].held.add(-size_bytes, -1)

    def drop(self) -> None:
        """What waits for the handler isn't wanted any more."""
        for lane in self.lanes:
            lane.frames.clear()
