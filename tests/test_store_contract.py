"""One contract, every store: the embedded one and a real S3 server are asked the same, by owners and by miners with grants."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from store_worlds import LOG, EmbeddedWorld, S3World, raw, soon, want

from iota.live import store_line
from miner.blobs import Blobs
from subnet.errors import Exists, Expired, HashMismatch, InputError, IotaError, NotFound, Refused
from subnet.protocol.messages import GrantRequest, StoreUse
from subnet.protocol.wire import blob_hash
from subnet.run.config import PricesSection
from subnet.store.base import PART_BYTES, SINGLE_BYTES, Grant, Hold, OwnerStore, part_digests
from subnet.store.folder import FolderStore
from subnet.store.meter import RunUse, StoreMeter
from subnet.store.parts import cut
from subnet.store.presigned import BlobClient
from subnet.store.s3_calls import S3Calls
from subnet.timing import Deadline
from subnet.words import BlobHash
from validator.store_choice import grant_puts
from validator.store_costs import store_costs

World = EmbeddedWorld | S3World


@pytest.fixture(params=["embedded", "s3"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "s3":
        world: World = S3World(request.getfixturevalue("seaweed"), tmp_path / "store")
    else:
        world = EmbeddedWorld(tmp_path / "store")
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
def store(world: World) -> OwnerStore:
    return world.store


class Granting:
    """The validator's part in :class:`Blobs`."""

    def __init__(self, store: OwnerStore) -> None:
        self.store, self.asked = store, list[GrantRequest]()

    async def request(self, method: str, path: str, body: GrantRequest, kind: Any, *, deadline: Deadline) -> Any:
        self.asked.append(body)
        try:
            if body.put:
                hold = Hold(body.retention, body.run, 0)
                return await grant_puts(self.store, body, hold, "hotkey", deadline)
            refs = [(BlobHash(blob), size) for blob, size in body.blobs]
            if body.damaged:
                await self.store.check_blobs([blob for blob, _ in refs], deadline=deadline)
            return await self.store.grant_gets(refs, body.run, deadline=deadline)
        except IotaError as error:
            if error.code == "needs_sha256":  # as it comes over the wire
                raise Refused(error.refusal(), status=error.http_status) from error
            raise


async def put(store: OwnerStore, data: bytes, hold: Hold = LOG) -> BlobHash:
    return await store.put_blob(data, hold, deadline=soon())


async def grant_to_put(store: OwnerStore, data: bytes) -> Grant:
    return (await store.grant_puts([want(data)], LOG, deadline=soon()))[0]


async def grant_to_get(store: OwnerStore, blob: str, size_bytes: int) -> Grant:
    return (await store.grant_gets([(BlobHash(blob), size_bytes)], deadline=soon()))[0]


# --- blobs ------------------------------------------------------------------------------------------------------------


async def test_blobs_come_back_as_they_went(store: OwnerStore) -> None:
    for size_bytes in (0, 1, 1000, (1 << 20) + 17):
        data = os.urandom(size_bytes)
        blob = await put(store, data)
        assert await store.get_blob(blob, size_bytes, deadline=soon()) == data
        for start, count in ((0, min(1, size_bytes)), (size_bytes // 3, size_bytes // 2), (size_bytes, 0)):
            found = await store.get_range(blob, size_bytes, start, count, deadline=soon())
            assert found == data[start : start + count]


async def test_several_buffers_are_one_blob(store: OwnerStore) -> None:
    parts = [b"ab", bytearray(b""), memoryview(b"cdef")[1:]]
    async with BlobClient() as client:
        await client.put(await grant_to_put(store, b"abdef"), parts, deadline=soon())
        assert await client.get(await grant_to_get(store, blob_hash(b"abdef"), 5), deadline=soon()) == b"abdef"


async def test_the_same_bytes_again_are_welcome(store: OwnerStore) -> None:
    blobs = await asyncio.gather(*(put(store, b"same" * 1000) for _ in range(16)))
    assert len(set(blobs)) == 1
    async with BlobClient() as client:
        await client.put(await grant_to_put(store, b"same" * 1000), b"same" * 1000, deadline=soon())
    usage = await store.usage(deadline=soon())
    assert (usage.num_blobs, usage.used_bytes) == (1, 4000)


async def test_what_is_absent_is_not_found(store: OwnerStore) -> None:
    with pytest.raises(NotFound):
        await store.get_blob(blob_hash(b"never"), 5, deadline=soon())
    with pytest.raises(NotFound):
        await store.grant_gets([(blob_hash(b"never"), 0)], deadline=soon())
    with pytest.raises(NotFound):
        await store.get_named("never", deadline=soon())
    granted = await grant_to_put(store, b"granted, never sent")
    assert await store.sizes([BlobHash(granted.hash)], deadline=soon()) == {}


async def test_sizes_of_what_is_there(store: OwnerStore) -> None:
    blobs = [await put(store, b"x" * n) for n in (0, 5, 700)]
    asked = [*blobs, blob_hash(b"absent"), blobs[1]]
    assert await store.sizes(asked, deadline=soon()) == dict(zip(blobs, (0, 5, 700), strict=True))
    grant = await grant_to_get(store, blobs[2], 0)
    assert grant.size_bytes == 700
    with pytest.raises(InputError):
        await store.sizes([BlobHash("no hash")], deadline=soon())


# --- grants are good for what they say, and for nothing else ----------------------------------------------------------


async def test_a_body_that_is_not_what_was_signed_is_refused_and_leaves_nothing(store: OwnerStore) -> None:
    right = b"right bytes"
    grant = await grant_to_put(store, right)
    for body in (b"wrong bytes", b"longer than was signed", b"short"):
        assert 400 <= await raw("PUT", grant, body) < 500
    async with BlobClient() as client:
        with pytest.raises(HashMismatch):
            await client.put(grant, b"wrong bytes", deadline=soon())
        with pytest.raises(InputError):
            await client.put(grant, b"longer than was signed", deadline=soon())
        assert await store.sizes([BlobHash(grant.hash)], deadline=soon()) == {}
        await client.put(grant, right, deadline=soon())
    assert await store.sizes([BlobHash(grant.hash)], deadline=soon()) == {grant.hash: len(right)}


async def test_grants_expire(world: World) -> None:
    store, data = world.store, b"data"
    blob = await put(store, data)
    with world.minted_ago(200):
        get, put_grant = await grant_to_get(store, blob, 4), await grant_to_put(store, b"more")
    async with BlobClient() as client:
        assert await client.get(get, deadline=soon()) == data
        with world.minted_ago(400):
            get, put_grant = await grant_to_get(store, blob, 4), await grant_to_put(store, b"more")
        for work in (client.get(get, deadline=soon()), client.put(put_grant, b"more", deadline=soon())):
            with pytest.raises(Expired):
                await work

        async def renew(limit: Deadline) -> Grant:
            return await grant_to_get(store, blob, 4)

        assert await client.get(get, deadline=soon(), renew=renew) == data


def altered(grant: Grant, old: str, new: str) -> Grant:
    assert old in grant.url
    return msgspec.structs.replace(grant, url=grant.url.replace(old, new))


async def test_an_altered_grant_is_refused(world: World) -> None:
    store = world.store
    blob, other = await put(store, b"data"), await put(store, b"evil")
    get, other_get = await grant_to_get(store, blob, 4), await grant_to_get(store, other, 4)
    key, other_key = (grant.url.partition("?")[0].rpartition("/")[2] for grant in (get, other_get))
    expires = "expires=1" if world.name == "embedded" else "Expires=3"
    signature = "&sig=" if world.name == "embedded" else "&X-Amz-Signature="
    cases = [
        altered(get, key, other_key),
        altered(get, expires, expires[:-1] + "2"),
        altered(get, signature, signature + "0"),
        altered(get, signature, f"&more=1{signature}"),
    ]
    async with BlobClient() as client:
        for grant in cases:
            with pytest.raises(IotaError) as refused:
                await client.get(grant, deadline=soon())
            assert refused.value.code == "bad_grant", grant.url
            assert not refused.value.retryable
        for method in ("PUT", "DELETE"):
            assert await raw(method, get, b"data" if method == "PUT" else None) == 403
        to_put = await grant_to_put(store, b"new")
        assert await raw("GET", to_put) == 403
    bare = msgspec.structs.replace(get, url=get.url.partition("?")[0])
    assert await raw("GET", bare) == 403
    assert await store.get_blob(blob, 4, deadline=soon()) == b"data"


# --- names ------------------------------------------------------------------------------------------------------------


async def test_a_named_key_has_one_winner(store: OwnerStore) -> None:
    async def write(i: int) -> bool:
        try:
            await store.put_named("journal/0001", f"writer {i}".encode(), deadline=soon())
        except Exists:
            return False
        return True

    won = await asyncio.gather(*(write(i) for i in range(16)))
    assert won.count(True) == 1
    assert await store.get_named("journal/0001", deadline=soon()) == f"writer {won.index(True)}".encode()


async def test_writing_a_name_again(store: OwnerStore) -> None:
    await store.put_named("head", b"one", deadline=soon())
    await store.put_named("head", b"one", deadline=soon())  # a retry whose answer was lost
    with pytest.raises(Exists):
        await store.put_named("head", b"two", deadline=soon())
    with pytest.raises(Exists):
        await store.put_named("head", b"", deadline=soon())


async def test_a_write_once_grant_for_another(store: OwnerStore) -> None:
    digest = hashlib.sha256(b"segment").hexdigest()
    grant = store.presign_put_named("journal/7", blob_hash(b"segment"), 7, sha256=digest)
    async with BlobClient() as other:
        await other.put(grant, b"segment", deadline=soon())
        with pytest.raises(Exists):
            await other.put(grant, b"segment", deadline=soon())
    assert await store.get_named("journal/7", deadline=soon()) == b"segment"


async def test_names_are_listed_by_prefix(store: OwnerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderStore.list_named, "__defaults__", ("", 3))
    monkeypatch.setitem(S3Calls.list.__kwdefaults__, "page", 3)
    names = [f"a/{i:03d}" for i in range(8)] + ["a", "b/1", "aa"]
    for name in names:
        await store.put_named(name, name.encode(), deadline=soon())
    for prefix in ("", "a", "a/", "a/00", "b", "c"):
        keys = await store.list_named(prefix, deadline=soon())
        assert [key.name for key in keys] == sorted(name for name in names if name.startswith(prefix))
        assert all(key.size_bytes == len(key.name) for key in keys)


@pytest.mark.parametrize("name", ["", "../x", "a/../b", "/a", "a//b", "a b", ".hidden", "x" * 300, "a%b", "a~b", "a\n"])
async def test_names_that_are_no_names(store: OwnerStore, name: str) -> None:
    with pytest.raises(InputError):
        await store.put_named(name, b"x", deadline=soon())


# --- holds ------------------------------------------------------------------------------------------------------------


async def test_holds_keep_and_expiry_frees(store: OwnerStore) -> None:
    evidence, kept = Hold("evidence", "run-1", 5), Hold("evidence", "run-1", 6)
    old, new = await put(store, b"old", evidence), await put(store, b"newer", kept)
    both = await put(store, b"in both", evidence)
    await put(store, b"in both")
    other_run = await put(store, b"other run", Hold("evidence", "run-2", 0))
    freed = await store.expire("evidence", "run-1", 6, deadline=soon())
    assert (freed.num_blobs, freed.freed_bytes) == (1, 3)
    with pytest.raises(NotFound):
        await store.get_blob(old, 3, deadline=soon())
    for blob, size_bytes in ((new, 5), (both, 7), (other_run, 9)):
        await store.get_blob(blob, size_bytes, deadline=soon())
    assert (await store.expire("log", "run-1", 4, deadline=soon())).num_blobs == 1
    assert (await store.usage(deadline=soon())).used_bytes == 14
    with pytest.raises(InputError):
        await store.expire("forever", "run-1", 4, deadline=soon())
    again = await put(store, b"old", evidence)
    assert await store.get_blob(again, 3, deadline=soon()) == b"old"


async def test_delete_ends_all_holds(store: OwnerStore) -> None:
    blob = await put(store, b"data")
    await put(store, b"data", Hold("data", "run-1"))
    await store.delete(blob, deadline=soon())
    await store.delete(blob, deadline=soon())
    with pytest.raises(NotFound):
        await store.get_blob(blob, 4, deadline=soon())
    await put(store, b"data")
    assert await store.get_blob(blob, 4, deadline=soon()) == b"data"


async def test_everything_is_there_after_a_restart(world: World) -> None:
    blob = await put(world.store, b"data")
    await world.store.put_named("journal/1", b"segment", deadline=soon())
    before = await world.store.usage(deadline=soon())
    use = world.store.meter.use("run-1")
    await world.stop()
    store = await world.start()
    after = await store.usage(deadline=soon())
    assert (after.used_bytes, after.num_blobs) == (before.used_bytes, before.num_blobs)
    assert await store.get_blob(blob, 4, deadline=soon()) == b"data"
    assert await store.get_named("journal/1", deadline=soon()) == b"segment"
    assert (await store.expire("log", "run-1", 4, deadline=soon())).num_blobs == 1
    with pytest.raises(NotFound):
        await store.get_blob(blob, 4, deadline=soon())
    assert use.own.puts == 1
    assert use.own.bytes_up == 4


# --- miners -----------------------------------------------------------------------------------------------------------


async def test_a_miner_puts_and_gets_whatever_the_store(world: World) -> None:
    granting, data = Granting(world.store), [os.urandom(n) for n in (0, 1000, 2 << 20)]
    blobs = [(str(blob_hash(one)), one) for one in data]
    async with BlobClient() as client:
        miner = Blobs(granting, client, "run-1")  # type: ignore[arg-type]
        await miner.put_many(blobs[:1], "log", soon())
        await miner.put_many(blobs[1:], "log", soon())
        assert await miner.get_many([(blob, 0) for blob, _ in blobs], soon()) == data
        assert await miner.get_range((blobs[1][0], 1000), 10, 90, soon()) == data[1][10:100]
        used = miner.used
    wanted = [bool(request.sha256) for request in granting.asked if request.put]
    assert wanted == {"embedded": [False, False], "s3": [False, True, True]}[world.name]
    total = sum(map(len, data))
    assert (used.puts, used.bytes_up) == (3, total)
    assert (used.gets, used.bytes_down) == (3, total + 90), "an empty blob needs no request"
    granted = world.store.meter.use("run-1").granted
    assert (granted.puts, granted.bytes_up, granted.gets) == (3, total, 4)


def test_what_a_process_reports_counts_once() -> None:
    meter = StoreMeter()
    for puts in (3, 5, 4):
        meter.reported("run", "hot", "p", StoreUse(puts=puts))
    meter.reported("run", "hot", "q", StoreUse(puts=1, bytes_down=7))
    meter.reported("other", "hot", "p", StoreUse(puts=9))
    assert meter.use("run").reported == StoreUse(puts=6, bytes_down=7)


def test_what_a_run_costs() -> None:
    own = StoreUse(puts=1_000_000, lists=1_000_000, gets=2_000_000, deletes=9, bytes_up=5, bytes_down=3 * 10**9)
    use = RunUse(own=own, granted=StoreUse(puts=7), reported=StoreUse(gets=1_000_000, bytes_down=10**9))
    prices = PricesSection(put_usd_per_million=5.0, get_usd_per_million=0.4, egress_usd_per_gb=0.09)
    costs = store_costs([use, RunUse(reported=StoreUse(puts=10))], 2 * 10**9, prices)
    assert costs.usd == pytest.approx(5.0 * 2.00001 + 0.4 * 3 + 0.09 * 4)
    assert costs.usd_per_month == pytest.approx(0.03)
    assert costs.granted.puts == 7
    line = store_line(costs, 2 * 10**9)
    assert "1,000,010 puts" in line
    assert "$11.5600" in line


async def test_a_request_that_makes_no_sense_is_refused(store: OwnerStore) -> None:
    good = want(b"data")
    cases: Sequence[GrantRequest] = [
        GrantRequest(1, "run-1", True, ((good.blob, 4),), sha256=((), ())),
        GrantRequest(1, "run-1", True, ((good.blob, 4), (good.blob, 4)), parts=(1,)),
        GrantRequest(1, "run-1", True, ((good.blob, 4),), parts=tuple(range(2000))),
        GrantRequest(1, "run-1", True, (("no hash", 4),)),
        GrantRequest(1, "run-1", True, ((good.blob, 4),), retention="for ever"),
    ]
    for request in cases:
        with pytest.raises(InputError):
            await grant_puts(store, request, Hold(request.retention, "run-1"), "hot", soon())


# --- digests ----------------------------------------------------------------------------------------------------------


def test_digests_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SINGLE_BYTES % PART_BYTES == 0
    monkeypatch.setattr("subnet.store.base.SINGLE_BYTES", 20)
    monkeypatch.setattr("subnet.store.base.PART_BYTES", 8)
    data = os.urandom(50)

    def digest(part: bytes) -> str:
        return hashlib.sha256(part).hexdigest()

    for size in (0, 1, 20):
        assert part_digests(data[:size]) == (digest(data[:size]),)
    for size in (21, 24, 25, 48, 50):
        expected = tuple(digest(data[start : min(size, start + 8)]) for start in range(0, size, 8))
        for cuts in ([0], [1, 7, 9], [8, 16], [3, 3, 20]):
            edges = [0, *[min(c, size) for c in cuts], size]
            views = [data[a:b] for a, b in itertools.pairwise(edges)]
            assert part_digests(views) == expected


def test_cutting_buffers() -> None:
    views = [memoryview(b"abc"), memoryview(b"defg"), memoryview(b"h")]
    for start in range(9):
        for stop in range(start, 9):
            assert b"".join(cut(views, start, stop)) == b"abcdefgh"[start:stop]
