"""The short way for small signed messages that come every second from everybody: no request object, no task, no timer.

A connection is served by aiohttp as ever; a whole POST to one of a few paths that arrives while nothing else is under way is
answered in between. Anything unusual about it (another header form, a long body, a hotkey over its limit) goes the long way,
which has the last word on what is refused and how. Both ways authenticate alike, and answer with the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from loguru import logger

from subnet.errors import IotaError, Refusal
from subnet.net.border import TIME_HEADER
from subnet.net.limits import RequestLimits
from subnet.protocol import wire
from subnet.protocol.signing import RequestVerifier

MAX_HEAD_BYTES = 8 << 10
_REASONS = {200: b"OK", 204: b"No Content"}


@dataclass(frozen=True)
class QuickRoute:
    """``answer(hotkey, body)`` gives a struct, or None for an answer without a body; it doesn't wait for anything."""

    path: str
    answer: Callable[[str, bytes], object]
    body_limit_bytes: int


class NotQuick(Exception):
    """This message goes the long way."""


class QuickRoutes:
    """Turns the bytes of a request into those of its answer."""

    def __init__(self, routes: Sequence[QuickRoute], verifier: RequestVerifier, limits: RequestLimits) -> None:
        self._verifier, self._limits = verifier, limits
        self._routes = {f"POST {route.path} HTTP/1.1".encode(): route for route in routes}
        self._first = tuple(self._routes)

    def is_one(self, data: bytes) -> bool:
        """Whether this is, or may become, a request to one of the paths."""
        return data.startswith(self._first) or (len(data) < 64 and any(one.startswith(data) for one in self._first))

    def answer(self, data: bytes) -> bytes | None:
        """The whole answer; None while the request isn't whole; :class:`NotQuick` if it goes the long way."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise NotQuick
            return None
        first, *lines = data[:end].split(b"\r\n")
        route, headers = self._routes.get(first), _headers(lines)
        length = headers.get("content-length", "")
        if route is None or not length.isdigit() or len(length) > 9 or not headers.keys().isdisjoint(_UNUSUAL):
            raise NotQuick
        size_bytes, body = int(length), data[end + 4 :]
        if size_bytes > route.body_limit_bytes or len(body) > size_bytes:
            raise NotQuick
        if len(body) < size_bytes:
            return None
        if not self._limits.has_room(headers.get("x-bittensor-hotkey", ""), size_bytes):
            raise NotQuick
        ours = wire.CONTENT_TYPE in headers.get("accept", "")
        return self._answer(route, headers, body, ours=ours)

    def _answer(self, route: QuickRoute, headers: dict[str, str], body: bytes, *, ours: bool) -> bytes:
        try:
            hotkey = self._verifier.verify(headers, body, method="POST", target=route.path)
            self._limits.wait_s(hotkey, len(body))
            value = route.answer(hotkey, body)
        except IotaError as error:
            return self._refusal(error.refusal(), error.http_status, ours=ours)
        except Exception as error:  # noqa: BLE001 - the outermost border: logged, and answered as ours
            logger.opt(exception=error).error("POST {} failed", route.path)
            refusal = Refusal("internal", "an internal error; the operator's log says more")
            return self._refusal(refusal, 500, ours=ours)
        return self._response(204) if value is None else self._response(200, wire.encode(value))

    def _refusal(self, refusal: Refusal, status: int, *, ours: bool) -> bytes:
        retry = b"" if refusal.retry_after is None else b"Retry-After: %d\r\n" % max(1, round(refusal.retry_after))
        if ours:
            return self._response(status, wire.encode(refusal), more=retry)
        return self._response(status, msgspec.json.encode(refusal), b"application/json", retry)

    def _response(
        self, status: int, body: bytes = b"", kind: bytes = wire.CONTENT_TYPE.encode(), more: bytes = b""
    ) -> bytes:
        reason, now_ns = _REASONS.get(status, b"Refused"), self._verifier.clock.wall_ns()
        head = b"HTTP/1.1 %d %b\r\n%b: %d\r\n%b" % (status, reason, TIME_HEADER.encode(), now_ns, more)
        if status == 204:
            return head + b"\r\n"
        return head + b"Content-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


_UNUSUAL = frozenset({"transfer-encoding", "expect", "connection", "upgrade", "content-encoding"})


def _headers(lines: Sequence[bytes]) -> dict[str, str]:
    """By lower-case name; a name that comes twice, a folded or a malformed line goes the long way."""
    headers: dict[str, str] = {}
    try:
        for line in lines:
            name, colon, value = line.decode("ascii").partition(":")
            key = name.lower()
            if not colon or key in headers or not key or key != key.strip():
                raise NotQuick
            headers[key] = value.strip(" \t")
    except UnicodeDecodeError:
        raise NotQuick from None
    return headers


class _Handler(RequestHandler):
    """aiohttp's connection, with the short way in front while it waits for a request."""

    __slots__ = ("_begun", "_held", "_quick")

    def __init__(self, quick: QuickRoutes, manager: Any, **options: Any) -> None:
        super().__init__(manager, **options)
        self._quick = quick
        self._held = b""
        """The beginning of a message that may go the short way."""
        self._begun = False
        """aiohttp has the beginning of a request."""

    def data_received(self, data: bytes) -> None:
        if self._held or (not self._begun and self._waits() and self._quick.is_one(data)):
            data, self._held = self._held + data, b""
            try:
                answer = self._quick.answer(data)
            except NotQuick:
                answer = None
            else:
                if answer is None:
                    self._held = data
                    return
            if answer is not None:
                self._say(answer)
                return
        super().data_received(data)
        self._begun = self._waits()

    def _waits(self) -> bool:
        """Whether aiohttp waits for a request, with none in its queue."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _say(self, answer: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.write(answer)
        # An idle connection is closed after a while; this one isn't idle.
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout

    def connection_lost(self, exc: BaseException | None) -> None:
        self._held = b""
        super().connection_lost(exc)


def handler_factory(server: web.Server, quick: QuickRoutes) -> Callable[[], asyncio.Protocol]:
    """What makes a connection's protocol for ``loop.create_server``."""
    return lambda: _Handler(quick, server, loop=server._loop, **server._kwargs)  # pyright: ignore[reportPrivateUsage]
