"""What only a bucket needs: parts that resume, holds in an index that another owner takes over, liars found, nothing left over."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from seaweed import Seaweed
from store_faults import (
    FaultyS3,
    cut_short,
    half,
    lost_answer,
    reset,
    s3_expired,
    s3_says,
    silence,
    slow_down,
    wrong_bytes,
)
from store_worlds import LOG, S3World, soon, want
from test_store_contract import Granting, grant_to_get, grant_to_put, put

from miner.blobs import Blobs
from subnet.errors import Corrupt, Expired, HashMismatch, InputError, NotFound, TooLarge, Unreachable
from subnet.protocol.wire import blob_hash
from subnet.store.base import Hold, NeedsSha256, PutWant
from subnet.store.hold_index import HoldIndex, StoredObject
from subnet.store.presigned import BlobClient
from subnet.store.s3 import S3Store
from subnet.store.s3_admin import ensure_lifecycle, lifecycle_rules, make_bucket
from subnet.store.s3_calls import ListedKey
from subnet.store.signed_urls import BadGrant
from subnet.timing import Deadline
from subnet.words import BlobHash

PART = 5 << 20
"""The least a part may have."""


@pytest.fixture
async def proxy(seaweed: Seaweed) -> AsyncIterator[FaultyS3]:
    proxy = await FaultyS3(seaweed.endpoint).start()
    yield proxy
    await proxy.close()


@pytest.fixture
async def world(seaweed: Seaweed, proxy: FaultyS3, tmp_path: Path) -> AsyncIterator[S3World]:
    world = S3World(seaweed, tmp_path / "store", endpoint=proxy.url)
    await world.start()
    proxy.seen.clear()
    yield world
    await world.stop()


@pytest.fixture
def store(world: S3World) -> S3Store:
    return world.store


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subnet.store.base.SINGLE_BYTES", 2 * PART)
    for module in ("base", "s3"):
        monkeypatch.setattr(f"subnet.store.{module}.PART_BYTES", PART)


def patient(idle_s: float = 30.0) -> BlobClient:
    return BlobClient(try_s=30, idle_s=idle_s)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
async def test_a_big_blob_goes_up_in_parts_and_only_what_is_missing_goes_again(store: S3Store, proxy: FaultyS3) -> None:
    data = os.urandom(2 * PART + 1_000_000)
    blob = str(blob_hash(data))
    granting = Granting(store)
    async with patient() as client:
        miner = Blobs(granting, client, "run-1")  # type: ignore[arg-type]
        proxy.on("PUT", reset, s3_expired, slow_down)
        await miner.put_many([(blob, data)], "snapshot", soon())
        assert proxy.fired.total() == 3
        assert proxy.asked("PUT") == 3 + 3
        proxy.on("GET", half, reset)
        assert await miner.get_many([(blob, 0)], soon()) == [data]
        ranges = {wanted.partition("-")[0] for method, _, wanted in proxy.seen if method == "GET" and wanted}
        assert {"bytes=0", f"bytes={PART}", f"bytes={2 * PART}"} <= ranges
        before = proxy.asked("PUT")
        await Blobs(granting, client, "run-1").put_many([(blob, data)], "snapshot", soon())  # type: ignore[arg-type]
        assert proxy.asked("PUT") == before, "it is there already"


@pytest.mark.usefixtures("small_parts")
async def test_a_broken_upload_is_resumed_by_whoever_comes_next(store: S3Store, proxy: FaultyS3) -> None:
    data = os.urandom(3 * PART)
    blob = str(blob_hash(data))
    async with patient() as client:
        proxy.on("PUT", s3_says(403, "AccessDenied", "no"), times=3)
        with pytest.raises(BadGrant, match="AccessDenied"):
            await Blobs(Granting(store), client, "run-1").put_many([(blob, data)], "log", soon())  # type: ignore[arg-type]
        (first,) = await store.grant_puts([want(data)], LOG, deadline=soon())
        with pytest.raises(InputError, match="parts"):
            await client.put(first, data, deadline=soon())
        (grant,) = await store.grant_parts(want(data), [1], LOG, deadline=soon())
        await client.put(grant, data[:PART], deadline=soon())
        with pytest.raises(HashMismatch):
            await client.put(grant, bytes(PART), deadline=soon())
        with pytest.raises(InputError):
            await store.grant_parts(want(data), [4], LOG, deadline=soon())
        lacking = await store.complete_parts(want(data), LOG, deadline=soon())
        assert lacking.parts == (2, 3)
        proxy.seen.clear()
        await Blobs(Granting(store), client, "run-1").put_many([(blob, data)], "log", soon())  # type: ignore[arg-type]
        assert proxy.asked("PUT") == 2
        assert await store.get_blob(BlobHash(blob), len(data), deadline=soon()) == data
        assert (await store.complete_parts(want(data), LOG, deadline=soon())).held


@pytest.mark.usefixtures("small_parts")
async def test_two_members_put_the_same_big_blob_and_the_owner_another(store: S3Store) -> None:
    data, own = os.urandom(2 * PART + 5), os.urandom(2 * PART + 6)
    blob = str(blob_hash(data))
    async with patient() as client:
        members = [Blobs(Granting(store), client, "run-1") for _ in range(2)]  # type: ignore[arg-type]
        await asyncio.gather(*(member.put_many([(blob, data)], "log", soon()) for member in members))
        await store.put_blob(own, LOG, deadline=soon())
    assert await store.get_blob(BlobHash(blob), len(data), deadline=soon()) == data
    assert await store.get_blob(blob_hash(own), len(own), deadline=soon()) == own


async def test_what_is_too_big_or_unnamed(store: S3Store) -> None:
    blob = blob_hash(b"x")
    for bad, kind in (
        (PutWant(blob, 1), NeedsSha256),
        (PutWant(blob, 1, ("zz",)), InputError),
        (PutWant(blob, 1, ("0" * 64,) * 2), InputError),
        (PutWant(blob, -1, ("0" * 64,)), InputError),
        (PutWant(blob, 1 << 50, ("0" * 64,)), TooLarge),
    ):
        with pytest.raises(kind):
            await store.grant_puts([bad], LOG, deadline=soon())
    with pytest.raises(NeedsSha256):
        store.presign_put_named("a", blob, 1)


# --- a store that breaks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [reset, half, cut_short, wrong_bytes, silence, slow_down, s3_expired])
async def test_a_download_survives_each_fault_once(store: S3Store, proxy: FaultyS3, fault: Any) -> None:
    data = os.urandom(50_000)
    blob = await put(store, data)
    proxy.on("GET", fault)
    async with patient(2.0 if fault is silence else 30.0) as client:
        miner = Blobs(Granting(store), client, "run-1")  # type: ignore[arg-type]
        assert await miner.get_many([(str(blob), 0)], soon()) == [data]
    assert proxy.fired.total() == 1


@pytest.mark.parametrize("fault", [reset, lost_answer, slow_down, s3_expired, s3_says(500, "InternalError")])
async def test_an_upload_survives_each_fault_once(store: S3Store, proxy: FaultyS3, fault: Any) -> None:
    data = os.urandom(50_000)
    proxy.on("PUT", fault)
    async with patient() as client:
        miner = Blobs(Granting(store), client, "run-1")  # type: ignore[arg-type]
        await miner.put_many([(str(blob_hash(data)), data)], "log", soon())
        used = miner.used
    assert used.puts == 2, "a retry is a request too"
    assert await store.get_blob(blob_hash(data), len(data), deadline=soon()) == data
    if fault is not s3_expired:
        proxy.on("PUT", fault)
        await store.put_named("journal/1", b"segment", deadline=soon())
        assert proxy.fired.total() == 2


async def test_an_outage_is_unreachable_and_over_when_it_is_over(store: S3Store, proxy: FaultyS3) -> None:
    blob = await put(store, b"data")
    proxy.down = True
    for work in (
        store.get_named("journal/1", deadline=Deadline.after(0.3)),
        store.get_blob(blob, 4, deadline=Deadline.after(0.3)),
        store.list_named("", deadline=Deadline.after(0.3)),
        store.sizes([blob_hash(b"granted")], deadline=Deadline.after(0.3)),
    ):
        try:
            assert await work == {}
        except Unreachable:
            continue
    freed = store.expire("log", "run-1", 99, deadline=Deadline.after(0.3))
    with pytest.raises(Unreachable):
        await freed
    proxy.down = False
    await store.upkeep.purge(soon())
    with pytest.raises(NotFound):
        await store.get_blob(blob, 4, deadline=soon())
    assert await store.put_blob(b"data", LOG, deadline=soon()) == blob, "deleted, so it can come again"
    assert await store.get_blob(blob, 4, deadline=soon()) == b"data"


async def test_a_clock_that_is_wrong_is_named(world: S3World) -> None:
    blob = await put(world.store, b"data")
    world.clock.shift_s = -7200
    with pytest.raises(Expired, match=r"-7[12]\d\d s off the store's.*NTP"):
        await world.store.get_blob(blob, 4, deadline=Deadline.after(5))
    with pytest.raises(Expired, match="NTP"):
        await world.store.get_named("journal/1", deadline=Deadline.after(5))
    world.clock.shift_s = 0.0


# --- liars ------------------------------------------------------------------------------------------------------------


def lie(data: bytes, instead: bytes) -> PutWant:
    """A want for the address of ``data`` that will store ``instead``."""
    return PutWant(blob_hash(data), len(instead), (hashlib.sha256(instead).hexdigest(),))


async def test_other_bytes_under_an_address_are_found_and_removed(store: S3Store, proxy: FaultyS3) -> None:
    data, instead = os.urandom(1000), os.urandom(1000)
    async with patient() as client:
        (grant,) = await store.grant_puts([lie(data, instead)], LOG, who="the liar", deadline=soon())
        await client.put(grant, instead, deadline=soon())
        miner = Blobs(Granting(store), client, "run-1")  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            await miner.get_many([(str(blob_hash(data)), 0)], soon())
        assert await store.sizes([blob_hash(data)], deadline=soon()) == {}
        await miner.put_many([(str(blob_hash(data)), data)], "log", soon())
        assert await miner.get_many([(str(blob_hash(data)), 0)], soon()) == [data]
        proxy.seen.clear()
        await store.check_blobs([blob_hash(data)], deadline=soon())
        seen = len(proxy.seen)
        await store.check_blobs([blob_hash(data)], deadline=soon())
        assert len(proxy.seen) == seen, "what was found right isn't read again for every complaint"


async def test_of_two_that_claim_an_address_the_right_one_is_served(store: S3Store) -> None:
    data, instead = os.urandom(1000), os.urandom(1000)
    async with patient() as client:
        for asked in (lie(data, instead), want(data)):
            (grant,) = await store.grant_puts([asked], LOG, deadline=soon())
            await client.put(grant, instead if asked.sha256 != want(data).sha256 else data, deadline=soon())
        assert await client.get(await grant_to_get(store, blob_hash(data), 0), deadline=soon()) == data
    assert await store.sizes([blob_hash(data)], deadline=soon()) == {blob_hash(data): 1000}


# --- holds in the index -----------------------------------------------------------------------------------------------


async def test_a_hold_is_on_the_disk_before_its_grant_leaves(world: S3World) -> None:
    grants = await asyncio.gather(*(grant_to_put(world.store, b"%d" % i) for i in range(20)))
    with closing(sqlite3.connect(f"file:{world.store._index.path}?mode=ro", uri=True)) as other:
        held = {row[0].hex() for row in other.execute("SELECT blob FROM holds")}
    assert held == {grant.hash for grant in grants}


async def test_a_key_that_is_being_deleted_is_granted_only_afterwards(store: S3Store, proxy: FaultyS3) -> None:
    blob = await put(store, b"data")
    await asyncio.to_thread(store._index.expire, "log", "run-1", 99)
    proxy.seen.clear()
    again = await put(store, b"data")
    assert again == blob
    methods = [method for method, path, _ in proxy.seen]
    assert methods.index("POST") < methods.index("PUT"), "deleted, then put"
    assert await store.get_blob(blob, 4, deadline=soon()) == b"data"


async def test_evidence_lies_apart_and_other_classes_outlive_it(world: S3World) -> None:
    store, evidence = world.store, Hold("evidence", "run-1", 1)
    blob = await put(store, b"both", evidence)
    assert "/evidence/" in (await grant_to_get(store, blob, 4)).url
    await put(store, b"both")
    assert "/blobs/" in (await grant_to_get(store, blob, 4)).url
    await store.expire("evidence", "run-1", 99, deadline=soon())
    assert await store.get_blob(blob, 4, deadline=soon()) == b"both"


async def test_another_owner_takes_over_what_was_held(world: S3World, proxy: FaultyS3) -> None:
    held, late = await put(world.store, b"held"), b"after the copy"
    await world.store.put_named("runs/x/run", b"run", deadline=soon())
    await world.store.upkeep.copy(soon())
    asked = len(proxy.seen)
    await world.store.upkeep.copy(soon())
    assert len(proxy.seen) == asked, "nothing changed"
    await put(world.store, late)
    other = world.new_store("other")
    try:
        await other.open(deadline=soon())
        assert await other.get_blob(held, 4, deadline=soon()) == b"held"
        assert await other.get_blob(blob_hash(late), len(late), deadline=soon()) == late
        assert await other.get_named("runs/x/run", deadline=soon()) == b"run"
        await other.expire("log", "run-1", 99, deadline=soon())
        with pytest.raises(NotFound):
            await other.get_blob(held, 4, deadline=soon())
        assert await other.get_blob(blob_hash(late), len(late), deadline=soon()) == late, "adopted, so kept"
    finally:
        await other.close()


async def test_a_sweep_takes_what_is_old_and_nobody_names(world: S3World) -> None:
    store = world.store
    kept = await put(store, b"kept")
    orphan = StoredObject(blob_hash(b"orphan"), hashlib.sha256(b"orphan").hexdigest(), "blobs", 6)
    await store._calls.put(f"{world.prefix}/{orphan.name}", b"orphan", deadline=soon())
    await store._calls.put(f"{world.prefix}/blobs/not-ours", b"?", deadline=soon())
    upload = await store._calls.create_upload(f"{world.prefix}/blobs/given-up", deadline=soon())
    assert await store.upkeep.sweep(soon()) == 0, "too young"
    assert await store.upkeep.sweep(soon(), old_s=-60.0) == 2
    names = {item.key.rpartition("/")[2] for item in await store._calls.list(f"{world.prefix}/blobs/", deadline=soon())}
    assert names == {
        StoredObject(kept, hashlib.sha256(b"kept").hexdigest(), "blobs").name.rpartition("/")[2],
        "not-ours",
    }
    with pytest.raises(NotFound):
        await store._calls.list_parts(f"{world.prefix}/blobs/given-up", upload, deadline=soon())


async def test_the_upkeep_keeps_copies_counts_and_rules(
    world: S3World, proxy: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subnet.store.s3_upkeep.COPY_EVERY_S", 0.02)
    store = world.store
    upkeep = asyncio.create_task(store.maintain())
    try:
        for i in range(4):  # each is a change, so each makes a copy; two are kept
            seen = {item.key for item in await copies(world)}
            await put(store, b"%d" % i)
            async with asyncio.timeout(30):
                while not {item.key for item in await copies(world)} - seen:
                    await asyncio.sleep(0.02)
        proxy.down = True
        await asyncio.sleep(0.1)
        proxy.down = False
        assert not upkeep.done(), "a store that is away is no end"
    finally:
        upkeep.cancel()
        await asyncio.wait({upkeep})
    assert 1 <= len(await copies(world)) <= 3
    assert not await asyncio.to_thread(ensure_lifecycle, store._signer), "the rules are set"
    puts = store.meter.use("run-1").own.puts
    assert puts == 4
    await store.close()
    again = await world.start()
    assert again.meter.use("run-1").own.puts == puts


async def copies(world: S3World) -> list[ListedKey]:
    return await world.store._calls.list(f"{world.prefix}/index/", deadline=soon())


def test_a_copy_that_is_damaged_is_refused(tmp_path: Path) -> None:
    index = HoldIndex(tmp_path / "index.db")
    (tmp_path / "other.db").write_bytes(b"no database, but long enough to be looked at" * 100)
    with pytest.raises(Corrupt, match="can't be read"):
        index.merge(tmp_path / "other.db")
    entry = StoredObject(blob_hash(b"x"), "0" * 64, "blobs", 1)
    assert index.add([(entry, LOG)]) == set()
    index.close()
    (tmp_path / "bad.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Corrupt, match="can't be used"):
        HoldIndex(tmp_path / "bad.db")


# --- the bucket -------------------------------------------------------------------------------------------------------


def test_a_bucket_is_made_once_and_rules_stay_beside_others(seaweed: Seaweed) -> None:
    signer = seaweed.signer("one/run")
    assert not make_bucket(signer)
    assert ensure_lifecycle(signer)
    assert not ensure_lifecycle(signer), "they are there"
    assert ensure_lifecycle(seaweed.signer("another"))
    assert not ensure_lifecycle(signer), "and stay"
    ids = [rule["ID"] for rule in lifecycle_rules(signer.place)]
    assert ids == ["iota-one-run-uploads", "iota-one-run-evidence"]
