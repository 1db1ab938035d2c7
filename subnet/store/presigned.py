"""Bytes to and from a store by grants: whole, of the granted size, with the granted hash, or an error that says why.

An expired grant is renewed once per try (``renew``) and the same transfer goes on; without ``renew``, ``Expired`` comes at
once. Lost connections, silence and "come again later" are retried within the deadline, and a download goes on where it broke
off. Wrong or missing bytes are never given to the caller: the blob is fetched once more as a whole, then refused.
A big blob whose grant allows it is read in ranges side by side, each retried on its own; its hash is checked as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
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
from subnet.net.rate import RateLimit
from subnet.protocol import wire
from subnet.protocol.messages import StoreUse
from subnet.protocol.wire import Buffer, blob_hash, byte_views
from subnet.store.base import Grant
from subnet.store.s3_errors import XML_TYPES, s3_error
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Clock, Deadline

T = TypeVar("T")
_PIECE_BYTES = 256 << 10
_HASH_INLINE_BYTES = 1 << 20
_SLOWEST_BYTES_PER_S = 1 << 18
"""A try may take as long as its bytes do at this speed, if that is longer than ``try_s``."""
_LATER_STATUSES = (429, 502, 503, 504)
_MAX_RETRY_AFTER_S = 300.0
MAX_RANGES = 4
"""Ranges of one blob that are read side by side."""
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


@dataclass
class _Tally:
    puts: int = 0
    gets: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class BlobClient:
    """Uses grants; holds no credential. ``clock`` is for the owner: it names how far that is off the store's.

    ``upload`` and ``download`` are shared with whatever else they limit.
    """

    def __init__(
        self,
        *,
        max_connections: int = 32,
        try_s: float = TIMEOUTS.store_request_s,
        idle_s: float = TIMEOUTS.stream_idle_s,
        clock: Clock | None = None,
        upload: RateLimit | None = None,
        download: RateLimit | None = None,
    ) -> None:
        self._upload, self._download = upload or RateLimit(), download or RateLimit()
        self._max_connections = max_connections
        self._try_s = try_s
        self._idle_s = idle_s
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._tally = _Tally()

    @property
    def used(self) -> StoreUse:
        """Requests that :meth:`put` and :meth:`get` have sent, tries that failed included, and the bytes they moved."""
        tally = self._tally
        return StoreUse(puts=tally.puts, gets=tally.gets, bytes_up=tally.bytes_up, bytes_down=tally.bytes_down)

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
        if grant.parts:
            raise InputError(f"blob {grant.hash[:10]}… goes up in {len(grant.parts)} parts, each by a grant of its own")
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
        if 0 < grant.part_bytes < grant.size_bytes:
            data = await self._get_ranges(grant, deadline, renew)
        else:
            data = await self.get_range(grant, 0, grant.size_bytes, deadline=deadline, renew=renew)
        if len(data) > _HASH_INLINE_BYTES:
            found = await asyncio.to_thread(blob_hash, data)
        else:
            found = blob_hash(data)
        if found != grant.hash:
            raise HashMismatch(f"the store's bytes for blob {grant.hash[:10]}… have the hash {found[:10]}…")
        return data

    async def _get_ranges(self, grant: Grant, deadline: Deadline, renew: Renew | None) -> bytearray:
        data = bytearray(grant.size_bytes)
        starts = iter(range(0, grant.size_bytes, grant.part_bytes))

        async def read_some() -> None:
            for start in starts:
                part = memoryview(data)[start : start + grant.part_bytes]
                await self._fill(part, grant, start, deadline=deadline, renew=renew)

        await all_of([read_some() for _ in range(MAX_RANGES)])
        return data

    async def get_range(
        self, grant: Grant, start: int, num_bytes: int, *, deadline: Deadline, renew: Renew | None = None
    ) -> bytearray:
        """Bytes ``[start, start + num_bytes)``: the caller checks them, the blob's hash can't."""
        if not (start >= 0 and num_bytes >= 0 and start + num_bytes <= grant.size_bytes):
            raise InputError(f"bytes {start} to {start + num_bytes} of a blob of {grant.size_bytes}")
        data = bytearray(num_bytes)
        await self._fill(memoryview(data), grant, start, deadline=deadline, renew=renew)
        return data

    async def _fill(
        self, data: memoryview, grant: Grant, start: int, *, deadline: Deadline, renew: Renew | None
    ) -> None:
        num_bytes = data.nbytes
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
            _, answer = await self.exchange(method, target, limit=limit, body=body, limit_bytes=limit_bytes)
            if kind is None or kind is bytes:
                return answer if kind is bytes else None
            return wire.decode(answer, kind, limit_bytes=limit_bytes, what=what)

        return await self._retrying(attempt, deadline)

    async def exchange(
        self,
        method: str,
        url: str,
        *,
        limit: Deadline,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        limit_bytes: int = MAX_REFUSAL_BYTES,
    ) -> tuple[Mapping[str, str], bytes]:
        """One try of a request: headers and body of the answer, or the contract's error."""
        what = f"{method} {_shown(url)}"
        with translated(what):
            data = body if len(body) <= _PIECE_BYTES else self._pieces([memoryview(body)])
            headers = {**(headers or {}), "Content-Length": str(len(body))} if body else headers
            async with await self._send(method, url, limit, headers, data or None) as response:
                await self._raise_refusal(response, what)
                return response.headers, await read_answer(response, limit_bytes, what)

    async def _retrying(self, attempt: Any, deadline: Deadline, size_bytes: int = 0) -> Any:
        allowed = [limit.bytes_per_s / 4 for limit in (self._upload, self._download) if limit.bytes_per_s]
        try_s = max(self._try_s, size_bytes / min([_SLOWEST_BYTES_PER_S, *allowed]))
        return await retrying(attempt, deadline, try_s=try_s, stop_at=(Expired,))

    async def _put_once(self, grant: Grant, views: Sequence[memoryview], limit: Deadline) -> None:
        if grant.held:
            return
        what = _what(grant)
        headers = {"Content-Length": str(grant.size_bytes), **grant.headers}
        self._tally.puts += 1
        with translated(what):
            async with await self._send("PUT", grant.url, limit, headers, self._pieces(views)) as response:
                try:
                    await self._raise_refusal(response, what)
                except Exists:
                    if not grant.same_bytes:
                        raise
                    return
                await read_answer(response, MAX_REFUSAL_BYTES, what)

    async def _pieces(self, views: Sequence[memoryview]) -> AsyncGenerator[memoryview]:
        for view in views:
            size_bytes = min(_PIECE_BYTES, self._upload.piece_bytes)
            for start in range(0, view.nbytes, size_bytes):
                piece = view[start : start + size_bytes]
                await self._upload.take(piece.nbytes)
                self._tally.bytes_up += piece.nbytes
                yield piece

    async def _get_once(self, grant: Grant, start: int, num_bytes: int, limit: Deadline) -> AsyncGenerator[bytes]:
        """At most ``num_bytes`` from ``start`` on."""
        what = _what(grant)
        headers = {"Accept-Encoding": "identity", **grant.headers}
        self._tally.gets += 1
        whole = start == 0 and num_bytes == grant.size_bytes
        if not whole:
            headers["Range"] = f"bytes={start}-{start + num_bytes - 1}"
        with translated(what):
            async with await self._send("GET", grant.url, limit, headers) as response:
                await self._raise_refusal(response, what)
                expected = f"bytes {start}-{start + num_bytes - 1}/{grant.size_bytes}"
                if not whole and (response.status != 206 or response.headers.get("Content-Range") != expected):
                    raise InputError(f"{what}: asked for {headers['Range']}, got {response.status}")
                if response.content_length not in (None, num_bytes):
                    raise HashMismatch(f"{what}: {response.content_length} bytes, the grant says {num_bytes}")
                left_bytes = num_bytes
                async for chunk in response.content.iter_any():
                    left_bytes -= len(chunk)
                    self._tally.bytes_down += len(chunk)
                    if (pause_s := self._download.spend(len(chunk))) > 0:
                        await asyncio.sleep(pause_s)
                    if left_bytes < 0:
                        raise HashMismatch(f"{what}: more than {num_bytes} bytes")
                    yield chunk

    async def _raise_refusal(self, response: aiohttp.ClientResponse, what: str) -> None:
        if response.status < 300:
            return
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) >= MAX_REFUSAL_BYTES:
                response.close()
                break
        error = self._refusal(response, what, bytes(body[:MAX_REFUSAL_BYTES]))
        after_s = _retry_after_s(response)
        if response.status in _LATER_STATUSES and after_s is not None and not _is_ours(response):
            raise Busy(f"{what}: answered {response.status}, come again in {after_s:g} s", retry_after_s=after_s)
        raise error

    def _refusal(self, response: aiohttp.ClientResponse, what: str, body: bytes) -> IotaError:
        if response.content_type in XML_TYPES or (not body and _to_s3(response)):
            now_s = self._clock.wall_ns() / 1e9 if self._clock is not None else None
            return s3_error(what, response.status, body, server_date=response.headers.get("Date", ""), now_s=now_s)
        error = refusal_error(what, response.status, response.content_type, body)
        return _typed(error) if isinstance(error, Refused) else error

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


def _to_s3(response: aiohttp.ClientResponse) -> bool:
    """Whether the request was signed for S3, whose HEAD says no more than a status."""
    signed = response.request_info.headers.get("Authorization", "").startswith("AWS4-")
    return signed or "X-Amz-Signature" in response.url.query


def _is_ours(response: aiohttp.ClientResponse) -> bool:
    """Whether the answer is a refusal in our own form, which says itself when to come again."""
    return response.content_type in (wire.CONTENT_TYPE, "application/json")


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
