"""A bounded queue of frames for one peer: backward before forward before the rest, first come first served within.

A sender that gave up takes its frame out; what is being written stays whole.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from subnet.errors import IotaError
from subnet.net.base import Priority


@dataclass(eq=False)
class OutgoingFrame:
    """One frame on its way; ``done`` is set when the kernel has it, or fails for good."""

    priority: Priority
    header: bytes
    views: Sequence[memoryview]
    done: asyncio.Future[None]
    size_bytes: int = 0
    serial: int = 0
    counted: bool = False
    writing: bool = False
    dead: bool = False

    def __post_init__(self) -> None:
        self.size_bytes = len(self.header) + sum(view.nbytes for view in self.views)


@dataclass
class OutgoingQueue:
    max_bytes: int
    max_frames: int
    _heap: list[tuple[int, int, OutgoingFrame]] = field(default_factory=list[tuple[int, int, OutgoingFrame]])
    _serial: int = 0
    _bytes: int = 0
    _frames: int = 0
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def push(self, frame: OutgoingFrame) -> None:
        """Wait for room, then queue."""
        while self._frames and (self._bytes + frame.size_bytes > self.max_bytes or self._frames >= self.max_frames):
            self._room.clear()
            await self._room.wait()
        frame.counted = True
        self._bytes += frame.size_bytes
        self._frames += 1
        self._serial += 1
        frame.serial = self._serial
        heapq.heappush(self._heap, (frame.priority, frame.serial, frame))

    def pop(self) -> OutgoingFrame | None:
        """The next frame that somebody still wants sent; it goes back by :meth:`unpop` or ends by :meth:`finish`."""
        while self._heap:
            frame = heapq.heappop(self._heap)[2]
            if not frame.dead:
                frame.writing = True
                return frame
        return None

    def unpop(self, frame: OutgoingFrame) -> None:
        """Back to where it was: it wasn't sent."""
        frame.writing = False
        if frame.dead:
            self._forget(frame)
        else:
            heapq.heappush(self._heap, (frame.priority, frame.serial, frame))

    def finish(self, frame: OutgoingFrame, error: IotaError | None = None) -> None:
        frame.writing = False
        frame.dead = True
        self._forget(frame)
        if not frame.done.done():
            if error is None:
                frame.done.set_result(None)
            else:
                frame.done.set_exception(error)

    def abandon(self, frame: OutgoingFrame) -> None:
        """Its sender no longer waits."""
        frame.dead = True
        if not frame.writing:
            self._forget(frame)

    def fail_all(self, error: IotaError) -> None:
        while (frame := self.pop()) is not None:
            self.finish(frame, error)

    def _forget(self, frame: OutgoingFrame) -> None:
        if frame.counted:
            frame.counted = False
            self._bytes -= frame.size_bytes
            self._frames -= 1
            self._room.set()
