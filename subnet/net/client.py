"""The signed client: each try is signed anew, retries stop at a permanent refusal or at the deadline.

A refusal of the other side raises :class:`~subnet.errors.Refused` with its code; a lost connection
:class:`~subnet.errors.Unreachable`; an answer that isn't ours (a wrong URL) :class:`~subnet.errors.ConfigError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, overload

import aiohttp
from yarl import URL

from subnet.errors import ConfigError, DeadlinePassed, IotaError, Refused, Unreachable
from subnet.net.border import (
    MAX_REFUSAL_BYTES,
    TIME_HEADER,
    describe_answer,
    not_ours,
    read_answer,
    refusal_error,
    retrying,
    translated,
)
from subnet.protocol import wire
from subnet.protocol.signing import SIGN_ANEW_CODES, Signer
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline

T = TypeVar("T")
_MAX_RESIGNED = 3
_MAX_CLOCK_OFFSET_NS = 3600 * 10**9


class SignedClient:
    """Requests of one hotkey to one receiver. ``receiver`` may be empty until hello named it (public routes only)."""

    def __init__(
        self,
        base_url: str,
        signer: Signer | None = None,
        receiver: str = "",
        *,
        clock: Clock = SYSTEM_CLOCK,
        answer_limit_bytes: int = 32 << 20,
        max_connections: int = 32,
    ) -> None:
        self.base_url = checked_base_url(base_url)
        self.signer = signer
        self.receiver = receiver
        self.offset_ns = 0
        self._clock = clock
        self._answer_limit_bytes = answer_limit_bytes
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SignedClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def learn_clock(self, server_wall_ns: int) -> None:
        """From now on sign with the server's clock (what hello answers); an offset above an hour is a ConfigError."""
        offset_ns = server_wall_ns - self._clock.wall_ns()
        if abs(offset_ns) > _MAX_CLOCK_OFFSET_NS:
            raise ConfigError(
                f"the clocks of this machine and of {self.base_url} differ by {offset_ns / 1e9:.0f} s",
                hint="set this machine's clock",
            )
        self.offset_ns = offset_ns
        if self.signer is not None:
            self.signer.follow_clock(self._wall_ns())

    @overload
    async def request(
        self, method: str, path: str, body: object, kind: type[T], *, deadline: Deadline, signed: bool = True
    ) -> T: ...
    @overload
    async def request(
        self, method: str, path: str, body: object, kind: Any, *, deadline: Deadline, signed: bool = True
    ) -> Any: ...
    async def request(
        self, method: str, path: str, body: object, kind: Any, *, deadline: Deadline, signed: bool = True
    ) -> Any:
        """Send ``body`` (a struct, or None for no body) and decode the answer as ``kind`` (None: ignore it)."""
        data = b"" if body is None else wire.encode(body)
        resigned = 0

        async def attempt(limit: Deadline) -> Any:
            nonlocal resigned
            while True:
                try:
                    return await self._try(method, path, data, kind, limit, signed)
                except Refused as refused:
                    resigned += 1
                    if refused.code not in SIGN_ANEW_CODES or resigned > _MAX_RESIGNED:
                        raise

        return await retrying(attempt, deadline, try_s=TIMEOUTS.http_request_s)

    async def stream(
        self, path: str, *, connect: Deadline, idle_s: float = TIMEOUTS.stream_idle_s
    ) -> AsyncGenerator[bytes]:
        """Frames of a signed long-lived GET until the server ends it.

        ``connect`` bounds the time to the answer's head; silence of ``idle_s`` (keep-alives count as sound) raises
        :class:`DeadlinePassed`. The caller opens it anew from its last position.
        """
        what = f"GET {self.base_url}{path}"
        with translated(what):
            async with connect.limit(what):
                response = await self._send("GET", path, b"", signed=True, total_s=None)
            try:
                await self._check_head(response, what)
                while True:
                    frame = await self._read_frame(response, what, idle_s)
                    if frame is None:
                        return
                    if frame:
                        yield frame
            finally:
                response.close()

    async def _read_frame(self, response: aiohttp.ClientResponse, what: str, idle_s: float) -> bytes | None:
        """The next frame, empty for a keep-alive, None at the end."""
        try:
            async with asyncio.timeout(idle_s):
                head = await response.content.readexactly(wire.STREAM_HEAD.size)
                return await response.content.readexactly(wire.stream_size(head))
        except TimeoutError as error:
            raise DeadlinePassed(f"{what}: silent for {idle_s:g} s") from error
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Unreachable(f"{what}: ended within a frame") from error
            return None

    async def _try(self, method: str, path: str, data: bytes, kind: Any, limit: Deadline, signed: bool) -> Any:
        what = f"{method} {self.base_url}{path}"
        limit.check(what)
        with translated(what):
            response = await self._send(method, path, data, signed=signed, total_s=limit.remaining_s())
            async with response:
                await self._check_head(response, what)
                body = await read_answer(response, self._answer_limit_bytes, what)
        return None if kind is None else wire.decode(body, kind, limit_bytes=self._answer_limit_bytes, what=what)

    async def _send(
        self, method: str, path: str, data: bytes, *, signed: bool, total_s: float | None
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": wire.CONTENT_TYPE}
        if data:
            headers["Content-Type"] = wire.CONTENT_TYPE
        url = URL(self.base_url + path, encoded=True)
        if signed:
            if self.signer is None or not self.receiver:
                raise ConfigError(f"{method} {path} must be signed for a receiver", hint="ask hello for it first")
            target = url.raw_path_qs
            headers |= self.signer.sign_request(
                method=method, target=target, body=data, receiver=self.receiver, wall_ns=self._wall_ns()
            )
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections, ttl_dns_cache=60)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        timeout = aiohttp.ClientTimeout(total=total_s)
        return await self._session.request(
            method, url, data=data or None, headers=headers, timeout=timeout, allow_redirects=False
        )

    async def _check_head(self, response: aiohttp.ClientResponse, what: str) -> None:
        """Raise unless this is one of our answers; a refusal about our clock corrects it first."""
        if response.status < 300 and response.content_type == wire.CONTENT_TYPE:
            return
        if response.status == 204:
            return
        body = await self._head_of_body(response)
        error: IotaError
        if response.status < 300:
            error = not_ours(what, describe_answer(response.status, response.content_type, body))
        else:
            error = refusal_error(what, response.status, response.content_type, body)
        if isinstance(error, Refused) and error.code in SIGN_ANEW_CODES:
            server_ns = response.headers.get(TIME_HEADER, "")
            if server_ns.isascii() and server_ns.isdigit() and len(server_ns) < 20:
                self.learn_clock(int(server_ns))
        raise error

    async def _head_of_body(self, response: aiohttp.ClientResponse) -> bytes:
        """As much as a refusal may have, and as comes within a moment: the answer may be a stream that never ends."""
        body = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUTS.answer_head_s):
                await self._read_head(response, body)
        return bytes(body[:MAX_REFUSAL_BYTES])

    async def _read_head(self, response: aiohttp.ClientResponse, body: bytearray) -> None:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) >= MAX_REFUSAL_BYTES:
                response.close()
                break

    def _wall_ns(self) -> int:
        return self._clock.wall_ns() + self.offset_ns


def checked_base_url(text: str) -> str:
    """``scheme://host:port`` without a path, or a :class:`ConfigError` that names the URL."""
    try:
        url = URL(text.strip().rstrip("/"))
        ok = url.scheme in ("http", "https") and bool(url.host) and url.raw_path in ("", "/") and not url.query_string
    except ValueError:
        ok, url = False, URL()
    if not ok:
        raise ConfigError(f"{text!r} isn't a base URL", hint="such as http://127.0.0.1:8091")
    return str(url.origin())
