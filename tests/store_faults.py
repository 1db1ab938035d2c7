"""The real store's handlers behind a border that breaks: one-shot, counted faults, and an outage that can be switched.

Whatever isn't broken on purpose is the real thing: grants are checked, and expire, as in a store of one's own.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from subnet.errors import Expired, OutOfSpace
from subnet.net.border import Listener, listen
from subnet.store.folder import FolderStore
from subnet.store.server import StoreServer
from subnet.store.signed_urls import StoreSigner
from subnet.timing import SYSTEM_CLOCK, Clock

SECRET = b"s" * 32
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[["FaultyStore", web.Request, Handler], Awaitable[web.StreamResponse]]


@dataclass
class FaultyStore:
    """``on("GET", fault, times=2)`` breaks the next two; ``seen`` is what was asked for, ``fired`` what was broken."""

    directory: Path
    budget_bytes: int = 64 << 20
    clock: Clock = SYSTEM_CLOCK
    down: bool = False
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""
    fired: Counter[str] = field(default_factory=Counter)
    _faults: dict[str, deque[Fault]] = field(default_factory=dict)

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

    def on(self, method: str, *faults: Fault, times: int = 1) -> FaultyStore:
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

    def blob(self, request: web.Request) -> tuple[bytes, int, int]:
        """What was asked for, where it starts, and the size of the whole."""
        data = self.store.find_blob(request.match_info["hash"])[0].read_bytes()
        start, stop, _ = request.http_range.indices(len(data))
        return data[start:stop], start, len(data)


async def reset(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The connection breaks before anything is answered."""
    if request.transport is not None:
        request.transport.abort()
    raise ConnectionResetError("on purpose")


async def lost_answer(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """It is done, but nobody hears of it."""
    await handler(request)
    return await reset(store, request, handler)


async def expired(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    raise Expired("this URL expired on purpose")


async def full(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    raise OutOfSpace("full on purpose", hint="none")


async def crash(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    raise KeyError("a mistake of the store's own")


def later(seconds: int) -> Fault:
    """A gateway's 503 in its own words."""

    async def later(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
        return web.Response(status=503, text="<html>later</html>", headers={"Retry-After": str(seconds)})

    return later


async def half(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Half of a GET's bytes come, then the connection breaks."""
    data, start, whole = store.blob(request)
    response = await _begin(request, len(data), start, whole)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(0.05)  # so that they are on their way
    return await reset(store, request, handler)


async def cut_short(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """A whole answer, of too few bytes."""
    data, start, whole = store.blob(request)
    data = data[: len(data) // 2]
    response = await _begin(request, len(data), start, whole)
    await response.write(data)
    await response.write_eof()
    return response


async def wrong_bytes(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The right number of bytes, one of them another."""
    data, start, whole = store.blob(request)
    response = await _begin(request, len(data), start, whole)
    await response.write(bytes([data[0] ^ 1]) + data[1:])
    await response.write_eof()
    return response


async def silence(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """The head of the answer, then nothing."""
    data, start, whole = store.blob(request)
    response = await _begin(request, len(data), start, whole)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(3600)
    return response


async def drip(store: FaultyStore, request: web.Request, handler: Handler) -> web.StreamResponse:
    """A byte now and then."""
    data, start, whole = store.blob(request)
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
