"""The real store's handlers behind a border that breaks: one-shot, counted faults, and an outage that can be switched.

Whatever isn't broken on purpose is the real thing: grants are checked, and expire, as in a store of one's own. The same border
stands before a real S3 server as a proxy (:class:`FaultyS3`), whose answers are in S3's own words.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

from subnet.errors import Expired, OutOfSpace
from subnet.net.border import Listener, listen
from subnet.store.folder import FolderStore
from subnet.store.server import StoreServer
from subnet.store.signed_urls import StoreSigner
from subnet.timing import SYSTEM_CLOCK, Clock

SECRET = b"s" * 32
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[["FaultyBorder", web.Request, Handler], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True)
class FaultyBorder:
    """``on("GET", fault, times=2)`` breaks the next two; ``seen`` is what was asked for, ``fired`` what was broken."""

    down: bool = False
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""
    fired: Counter[str] = field(default_factory=Counter)
    _faults: dict[str, deque[Fault]] = field(default_factory=dict)

    def on(self, method: str, *faults: Fault, times: int = 1) -> Self:
        self._faults.setdefault(method, deque()).extend(faults * times)
        return self

    def asked(self, method: str) -> int:
        return sum(seen == method for seen, _, _ in self.seen)

    def _border(self) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
        @web.middleware
        async def border(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.seen.append((request.method, request.path, request.headers.get("Range", "")))
            if self.down:
                self.fired["outage"] += 1
                return await reset(self, request, handler)
            waiting = self._faults.get(request.method)
            if not waiting:
                return await handler(request)
            fault = waiting.popleft()
            self.fired[getattr(fault, "__name__", "fault")] += 1
            return await fault(self, request, handler)

        return border

    async def blob(self, request: web.Request) -> tuple[bytes, int, int]:
        """What was asked for, where it starts, and the size of the whole."""
        raise AssertionError("which store?")


class FaultyStore(FaultyBorder):
    def __init__(self, directory: Path, budget_bytes: int = 64 << 20, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self.directory, self.budget_bytes, self.clock = directory, budget_bytes, clock

    async def start(self, port: int = 0) -> FaultyStore:
        self.store = FolderStore(self.directory, self.budget_bytes)
        app = StoreServer(self.store, StoreSigner(SECRET, "", clock=self.clock)).app()
        app.middlewares.append(self._border())  # inside of the border that turns our errors into answers
        self.listener: Listener = await listen(app, "127.0.0.1", port)
        return self

    async def close(self) -> None:
        await self.listener.close()

    @property
    def url(self) -> str:
        return self.listener.url

    async def blob(self, request: web.Request) -> tuple[bytes, int, int]:
        data = self.store.find_blob(request.match_info["hash"])[0].read_bytes()
        start, stop, _ = request.http_range.indices(len(data))
        return data[start:stop], start, len(data)


class FaultyS3(FaultyBorder):
    """A proxy before an S3 server; the host that was signed for is passed on, so signatures hold."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def start(self) -> FaultyS3:
        self._session = aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        app = web.Application(middlewares=[self._border()], client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self.listener: Listener = await listen(app, "127.0.0.1", 0)
        return self

    async def close(self) -> None:
        await self.listener.close()
        await self._session.close()

    @property
    def url(self) -> str:
        return self.listener.url

    async def ask(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        """The server's answer to the request."""
        url = URL(f"{self._endpoint}{request.raw_path}", encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        body = await request.read() if request.can_read_body else b""
        if "Content-Length" in headers:
            headers["Content-Length"] = str(len(body))
        async with self._session.request(
            request.method,
            url,
            headers=headers,
            data=io.BytesIO(body) if body else None,
            skip_auto_headers=("Content-Type", "User-Agent"),
        ) as answer:
            data = await answer.read()
            return answer.status, {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}, data

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        status, headers, data = await self.ask(request)
        if request.method == "HEAD":
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
            return response
        headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
        return web.Response(status=status, headers=headers, body=data)

    async def blob(self, request: web.Request) -> tuple[bytes, int, int]:
        _, headers, data = await self.ask(request)
        found = {name.lower(): value for name, value in headers.items()}.get("content-range", "")
        if not found:
            return data, 0, len(data)
        span, _, whole = found.removeprefix("bytes ").partition("/")
        return data, int(span.partition("-")[0]), int(whole)


_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect")


async def reset(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The connection breaks before anything is answered."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("on purpose")


async def lost_answer(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """It is done, but nobody hears of it."""
    await handler(request)
    return await reset(store, request, handler)


async def expired(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    raise Expired("this URL expired on purpose")


async def full(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    raise OutOfSpace("full on purpose", hint="none")


async def crash(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    raise KeyError("a mistake of the store's own")


def later(seconds: int) -> Fault:
    """A gateway's 503 in its own words."""

    async def later(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
        return web.Response(status=503, text="<html>later</html>", headers={"Retry-After": str(seconds)})

    return later


def s3_says(status: int, code: str, message: str = "") -> Fault:
    """An error in S3's own words; nothing was done."""

    async def s3_says(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
        await request.read()
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return web.Response(status=status, body=text.encode(), content_type="application/xml")

    s3_says.__name__ = code
    return s3_says


slow_down = s3_says(503, "SlowDown", "Please reduce your request rate.")
s3_expired = s3_says(403, "AccessDenied", "Request has expired")


async def half(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Half of a GET's bytes come, then the connection breaks."""
    data, start, whole = await store.blob(request)
    response = await _begin(request, len(data), start, whole)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(0.05)  # so that they are on their way
    return await reset(store, request, handler)


async def cut_short(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """A whole answer, of too few bytes."""
    data, start, whole = await store.blob(request)
    data = data[: len(data) // 2]
    response = await _begin(request, len(data), start, whole)
    await response.write(data)
    await response.write_eof()
    return response


async def wrong_bytes(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The right number of bytes, one of them another."""
    data, start, whole = await store.blob(request)
    response = await _begin(request, len(data), start, whole)
    await response.write(bytes([data[0] ^ 1]) + data[1:])
    await response.write_eof()
    return response


async def silence(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The head of the answer, then nothing."""
    data, start, whole = await store.blob(request)
    response = await _begin(request, len(data), start, whole)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(3600)
    return response


async def drip(store: FaultyBorder, request: web.Request, handler: Handler) -> web.StreamResponse:
    """A byte now and then."""
    data, start, whole = await store.blob(request)
    response = await _begin(request, len(data), start, whole)
    for i in range(len(data)):
        await response.write(data[i : i + 1])
        await asyncio.sleep(0.05)
    return response


async def _begin(request: web.Request, num_bytes: int, start: int, whole: int) -> web.StreamResponse:
    ranged = "Range" in request.headers
    headers = {"Content-Type": "application/octet-stream"}
    if ranged:
        headers["Content-Range"] = f"bytes {start}-{start + num_bytes - 1}/{whole}"
    response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    response.content_length = num_bytes
    await response.prepare(request)
    return response
