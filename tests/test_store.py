"""The embedded store's own edges, beside the contract of all stores: altered URLs, lies, full disks, and kill -9."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from subnet.errors import (
    ConfigError,
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
from subnet.protocol.wire import blob_hash
from subnet.store.base import Grant, Hold
from subnet.store.embedded import EmbeddedStore
from subnet.store.folder import FolderStore
from subnet.store.presigned import BlobClient
from subnet.store.server import start_store
from subnet.store.signed_urls import StoreSigner, load_or_create_secret
from subnet.timing import Deadline, ManualClock

SECRET = b"s" * 32
LOG = Hold("log", "run-1", 3)


def soon() -> Deadline:
    return Deadline.after(20)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


class EmbeddedFixture:
    """What the contract needs of a store: a fresh one with a budget, and a way to move its time."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self._directory = directory

    async def start(self, budget_bytes: int) -> EmbeddedStore:
        self._listener = await start_store(self._directory, "127.0.0.1", 0, SECRET, budget_bytes, clock=self.clock)
        self.store = EmbeddedStore(self._listener.url, SECRET, clock=self.clock)
        return self.store

    async def stop(self) -> None:
        await self.store.close()
        await self._listener.close()

    def stored_files(self) -> list[Path]:
        return [path for path in self._directory.rglob("*") if path.is_file() and "named" not in path.parts]


@pytest.fixture(params=[EmbeddedFixture])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EmbeddedFixture]:
    world = request.param(tmp_path / "store")
    await world.start(8 << 20)
    yield world
    await world.stop()


@pytest.fixture
def store(world: EmbeddedFixture) -> EmbeddedStore:
    return world.store


# --- the contract -----------------------------------------------------------------------------------------------------


async def test_ranges(store: EmbeddedStore) -> None:
    data = os.urandom(5000)
    grant = store.presign_get(await store.put_blob(data, LOG, deadline=soon()), 5000)
    for start, count in ((0, 1), (4999, 1), (100, 2000), (0, 5000), (7, 0)):
        assert await store.blobs.get_range(grant, start, count, deadline=soon()) == data[start : start + count]
    with pytest.raises(InputError):
        await store.blobs.get_range(grant, 4000, 1001, deadline=soon())


async def test_the_same_bytes_again_are_welcome(store: EmbeddedStore) -> None:
    blobs = await asyncio.gather(*(store.put_blob(b"same" * 1000, LOG, deadline=soon()) for _ in range(16)))
    assert len(set(blobs)) == 1
    usage = await store.usage(deadline=soon())
    assert (usage.num_blobs, usage.used_bytes) == (1, 4000)


@pytest.mark.parametrize("data", [b"wrong", b"much too long", b"sho"])
async def test_what_the_grant_does_not_say_is_refused_and_leaves_nothing(world: EmbeddedFixture, data: bytes) -> None:
    grant = world.store.presign_put(blob_hash(b"right"), 5, LOG)
    status = await raw_put(grant.url, data)
    assert status == {5: 409, 13: 413, 3: 400}[len(data)]
    assert world.stored_files() == []
    assert (await world.store.usage(deadline=soon())).used_bytes == 0


async def test_the_client_names_a_wrong_hash(store: EmbeddedStore) -> None:
    with pytest.raises(HashMismatch):
        await store.blobs.put(store.presign_put(blob_hash(b"right"), 5, LOG), b"wrong", deadline=soon())
    with pytest.raises(InputError):
        await store.blobs.put(store.presign_put(blob_hash(b"right"), 5, LOG), b"longer", deadline=soon())


async def test_grants_expire(world: EmbeddedFixture) -> None:
    store = world.store
    blob = await store.put_blob(b"data", LOG, deadline=soon())
    put, get = store.presign_put(blob, 4, LOG, ttl_s=10), store.presign_get(blob, 4, ttl_s=10)
    world.clock.advance(9)
    assert await store.blobs.get(get, deadline=soon()) == b"data"
    world.clock.advance(2.1)
    for attempt in (store.blobs.get(get, deadline=soon()), store.blobs.put(put, b"data", deadline=soon())):
        with pytest.raises(Expired):
            await attempt


def altered(grant: Grant, old: str, new: str) -> Grant:
    assert old in grant.url
    return msgspec.structs.replace(grant, url=grant.url.replace(old, new))


async def test_an_altered_grant_is_refused(store: EmbeddedStore) -> None:
    blob = await store.put_blob(b"data", LOG, deadline=soon())
    other = await store.put_blob(b"evil", LOG, deadline=soon())
    put, get = store.presign_put(blob, 4, LOG), store.presign_get(blob, 4)
    cases = [
        altered(get, blob, other),
        altered(get, "size=4", "size=5"),
        altered(get, "expires=1", "expires=2"),
        altered(get, "&sig=", "&sig=0"),
        altered(get, "&sig=", "&more=1&sig="),
        altered(get, "&sig=", "&size=4&sig="),
        altered(get, "&sig=", "&other="),
        altered(put, "horizon=3", "horizon=9"),
        altered(put, "label=run-1", "label=run-2"),
        altered(put, "retention=log", "retention=data"),
    ]
    for grant in cases:
        with pytest.raises(Refused) as refused:
            await store.blobs.get(grant, deadline=soon())
        assert (refused.value.code, refused.value.status) == ("bad_grant", 403)
    assert await raw_put(get.url, b"data") == 403  # a GET grant doesn't put
    with pytest.raises(Refused, match="what was signed"):
        await store.blobs.call("DELETE", get.url, None, deadline=soon())


async def test_another_secret_opens_nothing(world: EmbeddedFixture) -> None:
    stranger = EmbeddedStore(world._listener.url, b"x" * 32, clock=world.clock)
    with pytest.raises(Refused) as refused:
        await stranger.usage(deadline=soon())
    assert refused.value.code == "bad_grant"
    await stranger.close()


async def test_out_of_space_is_said_before_the_bytes_come(world: EmbeddedFixture) -> None:
    store = world.store
    await store.put_blob(os.urandom(6 << 20), LOG, deadline=soon())
    with pytest.raises(OutOfSpace):
        await store.put_blob(os.urandom(3 << 20), LOG, deadline=soon())
    small = await store.put_blob(b"still fits", LOG, deadline=soon())
    assert await store.get_blob(small, 10, deadline=soon()) == b"still fits"


# --- the embedded store's own edges -----------------------------------------------------------------------------------


async def raw_put(url: str, data: bytes) -> int:
    async with aiohttp.ClientSession() as session, session.put(url, data=data) as response:
        await response.read()
        return response.status


async def raw(method: str, url: str, **options: object) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.request(method, url, **options) as response:
        return response.status, await response.json()


async def test_every_refusal_has_a_status_and_a_code(world: EmbeddedFixture) -> None:
    url = world._listener.url
    get = world.store.presign_get(await world.store.put_blob(b"data", LOG, deadline=soon()), 4).url
    cases = [
        ("GET", f"{url}/", {}, 404, "no_such_route"),
        ("POST", f"{url}/usage", {}, 405, "no_such_method"),
        ("HEAD", f"{url}/usage", {}, 405, None),
        ("GET", f"{url}/usage", {}, 403, "bad_grant"),
        ("GET", get, {"headers": {"Range": "bytes=4-9"}}, 416, "bad_range"),
        ("GET", get, {"headers": {"Range": "bytes=x"}}, 416, "bad_range"),
    ]
    for method, target, options, status, code in cases:
        if code is None:
            async with aiohttp.ClientSession() as session, session.request(method, target) as response:
                assert response.status == status
            continue
        found, body = await raw(method, target, **options)
        assert (found, body["code"]) == (status, code), target
        assert body["reason"]


async def test_an_upload_without_a_length_is_refused(world: EmbeddedFixture) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"da"
        yield b"ta"

    status, body = await raw("PUT", world.store.presign_put(blob_hash(b"data"), 4, LOG).url, data=pieces())
    assert (status, body["code"]) == (400, "bad_input")


async def test_a_sender_that_breaks_off_leaves_nothing(world: EmbeddedFixture) -> None:
    url = world.store.presign_put(blob_hash(b"x" * 2_000_000), 2_000_000, LOG).url
    host, port = url.split("/")[2].split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    target = url.split(f":{port}")[1]
    writer.write(f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n".encode() + b"x" * 1_500_000)
    await writer.drain()
    await until(lambda: bool(world.stored_files()))
    writer.close()
    await writer.wait_closed()
    await until(lambda: not world.stored_files())
    assert (await world.store.usage(deadline=soon())).used_bytes == 0


async def test_a_download_goes_on_where_it_broke_off() -> None:
    data = os.urandom(100_000)
    ranges: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        wanted = next((line for line in head.split("\r\n") if line.startswith("Range: ")), "")
        ranges.append(wanted)
        start = int(wanted.removeprefix("Range: bytes=").split("-")[0]) if wanted else 0
        extra = f"Content-Range: bytes {start}-99999/100000\r\n" if wanted else ""
        writer.write(
            f"HTTP/1.1 {206 if wanted else 200} x\r\nContent-Length: {100_000 - start}\r\n{extra}\r\n".encode()
        )
        writer.write(data[start : start + 40_000])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    grant = Grant(f"http://127.0.0.1:{port}/blob", "GET", {}, blob_hash(data), 100_000, 0)
    async with BlobClient() as client:
        assert await client.get(grant, deadline=soon()) == data
    assert ranges == ["", "Range: bytes=40000-99999", "Range: bytes=80000-99999"]
    server.close()
    await server.wait_closed()


async def test_a_store_that_is_away_is_waited_for_until_the_deadline() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    grant = StoreSigner(SECRET, f"http://127.0.0.1:{port}").presign_get(blob_hash(b"x"), 1)
    async with BlobClient() as client:
        with pytest.raises(Unreachable):
            await client.get(grant, deadline=Deadline.after(0.3))


async def test_a_lying_store_is_found_out() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    async with BlobClient() as client:
        for size_bytes in (4, 5):
            with pytest.raises(HashMismatch):
                await client.get(Grant(url, "GET", {}, blob_hash(b"data"), size_bytes, 0), deadline=soon())
        with pytest.raises(TooLarge):
            await client.get(Grant(url, "GET", {}, blob_hash(b"data"), 4, 0), deadline=soon(), limit_bytes=3)
    server.close()
    await server.wait_closed()


async def test_port_in_use_is_one_line(world: EmbeddedFixture, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        await start_store(tmp_path / "second", "127.0.0.1", world._listener.port, SECRET, 1000)


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="can't be used"):
        FolderStore(tmp_path / "file", 1000)


async def test_a_full_disk_is_out_of_space(world: EmbeddedFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("subnet.store.folder.write_all", full)
    with pytest.raises(OutOfSpace):
        await world.store.put_blob(b"data", LOG, deadline=soon())
    monkeypatch.undo()
    assert world.stored_files() == []
    await world.store.put_blob(b"data", LOG, deadline=soon())


async def test_everything_is_there_after_a_restart(world: EmbeddedFixture) -> None:
    blob = await world.store.put_blob(b"data", LOG, deadline=soon())
    await world.store.put_named("journal/1", b"segment", deadline=soon())
    before = await world.store.usage(deadline=soon())
    await world.stop()
    store = await world.start(8 << 20)
    assert await store.usage(deadline=soon()) == before
    assert await store.get_blob(blob, 4, deadline=soon()) == b"data"
    assert await store.get_named("journal/1", deadline=soon()) == b"segment"
    with pytest.raises(Exists):
        await store.put_named("journal/1", b"other", deadline=soon())


SERVE = """
import sys
from pathlib import Path
from subnet.store.server import serve_store
serve_store(Path(sys.argv[1]), "127.0.0.1", int(sys.argv[2]), Path(sys.argv[3]), 1 << 30)
"""


async def test_kill_9_leaves_no_half_file(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret_file = tmp_path / "secret"
    command = [sys.executable, "-c", SERVE, str(tmp_path / "store"), str(port), str(secret_file)]
    secret = load_or_create_secret(secret_file)
    assert secret_file.stat().st_mode & 0o077 == 0
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    blobs = [os.urandom(700_000 + i) for i in range(40)]
    async with EmbeddedStore(f"http://127.0.0.1:{port}", secret) as store:
        await store.usage(deadline=soon())
        acknowledged: list[bytes] = []

        async def put(data: bytes) -> None:
            await store.put_blob(data, LOG, deadline=Deadline.after(3))
            acknowledged.append(data)
            if len(acknowledged) == 10:
                os.kill(process.pid, signal.SIGKILL)

        results = await asyncio.gather(*(put(data) for data in blobs), return_exceptions=True)
        assert all(result is None or isinstance(result, IotaError) for result in results)
        await process.wait()
        assert 10 <= len(acknowledged) < 40
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        found = 0
        for data in blobs:
            try:
                assert await store.get_blob(blob_hash(data), len(data), deadline=soon()) == data
                found += 1
            except NotFound:
                assert data not in acknowledged
        usage = await store.usage(deadline=soon())
        assert usage.num_blobs == found
        assert list((tmp_path / "store" / "tmp").iterdir()) == []
        assert (await store.expire("log", "run-1", 99, deadline=soon())).num_blobs == found
        assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
