"""Cheap HTTP for simulated miners: one socket for reports, one for directives, no more work than the bytes need.

Signatures are real (btauth/1); answers are read as far as status and length. Nothing here retries: the fleet does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from subnet.protocol import wire
from subnet.protocol.signing import Signer

CONTENT = "application/msgpack"


def request_bytes(
    signer: Signer, receiver: str, method: str, target: str, body: bytes, *, host: str = "validator"
) -> bytes:
    """A signed request, ready for the socket."""
    headers = signer.sign_request(method=method, target=target, body=body, receiver=receiver, wall_ns=time.time_ns())
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Accept: {CONTENT}"]
    if body:
        lines += [f"Content-Type: {CONTENT}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode() + body


class Poster(asyncio.Protocol):
    """One persistent connection, one request at a time; ``on_answer(status, body)`` with status 0 when it was lost."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._on_answer: Callable[[int, bytes], None] | None = None
        self._got = bytearray()

    @property
    def is_busy(self) -> bool:
        return self._on_answer is not None

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, data: bytes, on_answer: Callable[[int, bytes], None]) -> None:
        assert self.transport is not None
        self._on_answer = on_answer
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        got = self._got
        got += data
        end = got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(got[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(got) < end + 4 + length:
            return
        status, body = int(head[9:12]), bytes(got[end + 4 : end + 4 + length])
        del got[: end + 4 + length]
        self._answer(status, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._got.clear()
        self._answer(0, b"")

    def _answer(self, status: int, body: bytes) -> None:
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(status, body)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Stream(asyncio.Protocol):
    """A directive stream; counts its bytes, and gives its frames to ``on_frame`` where somebody wants them."""

    def __init__(
        self, request: bytes, on_end: Callable[[], None], on_frame: Callable[[bytes], None] | None = None
    ) -> None:
        self._request, self._on_end, self._on_frame = request, on_end, on_frame
        self.transport: asyncio.Transport | None = None
        self.num_bytes = 0
        self._raw, self._body = bytearray(), bytearray()
        self._in_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.num_bytes and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"directives: {data[:300]!r}")
        self.num_bytes += len(data)
        if self._on_frame is None:
            return
        self._raw += data
        if self._in_head:
            end = self._raw.find(b"\r\n\r\n")
            if end < 0:
                return
            del self._raw[: end + 4]
            self._in_head = False
        self._dechunk()
        self._cut()

    def _dechunk(self) -> None:
        raw, at = self._raw, 0
        while (end := raw.find(b"\r\n", at)) >= 0:
            length = int(raw[at:end], 16)
            if len(raw) < end + 2 + length + 2:
                break
            self._body += raw[end + 2 : end + 2 + length]
            at = end + 2 + length + 2
        del raw[:at]

    def _cut(self) -> None:
        body, at, size = self._body, 0, wire.STREAM_HEAD.size
        while len(body) - at >= size:
            length = wire.stream_size(body[at : at + size])
            if len(body) - at - size < length:
                break
            frame = bytes(body[at + size : at + size + length])
            at += size + length
            if frame and self._on_frame is not None:
                self._on_frame(frame)
        del body[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._on_end()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
