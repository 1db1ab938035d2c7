"""Authenticated HTTP: a handler sees a body within its limit and, on signed routes, a hotkey that proved itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeVar, overload
from weakref import WeakKeyDictionary

from aiohttp import HttpVersion11, web

from subnet.errors import InputError, Unreachable
from subnet.net.border import TIME_HEADER, answer, expecting, listen, read_body, refusing
from subnet.net.limits import RequestLimits
from subnet.protocol import wire
from subnet.protocol.signing import RequestVerifier
from subnet.timing import TIMEOUTS

__all__ = ["Call", "FrameWriter", "Route", "answer", "create_app", "encoded_frame", "listen"]

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


def create_app(
    routes: Sequence[Route], verifier: RequestVerifier, limits: RequestLimits | None = None
) -> web.Application:
    """An application whose every refusal is a ``Refusal`` with its own status and code; ``limits`` are by hotkey."""

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
        handler = _bind(route, verifier, limits)
        app.router.add_route(route.method, route.path, handler, expect_handler=expecting)
    return app


def _bind(
    route: Route, verifier: RequestVerifier, limits: RequestLimits | None
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if limits is not None and request.transport is not None:
            await limits.before(request.transport)
        body = await read_body(request, route.body_limit_bytes)
        hotkey = ""
        if route.signed:
            hotkey = verifier.verify(request.headers, body, method=request.method, target=request.raw_path)
            if limits is not None and request.transport is not None:
                await limits.take(hotkey, len(body), request.transport)
        return await route.handler(Call(request, hotkey, body, route.body_limit_bytes))

    return handle


def encoded_frame(frame: bytes) -> bytes:
    """A frame as it goes out to every reader: its length, its bytes, and HTTP's chunk around them."""
    if len(frame) > wire.MAX_STREAM_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes is more than {wire.MAX_STREAM_FRAME_BYTES}")
    size = wire.STREAM_HEAD.size + len(frame)
    return b"%x\r\n%b%b\r\n" % (size, wire.stream_head(len(frame)), frame)


_KEEP_ALIVE = encoded_frame(b"")
MAX_UNREAD_BYTES = 2 << 20
"""A reader that has so much before it isn't written to without waiting."""


class FrameWriter:
    """Answers with a long-lived stream of length-prefixed frames; an empty frame keeps it alive.

    ``async with FrameWriter(call) as out: await out.send(data)``; the handler then returns ``out.response``.
    A client that is gone raises :class:`Unreachable` from ``send``, ``check`` and :meth:`race`.
    """

    def __init__(
        self, call: Call, *, keepalive_s: float = TIMEOUTS.stream_keepalive_s, send_s: float = TIMEOUTS.stream_idle_s
    ) -> None:
        self._call = call
        self._keepalive_s = keepalive_s
        self._send_s = send_s
        self._due_s = 0.0
        self._gone = asyncio.Event()
        self._on_gone: Callable[[], None] = lambda: None
        self._pulse: _Pulse | None = None
        self.response = web.StreamResponse()

    async def __aenter__(self) -> FrameWriter:
        if self._call.request.version < HttpVersion11:
            raise InputError("a stream needs HTTP/1.1", hint="HTTP/1.0 has no chunks")
        self.response.content_type = wire.CONTENT_TYPE
        self.response.headers["Cache-Control"] = "no-store"
        await self.response.prepare(self._call.request)
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self._keepalive_s
        self._pulse = _Pulse.of(loop)
        self._pulse.add(self)
        await self.send(b"")  # the head goes out with the first bytes
        return self

    async def send(self, frame: bytes) -> None:
        """Back-pressure: waits until the kernel takes the frame; a client that reads nothing for too long is gone."""
        if len(frame) > wire.MAX_STREAM_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes is more than {wire.MAX_STREAM_FRAME_BYTES}")
        self._due_s = 0.0
        try:
            async with asyncio.timeout(self._send_s):
                await self.response.write(wire.stream_head(len(frame)) + frame)
        except (ConnectionError, TimeoutError) as error:
            self._lost()
            raise self._unreachable() from error

    def push(self, chunk: bytes) -> bool:
        """Hand an :func:`encoded_frame` to the kernel without waiting; False: it has too much unread, or is gone."""
        transport = self._call.request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            return False
        transport.write(chunk)
        self._due_s = 0.0
        return True

    def check(self) -> None:
        """Raises :class:`Unreachable` if the client has gone."""
        if self._gone.is_set():
            raise self._unreachable()

    def when_gone(self, told: Callable[[], None]) -> None:
        """Have ``told`` called once the client is found to be gone; one at a time."""
        self._on_gone = told
        if self._gone.is_set():
            told()

    async def race(self, waiting: Coroutine[Any, Any, T]) -> T:
        """What ``waiting`` returns, for a handler with nothing to say; :class:`Unreachable` if the client goes first."""
        task, gone = asyncio.create_task(waiting), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._unreachable()
            return task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.wait([task, gone])

    def _unreachable(self) -> Unreachable:
        return Unreachable(f"{self._call.hotkey or 'a reader'} no longer reads its stream")

    def _lost(self) -> None:
        if not self._gone.is_set():
            self._gone.set()
            self._on_gone()

    def look(self, now_s: float) -> None:
        """Called every ``READER_LOOK_S``: whether the client is still there, and a keep-alive when one is due."""
        transport = self._call.request.transport
        if transport is None or transport.is_closing():
            self._lost()
        elif self._due_s == 0.0:
            self._due_s = now_s + self._keepalive_s  # it was written to since the last look
        elif now_s >= self._due_s:
            self._due_s = now_s + self._keepalive_s
            self.push(_KEEP_ALIVE)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pulse is not None:
            self._pulse.remove(self)


class _Pulse:
    """Looks after all streams of an event loop with one timer."""

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Pulse]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writers: dict[FrameWriter, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Pulse:
        return cls._of_loop.setdefault(loop, cls(loop))

    def add(self, writer: FrameWriter) -> None:
        self._writers[writer] = None
        if self._timer is None:
            self._timer = self._loop.call_later(READER_LOOK_S, self._beat)

    def remove(self, writer: FrameWriter) -> None:
        self._writers.pop(writer, None)
        if not self._writers and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._timer = self._loop.call_later(READER_LOOK_S, self._beat)
        now_s = self._loop.time()
        for writer in list(self._writers):
            writer.look(now_s)
