"""What waits to be sent to one peer: by priority, bounded, written in pieces as far as the receiver's credits go.

The frame to write next is the lowest number's that has begun or may begin; a frame that is full of credit holds up its own
priority only. A sender that gave up takes its frame out, also one of which a part was written: that one is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from subnet.errors import InputError, IotaError
from subnet.net.base import Priority, share
from subnet.net.records import Amount


@dataclass(eq=False)
class OutgoingFrame:
    """One frame on its way; ``done`` is set when the kernel has it, or fails for good."""

    priority: Priority
    header: bytes
    views: Sequence[memoryview]
    done: asyncio.Future[None]
    body_bytes: int = 0
    begun: bool = False
    dead: bool = False
    counted: bool = False
    written_bytes: int = 0
    """Of the body."""
    _view: int = 0
    _offset: int = 0

    def __post_init__(self) -> None:
        self.body_bytes = sum(view.nbytes for view in self.views)

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.body_bytes

    @property
    def whole(self) -> bool:
        """Whether nothing of it is left to write."""
        return self.begun and self.written_bytes == self.body_bytes

    def rewind(self) -> None:
        self.begun = False
        self.written_bytes = self._view = self._offset = 0

    def piece(self, num_bytes: int) -> memoryview:
        """The next bytes of the body, at most so many; they count as written."""
        view = self.views[self._view]
        found = view[self._offset : self._offset + num_bytes]
        self._offset += found.nbytes
        self.written_bytes += found.nbytes
        if self._offset == view.nbytes:
            self._view, self._offset = self._view + 1, 0
        return found


class Credit:
    """How much the receiver allows on this connection, and what is under way, by priority."""

    def __init__(self) -> None:
        self.windows = [Amount() for _ in Priority]
        self.under_way = [Amount() for _ in Priority]

    def admits(self, frame: OutgoingFrame) -> bool:
        return self.windows[frame.priority].admits(self.under_way[frame.priority], frame.size_bytes)

    def handled(self, priority: Priority, amount: Amount) -> None:
        used = self.under_way[priority]
        used.add(-amount.num_bytes, -amount.num_frames)
        if used.num_bytes < 0 or used.num_frames < 0:
            raise InputError("credit for more than was sent")


@dataclass
class _Lane:
    waiting: deque[OutgoingFrame] = field(default_factory=deque[OutgoingFrame])
    writing: OutgoingFrame | None = None
    held: Amount = field(default_factory=Amount)
    room: asyncio.Event = field(default_factory=asyncio.Event)


class OutgoingQueue:
    def __init__(self, max_bytes: int, max_frames: int) -> None:
        self._most = Amount(share(max_bytes), share(max_frames))
        """Of each priority."""
        self._lanes = [_Lane() for _ in Priority]
        self.changed = asyncio.Event()
        """Set by whatever may make a frame writable; whoever waits for it clears it."""

    async def push(self, frame: OutgoingFrame) -> None:
        """Wait for room, then queue."""
        lane = self._lanes[frame.priority]
        while not self._most.admits(lane.held, frame.size_bytes):
            lane.room.clear()
            await lane.room.wait()
        frame.counted = True
        lane.held.add(frame.size_bytes)
        lane.waiting.append(frame)
        self.changed.set()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a frame to be sent."""
        return any(lane.held.num_frames for lane in self._lanes)

    def next(self, credit: Credit) -> OutgoingFrame | None:
        """The frame of which the next piece (or the cancellation) should be written; None: credit is waited for."""
        for lane in self._lanes:
            if lane.writing is not None:
                return lane.writing
            while lane.waiting and lane.waiting[0].dead:
                lane.waiting.popleft()
            if lane.waiting and credit.admits(lane.waiting[0]):
                return lane.waiting[0]
        return None

    def begin(self, frame: OutgoingFrame, credit: Credit) -> None:
        """The first piece of what :meth:`next` gave is being written."""
        lane = self._lanes[frame.priority]
        lane.waiting.popleft()
        lane.writing = frame
        frame.begun = True
        credit.under_way[frame.priority].add(frame.size_bytes)

    def cancelled(self, frame: OutgoingFrame, credit: Credit) -> None:
        """The receiver is told that the rest of a frame doesn't come."""
        self._lanes[frame.priority].writing = None
        credit.under_way[frame.priority].add(-frame.size_bytes, -1)
        self._forget(frame)

    def finish(self, frame: OutgoingFrame, error: IotaError | None = None) -> None:
        lane = self._lanes[frame.priority]
        if lane.writing is frame:
            lane.writing = None
        frame.dead = True
        self._forget(frame)
        if not frame.done.done():
            if error is None:
                frame.done.set_result(None)
            else:
                frame.done.set_exception(error)

    def rewind(self) -> None:
        """The connection is another one: what was being written starts from its beginning, where it still is wanted."""
        for lane in self._lanes:
            if (frame := lane.writing) is None:
                continue
            lane.writing = None
            if frame.dead:
                self._forget(frame)
            else:
                frame.rewind()
                lane.waiting.appendleft(frame)

    def abandon(self, frame: OutgoingFrame) -> None:
        """Its sender no longer waits; nothing more of its body is read."""
        frame.dead = True
        if self._lanes[frame.priority].writing is not frame:
            self._forget(frame)
        self.changed.set()

    def fail_all(self, error: IotaError) -> None:
        self.rewind()
        for lane in self._lanes:
            while lane.waiting:
                self.finish(lane.waiting.popleft(), error)

    def _forget(self, frame: OutgoingFrame) -> None:
        if frame.counted:
            frame.counted = False
            lane = self._lanes[frame.priority]
            lane.held.add(-frame.size_bytes, -1)
            lane.room.set()
