"""The folder store over HTTP, its own process: only signed URLs, streamed uploads, refusals with their own codes.

    PUT    /blob/{hash}     201 new, 200 already there (the same bytes again are welcome)
    GET    /blob/{hash}     200, or 206 with a Range
    DELETE /blob/{hash}     204                                    the owner
    PUT    /named/{name}    201, or 409 ``exists``                 write-once
    GET    /named/{name}    200
    GET    /named           a page of names by prefix              the owner
    POST   /expire          ends holds                             the owner
    POST   /sizes           which of these blobs are here          the owner
    GET    /usage           bytes used and left                    the owner

"The owner" is whoever can sign such a URL. No bytes are read before the URL, the size and the budget are checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from loguru import logger

from subnet.allocator import bound_heap, give_back
from subnet.errors import DeadlinePassed, InputError, IotaError, OutOfSpace, TooLarge
from subnet.net.border import Listener, answer, expecting, listen, read_body, refusing
from subnet.protocol import wire
from subnet.protocol.wire import Buffer
from subnet.service import Service
from subnet.store.base import MAX_NAMED_BYTES, MAX_SIZES, Hold, check_blob
from subnet.store.folder import FolderStore, Upload
from subnet.store.signed_urls import StoreSigner, load_or_create_secret
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock

CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 1 << 20
GIVE_BACK_EVERY_S = 20.0
_MAX_SIZES_BYTES = MAX_SIZES * 66 + 8


class BadRange(IotaError):
    code, http_status = "bad_range", 416


class StoreServer:
    """Handlers over a :class:`FolderStore`; ``signer`` checks what its owner minted."""

    def __init__(self, store: FolderStore, signer: StoreSigner, *, idle_s: float = TIMEOUTS.stream_idle_s) -> None:
        self._store = store
        self._signer = signer
        self._idle_s = idle_s

    def app(self) -> web.Application:
        app = web.Application(middlewares=[refusing], client_max_size=0)
        routes: tuple[tuple[str, str, _Handler], ...] = (
            ("PUT", "/blob/{hash}", self._put_blob),
            ("GET", "/blob/{hash}", self._get_blob),
            ("DELETE", "/blob/{hash}", self._delete_blob),
            ("PUT", "/named/{name:.+}", self._put_named),
            ("GET", "/named/{name:.+}", self._get_named),
            ("GET", "/named", self._list_named),
            ("POST", "/expire", self._expire),
            ("POST", "/sizes", self._sizes),
            ("GET", "/usage", self._usage),
        )
        for method, path, handler in routes:
            # HEAD isn't GET to a signature, so it has no route either
            app.router.add_route(method, path, self._checked(handler), expect_handler=expecting)
        return app

    def _checked(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            path, _, query = request.raw_path.partition("?")
            return await handler(request, self._signer.check(request.method, path, query))

        return handle

    async def _put_blob(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        blob = check_blob(request.match_info["hash"])
        hold = Hold(params["retention"], params["label"], int(params["horizon"]))
        size_bytes = _announced_size(request, int(params["size"]))
        with self._noting_refusals(size_bytes):
            upload = self._store.begin(size_bytes, blob)
            try:
                await self._receive(request, upload)
                created = await asyncio.to_thread(self._store.commit_blob, upload, hold)
            finally:
                upload.abort()
        return web.Response(status=201 if created else 200)

    async def _put_named(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        size_bytes = _announced_size(request, int(params["size"]))
        if size_bytes > MAX_NAMED_BYTES:
            raise TooLarge(f"a named key of {size_bytes} bytes, more than {MAX_NAMED_BYTES}")
        with self._noting_refusals(size_bytes):
            upload = self._store.begin(size_bytes, check_blob(params["hash"]))
            try:
                await self._receive(request, upload)
                await asyncio.to_thread(self._store.commit_named, upload, request.match_info["name"])
            finally:
                upload.abort()
        return web.Response(status=201)

    @contextmanager
    def _noting_refusals(self, size_bytes: int) -> Generator[None]:
        """The owner learns from the usage that there is no room, whatever the uploader says to it."""
        try:
            yield
        except OutOfSpace:
            self._store.note_refused(size_bytes)
            raise

    async def _receive(self, request: web.Request, upload: Upload) -> None:
        """Hash and write while the bytes arrive; a sender that goes silent is let go."""
        pending = bytearray()
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    chunk = await request.content.readany()
            except TimeoutError as error:
                raise DeadlinePassed(f"the sender was silent for {self._idle_s:g} s") from error
            pending += chunk
            if len(pending) >= CHUNK_BYTES or (pending and not chunk):
                await _write(upload, pending)
                pending = bytearray()
            if not chunk:
                return

    async def _get_blob(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        path, size_bytes = self._store.find_blob(check_blob(request.match_info["hash"]))
        if size_bytes != int(params["size"]):
            raise InputError(f"the blob has {size_bytes} bytes, not the {params['size']} of the grant")
        return await _send_file(request, path, size_bytes)

    async def _get_named(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        path, size_bytes = self._store.find_named(request.match_info["name"])
        return await _send_file(request, path, size_bytes)

    async def _list_named(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        return answer(await asyncio.to_thread(self._store.list_named, params["prefix"], params["after"]))

    async def _delete_blob(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        await asyncio.to_thread(self._store.delete, check_blob(request.match_info["hash"]))
        return web.Response(status=204)

    async def _expire(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        below = int(params["below"])
        return answer(await asyncio.to_thread(self._store.expire, params["retention"], params["label"], below))

    async def _sizes(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        body = await read_body(request, _MAX_SIZES_BYTES)
        asked = wire.decode(body, list[str], limit_bytes=_MAX_SIZES_BYTES, what="the blobs asked for")
        if len(asked) > MAX_SIZES:
            raise TooLarge(f"the sizes of {len(asked)} blobs, more than {MAX_SIZES}")
        blobs = [check_blob(blob) for blob in asked]
        return answer(await asyncio.to_thread(self._store.sizes, blobs))

    async def _usage(self, request: web.Request, params: dict[str, str]) -> web.StreamResponse:
        return answer(self._store.usage())


_Handler = Callable[[web.Request, dict[str, str]], Awaitable[web.StreamResponse]]


def _announced_size(request: web.Request, granted_bytes: int) -> int:
    length = request.content_length
    if length is None:
        raise InputError("the upload doesn't say its length", hint="send Content-Length")
    if length > granted_bytes:
        raise TooLarge(f"an upload of {length} bytes, the grant says {granted_bytes}")
    if length < granted_bytes:
        raise InputError(f"an upload of {length} bytes, the grant says {granted_bytes}")
    return length


async def _write(upload: Upload, data: Buffer) -> None:
    if len(data) < CHUNK_BYTES // 4:
        upload.write(data)  # cheaper than the way to a thread; goes to the page cache
    else:
        await asyncio.to_thread(upload.write, data)


async def _send_file(request: web.Request, path: Path, size_bytes: int) -> web.StreamResponse:
    try:
        wanted = request.http_range
    except ValueError as error:
        raise BadRange(f"Range {request.headers.get('Range')!r} can't be read") from error
    ranged = wanted.start is not None or wanted.stop is not None
    start, stop, _ = wanted.indices(size_bytes)
    if ranged and start >= stop:
        raise BadRange(f"Range {request.headers.get('Range')!r} lies outside of {size_bytes} bytes")
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    if ranged:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size_bytes}"
    response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    response.content_length = stop - start
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        await response.prepare(request)
        left_bytes = stop - start
        while left_bytes:
            data = await asyncio.to_thread(file.read, min(left_bytes, CHUNK_BYTES))
            if not data:
                raise ConnectionResetError(f"{path} ended early")  # the answer has begun: all we can do is hang up
            left_bytes -= len(data)
            await response.write(data)
    await response.write_eof()
    return response


async def start_store(
    directory: Path, host: str, port: int, secret: bytes, budget_bytes: int, *, clock: Clock = SYSTEM_CLOCK
) -> Listener:
    """A store inside this process, until :meth:`Listener.close`."""
    store = await asyncio.to_thread(FolderStore, directory, budget_bytes)
    return await listen(StoreServer(store, StoreSigner(secret, "", clock=clock)).app(), host, port)


async def run_store(directory: Path, host: str, port: int, secret: bytes, budget_bytes: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    listener = await start_store(directory, host, port, secret, budget_bytes)
    service = Service("store")
    service.on_close("listener", listener.close)
    service.forever("heap", _give_back_forever)
    logger.info("store of {} serves at {}", directory, listener.url)
    await service.run()


async def _give_back_forever() -> None:
    """What a burst of requests left in the heap would stay there: between bursts it is of no use."""
    while True:
        await asyncio.sleep(GIVE_BACK_EVERY_S)
        await asyncio.to_thread(give_back)


def serve_store(directory: Path, host: str, port: int, secret_file: Path, budget_bytes: int) -> None:
    """The process behind ``iota store serve``; a port in use or an unusable folder is a ``ConfigError``."""
    bound_heap()
    asyncio.run(run_store(directory, host, port, load_or_create_secret(secret_file), budget_bytes))
