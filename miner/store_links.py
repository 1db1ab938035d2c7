"""Boundaries and slices through the object store: whole before they are receipted, checked before they are taken.

Several transfers are under way at once each way, gradients first; grants for whatever has come together are asked for in one
request. What the store doesn't have is looked for again with growing waits, and after a few times it is called missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miner.batches import Batches
from miner.blobs import BlobRef
from miner.context import RunContext
from miner.local_view import BoundaryKey
from miner.owed import still_needs
from miner.owes import FetchSlice, FetchStored, StoreBoundary, StoreSlice
from subnet.errors import HashMismatch, IotaError, NotFound
from subnet.logs import ReasonLog
from subnet.model.memory import boundary_bytes
from subnet.protocol.messages import AnyClaim, ForwardReceipt
from subnet.protocol.wire import Buffer
from subnet.timing import TIMEOUTS, Backoff, Deadline, transfer_deadline

LANES = 3
"""Batches under way each way: one at the validator, one on the wire, one at the store."""
MOST = 16
LOOKED_BEFORE_MISSING = 3
LOOK_AGAIN_S = 0.1
LOOK_AGAIN_MAX_S = 2.0
EVIDENCE = "evidence"
Blob = tuple[str, Buffer]


class StoreLinks:
    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._puts: Batches[Blob, None] = Batches(self._put_all, lanes=LANES, most=MOST)
        self._gets: Batches[BlobRef, bytearray] = Batches(self._get_all, lanes=LANES, most=MOST)
        self._slice_puts: Batches[Blob, None] = Batches(self._put_all, lanes=LANES, most=MOST)
        self._slice_gets: Batches[BlobRef, bytearray] = Batches(self._get_all, lanes=LANES, most=MOST)
        self._boundary_bytes = boundary_bytes(context.plan)
        self._waits: dict[BoundaryKey | str, Backoff] = {}
        self._looks: dict[BoundaryKey, int] = {}
        self._reasons = ReasonLog()

    def awaited(self, claims: Sequence[AnyClaim]) -> bool:
        """Whether somebody learns by one of these receipts what to fetch: then it goes at once."""
        stored = self._context.local.in_store
        return any(
            isinstance(c, ForwardReceipt) and BoundaryKey(c.step, c.microbatch, c.stage, False) in stored
            for c in claims
        )

    async def close(self) -> None:
        for batches in (self._puts, self._gets, self._slice_puts, self._slice_gets):
            await batches.close()

    def end_step(self) -> None:
        self._looks.clear()
        self._waits.clear()

    # --- boundaries --------------------------------------------------------------------------------------------

    async def store_boundary(self, owe: StoreBoundary) -> None:
        context = self._context
        data = await context.cache.get(owe.key)
        if data is None:
            context.local.lose(owe.key)
            raise NotFound(f"boundary {owe.key} is no longer held")
        await self._puts.ask((owe.hash, data), _rank(owe.key))
        context.local.in_store[owe.key] = owe.turn
        context.wake()

    async def fetch_stored(self, owe: FetchStored) -> None:
        context, key = self._context, owe.key
        try:
            data = await self._gets.ask((owe.hash, self._boundary_bytes), _rank(key))
        except (NotFound, HashMismatch) as error:
            await self._look_again(key, error)
            return
        member = context.member
        if member is None or key in context.local.boundaries:
            return
        if not still_needs(context.run_state, member, key, owe.hash):
            return  # its maker was voided meanwhile: what the next one says may be something else
        context.cache.put(key, data, owe.hash)
        context.local.boundaries[key] = owe.hash
        context.local.unavailable.discard(key)
        self._looks.pop(key, None)
        self._waits.pop(key, None)
        context.wake()

    async def _look_again(self, key: BoundaryKey, error: IotaError) -> None:
        """Its maker is about to put it there, or it is lost: then it is made again."""
        self._looks[key] = self._looks.get(key, 0) + 1
        if self._looks[key] >= LOOKED_BEFORE_MISSING:
            self._reasons.note("boundaries in the store", error.code, str(error))
            self._context.local.unavailable.add(key)
            self._context.wake()
        await asyncio.sleep(self._wait_s(key))

    def _wait_s(self, what: BoundaryKey | str) -> float:
        """Until it is looked for again; longer each time."""
        return self._waits.setdefault(what, Backoff(LOOK_AGAIN_S, LOOK_AGAIN_MAX_S)).next_s()

    # --- slices ------------------------------------------------------------------------------------------------

    async def store_slice(self, owe: StoreSlice) -> None:
        data = self._context.slices.get(owe.hash)
        if data is None:
            raise NotFound(f"slice {owe.partition} is gone")
        await self._slice_puts.ask((owe.hash, data), (owe.partition,))
        self._context.local.stored.add(owe.hash)
        self._context.wake()

    async def fetch_slice(self, owe: FetchSlice) -> None:
        """Put there before its contributor committed, or once the fold said that it goes through the store."""
        context = self._context
        if owe.hash in context.slices:
            return
        try:
            data = await self._slice_gets.ask((owe.hash, 0), (owe.partition,))
        except NotFound:
            await asyncio.sleep(self._wait_s(owe.hash))
            return
        context.slices[owe.hash] = memoryview(data)
        context.local.slices.add(owe.hash)
        context.wake()

    # --- transfers ---------------------------------------------------------------------------------------------

    async def _put_all(self, blobs: Sequence[Blob]) -> Sequence[Exception | None]:
        size_bytes = sum(memoryview(data).nbytes for _, data in blobs)
        deadline = transfer_deadline(TIMEOUTS.store_request_s, size_bytes)
        await self._context.blobs.put_many(list(blobs), EVIDENCE, deadline)
        return [None] * len(blobs)

    async def _get_all(self, refs: Sequence[BlobRef]) -> Sequence[bytearray | Exception]:
        """One that isn't there must not keep the others from their bytes."""
        deadline = transfer_deadline(TIMEOUTS.store_request_s, sum(size or self._boundary_bytes for _, size in refs))
        try:
            return await self._context.blobs.get_many(list(refs), deadline)
        except (NotFound, HashMismatch) as error:
            if len(refs) == 1:
                return [error]
        return [await self._get(ref, deadline) for ref in refs]

    async def _get(self, ref: BlobRef, deadline: Deadline) -> bytearray | Exception:
        try:
            return (await self._context.blobs.get_many([ref], deadline))[0]
        except IotaError as error:
            return error


def _rank(key: BoundaryKey) -> tuple[int, int]:
    """A gradient frees memory and the pipeline behind it."""
    return (0 if key.backward else 1, key.microbatch)
