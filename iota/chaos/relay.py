"""One connection through a proxy: bytes pass in order, as its links' policies allow at that moment, or the connection ends.

Nothing is held beyond ``QUEUE_CHUNKS`` chunks a direction; an end of one side reaches the other as an end, a loss as a reset.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iota.chaos.proxy import Link, Policy, Proxy

CHUNK_BYTES = 16 << 10
QUEUE_CHUNKS = 16
CONNECT_S = 5.0
IDLE_S = 600.0
WRITE_S = 120.0
_HEAD_BYTES = 64 << 10
_LINGER_S = 1.0
_BUSY = b"503 Service Unavailable\n"
_BUSY_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(_BUSY)).encode() + b"\r\n\r\n" + _BUSY
)


class Flipper:
    """Inverts one byte in ``every`` that pass, ``left`` times."""

    def __init__(self, left: int, every: int) -> None:
        self.left, self._every, self._next = left, max(1, every), max(1, every) - 1

    def flip(self, data: bytes) -> tuple[bytes, int]:
        """The bytes as they leave, and how many were inverted."""
        if not self.left:
            return data, 0
        changed, count = bytearray(data), 0
        while self.left and self._next < len(changed):
            changed[self._next] ^= 0xFF
            self._next += self._every
            self.left -= 1
            count += 1
        self._next -= len(changed)
        return bytes(changed), count


class _Cut(Exception):
    """The connection is reset because a policy says so."""


class _Ended(Exception):
    """The connection ends in order, though too early, because a policy says so."""


class Relay:
    def __init__(self, proxy: Proxy, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy, self._reader, self._writer = proxy, reader, writer
        self.links: list[Link] = [link]
        self._up: asyncio.StreamWriter | None = None
        self._answered: tuple[Policy, int] | None = None
        self._is_reset = False

    def reset(self) -> None:
        """Both sides see a reset, at once."""
        self._is_reset = True
        for writer in (self._writer, self._up):
            if writer is not None:
                _abort(writer)

    async def run(self) -> None:
        in_order = False
        try:
            await self._relay()
            in_order = True
        except* _Ended:
            in_order = True
        except* (OSError, _Cut, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            in_order = False
        finally:
            if not in_order:
                self.reset()
            await self._close()

    async def _relay(self) -> None:
        if self._mode("reset"):
            self.links[0].num_reset += 1
            raise _Cut
        if self._mode("busy"):
            await self._answer_busy()
            return
        await self._gate()
        first = await self._identified()
        link = self.links[0]
        async with asyncio.timeout(CONNECT_S):
            reader, self._up = await asyncio.open_connection(link.upstream_host, link.upstream_port)
        if self._is_reset:
            raise _Cut
        async with asyncio.TaskGroup() as group:
            self._pump(group, self._reader, self._up, first, answers=False)
            self._pump(group, reader, self._writer, b"", answers=True)

    async def _identified(self) -> bytes:
        """The first bytes, where they tell who opened this connection."""
        identify = self.links[0].identify
        if identify is None:
            return b""
        async with asyncio.timeout(IDLE_S):
            first = await self._reader.read(CHUNK_BYTES)
        name = identify(first)
        origin = self._proxy.links.get(name) if name is not None else None
        if origin is not None and origin is not self.links[0]:
            self.links.append(origin)
            origin.relays.add(self)
            if self._mode("reset"):
                origin.num_reset += 1
                raise _Cut
        return first

    # ---- passing

    def _pump(
        self,
        group: asyncio.TaskGroup,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        first: bytes,
        *,
        answers: bool,
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE_CHUNKS)
        group.create_task(self._take(reader, queue, first))
        group.create_task(self._give(queue, writer, answers))

    async def _take(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]], first: bytes
    ) -> None:
        clock = asyncio.get_running_loop().time
        chunk = first
        while True:
            if not chunk:
                async with asyncio.timeout(IDLE_S):
                    chunk = await reader.read(CHUNK_BYTES)
            delay_s = sum(policy.delay_ms for policy in self._policies()) / 1000
            await queue.put((clock() + delay_s, chunk))
            if not chunk:
                return
            chunk = b""

    async def _give(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, answers: bool
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due_s - clock()))
            await self._pace(len(chunk))
            await self._gate()
            if not chunk:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            for link in self.links:
                chunk, flipped = link.flipper.flip(chunk)
                link.num_flipped += flipped
                link.num_bytes += len(chunk)
            left = self._left(len(chunk)) if answers else None
            writer.write(chunk if left is None else chunk[:left])
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
            if left is not None and left < len(chunk):
                raise _Ended  # as from a proxy that lost its server

    async def _pace(self, num_bytes: int) -> None:
        """Wait until the slowest link has room for so many bytes."""
        clock = asyncio.get_running_loop().time
        for link in self.links:
            if link.policy.kbit_per_s:
                link.free_at_s = max(clock(), link.free_at_s) + num_bytes * 8 / (1000 * link.policy.kbit_per_s)
                await asyncio.sleep(link.free_at_s - clock())

    async def _gate(self) -> None:
        while self._mode("blackhole"):
            await self._proxy.changed.wait()

    def _left(self, num_bytes: int) -> int | None:
        """How many of the next bytes of the answers may pass; None: all."""
        policy = next((policy for policy in self._policies() if policy.truncate_after is not None), None)
        if policy is None or policy.truncate_after is None:
            self._answered = None
            return None
        if self._answered is None or self._answered[0] is not policy:
            self._answered = (policy, 0)
        passed = self._answered[1]
        self._answered = (policy, passed + num_bytes)
        return max(0, policy.truncate_after - passed)

    def _policies(self) -> list[Policy]:
        return [link.policy for link in self.links]

    def _mode(self, mode: str) -> bool:
        return any(policy.mode == mode for policy in self._policies())

    # ---- ending

    async def _answer_busy(self) -> None:
        """One request's head, one 503; the rest of the request is read for a moment, so that the answer arrives."""
        async with asyncio.timeout(CONNECT_S):
            await self._reader.readuntil(b"\r\n\r\n")
        self._writer.write(_BUSY_ANSWER)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._writer.drain()
                self._writer.write_eof()
                while await self._reader.read(_HEAD_BYTES):
                    continue

    async def _close(self) -> None:
        for writer in (self._writer, self._up):
            if writer is None:
                continue
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await writer.wait_closed()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Reset instead of an orderly end."""
    found = writer.get_extra_info("socket")
    if found is not None and found.fileno() >= 0:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
