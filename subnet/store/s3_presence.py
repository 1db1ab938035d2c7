"""What of the index is really in the bucket, and which of several objects under one address is the right one.

A grant isn't an upload, so the bucket is asked; what was seen is believed for a while. Objects that claim the same BLAKE3 with
different SHA-256 can't both be right: they are read, and what is wrong is deleted, with a line in the log that says whose grant
it was.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from blake3 import blake3
from loguru import logger

from subnet.errors import Busy
from subnet.protocol.messages import StoreUse
from subnet.store.base import PART_BYTES, Grant
from subnet.store.hold_index import HoldIndex, StoredObject
from subnet.store.meter import StoreMeter
from subnet.store.presigned import BlobClient
from subnet.store.s3_calls import S3Calls
from subnet.store.s3_place import S3Signer
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash

SEEN_FOR_S = 600.0
MAX_SEEN = 262_144
_SLOWEST_BYTES_PER_S = 4 << 20
_PARALLEL_HEADS = 16


class Presence:
    def __init__(
        self, signer: S3Signer, calls: S3Calls, index: HoldIndex, client: BlobClient, meter: StoreMeter
    ) -> None:
        self._signer, self._calls, self._index, self._client, self._meter = signer, calls, index, client, meter
        self._slots = asyncio.Semaphore(_PARALLEL_HEADS)
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._verified: OrderedDict[str, None] = OrderedDict()
        self._checks: dict[BlobHash, asyncio.Task[None]] = {}

    async def close(self) -> None:
        for task in self._checks.values():
            task.cancel()
        if self._checks:
            await asyncio.wait(self._checks.values())

    # --- what was seen

    def saw(self, entry: StoredObject) -> None:
        self._seen[entry.name] = self._signer.clock.now_s()
        self._seen.move_to_end(entry.name)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def known(self, entry: StoredObject) -> bool:
        at_s = self._seen.get(entry.name)
        return at_s is not None and self._signer.clock.now_s() - at_s < SEEN_FOR_S

    def gone(self, entries: Sequence[StoredObject]) -> None:
        for entry in entries:
            self._seen.pop(entry.name, None)
            self._verified.pop(entry.name, None)

    async def is_there(self, entry: StoredObject, deadline: Deadline) -> bool:
        if self.known(entry):
            return True
        async with self._slots:
            size_bytes = await self._calls.head(self._signer.place.key(entry.name), deadline=deadline)
        if size_bytes != entry.size_bytes:
            return False
        self.saw(entry)
        return True

    # --- where a blob is

    async def locate(self, blobs: Sequence[BlobHash], deadline: Deadline) -> dict[BlobHash, StoredObject]:
        """The object to read for each blob; where there is only one, whether it is there is left to the reader."""
        found = await asyncio.to_thread(self._index.find, blobs)
        return await self._choose(found, deadline, sure=False)

    async def present(self, blobs: Sequence[BlobHash], deadline: Deadline) -> dict[BlobHash, StoredObject]:
        """The same of those that are in the bucket."""
        found = await asyncio.to_thread(self._index.find, blobs)
        return await self._choose(found, deadline, sure=True)

    async def _choose(
        self, found: dict[BlobHash, list[StoredObject]], deadline: Deadline, *, sure: bool
    ) -> dict[BlobHash, StoredObject]:
        async def choose(blob: BlobHash, entries: list[StoredObject]) -> tuple[BlobHash, StoredObject | None]:
            if len(entries) == 1 and not sure:
                return blob, entries[0]
            there = await self._there(entries, deadline)
            if len({entry.sha256 for entry in there}) > 1:
                await self.check(blob, deadline)
                there = await self._there((await asyncio.to_thread(self._index.find, [blob])).get(blob, []), deadline)
            return blob, there[0] if there else None

        chosen = await all_of([choose(blob, entries) for blob, entries in found.items()])
        return {blob: entry for blob, entry in chosen if entry is not None}

    async def _there(self, entries: Sequence[StoredObject], deadline: Deadline) -> list[StoredObject]:
        seen = await all_of([self.is_there(entry, deadline) for entry in entries])
        return [entry for entry, is_there in zip(entries, seen, strict=True) if is_there]

    # --- whether it is what it says

    async def check(self, blob: BlobHash, deadline: Deadline) -> None:
        """Read what is there under this address and remove what is something else; :class:`Busy` if that takes longer."""
        task = self._checks.get(blob)
        if task is None:
            task = self._checks[blob] = asyncio.create_task(self._check(blob), name=f"check {blob[:10]}")
            task.add_done_callback(lambda _: self._checks.pop(blob, None))
        done, _ = await asyncio.wait({task}, timeout=deadline.remaining_s())
        if not done:
            raise Busy(f"blob {blob[:10]}… is being looked at")
        task.result()

    async def _check(self, blob: BlobHash) -> None:
        entries = (await asyncio.to_thread(self._index.find, [blob])).get(blob, [])
        for entry in entries:
            limit = Deadline.after(TIMEOUTS.store_request_s + entry.size_bytes / _SLOWEST_BYTES_PER_S)
            if entry.name in self._verified or not await self.is_there(entry, limit):
                continue
            if await self._hash(entry, limit) == blob:
                self._verified[entry.name] = None
                if len(self._verified) > MAX_SEEN:
                    self._verified.popitem(last=False)
                continue
            logger.warning(
                "blob {} in the store is something else, and is deleted; it was put by a grant to {}",
                blob[:16],
                entry.who or "an unknown member",
            )
            await self._remove(entry, limit)

    async def _hash(self, entry: StoredObject, deadline: Deadline) -> str:
        hasher = blake3()
        key = self._signer.place.key(entry.name)

        async def renew(limit: Deadline) -> Grant:
            url, expires_s = self._signer.presign("GET", key, ttl_s=TIMEOUTS.url_ttl_s)
            return Grant(url, "GET", {}, entry.blob, entry.size_bytes, expires_s)

        grant = await renew(deadline)
        for start in range(0, entry.size_bytes, PART_BYTES):
            count = min(PART_BYTES, entry.size_bytes - start)
            data = await self._client.get_range(grant, start, count, deadline=deadline, renew=renew)
            await asyncio.to_thread(hasher.update, data)
            self._meter.own_use("", StoreUse(gets=1, bytes_down=count))
        return hasher.hexdigest()

    async def _remove(self, entry: StoredObject, deadline: Deadline) -> None:
        await asyncio.to_thread(self._index.drop, entry)
        self.gone([entry])
        await self._calls.delete([self._signer.place.key(entry.name)], deadline=deadline)
        await asyncio.to_thread(self._index.died, [entry])
