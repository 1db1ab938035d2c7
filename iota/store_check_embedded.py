"""What runs need of the embedded store, each thing done against a running one (``iota store serve``)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

import msgspec

from iota.store_check import Check, Lacking, expect, same
from subnet.errors import ConfigError, Exists, Expired, HashMismatch, InputError, NotFound
from subnet.protocol.wire import blob_hash
from subnet.store.base import Hold
from subnet.store.embedded import EmbeddedStore
from subnet.store.signed_urls import BadGrant, load_or_create_secret
from subnet.timing import Deadline

DATA = b"what runs need of a store" * 40
WRITERS = 16
REFUSED = (BadGrant.code,)
WRONG = "this is no store of this version, or a proxy stands before it"


class EmbeddedTrial:
    def __init__(self, url: str, secret: Path, trial: str) -> None:
        if not secret.exists():
            raise ConfigError(f"there is no store secret in {secret}", hint="copy the store's file, see --store.secret")
        self._url, self._trial = url, trial
        self._store = EmbeddedStore(url, load_or_create_secret(secret))
        self._hold, self._blob = Hold("data", trial), blob_hash(DATA + trial.encode())
        self._data = DATA + trial.encode()

    async def __aenter__(self) -> EmbeddedTrial:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._store.close()

    def checks(self) -> list[Check]:
        return [
            Check("the store answers with this secret", self._answers, "nothing works"),
            Check("a presigned URL puts, another gets", self._round_trip, WRONG),
            Check("a late URL is refused", self._late, WRONG),
            Check("a URL for another blob or method is refused", self._altered, WRONG),
            Check("a body of another length or hash is refused", self._bodies, WRONG),
            Check("of racing writers of a key one wins", self._race, "two validators could both lead"),
            Check("ranges are read", self._ranges, WRONG),
            Check("keys are listed", self._list, "no validator can take over a run"),
            Check("holds end, and their blobs", self._expire, "the store only grows"),
        ]

    async def _answers(self, deadline: Deadline) -> str:
        usage = await self._store.usage(deadline=deadline)
        return f"{usage.used_bytes} of {usage.budget_bytes} bytes used"

    async def _round_trip(self, deadline: Deadline) -> str:
        await self._store.put_blob(self._data, self._hold, deadline=deadline)
        same(await self._store.get_blob(self._blob, len(self._data), deadline=deadline), self._data)
        return f"{len(self._data)} bytes"

    async def _late(self, deadline: Deadline) -> str:
        late = self._store.presign_get(self._blob, len(self._data), ttl_s=-60)
        return await expect(self._store.blobs.get(late, deadline=deadline), Expired)

    async def _altered(self, deadline: Deadline) -> str:
        get = self._store.presign_get(self._blob, len(self._data))
        other = msgspec.structs.replace(get, url=get.url.replace(self._blob, blob_hash(b"another")))
        await expect(self._store.blobs.get(other, deadline=deadline), codes=REFUSED)
        return await expect(self._store.blobs.exchange("DELETE", get.url, limit=deadline), codes=REFUSED)

    async def _bodies(self, deadline: Deadline) -> str:
        grant = self._store.presign_put(blob_hash(b"right"), 5, self._hold)
        for body in (b"longer", b"sho"):
            await expect(self._store.blobs.exchange("PUT", grant.url, limit=deadline, body=body), InputError)
        return await expect(self._store.blobs.put(grant, b"wrong", deadline=deadline), HashMismatch)

    async def _race(self, deadline: Deadline) -> str:
        async def write(i: int) -> bool:
            try:
                await self._store.put_named(f"{self._trial}/race", b"%d" % i, deadline=deadline)
            except Exists:
                return False
            return True

        won = await asyncio.gather(*(write(i) for i in range(WRITERS)))
        if won.count(True) != 1:
            raise Lacking(f"{won.count(True)} of {WRITERS} won")
        return f"1 of {WRITERS} (the key stays: names are for ever)"

    async def _ranges(self, deadline: Deadline) -> str:
        found = await self._store.get_range(self._blob, len(self._data), 10, 500, deadline=deadline)
        same(found, self._data[10:510])
        return "206"

    async def _list(self, deadline: Deadline) -> str:
        keys = await self._store.list_named(f"{self._trial}/", deadline=deadline)
        if [key.name for key in keys] != [f"{self._trial}/race"]:
            raise Lacking(f"{len(keys)} keys of 1")
        return "1 key"

    async def _expire(self, deadline: Deadline) -> str:
        freed = await self._store.expire("data", self._trial, 1, deadline=deadline)
        if freed.num_blobs != 1:
            raise Lacking(f"{freed.num_blobs} blobs of 1 went")
        return await expect(self._store.get_blob(self._blob, len(self._data), deadline=deadline), NotFound)
