"""TCP proxies on the loopback whose behaviour can be changed while they run; their thread ends with :meth:`Proxy.close`.

At most ``QUEUE_CHUNKS`` chunks of a connection are held per direction; connecting, writing and silence have deadlines; no
task, socket or thread outlives ``close``, and an error that nobody expected is raised by it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from iota.chaos.relay import Flipper, Relay
from iota.ports import HOST
from subnet.errors import ConfigError, IotaError, Unreachable

T = TypeVar("T")
Mode = Literal["pass", "blackhole", "reset", "busy"]
_CALL_S = 20.0
_MAX_CONNECTIONS = 1024


@dataclass(frozen=True)
class Policy:
    """How a link treats its connections.

    ``blackhole``: nothing passes, nothing is lost; what was held passes afterwards. ``reset``: connections are reset, new
    ones at once. ``busy``: an HTTP request is answered with 503.
    """

    mode: Mode = "pass"
    delay_ms: float = 0.0
    kbit_per_s: float | None = None
    """Of the link, shared by its connections and both directions."""
    truncate_after: int | None = None
    """The answers of a connection end after so many more bytes."""
    flip_bytes: int = 0
    """So many bytes in all are inverted,"""
    flip_every: int = 1
    """one in so many that pass."""


PASS = Policy()


class Link:
    """One listening port and where it leads. Change it through :meth:`Proxy.set` only."""

    def __init__(self, name: str, upstream_port: int, upstream_host: str) -> None:
        self.name, self.upstream_port, self.upstream_host = name, upstream_port, upstream_host
        self.port = 0
        self.policy = PASS
        self.identify: Callable[[bytes], str | None] | None = None
        """Names the link of whoever opened a connection, from its first bytes: then that link's policy holds as well."""
        self.flipper = Flipper(0, 1)
        self.free_at_s = 0.0
        self.num_accepted = self.num_reset = self.num_flipped = self.num_bytes = 0
        self.relays: set[Relay] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class Proxy:
    """Links by name, on one event loop in a thread of its own; the methods may be called from any other thread."""

    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.errors: list[BaseException] = []
        self.changed = asyncio.Event()
        """Replaced whenever a policy changes; the old one is set."""
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(ready)), name="proxy", daemon=True)
        self._thread.start()
        if not ready.wait(_CALL_S):
            raise Unreachable("the proxies' thread didn't start")

    def close(self) -> None:
        """End every connection and the thread; safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(_CALL_S)
        if thread.is_alive():
            raise Unreachable("the proxies' thread doesn't end")
        if self.errors:
            raise ExceptionGroup("the proxies failed", [e for e in self.errors if isinstance(e, Exception)])

    def add(
        self,
        name: str,
        upstream_port: int,
        *,
        port: int = 0,
        upstream_host: str = HOST,
        identify: Callable[[bytes], str | None] | None = None,
    ) -> Link:
        """A new link that listens; where it leads need not listen yet."""
        if name in self.links:
            raise ValueError(f"there is a link {name} already")
        link = Link(name, upstream_port, upstream_host)
        link.identify = identify
        self._call(self._listen(link, port))
        self.links[name] = link
        return link

    def set(self, name: str, policy: Policy) -> None:
        """From now on, for open connections too; ``reset`` and ``busy`` reset those."""
        self._call(self._set(self.links[name], policy))

    def num_open(self) -> int:
        """Connections that are being relayed."""
        return len(self._tasks)

    # ---- on the loop

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ready.set()
        await self._stop.wait()
        for server in self._servers:
            server.close()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _listen(self, link: Link, port: int) -> None:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(link, reader, writer), name=f"relay {link.name}")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

        try:
            server = await asyncio.start_server(accepted, HOST, port)
        except OSError as error:
            raise ConfigError(f"can't listen on {HOST}:{port}: {error.strerror or error}") from error
        link.port = server.sockets[0].getsockname()[1]
        self._servers.append(server)

    async def _serve(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = Relay(self, link, reader, writer)
        if len(link.relays) >= _MAX_CONNECTIONS:
            relay.reset()
            return
        link.num_accepted += 1
        link.relays.add(relay)
        try:
            await relay.run()
        finally:
            for known in relay.links:
                known.relays.discard(relay)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def _set(self, link: Link, policy: Policy) -> None:
        link.policy = policy
        link.flipper = Flipper(policy.flip_bytes, policy.flip_every)
        link.free_at_s = 0.0
        self.changed.set()
        self.changed = asyncio.Event()
        if policy.mode in ("reset", "busy"):
            for relay in list(link.relays):
                link.num_reset += 1
                relay.reset()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None or self._thread is None:
            work.close()
            raise IotaError("the proxies aren't running")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_CALL_S)
        except TimeoutError as error:
            future.cancel()
            raise Unreachable("the proxies don't answer") from error
