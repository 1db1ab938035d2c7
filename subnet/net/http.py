"""Authenticated HTTP: a handler sees a body within its limit and, on signed routes, a hotkey that proved itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, overload

from aiohttp import web

from subnet.errors import Unreachable
from subnet.net.border import TIME_HEADER, answer, listen, read_body, refusing
from subnet.protocol import wire
from subnet.protocol.signing import RequestVerifier
from subnet.timing import TIMEOUTS

__all__ = ["Call", "FrameWriter", "Route", "answer", "create_app", "listen"]

T = TypeVar("T")
DEFAULT_BODY_LIMIT_BYTES = 1 << 20
READER_LOOK_S = 0.1
"""How often a stream with nothing to say looks whether its reader is still connected."""


@dataclass(frozen=True)
class Call:
    """One request as a handler sees it; ``hotkey`` is empty on a public route."""

    request: web.Request
    hotkey: str
    body: bytes
    limit_bytes: int

    @overload
    def decode(self, kind: type[T]) -> T: ...
    @overload
    def decode(self, kind: Any) -> Any: ...
    def decode(self, kind: Any) -> Any:
        """The body as a struct; a fault names its place."""
        what = f"{self.request.method} {self.request.path}"
        return wire.decode(self.body, kind, limit_bytes=self.limit_bytes, what=what)


Handler = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """``signed``: the caller must be a known hotkey; otherwise anyone may ask."""

    method: str
    path: str
    handler: Handler
    signed: bool = True
    body_limit_bytes: int = DEFAULT_BODY_LIMIT_BYTES


def create_app(routes: Sequence[Route], verifier: RequestVerifier) -> web.Application:
    """An application whose every refusal is a ``Refusal`` with its own status and code."""

    @web.middleware
    async def tell_time(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response = await handler(request)
        if not response.prepared:
            response.headers[TIME_HEADER] = str(verifier.clock.wall_ns())
        return response

    app = web.Application(middlewares=[tell_time, refusing], client_max_size=0)
    for route in routes:
        app.router.add_route(route.method, route.path, _bind(route, verifier))
    return app


def _bind(route: Route, verifier: RequestVerifier) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await read_body(request, route.body_limit_bytes)
        hotkey = ""
        if route.signed:
            hotkey = verifier.verify(request.headers, body, method=request.method, target=request.raw_path)
        return await route.handler(Call(request, hotkey, body, route.body_limit_bytes))

    return handle


class FrameWriter:
    """Answers with a long-lived stream of length-prefixed frames; an empty frame keeps it alive.

    ``async with FrameWriter(call) as out: await out.send(data)``; the handler then returns ``out.response``.
    A client that is gone raises :class:`Unreachable` from ``send`` and :meth:`race`.
    """

    def __init__(
        self, call: Call, *, keepalive_s: float = TIMEOUTS.stream_keepalive_s, send_s: float = TIMEOUTS.stream_idle_s
    ) -> None:
        self._call = call
        self._keepalive_s = keepalive_s
        self._send_s = send_s
        self._lock = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self.response = web.StreamResponse()

    async def __aenter__(self) -> FrameWriter:
        self.response.content_type = wire.CONTENT_TYPE
        self.response.headers["Cache-Control"] = "no-store"
        await self.response.prepare(self._call.request)
        self._keeper = asyncio.create_task(self._keep_alive(), name="stream keep-alive")
        return self

    async def send(self, frame: bytes) -> None:
        """Back-pressure: waits until the kernel takes the frame; a client that reads nothing for too long is gone."""
        if len(frame) > wire.MAX_STREAM_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes is more than {wire.MAX_STREAM_FRAME_BYTES}")
        try:
            async with self._lock, asyncio.timeout(self._send_s):
                await self.response.write(wire.FRAME_LENGTH.pack(len(frame)) + frame)
        except (ConnectionError, TimeoutError) as error:
            self._gone.set()
            raise Unreachable(f"{self._call.hotkey or 'a reader'} no longer reads its stream") from error

    async def race(self, waiting: Coroutine[Any, Any, T]) -> T:
        """What ``waiting`` returns, for a handler with nothing to say; :class:`Unreachable` if the client goes first."""
        task, gone = asyncio.create_task(waiting), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unreachable(f"{self._call.hotkey or 'a reader'} no longer reads its stream")
            return task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.wait([task, gone])

    def _is_connected(self) -> bool:
        transport = self._call.request.transport
        return transport is not None and not transport.is_closing()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._keepalive_s
        while True:
            await asyncio.sleep(min(READER_LOOK_S, self._keepalive_s))
            if not self._is_connected():
                self._gone.set()
                return
            if loop.time() < due_s:
                continue
            due_s = loop.time() + self._keepalive_s
            try:
                await self.send(b"")
            except Unreachable:
                return  # the handler learns it from race() or its next send

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
