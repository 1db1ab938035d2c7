"""A blob of the run's snapshots or log, from the first source that has it: this machine's disk, the replicas, the store.

Nothing counts before its hash is checked; what arrives is kept on disk at once, so that no blob is fetched twice, also over a
restart. Replicas and store are asked one after the other, the second also as soon as the first takes longer than a hedging
delay; whoever is first counts, and the loser is let go.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from miner.blobs import BlobRef, Blobs, Buffer
from subnet.errors import IotaError, NotFound, OutOfSpace, Unreachable
from subnet.logs import ReasonLog
from subnet.model.snapshots import SnapshotManifest
from subnet.protocol.wire import is_blob_hash
from subnet.run.audits import branch
from subnet.run.state import RunState, num_stages, restore_point
from subnet.store.disk import BlobCache
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash

DISK, REPLICAS, STORE = "disk", "replicas", "store"
"""Names of the sources."""

MAX_PARALLEL = 8
"""Blobs on their way at the same time."""


class Replicas(Protocol):
    """Other members that may have the blob."""

    async def fetch(self, ref: BlobRef, deadline: Deadline) -> bytearray:
        """The blob, its hash checked; :class:`NotFound` if nobody has it, else the last error."""
        ...


class Holdings:
    """What this machine holds of the run's snapshots and log, within its cache's budget; other members may ask for it."""

    def __init__(self, cache: BlobCache, state: Callable[[], RunState]) -> None:
        self._cache, self._state = cache, state
        self._chunks: dict[str, set[str]] = {}
        """By manifest."""
        self._kept: set[str] = set()
        self._named: set[str] = set()
        self._named_at: tuple[int, int, int] | None = None
        self._reasons = ReasonLog()

    def get(self, blob: str) -> bytearray | None:
        """The bytes, checked; None if they aren't here. Blocks on the disk."""
        data = self._cache.get(BlobHash(blob)) if is_blob_hash(blob) else None
        if data is not None:
            self._kept.add(blob)
        return data

    def get_piece(self, blob: str, offset: int, num_bytes: int) -> tuple[bytes, int] | None:
        """Bytes from ``offset`` on and the blob's size; the first piece is given only of a blob that is whole."""
        key = BlobHash(blob)
        if offset == 0:
            whole = self.get(blob)
            return None if whole is None else (bytes(memoryview(whole)[:num_bytes]), len(whole))
        size_bytes = self._cache.size_of(key)
        if size_bytes is None or offset >= size_bytes:
            return None
        data = self._cache.get_range(key, offset, min(num_bytes, size_bytes - offset))
        return None if data is None else (data, size_bytes)

    async def keep(self, blob: str, data: Buffer) -> None:
        """Onto the disk; where that is full, it is said once and the blob isn't kept."""
        try:
            await asyncio.to_thread(self._cache.put, BlobHash(blob), data)
            self._kept.add(blob)
        except OutOfSpace as error:
            self._reasons.note("cache", error.code, str(error))
        except OSError as error:
            self._reasons.note("cache", f"os_error_{error.errno}", str(error))

    async def keep_many(self, blobs: Sequence[tuple[str, Buffer]]) -> None:
        for blob, data in blobs:
            await self.keep(blob, data)

    def learn(self, blob: str, manifest: SnapshotManifest) -> None:
        """The chunks of this snapshot, whose manifest is this blob, belong to the run."""
        self._chunks[blob] = {ref.hash for ref in manifest.chunks}

    async def tidy(self) -> None:
        """Let go of what nobody can need: log and snapshots behind the oldest state that a joiner would restore."""
        needed = needed_blobs(self._state())
        self._chunks = {blob: chunks for blob, chunks in self._chunks.items() if blob in needed}
        needed = needed.union(*self._chunks.values())
        past, self._kept = self._kept - needed, self._kept & needed
        for blob in past:
            await asyncio.to_thread(self._cache.discard, BlobHash(blob))

    def may_serve(self, blob: str) -> bool:
        """Whether the blob is known as one of the run's log, snapshots or their chunks: others are nobody's business."""
        if any(blob in chunks for chunks in self._chunks.values()):
            return True
        state = self._state()
        at = (branch(state), state.next_step, sum(len(found) for found in state.snapshots.values()))
        if at != self._named_at:
            self._named, self._named_at = named_blobs(state), at
        return blob in self._named


def named_blobs(state: RunState) -> set[str]:
    """Blobs that the fold names: the merged partitions of the sealed steps it still has, and snapshot manifests."""
    named = {blob for log in state.sealed.values() for group in log.groups for blob, _ in group.blobs}
    named |= {blob for seal in state.seals.values() for blob, _ in seal.blobs}
    if state.work is not None:
        named |= {part.blob for merge in state.work.merges for part in merge.merged.values()}
    named |= {snapshot.manifest for stored in state.snapshots.values() for snapshot in stored}
    return named if state.run is None else named | {state.run.snapshot}


def needed_blobs(state: RunState) -> set[str]:
    """Those of them that somebody may still restore from."""
    named = named_blobs(state)
    run = state.run
    if run is not None and all(not restore_point(state, stage).whole for stage in range(num_stages(state))):
        named.discard(run.snapshot)
    return named


class Sources:
    """Ordered sources of blobs; ``bytes_from`` counts what came from each."""

    def __init__(
        self, holdings: Holdings, blobs: Blobs, replicas: Replicas, *, hedge_s: float = TIMEOUTS.hedge_s
    ) -> None:
        self.holdings = holdings
        self._blobs, self._replicas, self._hedge_s = blobs, replicas, hedge_s
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self.bytes_from: Counter[str] = Counter()

    async def fetch_many(
        self, refs: Sequence[BlobRef], deadline: Deadline, *, store_first: bool = False
    ) -> list[Buffer]:
        """The blobs in order; if some can't be had the others still come, and are kept for the next try."""
        works = [self.fetch(ref, deadline, store_first=store_first) for ref in refs]
        results = await asyncio.gather(*works, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, IotaError)), failures[0])
        return [result for result in results if not isinstance(result, BaseException)]

    async def fetch(self, ref: BlobRef, deadline: Deadline, *, store_first: bool = False) -> Buffer:
        """The blob; ``store_first``: the store has it for sure and everybody wants it now, replicas only help out."""
        async with self._slots:
            found = await asyncio.to_thread(self.holdings.get, ref[0])
            if found is not None:
                self.bytes_from[DISK] += len(found)
                return found
            names = [STORE, REPLICAS] if store_first else [REPLICAS, STORE]
            name, data = await self._race(ref, names, deadline)
            self.bytes_from[name] += len(data)
            await self.holdings.keep(ref[0], data)
            return data

    def _ask(self, name: str, ref: BlobRef, deadline: Deadline) -> Coroutine[Any, Any, bytearray]:
        return self._replicas.fetch(ref, deadline) if name == REPLICAS else self._blobs.get(ref, deadline)

    async def _race(self, ref: BlobRef, names: Sequence[str], deadline: Deadline) -> tuple[str, bytearray]:
        waiting, running, errors = deque(names), dict[asyncio.Task[bytearray], str](), dict[str, IotaError]()
        try:
            while waiting or running:
                deadline.check(f"blob {ref[0][:10]}")
                if waiting:
                    name = waiting.popleft()
                    running[asyncio.create_task(self._ask(name, ref, deadline), name=f"{name} {ref[0][:10]}")] = name
                wait_s = min(self._hedge_s, deadline.remaining_s()) if waiting else deadline.remaining_s()
                done, _ = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    name = running.pop(task)
                    error = task.exception()
                    if error is None:
                        return name, task.result()
                    if not isinstance(error, IotaError):
                        raise error
                    errors[name] = error
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
        raise _worst(ref, errors)


def _worst(ref: BlobRef, errors: dict[str, IotaError]) -> IotaError:
    """The store's word, since it must have what the fold names; with what the replicas said."""
    error = errors.get(STORE) or next(iter(errors.values()), Unreachable(f"blob {ref[0][:10]}: nobody was asked"))
    other = errors.get(REPLICAS)
    if other is not None and other is not error and not isinstance(other, NotFound):
        error.reason = f"{error.reason}; replicas: {other.reason}"
    return error
