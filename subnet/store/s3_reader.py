"""A bucket for somebody who only reads it: blobs are found by listing, no index is kept, nothing is written or deleted.

For a validator that follows: credentials with ListBucket and GetObject are enough. Objects that claim one BLAKE3 with different
SHA-256 are all tried; what is wrong is left to the bucket's owner.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from subnet.errors import HashMismatch, InputError, NotFound
from subnet.protocol.wire import is_blob_hash
from subnet.store.base import Grant, Hold, PutWant
from subnet.store.hold_index import SHELVES, HoldIndex, StoredObject
from subnet.store.meter import StoreMeter
from subnet.store.presigned import BlobClient
from subnet.store.s3 import S3Store
from subnet.store.s3_calls import S3Calls
from subnet.store.s3_place import S3Signer
from subnet.store.s3_presence import Presence
from subnet.store.together import all_of
from subnet.timing import Deadline
from subnet.words import BlobHash

MAX_LISTED = 65_536
"""Addresses whose objects are remembered, those found last."""
_PARALLEL_LISTS = 16


class ListedPresence(Presence):
    """Where blobs are, as the bucket lists them; one that was found is taken to be there for a while."""

    def __init__(
        self, signer: S3Signer, calls: S3Calls, index: HoldIndex, client: BlobClient, meter: StoreMeter
    ) -> None:
        super().__init__(signer, calls, index, client, meter)
        self._listed: OrderedDict[BlobHash, list[StoredObject]] = OrderedDict()
        self._lists = asyncio.Semaphore(_PARALLEL_LISTS)

    async def locate(self, blobs: Sequence[BlobHash], deadline: Deadline) -> dict[BlobHash, StoredObject]:
        return await self.present(blobs, deadline)

    async def present(self, blobs: Sequence[BlobHash], deadline: Deadline) -> dict[BlobHash, StoredObject]:
        found = await all_of([self.candidates(blob, deadline) for blob in blobs])
        return {blob: entries[0] for blob, entries in zip(blobs, found, strict=True) if entries}

    async def candidates(self, blob: BlobHash, deadline: Deadline) -> list[StoredObject]:
        """Every object under this address."""
        known = self._listed.get(blob)
        if known and all(self.known(entry) for entry in known):
            return known
        async with self._lists:
            entries = [entry for shelf in SHELVES for entry in await self._list(shelf, blob, deadline)]
        for entry in entries:
            self.saw(entry)
        self._listed.pop(blob, None)
        if entries:
            self._listed[blob] = entries
            while len(self._listed) > MAX_LISTED:
                self._listed.popitem(last=False)
        return entries

    async def _list(self, shelf: str, blob: BlobHash, deadline: Deadline) -> list[StoredObject]:
        prefix = self._signer.place.key(f"{shelf}/{blob}.")
        listed = await self._calls.list(prefix, deadline=deadline)
        named = [(item.key.removeprefix(prefix), item.size_bytes) for item in listed]
        return [StoredObject(blob, sha256, shelf, size_bytes) for sha256, size_bytes in named if is_blob_hash(sha256)]

    async def check(self, blob: BlobHash, deadline: Deadline) -> None:
        """The owner's to mend."""
        self._listed.pop(blob, None)


class S3Reader(S3Store):
    """An :class:`S3Store` that takes nothing; ``index`` is a file that stays empty."""

    def __init__(self, signer: S3Signer, index: Path, *, owner: str, client: BlobClient | None = None) -> None:
        super().__init__(signer, index, owner=owner, client=client)
        self._presence = self._found = ListedPresence(signer, self._calls, self._index, self.blobs, self.meter)

    async def open(self, *, deadline: Deadline) -> None:
        return

    async def maintain(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self.blobs.close()
        await asyncio.to_thread(self._index.close)

    async def get_blob(self, blob: BlobHash, size_bytes: int, *, deadline: Deadline) -> bytearray:
        """Of several objects under the address the one whose bytes are right."""
        last: HashMismatch | None = None
        for entry in await self._found.candidates(blob, deadline):

            async def renew(limit: Deadline, entry: StoredObject = entry) -> Grant:
                return self._get_grant(entry)

            if size_bytes > 0 and entry.size_bytes != size_bytes:
                continue
            try:
                return await self.blobs.get(self._get_grant(entry), deadline=deadline, renew=renew)
            except HashMismatch as error:
                last = error
        raise last or NotFound(f"blob {blob[:16]} is not in the store")

    async def get_range(
        self, blob: BlobHash, size_bytes: int, start: int, num_bytes: int, *, deadline: Deadline
    ) -> bytearray:
        """Part of the only object under the address; of several the one whose bytes are right, which takes all of it."""
        found = await self._found.candidates(blob, deadline)
        if len([entry for entry in found if entry.size_bytes == size_bytes]) > 1:
            whole = await self.get_blob(blob, size_bytes, deadline=deadline)
            return whole[start : start + num_bytes]
        return await super().get_range(blob, size_bytes, start, num_bytes, deadline=deadline)

    async def grant_puts(
        self, wants: Sequence[PutWant], hold: Hold, *, who: str = "", deadline: Deadline
    ) -> tuple[Grant, ...]:
        raise InputError("this validator only reads the store", hint="ask the validator that leads")
