"""The bytes of an audit: waits until what it wants is in the store, and makes bundles of them within a budget of disk.

Blobs that bundles share (snapshots, the log, tokens) lie once, in one cache; a bundle's are hard links into it, so that a
bundle stays whole until it is given back, whatever the cache lets go. Every blob is checked when it comes and again when it
is read, so nothing here needs to survive a crash.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from loguru import logger

from subnet.audit.bundle import BLOBS_NAME, CASE_NAME, Needed, needed_blobs, useful_blobs
from subnet.audit.case import Case
from subnet.errors import Busy, Corrupt, HashMismatch, IotaError, NotFound, OutOfSpace
from subnet.protocol import wire
from subnet.protocol.parts import PART_BYTES, decode_parts
from subnet.store.base import MAX_SIZES, OwnerStore
from subnet.store.disk import BlobCache, atomic_write
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import BlobHash, Want

GATHER_S = 20 * TIMEOUTS.store_request_s
"""Until a bundle is complete; what has come by then stays in the cache for the next try."""
POLL_BASE_S, POLL_CAP_S = 0.1, 2.0
MAX_PARALLEL = 8
MAX_ROUNDS = 16
"""Manifests name chunks, and those nothing: a bundle that asks for more than so many rounds is no bundle."""


@dataclass(frozen=True)
class Arrived:
    """How a wait for evidence ended."""

    missing: tuple[Want, ...]
    evidence_bytes: int


async def wait_for_evidence(
    store: OwnerStore,
    wants: Collection[Want],
    *,
    given_up: Callable[[Want], bool],
    waited_s: Callable[[], float],
    limit_s: float,
    parts: Callable[[Want], int] = lambda want: 0,
) -> Arrived:
    """Until the store has all of them, or ``limit_s`` by ``waited_s`` have passed: a clock that stands still while the store
    is away. A want that is ``given_up`` (its holder says that it is gone) is looked for once more and then not waited for.

    ``parts``: of how many parts a wanted boundary is; where it is of some, it is a list (:mod:`subnet.protocol.parts`), and is
    there when all that the list names is there: a list that names other things is as good as none.
    """
    left, size_bytes = set(wants), 0
    pause = Backoff(POLL_BASE_S, POLL_CAP_S)
    hopeless: set[Want] = set()
    while True:
        last = waited_s() >= limit_s
        if found := await _sizes(store, {want.hash for want in left}):
            came = {want for want in left if want.hash in found}
            lists = {want for want in came if parts(want)}
            size_bytes += sum(found[want.hash] for want in came)
            for want in lists:
                part_bytes = await _parts_bytes(store, want.hash, found[want.hash], parts(want))
                size_bytes += part_bytes or 0
                if part_bytes is None:
                    came.discard(want)
            left -= came
            hopeless |= {want for want in lists - came if given_up(want)}
        elif found is not None:
            hopeless |= {want for want in left if given_up(want)}
        if not left or (found is not None and (last or left <= hopeless)):
            return Arrived(
                tuple(sorted(left, key=lambda want: (want.stage, want.microbatch, want.backward))), size_bytes
            )
        await asyncio.sleep(pause.next_s())


async def _parts_bytes(store: OwnerStore, blob: str, list_bytes: int, num_parts: int) -> int | None:
    """Bytes of all parts that the list names; None where one of them isn't there, or the list is none."""
    if list_bytes != num_parts * PART_BYTES:
        return None
    try:
        data = await store.get_blob(BlobHash(blob), list_bytes, deadline=Deadline.after(TIMEOUTS.store_request_s))
        if await asyncio.to_thread(wire.blob_hash, data) != blob:
            return None
        named = sorted(set(decode_parts(data, num_parts)))
    except IotaError as error:
        logger.debug("audit evidence: {}", error)
        return None
    total = 0
    for start in range(0, len(named), MAX_SIZES):
        asked = named[start : start + MAX_SIZES]
        found = await _sizes(store, asked)
        if found is None or len(found) < len(asked):
            return None
        total += sum(found.values())
    return total


async def _sizes(store: OwnerStore, hashes: Collection[str]) -> dict[str, int] | None:
    """Of those that are there; None where the store can't be asked."""
    try:
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        return {**await store.sizes([BlobHash(h) for h in hashes if wire.is_blob_hash(h)], deadline=deadline)}
    except IotaError as error:
        logger.debug("audit evidence: {}", error)
        return None


@dataclass
class Bundle:
    """A case and what it names, as files. Without the blobs that ``held`` makes superfluous, where it was made with one."""

    case: Case
    directory: Path
    ticket: int
    sizes: dict[str, int] = field(default_factory=lambda: {})
    """Bytes of its blobs by hash, ``case.msgpack`` not among them."""
    read_bytes: int = 0
    """What had to be fetched for it."""

    def read(self, blob: str) -> bytes:
        return (self.directory / BLOBS_NAME / blob).read_bytes()

    def find(self, blob: str) -> bytes | None:
        """A blob that is in the bundle already."""
        return self.read(blob) if blob in self.sizes else None


class BundleMaker:
    """Bundles of one run under a directory that is this object's alone; it is emptied of old bundles at the start."""

    def __init__(self, store: OwnerStore, directory: Path, budget_bytes: int) -> None:
        self._store = store
        self._bundles, self._blobs = directory / "bundles", directory / "blobs"
        self._budget_bytes = budget_bytes
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._next_ticket, self._tickets = 1, set[int]()

    @cached_property
    def _cache(self) -> BlobCache:
        """Made with the first bundle: most runs of a validator that audits nothing have no such directory."""
        shutil.rmtree(self._bundles, ignore_errors=True)
        return BlobCache(self._blobs, self._budget_bytes)

    @asynccontextmanager
    async def bundle(self, case: Case, deadline: Deadline, *, held: int | None = None) -> AsyncGenerator[Bundle]:
        """The case as a directory with its blobs, for as long as the block lasts: all of them, or (``held``: the version of
        the stage's state that the worker has) what it takes to go on from there; :meth:`fill` fetches the others."""
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._tickets.add(ticket)
        bundle, cache = Bundle(case, self._bundles / str(ticket), ticket), self._cache
        try:
            await asyncio.to_thread(_begin, bundle.directory, case)
            await self.fill(bundle, deadline, held=held)
            yield bundle
        finally:
            self._tickets.discard(ticket)
            cache.release(min(self._tickets, default=self._next_ticket))
            await asyncio.to_thread(shutil.rmtree, bundle.directory, ignore_errors=True)

    async def fill(self, making: Bundle, deadline: Deadline, *, held: int | None = None) -> None:
        """Fetch what the bundle still lacks."""
        case = making.case
        for _ in range(MAX_ROUNDS):
            needed = await asyncio.to_thread(needed_blobs, case, making.find, has=making.sizes.__contains__, held=held)
            if not needed:
                return
            lacking = await self._link_all(needed, making)
            sizes = await self._sizes_of(lacking, deadline)
            self._check_budget(making, sum(sizes.values()))
            async with deadline.limit("the bundle of an audit"):
                await all_of([self._fetch(item, sizes[item.hash], making, deadline) for item in lacking])
        raise Corrupt(f"a case of step {case.step} stage {case.stage} names blobs without end")

    async def add_useful(self, making: Bundle, deadline: Deadline) -> None:
        """Claimed outputs, as far as the store has them, for a machine of another class: see :mod:`subnet.audit.tolerance`."""
        claimed = [item for item in useful_blobs(making.case) if wire.is_blob_hash(item.hash)]
        lacking = [item for item in claimed if item.hash not in making.sizes]
        lacking = await self._link_all(lacking, making)
        found = await self._found([BlobHash(item.hash) for item in lacking], deadline)
        self._check_budget(making, sum(found.values()))
        there = [item for item in lacking if item.hash in found]
        async with deadline.limit("claimed outputs for an audit"):
            await all_of([self._fetch(item, found[item.hash], making, deadline) for item in there])

    async def _found(self, blobs: Sequence[BlobHash], deadline: Deadline) -> dict[str, int]:
        found: dict[str, int] = {}
        for start in range(0, len(blobs), MAX_SIZES):
            asked = blobs[start : start + MAX_SIZES]
            sizes = await self._store.sizes(asked, deadline=deadline.sooner(TIMEOUTS.store_request_s))
            found.update({str(blob): size_bytes for blob, size_bytes in sizes.items()})
        return found

    async def _link_all(self, needed: Sequence[Needed], making: Bundle) -> list[Needed]:
        """Those that the cache doesn't have."""

        def link() -> list[Needed]:
            return [item for item in needed if not self._link(item.hash, making)]

        return await asyncio.to_thread(link)

    def _link(self, blob: str, making: Bundle) -> bool:
        if not self._cache.pin(BlobHash(blob), making.ticket):
            return False
        target = making.directory / BLOBS_NAME / blob
        try:
            target.hardlink_to(self._blobs / blob)
        except FileNotFoundError:
            self._cache.discard(BlobHash(blob))
            return False
        making.sizes[blob] = target.stat().st_size
        return True

    async def _sizes_of(self, lacking: Sequence[Needed], deadline: Deadline) -> dict[str, int]:
        sizes = {item.hash: item.size_bytes for item in lacking}
        unknown = [BlobHash(blob) for blob, size_bytes in sizes.items() if size_bytes <= 0]
        sizes.update(await self._found(unknown, deadline))
        gone = next((blob for blob, size_bytes in sizes.items() if size_bytes <= 0), None)
        if gone is not None:
            raise NotFound(f"blob {gone[:16]}, which an audit needs, is not in the store")
        return sizes

    def _check_budget(self, making: Bundle, more_bytes: int) -> None:
        size_bytes = sum(making.sizes.values()) + more_bytes
        if size_bytes > self._budget_bytes:
            raise OutOfSpace(
                f"an audit needs {size_bytes} bytes, its budget is {self._budget_bytes}", hint="raise --audit.disk"
            )

    async def _fetch(self, item: Needed, size_bytes: int, making: Bundle, deadline: Deadline) -> None:
        async with self._slots:
            limit = deadline.sooner(TIMEOUTS.store_request_s)
            data = await self._row_group(item, limit) if item.shard else None
            if data is None:
                data = await self._store.get_blob(BlobHash(item.hash), size_bytes, deadline=limit)
            try:
                await asyncio.to_thread(self._cache.put, BlobHash(item.hash), data, pin=making.ticket)
            except OutOfSpace as error:
                if len(self._tickets) > 1:  # it fits by itself: when the others are given back there is room
                    raise Busy(f"the disk of audits is full of other bundles: {error.reason}") from error
                raise
        making.read_bytes += size_bytes
        if not await asyncio.to_thread(self._link, item.hash, making):
            raise Corrupt(f"blob {item.hash[:16]} left the cache of audits while it was pinned")

    async def _row_group(self, item: Needed, limit: Deadline) -> bytearray | None:
        """Bytes of a shard; None where that is gone: a kept case has its row groups as blobs of their own."""
        try:
            data = await self._store.get_range(
                BlobHash(item.shard), item.shard_bytes, item.start, item.size_bytes, deadline=limit
            )
        except NotFound:
            return None
        if await asyncio.to_thread(wire.blob_hash, data) != item.hash:
            raise HashMismatch(f"bytes {item.start} on of {item.shard[:16]} aren't what the data manifest says")
        return data


def _begin(directory: Path, case: Case) -> None:
    (directory / BLOBS_NAME).mkdir(parents=True)
    atomic_write(directory / CASE_NAME, wire.encode(case), durable=False)
