"""Bytes to and from a store by grants: whole, of the granted size, with the granted hash, or an error that says why.

An expired grant is renewed once per try (``renew``) and the same transfer goes on; without ``renew``, ``Expired`` comes at
once. Lost connections, silence and "come again later" are retried within the deadline, and a download goes on where it broke
off. Wrong or missing bytes are never given to the caller: the blob is fetched once more as a whole, then refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, overload

import aiohttp
from yarl import URL

from subnet.errors import (
    Busy,
    Exists,
    Expired,
    HashMismatch,
    InputError,
    IotaError,
    NotFound,
    OutOfSpace,
    Refused,
    TooLarge,
    Unreachable,
)
from subnet.net.border import MAX_REFUSAL_BYTES, read_answer, refusal_error, retrying, translated
from subnet.protocol import wire
from subnet.protocol.wire import Buffer, blob_hash, byte_views
from subnet.store.base import Grant
from subnet.timing import TIMEOUTS, Deadline

T = TypeVar("T")
_PIECE_BYTES = 256 << 10
_HASH_INLINE_BYTES = 1 << 20
_SLOWEST_BYTES_PER_S = 1 << 20
"""A try may take as long as its bytes do at this speed, if that is longer than ``try_s``."""
_LATER_STATUSES = (429, 502, 503, 504)
_MAX_RETRY_AFTER_S = 300.0
_TYPED: dict[str, type[IotaError]] = {
    kind.code: kind for kind in (NotFound, Exists, Expired, HashMismatch, InputError, TooLarge, OutOfSpace)
}


Renew = Callable[[Deadline], Awaitable[Grant]]
"""A new grant for the same blob and method."""


@dataclass
class _Permit:
    """The grant in use; one that has expired is replaced once per try."""

    grant: Grant
    renew: Renew | None

    async def use(self, once: Callable[[Grant], Awaitable[None]], limit: Deadline) -> None:
        try:
            await once(self.grant)
        except Expired:
            if self.renew is None:
                raise
            fresh = await self.renew(limit)
            if (fresh.hash, fresh.size_bytes, fresh.method) != (
                self.grant.hash,
                self.grant.size_bytes,
                self.grant.method,
            ):
                raise InputError(f"{_what(self.grant)}: the new grant is for something else") from None
            self.grant = fresh
            await once(self.grant)


class BlobClient:
    """Uses grants; holds no credential."""

    def __init__(
        self,
        *,
        max_connections: int = 32,
        try_s: float = TIMEOUTS.store_request_s,
        idle_s: float = TIMEOUTS.stream_idle_s,
    ) -> None:
        self._max_connections = max_connections
        self._try_s = try_s
        self._idle_s = idle_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> BlobClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def put(
        self, grant: Grant, data: Buffer | Sequence[Buffer], *, deadline: Deadline, renew: Renew | None = None
    ) -> None:
        """Upload the buffers, one after the other; they must stay as they are until this returns."""
        views = byte_views(data)
        size_bytes = sum(view.nbytes for view in views)
        if size_bytes != grant.size_bytes:
            raise InputError(f"{size_bytes} bytes to put, the grant says {grant.size_bytes}")
        permit = _Permit(grant, renew)

        async def attempt(limit: Deadline) -> None:
            await permit.use(lambda grant: self._put_once(grant, views, limit), limit)

        await self._retrying(attempt, deadline, size_bytes)

    async def get(
        self, grant: Grant, *, deadline: Deadline, limit_bytes: int = 1 << 40, renew: Renew | None = None
    ) -> bytearray:
        """The blob, its size and hash checked; after wrong bytes it is fetched once more."""
        if grant.size_bytes > limit_bytes:
            raise TooLarge(f"blob {grant.hash[:10]}… has {grant.size_bytes} bytes, more than {limit_bytes}")
        try:
            return await self._get_checked(grant, deadline, renew)
        except HashMismatch:
            return await self._get_checked(grant, deadline, renew)

    async def _get_checked(self, grant: Grant, deadline: Deadline, renew: Renew | None) -> bytearray:
        data = await self.get_range(grant, 0, grant.size_bytes, deadline=deadline, renew=renew)
        if len(data) > _HASH_INLINE_BYTES:
            found = await asyncio.to_thread(blob_hash, data)
        else:
            found = blob_hash(data)
        if found != grant.hash:
            raise HashMismatch(f"the store's bytes for blob {grant.hash[:10]}… have the hash {found[:10]}…")
        return data

    async def get_range(
        self, grant: Grant, start: int, num_bytes: int, *, deadline: Deadline, renew: Renew | None = None
    ) -> bytearray:
        """Bytes ``[start, start + num_bytes)``: the caller checks them, the blob's hash can't."""
        if not (start >= 0 and num_bytes >= 0 and start + num_bytes <= grant.size_bytes):
            raise InputError(f"bytes {start} to {start + num_bytes} of a blob of {grant.size_bytes}")
        data = bytearray(num_bytes)
        filled = 0
        permit = _Permit(grant, renew)

        async def once(grant: Grant, limit: Deadline) -> None:
            nonlocal filled
            async for chunk in self._get_once(grant, start + filled, num_bytes - filled, limit):
                data[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            if filled != num_bytes:
                raise Unreachable(f"{_what(grant)}: broke off after {filled} of {num_bytes} bytes")

        async def attempt(limit: Deadline) -> None:
            await permit.use(lambda grant: once(grant, limit), limit)

        if num_bytes:
            await self._retrying(attempt, deadline, num_bytes)
        return data

    @overload
    async def call(
        self, method: str, url: str | Callable[[], str], kind: type[T], *, deadline: Deadline, body: bytes = b""
    ) -> T: ...
    @overload
    async def call(
        self, method: str, url: str | Callable[[], str], kind: Any, *, deadline: Deadline, body: bytes = b""
    ) -> Any: ...
    async def call(
        self, method: str, url: str | Callable[[], str], kind: Any, *, deadline: Deadline, body: bytes = b""
    ) -> Any:
        """One of the owner's requests: a struct as the answer (None: its body is ignored, ``bytes``: as it is).

        A function as ``url`` is asked for a fresh one at each try.
        """
        limit_bytes = 64 << 20

        async def attempt(limit: Deadline) -> Any:
            target = url if isinstance(url, str) else url()
            what = f"{method} {_shown(target)}"
            with translated(what):
                async with await self._send(method, target, limit, data=body or None) as response:
                    await _raise_refusal(response, what)
                    answer = await read_answer(response, limit_bytes, what)
            if kind is None or kind is bytes:
                return answer if kind is bytes else None
            return wire.decode(answer, kind, limit_bytes=limit_bytes, what=what)

        return await self._retrying(attempt, deadline)

    async def _retrying(self, attempt: Any, deadline: Deadline, size_bytes: int = 0) -> Any:
        try_s = max(self._try_s, size_bytes / _SLOWEST_BYTES_PER_S)
        return await retrying(attempt, deadline, try_s=try_s, stop_at=(Expired,))

    async def _put_once(self, grant: Grant, views: Sequence[memoryview], limit: Deadline) -> None:
        what = _what(grant)
        headers = {"Content-Length": str(grant.size_bytes), **grant.headers}
        with translated(what):
            async with await self._send("PUT", grant.url, limit, headers, _pieces(views)) as response:
                await _raise_refusal(response, what)
                await read_answer(response, MAX_REFUSAL_BYTES, what)

    async def _get_once(self, grant: Grant, start: int, num_bytes: int, limit: Deadline) -> AsyncGenerator[bytes]:
        """At most ``num_bytes`` from ``start`` on."""
        what = _what(grant)
        headers = dict(grant.headers)
        whole = start == 0 and num_bytes == grant.size_bytes
        if not whole:
            headers["Range"] = f"bytes={start}-{start + num_bytes - 1}"
        with translated(what):
            async with await self._send("GET", grant.url, limit, headers) as response:
                await _raise_refusal(response, what)
                expected = f"bytes {start}-{start + num_bytes - 1}/{grant.size_bytes}"
                if not whole and (response.status != 206 or response.headers.get("Content-Range") != expected):
                    raise InputError(f"{what}: asked for {headers['Range']}, got {response.status}")
                if response.content_length not in (None, num_bytes):
                    raise HashMismatch(f"{what}: {response.content_length} bytes, the grant says {num_bytes}")
                left_bytes = num_bytes
                async for chunk in response.content.iter_any():
                    left_bytes -= len(chunk)
                    if left_bytes < 0:
                        raise HashMismatch(f"{what}: more than {num_bytes} bytes")
                    yield chunk

    async def _send(
        self,
        method: str,
        url: str,
        limit: Deadline,
        headers: dict[str, str] | None = None,
        data: AsyncGenerator[memoryview] | bytes | None = None,
    ) -> aiohttp.ClientResponse:
        limit.check(f"{method} {_shown(url)}")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections, ttl_dns_cache=60)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 20
            )
        return await self._session.request(
            method,
            URL(url, encoded=True),
            data=data,
            headers={"Accept": wire.CONTENT_TYPE} | (headers or {}),
            timeout=aiohttp.ClientTimeout(total=limit.remaining_s(), sock_read=self._idle_s),
            allow_redirects=False,
        )


async def _pieces(views: Sequence[memoryview]) -> AsyncGenerator[memoryview]:
    for view in views:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


async def _raise_refusal(response: aiohttp.ClientResponse, what: str) -> None:
    if response.status < 300:
        return
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= MAX_REFUSAL_BYTES:
            response.close()
            break
    error = refusal_error(what, response.status, response.content_type, bytes(body[:MAX_REFUSAL_BYTES]))
    if isinstance(error, Refused):
        raise _typed(error)
    after_s = _retry_after_s(response)
    if response.status in _LATER_STATUSES and after_s is not None:
        raise Busy(f"{what}: answered {response.status}, come again in {after_s:g} s", retry_after_s=after_s)
    raise error


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """What a gateway or another store asks for in seconds; a date or nonsense counts as nothing."""
    text = response.headers.get("Retry-After", "").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        return None
    return min(float(text), _MAX_RETRY_AFTER_S)


def _typed(refused: Refused) -> IotaError:
    """The store's refusals that are part of the contract, as their own classes."""
    kind = _TYPED.get(refused.code)
    return refused if kind is None else kind(refused.reason, hint=refused.hint, retry_after_s=refused.retry_after_s)


def _shown(url: str) -> str:
    return url.partition("?")[0]


def _what(grant: Grant) -> str:
    return f"{grant.method} {_shown(grant.url)}"
