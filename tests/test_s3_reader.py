"""Who only reads a bucket finds in it whatever its owner's members put there, without an index and without a right to write."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from seaweed import Seaweed
from store_worlds import LOG, S3World, soon

from subnet.errors import InputError, NotFound
from subnet.protocol.wire import blob_hash
from subnet.store.base import Hold, PutWant
from subnet.store.s3_reader import S3Reader

EVIDENCE = Hold("evidence", "run", 3)


@pytest.fixture
async def world(seaweed: Seaweed, tmp_path: Path) -> AsyncIterator[S3World]:
    world = S3World(seaweed, tmp_path / "store")
    await world.start()
    yield world
    await world.stop()


@pytest.fixture
async def reader(world: S3World, seaweed: Seaweed, tmp_path: Path) -> AsyncIterator[S3Reader]:
    signer = seaweed.signer(world.prefix, clock=world.clock)
    reader = S3Reader(signer, tmp_path / "reader.db", owner="follower")
    await reader.open(deadline=soon())
    yield reader
    await reader.close()


async def test_blobs_and_names_are_found(world: S3World, reader: S3Reader) -> None:
    one, other, lacking = b"one" * 1000, b"other", blob_hash(b"never put")
    blobs = [
        await world.store.put_blob(one, LOG, deadline=soon()),
        await world.store.put_blob(other, EVIDENCE, deadline=soon()),
    ]
    await world.store.put_named("runs/a/journal/0", b"segment", deadline=soon())
    assert await reader.sizes([*blobs, lacking], deadline=soon()) == {blobs[0]: 3000, blobs[1]: 5}
    assert await reader.get_blob(blobs[0], 3000, deadline=soon()) == one
    assert await reader.get_blob(blobs[1], 0, deadline=soon()) == other
    assert await reader.get_range(blobs[0], 3000, 3, 3, deadline=soon()) == b"one"
    assert await reader.get_named("runs/a/journal/0", deadline=soon()) == b"segment"
    assert [key.name for key in await reader.list_named("runs/", deadline=soon())] == ["runs/a/journal/0"]
    with pytest.raises(NotFound):
        await reader.get_blob(lacking, 10, deadline=soon())


async def test_what_comes_later_is_found_later(world: S3World, reader: S3Reader) -> None:
    blob = blob_hash(b"late")
    assert await reader.sizes([blob], deadline=soon()) == {}
    await world.store.put_blob(b"late", EVIDENCE, deadline=soon())
    assert await reader.sizes([blob], deadline=soon()) == {blob: 4}


async def test_of_two_objects_under_one_address_the_right_one_is_read(world: S3World, reader: S3Reader) -> None:
    """A member that puts other bytes under a hash (its SHA-256 is its own) hides nothing."""
    data, lie = b"the true bytes", b"some other one"
    blob = blob_hash(data)
    (grant,) = await world.store.grant_puts(
        [PutWant(blob, len(lie), (hashlib.sha256(lie).hexdigest(),))], EVIDENCE, deadline=soon()
    )
    await world.store.blobs.put(grant, lie, deadline=soon())
    await world.store.put_blob(data, EVIDENCE, deadline=soon())
    assert await reader.get_blob(blob, len(data), deadline=soon()) == data
    assert await reader.get_range(blob, len(data), 4, 4, deadline=soon()) == b"true"


async def test_what_is_remembered_of_listings_is_bounded(
    world: S3World, reader: S3Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subnet.store.s3_reader.MAX_LISTED", 2)
    blobs = [await world.store.put_blob(bytes([number]) * 9, EVIDENCE, deadline=soon()) for number in range(5)]
    assert len(await reader.sizes(blobs, deadline=soon())) == 5
    assert len(reader._found._listed) == 2
    assert await reader.get_blob(blobs[0], 9, deadline=soon()) == bytes(9)


async def test_nothing_is_put(reader: S3Reader) -> None:
    with pytest.raises(InputError, match="only reads"):
        await reader.put_blob(b"bytes", LOG, deadline=soon())
