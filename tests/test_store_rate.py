"""Transfers with the store keep to the limits that they share with the links between miners."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from subnet.net.rate import RateLimit
from subnet.protocol.wire import blob_hash
from subnet.store.base import Hold
from subnet.store.embedded import EmbeddedStore
from subnet.store.presigned import BlobClient
from subnet.store.server import start_store
from subnet.timing import Deadline


async def test_blobs_take_from_the_shared_limits(tmp_path: Path) -> None:
    listener = await start_store(tmp_path / "store", "127.0.0.1", 0, b"s" * 32, 64 << 20)
    owner = EmbeddedStore(listener.url, b"s" * 32)
    up, down, deadline = RateLimit(2e6), RateLimit(4e6), Deadline.after(60)
    loop = asyncio.get_running_loop()
    try:
        async with BlobClient(upload=up, download=down) as client:
            data = os.urandom(1_000_000)
            name = blob_hash(data)
            await up.take(500_000)  # what a peer is sent counts as well
            began_s = loop.time()
            await client.put(owner.presign_put(name, len(data), Hold("log", "run", 1)), data, deadline=deadline)
            up_s = loop.time() - began_s
            began_s = loop.time()
            assert await client.get(owner.presign_get(name, len(data)), deadline=deadline) == data
            down_s = loop.time() - began_s
        assert (up.used_bytes, down.used_bytes) == (1_500_000, 1_000_000)
        assert up_s >= 0.6  # never faster than the limit; how much slower is the machine's affair
        assert down_s >= 0.1
        assert up.waited_s > 0
        assert down.waited_s > 0
    finally:
        await owner.close()
        await listener.close()
