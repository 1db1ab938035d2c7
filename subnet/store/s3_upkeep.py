"""Holds are durable before grants leave, what nothing holds is deleted, and another owner can go on from copies in the bucket.

* :meth:`Upkeep.hold`: holds of grants that are asked for at the same time share one fsync.
* :meth:`Upkeep.purge`: deletes in batches; what failed is tried again. A key that is being deleted is granted only afterwards.
* Every minute, if it changed, the index goes into the bucket; an owner without one takes over the newest of each other owner,
  and keeps whatever else it finds there.
* Once a day objects that no index names and that are older than a day are deleted (uploads that outlived their hold), and
  uploads in parts that were given up; a lifecycle rule of the bucket is the net below that (:mod:`subnet.store.s3_admin`).
"""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import IotaError
from subnet.logs import ReasonLog
from subnet.protocol import wire
from subnet.protocol.wire import is_blob_hash
from subnet.store.base import Hold
from subnet.store.hold_index import SHELVES, HoldIndex, StoredObject
from subnet.store.meter import RunCounts, StoreMeter
from subnet.store.s3_admin import ensure_lifecycle
from subnet.store.s3_calls import DELETE_KEYS, ListedKey, S3Calls
from subnet.store.s3_place import S3Signer
from subnet.store.s3_presence import Presence
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash

COPY_EVERY_S = 60.0
SWEEP_EVERY_S = 86_400.0
FIRST_SWEEP_S = 3600.0
OLD_S = 86_400.0
"""An object that no index names is left alone for so long."""
ADOPTED = "adopted"
"""Label of what was found in the bucket without a hold; ``expire`` of this label would end it."""
_KEPT_COPIES = 2
_METER = "meter"
_LIMIT_COPY_BYTES = 1 << 30
_Entries = Sequence[tuple[StoredObject, Hold]]


class Upkeep:
    def __init__(
        self, signer: S3Signer, calls: S3Calls, index: HoldIndex, meter: StoreMeter, presence: Presence, *, owner: str
    ) -> None:
        self._signer, self._calls, self._index, self._meter = signer, calls, index, meter
        self._presence, self._owner = presence, owner
        self._waiting: list[tuple[_Entries, asyncio.Future[set[StoredObject]]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._purging = asyncio.Lock()
        self._opened = False
        self._copied = -1
        self._reasons = ReasonLog(level="WARNING")

    async def open(self, deadline: Deadline) -> None:
        """Take over what other owners left; a new index can't do without, an old one may catch up later."""
        saved = await asyncio.to_thread(self._index.fact, _METER)
        if saved:
            self._meter.runs.update(msgspec.msgpack.decode(saved, type=dict[str, RunCounts]))
        try:
            await self._take_over(deadline)
        except IotaError as error:
            if self._index.was_new or not error.retryable:
                raise
            logger.warning("the copies of the store's index are looked at later: {}", error)

    async def run(self) -> None:
        """Forever."""
        await self._set_lifecycle()
        now_s = self._signer.clock.now_s()
        sweep_at_s = now_s + FIRST_SWEEP_S
        while True:
            await asyncio.sleep(COPY_EVERY_S)
            try:
                await self._turn()
                if self._signer.clock.now_s() >= sweep_at_s:
                    await self.sweep(Deadline.after(SWEEP_EVERY_S))
                    sweep_at_s = self._signer.clock.now_s() + SWEEP_EVERY_S
            except IotaError as error:
                self._reasons.note("the store's upkeep", error.code, str(error))

    async def _turn(self) -> None:
        await asyncio.to_thread(self._signer.refresh)
        deadline = Deadline.after(TIMEOUTS.store_open_s)
        if not self._opened:
            await self._take_over(deadline)
        await self.purge(deadline)
        await self._save_meter()
        await self.copy(deadline)

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.wait({self._writer})
        await self._presence.close()
        await self._save_meter()
        try:
            if self._opened:
                await self.copy(Deadline.after(TIMEOUTS.store_probe_s))
        except IotaError as error:
            logger.warning("the store's index isn't in the bucket as it is now: {}", error)

    async def _save_meter(self) -> None:
        await asyncio.to_thread(self._index.set_fact, _METER, wire.encode(self._meter.runs))

    async def _set_lifecycle(self) -> None:
        try:
            await asyncio.to_thread(ensure_lifecycle, self._signer)
        except IotaError as error:
            logger.warning("the bucket has no lifecycle rule as a net: {}", error)

    # --- holds

    async def hold(self, entries: _Entries, deadline: Deadline) -> None:
        """Durable on return."""
        while entries:
            async with deadline.limit("the store's index"):
                future: asyncio.Future[set[StoredObject]] = asyncio.get_running_loop().create_future()
                self._waiting.append((entries, future))
                if self._writer is None or self._writer.done():
                    self._writer = asyncio.create_task(self._write(), name="holds")
                dying = await future
            if dying:
                await self.purge(deadline)
            entries = [(entry, hold) for entry, hold in entries if entry in dying]

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                dying = await asyncio.to_thread(self._index.add, [pair for entries, _ in batch for pair in entries])
            except IotaError as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for entries, future in batch:
                if not future.done():
                    future.set_result({entry for entry, _ in entries if entry in dying})

    async def purge(self, deadline: Deadline, *, run: str = "") -> None:
        """Delete what is dying."""
        async with self._purging:
            while batch := await asyncio.to_thread(self._index.dying, DELETE_KEYS):
                self._presence.gone(batch)
                keys = [self._signer.place.key(entry.name) for entry in batch]
                await self._calls.delete(keys, run=run, deadline=deadline)
                await asyncio.to_thread(self._index.died, batch)

    # --- copies of the index

    async def copy(self, deadline: Deadline) -> None:
        """Put the index into the bucket, unless it is there as it is."""
        if self._index.changes == self._copied:
            return
        changes, packed = await asyncio.to_thread(self._packed)
        prefix = self._signer.place.key(f"index/{self._owner}/")
        await self._calls.put(f"{prefix}{self._signer.clock.wall_ns():020d}", packed, deadline=deadline)
        self._copied = changes
        keys = sorted(item.key for item in await self._calls.list(prefix, deadline=deadline))
        await self._calls.delete(keys[:-_KEPT_COPIES], deadline=deadline)

    def _packed(self) -> tuple[int, bytes]:
        with tempfile.TemporaryDirectory(dir=self._index.path.parent) as directory:
            path = Path(directory) / "copy.db"
            changes = self._index.copy_to(path)
            return changes, zlib.compress(path.read_bytes(), 1)

    async def _take_over(self, deadline: Deadline) -> None:
        prefix = self._signer.place.key("index/")
        newest: dict[str, str] = {}
        for item in await self._calls.list(prefix, deadline=deadline):
            owner = item.key.removeprefix(prefix).partition("/")[0]
            newest[owner] = max(newest.get(owner, ""), item.key)
        for owner, key in newest.items():
            fact = f"merged/{owner}"
            if owner == self._owner and not self._index.was_new:
                continue
            if await asyncio.to_thread(self._index.fact, fact) == key.encode():
                continue
            data = await self._calls.get(key, limit_bytes=_LIMIT_COPY_BYTES, deadline=deadline)
            await asyncio.to_thread(self._merge, data)
            await asyncio.to_thread(self._index.set_fact, fact, key.encode())
            logger.info("the store's index takes over what {} held", owner)
        if self._index.was_new:
            await self._adopt(deadline)
            self._index.was_new = False
        self._opened = True

    def _merge(self, packed: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=self._index.path.parent) as directory:
            path = Path(directory) / "other.db"
            path.write_bytes(zlib.decompress(packed))
            self._index.merge(path)

    async def _adopt(self, deadline: Deadline) -> None:
        """Hold what is in the bucket and in no copy: it was granted after the last of them."""
        unknown = [entry for entry, _ in await self._unknown(deadline)]
        if not unknown:
            return
        holds = {shelf: Hold("evidence" if shelf == "evidence" else "data", ADOPTED) for shelf in SHELVES}
        await asyncio.to_thread(self._index.add, [(entry, holds[entry.shelf]) for entry in unknown])
        size_bytes = sum(entry.size_bytes for entry in unknown)
        logger.info("{} objects of the bucket, {:.1f} MB, were in no index: kept", len(unknown), size_bytes / 1e6)

    # --- what nothing names

    async def sweep(self, deadline: Deadline, *, old_s: float = OLD_S) -> int:
        """Delete old objects that no index names, and old uploads that were given up; how many."""
        await self._take_over(deadline)
        now_s = self._signer.clock.wall_ns() / 1e9
        old = [entry for entry, listed in await self._unknown(deadline) if now_s - listed.modified_s > old_s]
        if old:
            await asyncio.to_thread(self._index.condemn, old)
            await self.purge(deadline)
            logger.info("store: {} objects that nothing names are deleted", len(old))
        open_uploads = await asyncio.to_thread(self._index.uploads)
        given_up = [
            item
            for item in await self._calls.list_uploads(self._signer.place.key(""), deadline=deadline)
            if item.upload not in open_uploads and now_s - item.initiated_s > old_s
        ]
        for item in given_up:
            await self._calls.abort_upload(item.key, item.upload, deadline=deadline)
        return len(old) + len(given_up)

    async def _unknown(self, deadline: Deadline) -> list[tuple[StoredObject, ListedKey]]:
        found: dict[StoredObject, ListedKey] = {}
        for shelf in SHELVES:
            prefix = self._signer.place.key(f"{shelf}/")
            for item in await self._calls.list(prefix, deadline=deadline):
                blob, _, sha256 = item.key.removeprefix(prefix).partition(".")
                if is_blob_hash(blob) and is_blob_hash(sha256):
                    found[StoredObject(BlobHash(blob), sha256, shelf, item.size_bytes)] = item
        known = await asyncio.to_thread(self._index.names, list(found))
        return [(entry, item) for entry, item in found.items() if entry not in known]
