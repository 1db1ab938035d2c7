"""Bytes to and from a store by grants: whole, of the granted size, with the granted hash, or an error that says why.

``Expired`` comes at once, so that the caller can ask for a new grant; lost connections are retried within the
deadline, and a download goes on where it broke off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, TypeVar, overload

import aiohttp
from yarl import URL

from subnet.errors import (
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
_TYPED: dict[str, type[IotaError]] = {
    kind.code: kind for kind in (NotFound, Exists, Expired, HashMismatch, InputError, TooLarge, OutOfSpace)
}


class BlobClient:
    """Uses grants; holds no credential."""

    def __init__(self, *, max_connections: int = 32, try_s: float = TIMEOUTS.store_request_s) -> None:
        self._max_connections = max_connections
        self._try_s = try_s
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

    async def put(self, grant: Grant, data: Buffer | Sequence[Buffer], *, deadline: Deadline) -> None:
        """Upload the buffers, one after the other; they must stay as they are until this returns."""
        views = byte_views(data)
        size_bytes = sum(view.nbytes for view in views)
        if size_bytes != grant.size_bytes:
            raise InputError(f"{size_bytes} bytes to put, the grant says {grant.size_bytes}")

        async def attempt(limit: Deadline) -> None:
            await self._put_once(grant, views, limit)

        await self._retrying(attempt, deadline)

    async def get(self, grant: Grant, *, deadline: Deadline, limit_bytes: int = 1 << 40) -> bytearray:
        """The blob, its size and hash checked."""
        if grant.size_bytes > limit_bytes:
            raise TooLarge(f"blob {grant.hash[:10]}… has {grant.size_bytes} bytes, more than {limit_bytes}")
        data = await self.get_range(grant, 0, grant.size_bytes, deadline=deadline)
        if len(data) > _HASH_INLINE_BYTES:
            found = await asyncio.to_thread(blob_hash, data)
        else:
            found = blob_hash(data)
        if found != grant.hash:
            raise HashMismatch(f"the store's bytes for blob {grant.hash[:10]}… have the hash {found[:10]}…")
        return data

    async def get_range(self, grant: Grant, start: int, num_bytes: int, *, deadline: Deadline) -> bytearray:
        """Bytes ``[start, start + num_bytes)``: the caller checks them, the blob's hash can't."""
        if not (start >= 0 and num_bytes >= 0 and start + num_bytes <= grant.size_bytes):
            raise InputError(f"bytes {start} to {start + num_bytes} of a blob of {grant.size_bytes}")
        data = bytearray(num_bytes)
        filled = 0

        async def attempt(limit: Deadline) -> None:
            nonlocal filled
            async for chunk in self._get_once(grant, start + filled, num_bytes - filled, limit):
                data[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
            if filled != num_bytes:
                raise Unreachable(f"{_what(grant)}: broke off after {filled} of {num_bytes} bytes")

        if num_bytes:
            await self._retrying(attempt, deadline)
        return data

    @overload
    async def call(self, method: str, url: str, kind: type[T], *, deadline: Deadline, body: bytes = b"") -> T: ...
    @overload
    async def call(self, method: str, url: str, kind: Any, *, deadline: Deadline, body: bytes = b"") -> Any: ...
    async def call(self, method: str, url: str, kind: Any, *, deadline: Deadline, body: bytes = b"") -> Any:
        """One of the owner's requests: a struct as the answer (None: its body is ignored, ``bytes``: as it is)."""
        limit_bytes = 64 << 20

        async def attempt(limit: Deadline) -> Any:
            what = f"{method} {_shown(url)}"
            with translated(what):
                async with await self._send(method, url, limit, data=body or None) as response:
                    await _raise_refusal(response, what)
                    answer = await read_answer(response, limit_bytes, what)
            if kind is None or kind is bytes:
                return answer if kind is bytes else None
            return wire.decode(answer, kind, limit_bytes=limit_bytes, what=what)

        return await self._retrying(attempt, deadline)

    async def _retrying(self, attempt: Any, deadline: Deadline) -> Any:
        return await retrying(attempt, deadline, try_s=self._try_s, stop_at=(Expired,))

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
            timeout=aiohttp.ClientTimeout(total=limit.remaining_s()),
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
    raise _typed(error) if isinstance(error, Refused) else error


def _typed(refused: Refused) -> IotaError:
    """The store's refusals that are part of the contract, as their own classes."""
    kind = _TYPED.get(refused.code)
    return refused if kind is None else kind(refused.reason, hint=refused.hint, retry_after_s=refused.retry_after_s)


def _shown(url: str) -> str:
    return url.partition("?")[0]


def _what(grant: Grant) -> str:
    return f"{grant.method} {_shown(grant.url)}"
