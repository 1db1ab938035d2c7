"""The store says which blobs it has and how large they are, to its owner alone, in requests of bounded size."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from subnet.errors import InputError
from subnet.protocol import wire
from subnet.protocol.wire import blob_hash
from subnet.store.base import MAX_SIZES, Hold
from subnet.store.embedded import EmbeddedStore
from subnet.store.server import start_store
from subnet.store.signed_urls import StoreSigner
from subnet.timing import Deadline
from subnet.words import BlobHash

SECRET = b"s" * 32
LOG = Hold("log", "run-1", 3)


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[EmbeddedStore]:
    listener = await start_store(tmp_path / "store", "127.0.0.1", 0, SECRET, 8 << 20)
    store = EmbeddedStore(listener.url, SECRET)
    yield store
    await store.close()
    await listener.close()


async def test_sizes_of_what_is_there(store: EmbeddedStore) -> None:
    there = {await store.put_blob(os.urandom(n), LOG, deadline=soon()): n for n in (1, 2000)}
    assert await store.sizes([*there, blob_hash(b"never"), *there], deadline=soon()) == there
    assert await store.sizes([], deadline=soon()) == {}


async def test_more_than_one_request_takes(store: EmbeddedStore) -> None:
    blob = await store.put_blob(b"here", LOG, deadline=soon())
    absent = [blob_hash(n.to_bytes(4, "little")) for n in range(MAX_SIZES)]
    assert await store.sizes([*absent, blob], deadline=soon()) == {blob: 4}


async def test_what_is_no_hash_is_refused_before_it_is_sent(store: EmbeddedStore) -> None:
    with pytest.raises(InputError, match="isn't the hash"):
        await store.sizes([BlobHash("../../etc")], deadline=soon())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (wire.encode(["no hash"]), 400),
        (wire.encode({"a": 1}), 400),
        (b"", 400),
        (wire.encode(["a" * 64] * (MAX_SIZES + 1)), 413),
        (b"\xc1" * (1 << 20), 413),
    ],
)
async def test_a_bad_question_is_refused(store: EmbeddedStore, body: bytes, status: int) -> None:
    signer = StoreSigner(SECRET, store.presign_get(blob_hash(b""), 0).url.partition("/blob")[0])
    url, _ = signer.mint("POST", "/sizes", {}, ttl_s=60)
    async with aiohttp.ClientSession() as session, session.post(url, data=body) as response:
        assert response.status == status


async def test_only_the_owner_may_ask(store: EmbeddedStore) -> None:
    base = store.presign_get(blob_hash(b""), 0).url.partition("/blob")[0]
    async with aiohttp.ClientSession() as session, session.post(f"{base}/sizes", data=wire.encode([])) as response:
        assert response.status == 403
