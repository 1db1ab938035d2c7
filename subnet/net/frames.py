"""Frames on one TCP connection: 4-byte length, header, 8-byte length, body; read straight into the body's own buffer.

A length over its limit ends the connection before anything is allocated for it. Reading stops while more is held
than the quota allows; writing waits for the kernel, so that at most one piece of a frame is ever copied.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from subnet.errors import IotaError, TooLarge, Unreachable
from subnet.protocol.wire import BODY_LENGTH, FRAME_LENGTH

SOCKET_BUFFER_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_SPARE_BYTES = 32 << 10
_PREFIX_BYTES = FRAME_LENGTH.size + BODY_LENGTH.size


class FrameConnection(asyncio.BufferedProtocol):
    """One side of a connection. One task reads (:meth:`next_frame`, :meth:`release`), one at a time writes."""

    def __init__(
        self,
        *,
        header_bytes: int,
        body_bytes: int,
        quota_bytes: int,
        quota_frames: int,
        on_open: Callable[[FrameConnection], None] | None = None,
        handshake: bool = False,
    ) -> None:
        self._header_limit = header_bytes
        self._body_limit = body_bytes
        self._quota_bytes = quota_bytes
        self._quota_frames = quota_frames
        self._on_open = on_open
        self._handshake = handshake
        """Frames are looked at one by one: what follows the last of the handshake waits for the real limits."""
        self._handed_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(header_bytes + _PREFIX_BYTES + _SPARE_BYTES)
        self._start = 0
        self._end = 0
        self._header = b""
        self._body: bytearray | None = None
        self._filled = 0
        self._frames: deque[tuple[bytes, bytearray]] = deque()
        self._held_bytes = 0
        self._held_frames = 0
        self._stalled = False
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._failure: IotaError | None = None
        self.peer_name = "?"

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple) and len(name) >= 2:
            self.peer_name = f"{name[0]}:{name[1]}"
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):  # only speed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        if self._on_open is not None:
            self._on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._scratch) - self._end < _SPARE_BYTES:
            rest = self._scratch[self._start : self._end]
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is None:
            self._end += nbytes
        else:
            self._filled += nbytes
            if self._filled < len(self._body):
                return
            self._deliver(self._body)
        self._parse()

    def eof_received(self) -> bool:
        self._fail(Unreachable(f"{self.peer_name} closed the connection"))
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Unreachable(f"connection with {self.peer_name} lost: {exc or 'closed'}"))
        self._ended.set()

    # --- reading

    async def next_frame(self) -> tuple[bytes, bytearray]:
        """The next header and body, in order; what ended the connection once all are taken."""
        while not self._frames:
            if self._failure is not None:
                raise self._failure
            self._readable.clear()
            await self._readable.wait()
        return self._frames.popleft()

    async def next_of_handshake(self) -> bytes:
        """The header of the next frame; until it is asked for, what comes after the last one isn't looked at."""
        self._release_handed()
        header, body = await self.next_frame()
        self._handed_bytes = len(header) + len(body)
        return header

    def end_handshake(self, *, header_bytes: int, body_bytes: int) -> None:
        """From here on frames come as they come, within these limits."""
        self.set_limits(header_bytes=header_bytes, body_bytes=body_bytes)
        self._handshake = False
        self._release_handed()

    def _release_handed(self) -> None:
        if self._handed_bytes:
            size_bytes, self._handed_bytes = self._handed_bytes, 0
            self.release(size_bytes)

    def release(self, size_bytes: int) -> None:
        """A frame of so many bytes, header and body, is handled: its share of the quota is free."""
        self._held_bytes -= size_bytes
        self._held_frames -= 1
        if self._stalled and self._failure is None:
            self._stalled = False
            self._parse()
            if not self._stalled and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def _parse(self) -> None:
        while self._failure is None:
            available = self._end - self._start
            if available < FRAME_LENGTH.size:
                return
            if self._handshake and self._held_frames:
                self._stall()
                return
            (header_bytes,) = FRAME_LENGTH.unpack_from(self._scratch, self._start)
            if header_bytes > self._header_limit:
                self._reject(TooLarge(f"a header of {header_bytes} bytes, more than {self._header_limit}"))
                return
            if available < _PREFIX_BYTES + header_bytes:
                return
            header_end = self._start + FRAME_LENGTH.size + header_bytes
            (body_bytes,) = BODY_LENGTH.unpack_from(self._scratch, header_end)
            if body_bytes > self._body_limit:
                self._reject(TooLarge(f"a body of {body_bytes} bytes, more than {self._body_limit}"))
                return
            if self._held_frames and (
                self._held_bytes + header_bytes + body_bytes > self._quota_bytes
                or self._held_frames >= self._quota_frames
            ):
                self._stall()
                return
            self._header = bytes(self._scratch[self._start + FRAME_LENGTH.size : header_end])
            self._begin_body(header_end + BODY_LENGTH.size, body_bytes)
            if self._body is not None:
                return

    def _begin_body(self, start: int, body_bytes: int) -> None:
        """Allocate the body, take what has already come, and deliver it if that is all."""
        self._held_bytes += len(self._header) + body_bytes
        self._held_frames += 1
        body = bytearray(body_bytes)
        taken = min(body_bytes, self._end - start)
        body[:taken] = memoryview(self._scratch)[start : start + taken]
        self._start = start + taken
        if taken == body_bytes:
            self._deliver(body)
        else:
            self._body, self._filled = body, taken

    def _deliver(self, body: bytearray) -> None:
        self._frames.append((self._header, body))
        self._body = None
        self._readable.set()

    def _stall(self) -> None:
        self._stalled = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _reject(self, error: IotaError) -> None:
        self._fail(error)
        self.abort()

    # --- writing

    def write_now(self, header: bytes) -> None:
        """A small frame without a body, at once; for the handshake."""
        if self._failure is not None or self._transport is None:
            raise self._failure or Unreachable("not connected")
        self._transport.write(FRAME_LENGTH.pack(len(header)) + header + BODY_LENGTH.pack(0))

    async def write_frame(self, header: bytes, views: Sequence[memoryview], *, stall_s: float) -> None:
        """Write a whole frame; a peer that takes nothing for ``stall_s`` loses the connection."""
        body_bytes = sum(view.nbytes for view in views)
        prefix = FRAME_LENGTH.pack(len(header)) + header + BODY_LENGTH.pack(body_bytes)
        await self._write_piece(prefix, stall_s)
        for view in views:
            for start in range(0, view.nbytes, _PIECE_BYTES):
                await self._write_piece(view[start : start + _PIECE_BYTES], stall_s)

    async def _write_piece(self, piece: bytes | memoryview, stall_s: float) -> None:
        if self._failure is not None or self._transport is None:
            raise self._failure or Unreachable("not connected")
        self._transport.write(piece)
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(stall_s):
                    await self._writable.wait()
            except TimeoutError as error:
                stalled = Unreachable(f"{self.peer_name} took nothing for {stall_s:g} s")
                self._reject(stalled)
                raise stalled from error
        if self._failure is not None:
            raise self._failure

    # --- ending

    @property
    def failure(self) -> IotaError | None:
        return self._failure

    def set_limits(self, *, header_bytes: int, body_bytes: int) -> None:
        """After the handshake; the header's limit can't grow beyond the one of the construction."""
        self._header_limit = min(header_bytes, len(self._scratch) - _PREFIX_BYTES - _SPARE_BYTES)
        self._body_limit = body_bytes

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
        self._readable.set()
        self._writable.set()
