"""One connection between two miners: a handshake of small frames, then records that carry frames of four priorities.

A length over its limit, more than was credited, or nothing for too long within a frame ends the connection before anything is
allocated for it. Bodies are read straight into their own buffer; writing waits for the kernel, which is given little
ahead, so that what is urgent overtakes all but the last few hundred kilobytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import cast

from subnet.errors import InputError, IotaError, Refusal, TooLarge, Unreachable
from subnet.net import records
from subnet.net.base import Body, Priority, TransportLimits
from subnet.net.inbound import Inbound
from subnet.net.outgoing import Credit
from subnet.net.rate import RateLimit
from subnet.net.records import Amount, Kind
from subnet.protocol import wire
from subnet.protocol.wire import BODY_LENGTH, FRAME_LENGTH
from subnet.timing import TIMEOUTS

HANDSHAKE_BYTES = 4096
SLOWEST_PROGRESS_BYTES_PER_S = 4096
_SPARE_BYTES = 32 << 10
_UNSENT_BYTES = 128 << 10
"""What the kernel takes beyond what is on its way to a peer that isn't local: at 100 Mbit/s 10 ms."""
_LOCAL_PIECE_BYTES, _PIECE_BYTES = 1 << 20, 128 << 10
_SECURE_BUFFER_BYTES = 64 << 10
_MAX_REFUSALS = 8


class SlowPeer(InputError):
    """A frame or a record that has begun doesn't get on."""

    code = "slow_peer"


class FrameConnection(asyncio.BufferedProtocol):
    """One side of a connection. For each priority one task reads (:meth:`next_frame`, :meth:`handled`); one writes."""

    def __init__(
        self,
        limits: TransportLimits,
        *,
        hashed: Collection[Priority] = (),
        download: RateLimit | None = None,
        stall_s: float = TIMEOUTS.peer_send_s,
        on_refused: Callable[[Priority, Refusal], None] = lambda priority, refusal: None,
    ) -> None:
        self._limits, self._download, self._stall_s = limits, download, stall_s
        self.on_refused = on_refused
        self.credit = Credit()
        self.changed = asyncio.Event()
        """Set when credit came or the connection failed; the queue's own event takes its place once it is adopted."""
        self.inbound = Inbound(limits, hashed)
        self.peer_name, self.peer_host = "?", ""
        self.piece_bytes = _LOCAL_PIECE_BYTES
        """What is written at once, before something more urgent may go."""
        self.channel = b""
        """Hash of the accepting side's certificate where the connection is encrypted."""
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(max(limits.header_bytes, HANDSHAKE_BYTES) + 64 + _SPARE_BYTES)
        self._start = self._end = 0
        self._data: tuple[Priority, int] | None = None
        """Priority and missing bytes of the DATA record that is being read."""
        self._greeting = True
        """In the handshake frames are looked at one by one: what follows the last of them is a record already."""
        self._greetings: deque[bytes] = deque()
        self._readable = [asyncio.Event() for _ in Priority]
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._failure: IotaError | None = None
        self._freed = [Amount() for _ in Priority]
        self._refusals: deque[tuple[Priority, Refusal]] = deque(maxlen=_MAX_REFUSALS)
        self._telling = False
        self._resume: asyncio.TimerHandle | None = None
        self._progress: asyncio.TimerHandle | None = None
        self._progress_bytes = 0
        self._rested = True

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Also called by :meth:`secured`'s caller with the encrypted transport in place of the plain one."""
        self._transport = cast("asyncio.Transport", transport)
        secure = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=_SECURE_BUFFER_BYTES if secure else 0)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2:  # pyright: ignore[reportUnknownArgumentType]
            self.peer_host, port = str(name[0]), int(name[1])  # pyright: ignore[reportUnknownArgumentType]
            self.peer_name = f"{self.peer_host}:{port}"

    def hurry(self) -> None:
        """Let the kernel take little ahead: what is in its queue can't be overtaken. Not worth it on one machine."""
        self.piece_bytes = _PIECE_BYTES
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is not None:
            with suppress(OSError):  # only speed
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        most = self._download.piece_bytes if self._download is not None else records.MAX_DATA_BYTES
        if self._data is not None:
            priority, missing = self._data
            return self.inbound.target(priority, min(missing, most))
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._scratch) - self._end < _SPARE_BYTES:
            rest = self._scratch[self._start : self._end]
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return memoryview(self._scratch)[self._end : self._end + most]

    def buffer_updated(self, nbytes: int) -> None:
        self._progress_bytes += nbytes
        if self._download is not None:
            self._hold_back(self._download.spend(nbytes))
        try:
            if self._data is None:
                self._end += nbytes
            else:
                priority, missing = self._data
                self._data = (priority, missing - nbytes) if missing > nbytes else None
                self._took(priority, nbytes)
            self._parse()
        except IotaError as error:
            self.reject(error)

    def eof_received(self) -> bool:
        self._fail(Unreachable(f"{self.peer_name} closed the connection"))
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Unreachable(f"connection with {self.peer_name} lost: {exc or 'closed'}"))
        self._ended.set()

    # --- reading

    async def next_greeting(self) -> bytes:
        """The next message of the handshake."""
        while not self._parse_greeting():
            if self._failure is not None:
                raise self._failure
            self._readable[0].clear()
            await self._readable[0].wait()
        return self._greetings.popleft()

    def end_handshake(self) -> None:
        """From here on there are records; the peer learns how much it may send."""
        self._greeting = False
        for priority in Priority:
            self._write(records.amount(Kind.WINDOW, priority, self.inbound.window))
        try:
            self._parse()
        except IotaError as error:
            self.reject(error)

    async def next_frame(self, priority: Priority) -> tuple[bytes, Body]:
        """The next header and body of this priority, in order; what ended the connection once all are taken."""
        lane = self.inbound.lanes[priority]
        while not lane.frames:
            if self._failure is not None:
                raise self._failure
            self._readable[priority].clear()
            await self._readable[priority].wait()
        return lane.frames.popleft()

    def handled(self, priority: Priority, size_bytes: int) -> None:
        """A frame of so many bytes, header and body, is handled: the peer may send as much again."""
        self.inbound.handled(priority, size_bytes)
        self._freed[priority].add(size_bytes)
        self._tell_soon()

    def refuse(self, priority: Priority, refusal: Refusal) -> None:
        """Tell the peer why a frame of it counts for nothing."""
        self._refusals.append((priority, refusal))
        self._tell_soon()

    def _parse(self) -> None:
        if self._greeting:
            if self._end - self._start > 2 * HANDSHAKE_BYTES:
                raise TooLarge("more than belongs into a handshake")
            self._readable[0].set()
            return
        while self._data is None and self._failure is None and self._parse_record():
            pass
        self._watch_progress()

    def _parse_greeting(self) -> bool:
        """Whether the next message of the handshake is there: its length, itself, and a body of length 0.

        Only looked at when it is asked for: behind the last one come records.
        """
        available = self._end - self._start
        if available < FRAME_LENGTH.size:
            return False
        (size_bytes,) = FRAME_LENGTH.unpack_from(self._scratch, self._start)
        if size_bytes > HANDSHAKE_BYTES:
            raise TooLarge(f"a message of {size_bytes} bytes in the handshake, more than {HANDSHAKE_BYTES}")
        end = self._start + FRAME_LENGTH.size + size_bytes
        if end + BODY_LENGTH.size > self._end:
            return False
        if BODY_LENGTH.unpack_from(self._scratch, end)[0]:
            raise TooLarge("a body in the handshake")
        self._greetings.append(bytes(self._scratch[self._start + FRAME_LENGTH.size : end]))
        self._start = end + BODY_LENGTH.size
        return True

    def _parse_record(self) -> bool:
        """Whether there may be more."""
        available = self._end - self._start
        if available < records.HEAD.size:
            return False
        kind, priority, num_bytes = records.parse_head(self._scratch, self._start)
        if num_bytes > records.payload_limit(kind, self._limits.header_bytes):
            raise TooLarge(f"{kind.name} with {num_bytes} bytes")
        begin = self._start + records.HEAD.size
        if kind is Kind.DATA:
            if not 0 < num_bytes <= self.inbound.left_bytes(priority):
                raise InputError(f"{num_bytes} bytes of a frame that lacks {self.inbound.left_bytes(priority)}")
            self._begin_data(priority, begin, num_bytes)
            return True
        if available < records.HEAD.size + num_bytes:
            return False
        payload = bytes(self._scratch[begin : begin + num_bytes])
        self._start = begin + num_bytes
        self._take(kind, priority, payload)
        return True

    def _begin_data(self, priority: Priority, begin: int, num_bytes: int) -> None:
        """Take what has come already; the rest is read to where it belongs."""
        taken = min(num_bytes, self._end - begin)
        self._start = begin + taken
        if taken:
            self.inbound.target(priority, taken)[:] = memoryview(self._scratch)[begin : begin + taken]
        if taken < num_bytes:
            self._data = (priority, num_bytes - taken)
        self._took(priority, taken)

    def _took(self, priority: Priority, num_bytes: int) -> None:
        if self.inbound.took(priority, num_bytes):
            self._readable[priority].set()

    def _take(self, kind: Kind, priority: Priority, payload: bytes) -> None:
        match kind:
            case Kind.START:
                if self.inbound.start(priority, *records.parse_start(payload)):
                    self._readable[priority].set()
            case Kind.CANCEL:
                self.inbound.cancel(priority)
            case Kind.WINDOW:
                self.credit.windows[priority] = records.parse_amount(payload)
                self.changed.set()
            case Kind.HANDLED:
                self.credit.handled(priority, records.parse_amount(payload))
                self.changed.set()
            case Kind.REFUSED:
                what = f"a refusal of {self.peer_name}"
                self.on_refused(priority, wire.decode(payload, Refusal, limit_bytes=len(payload), what=what))
            case Kind.DATA:
                raise InputError("bytes out of place")

    # --- progress and pace

    def _hold_back(self, seconds: float) -> None:
        """Read nothing for a while: the peer's kernel then sends nothing."""
        if seconds > 0 and self._transport is not None and self._resume is None:
            self._transport.pause_reading()
            self._resume = asyncio.get_running_loop().call_later(seconds, self._read_on)

    def _read_on(self) -> None:
        self._resume = None
        self._rested = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _watch_progress(self) -> None:
        unfinished = self._start < self._end or self.inbound.unfinished
        if not unfinished:
            self._rested = True
        elif self._progress is None and self._failure is None:
            self._rested, self._progress_bytes = False, 0
            self._progress = asyncio.get_running_loop().call_later(self._stall_s, self._check_progress)

    def _check_progress(self) -> None:
        self._progress = None
        enough = self._progress_bytes >= SLOWEST_PROGRESS_BYTES_PER_S * self._stall_s
        if self._failure is None and not (self._rested or enough or self._resume is not None):
            self.reject(SlowPeer(f"{self._progress_bytes} bytes in {self._stall_s:g} s of a frame that has begun"))
        self._watch_progress()

    # --- writing

    def write_greeting(self, message: bytes) -> None:
        """A message of the handshake, at once."""
        if self._failure is not None or self._transport is None:
            raise self._failure or Unreachable("not connected")
        self._transport.write(FRAME_LENGTH.pack(len(message)) + message + BODY_LENGTH.pack(0))

    async def write_record(self, data: bytes, view: memoryview | None, *, stall_s: float) -> None:
        """Write a record; a peer that takes nothing for ``stall_s`` loses the connection."""
        if self._failure is not None or self._transport is None:
            raise self._failure or Unreachable("not connected")
        self._transport.write(data)
        if view is not None:
            self._transport.write(view)
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(stall_s):
                    await self._writable.wait()
            except TimeoutError as error:
                stalled = Unreachable(f"{self.peer_name} took nothing for {stall_s:g} s")
                self.reject(stalled)
                raise stalled from error
        if self._failure is not None:
            raise self._failure

    def _tell_soon(self) -> None:
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Credit and refusals, between two other records; not while the peer takes nothing: then they add up."""
        self._telling = False
        if self._greeting or not self._writable.is_set():
            return
        for priority, freed in zip(Priority, self._freed, strict=True):
            if freed.num_frames:
                self._write(records.amount(Kind.HANDLED, priority, freed))
                freed.clear()
        while self._refusals:
            self._write(records.refused(*self._refusals.popleft()))

    def _write(self, data: bytes) -> None:
        if self._failure is None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # --- ending

    @property
    def failure(self) -> IotaError | None:
        return self._failure

    @property
    def transport(self) -> asyncio.Transport | None:
        return self._transport

    def reject(self, error: IotaError) -> None:
        self._fail(error)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self, flush_s: float = 0.5) -> None:
        """Flush what is written, then end; a peer that doesn't take it in time is aborted."""
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(flush_s):
                await self._ended.wait()
        except TimeoutError:
            self._transport.abort()
            await self._ended.wait()

    def _fail(self, error: IotaError) -> None:
        """The first reason stands."""
        if self._failure is None:
            self._failure = error
        for timer in (self._resume, self._progress):
            if timer is not None:
                timer.cancel()
        self._resume = self._progress = None
        for event in (*self._readable, self._writable, self.changed):
            event.set()
