"""One miner of the butterfly benchmark: the real transport and the real merge work, with a bare-bones coordinator among them.

Everything from a member's sum to the checked fp32 gradient is done as :mod:`miner.member_merge` does it: slices hashed,
packed and sent one after the other, checked as they arrive, summed by their owner, published (straight, or through a store),
fingerprinted under a seed that is revealed after all is committed, and checked by everybody. Left out is what a validator
does: journal, leases, grants. The first miner plays it: it collects hashes and reveals the seed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from benchmarks.butterfly_frames import (
    TWO_OWNERS,
    Cell,
    FixedScales,
    HashesFrame,
    Header,
    Measured,
    MergedFrame,
    PrintsFrame,
    SeedFrame,
    WithLayout,
    layout_of,
)
from miner.compute import ComputeThread
from subnet.engine.stage_executor import PartialKey, StagePartial
from subnet.engine.stage_merge import HashedSlice, MergedPartition, SliceEncoder, StageMerge
from subnet.net.base import PeerAddress
from subnet.net.streams import StreamTransport
from subnet.numerics.fixed_point import PartialSum
from subnet.numerics.owners import choose_owners, choose_seconds, pair
from subnet.protocol.messages import SliceFrame
from subnet.protocol.signing import Signer
from subnet.protocol.wire import Buffer, blob_hash
from subnet.store.base import Hold
from subnet.store.embedded import EmbeddedStore
from subnet.timing import Deadline
from subnet.words import BlobHash, GroupShape, Member

ROUND_S = 300.0
AT_ONCE = 2
"""Bodies packed or checked at the same time beside the compute thread, as in ``miner.member_slices``."""
HOLD = Hold("log", "butterfly")
T = TypeVar("T")


class Peer:
    """``signers`` and ``ports`` are everybody's, by rank."""

    def __init__(self, cell: Cell, rank: int, signers: Sequence[Signer]) -> None:
        self._cell, self._rank, self._signers = cell, rank, signers
        layout = layout_of(cell)
        self._members = [Member(signer.hotkey, 1, i + 1) for i, signer in enumerate(signers)]
        self._me = self._members[rank]
        self._layout = layout
        self._section = layout.sections[0]
        self._items = [
            cell.microbatches // cell.miners + (i < cell.microbatches % cell.miners) for i in range(cell.miners)
        ]
        self._packed = True
        self._compute = ComputeThread()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._transport: StreamTransport[Header] = StreamTransport(signers[rank], Header, self._on_frame)
        self._addresses: dict[Member, PeerAddress] = {}
        self._store = EmbeddedStore(cell.store_url, bytes.fromhex(cell.store_secret)) if cell.store_url else None
        self._partial = self._random_sum()
        self._changed = asyncio.Event()
        self._early: list[tuple[Header, Buffer]] = []
        self._began = False

    async def start(self) -> int:
        await self._transport.start()
        return self._transport.port

    def meet(self, ports: Sequence[int]) -> None:
        self._addresses = {
            member: PeerAddress(member.hotkey, "127.0.0.1", port)
            for member, port in zip(self._members, ports, strict=True)
            if member != self._me
        }

    async def close(self) -> None:
        await self._transport.close()
        if self._store is not None:
            await self._store.close()
        self._compute.stop()

    # --- input -------------------------------------------------------------------------------------------------

    def _random_sum(self) -> StagePartial:
        """A sum of quantised microbatches such as gradients give: most are far from the bound."""
        layout, items = self._layout, self._items[self._rank]
        exponents = FixedScales(layout).exponents(0)
        total = PartialSum(self._section, exponents)
        rng, values, bound = np.random.default_rng(self._rank), total.values.numpy(), items * self._section.item_bound
        spread = float(self._section.item_bound) / 4 * items**0.5
        step = 1 << 20
        for at in range(0, len(values), step):
            drawn = rng.standard_normal(len(values[at : at + step]), dtype=np.float32)
            np.clip(np.rint(drawn * np.float32(spread)), -bound, bound, out=values[at : at + step])
        total.maxima.fill_(1.0)
        total.num_items = items
        first = sum(self._items[: self._rank])
        return StagePartial(PartialKey(0, 1, self._rank, 0), {0: total}, set(range(first, first + items)))

    def _vary(self, number: int) -> None:
        """Other bytes in every partition each round: a store keeps equal blobs once."""
        values = self._partial.sums[0].values
        for partition in self._layout.groups[0].partitions:
            values[partition.element_start] = float(number % 100 - 50)

    # --- a round -----------------------------------------------------------------------------------------------

    def prepare(self, number: int) -> None:
        self._vary(number)
        self._merge = StageMerge(WithLayout(self._layout), 0, FixedScales(self._layout))
        members = {0: self._members}
        shape = GroupShape((0,), ((0,),) * len(self._merge.partitions))
        owners = choose_owners(shape, members, step=number, group=0)
        if owners is None:
            raise RuntimeError("nobody owns anything")
        two = self._cell.kind == TWO_OWNERS
        seconds = choose_seconds(shape, members, owners, step=number, group=0) if two else ()
        self._owners = [pair(owners, seconds, p) for p in range(len(owners))]
        self._hashes: dict[Member, tuple[str, ...]] = {}
        self._slices: dict[int, dict[Member, tuple[str, memoryview]]] = {p: {} for p in self._merge.partitions}
        self._summing: set[int] = set()
        self._told: dict[int, MergedFrame] = {}
        self._merged: dict[int, memoryview] = {}
        self._seed = ""
        self._prints: dict[Member, tuple[tuple[int, ...], ...]] = {}
        self._up = self._down = 0
        self._split: defaultdict[str, float] = defaultdict(float)
        self._jobs: set[asyncio.Task[None]] = set()
        self._cpu_s = time.process_time()
        self._began = False

    async def work(self) -> Measured:
        """From a sum to the checked gradient; the memory of what was found is given back before it returns."""
        self._began = True
        for header, body in self._early:
            await self._take(header, body)
        self._early.clear()
        async with asyncio.timeout(ROUND_S):
            await self._give_slices()
            await self._until(lambda: len(self._told) == len(self._owners))
            if self._rank == 0:
                self._seed = secrets.token_hex(32)
                self._tell(SeedFrame(self._seed, self._me))
            await self._until(lambda: bool(self._seed))
            await self._check()
            for job in list(self._jobs):
                await job
        cpu_s = time.process_time() - self._cpu_s
        split = {kind: round(seconds, 4) for kind, seconds in sorted(self._split.items())}
        split["loop and sockets"] = round(cpu_s - sum(self._split.values()), 4)
        measured = Measured(time.perf_counter(), self._up, self._down, split)
        self._slices, self._merged, self._told = {}, {}, {}
        del self._merge
        return measured

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            self._raise_failed()
            await self._changed.wait()

    def _raise_failed(self) -> None:
        for job in [job for job in self._jobs if job.done()]:
            self._jobs.discard(job)
            job.result()

    async def _give_slices(self) -> None:
        made: dict[int, str] = {}
        items = self._items[self._rank]
        encoder = SliceEncoder(self._merge, self._partial)
        for index in sorted(self._merge.partitions, key=lambda p: (self._me in self._owners[p], p)):
            found = await self._on_compute("encode and hash", partial(encoder.make, index))
            made[index] = found.hash
            if self._me in self._owners[index]:
                self._have(index, self._me, found.hash, found.data)
            if self._owners[index] != (self._me,):
                self._spawn(self._send_slice(index, found, items))
        hashes = tuple(made[index] for index in sorted(made))
        self._hashes[self._me] = hashes
        self._tell(HashesFrame(hashes, items, self._me))
        self._sum_ready()

    async def _send_slice(self, index: int, found: HashedSlice, items: int) -> None:
        body = await self._beside("pack", lambda: self._merge.pack(index, found.data, items))
        frame = SliceFrame("", 0, 0, index, 0, self._me, found.hash, items, "bits")
        await asyncio.gather(*[self._send(owner, frame, body) for owner in self._owners[index] if owner != self._me])

    def _have(self, index: int, sender: Member, hash_: str, data: memoryview) -> None:
        self._slices[index][sender] = (hash_, data)
        self._sum_ready()

    def _sum_ready(self) -> None:
        """Every partition of mine whose slices are all there and are those that were committed."""
        if len(self._hashes) < len(self._members):
            return
        for index, slices in self._slices.items():
            if self._me not in self._owners[index] or index in self._summing or len(slices) < len(self._members):
                continue
            if any(self._hashes[member][index] != hash_ for member, (hash_, _) in slices.items()):
                raise RuntimeError("a slice isn't the one that was committed")
            self._summing.add(index)
            self._spawn(self._sum(index))

    async def _sum(self, index: int) -> None:
        total = self._cell.microbatches
        given: list[tuple[Buffer, int]] = [
            (data, self._items[self._members.index(member)]) for member, (_, data) in self._slices[index].items()
        ]
        result: MergedPartition = await self._on_compute(
            "add", lambda: self._merge.merge_partition(index, given, total_items=total)
        )
        self._slices[index] = {}
        if index in self._told:  # its other owner was faster
            self._agrees(index, result.hash)
            return
        body = await self._beside("pack", lambda: self._merge.pack(index, result.data, total))
        blob = ""
        if self._store is not None:
            blob = await self._beside("pack", lambda: blob_hash(body))
            grant = self._store.presign_put(BlobHash(blob), body.nbytes, HOLD)
            await self._store.blobs.put(grant, body, deadline=Deadline.after(ROUND_S))
            self._up += body.nbytes
        frame = MergedFrame(index, result.hash, blob, body.nbytes, result.squares_hex, self._me)
        self._merged[index] = result.data
        self._told.setdefault(index, frame)
        self._changed.set()
        self._tell(frame, b"" if blob else body)

    def _agrees(self, index: int, hash_: str) -> None:
        if self._told[index].hash != hash_:
            raise RuntimeError("two owners of a partition differ")

    async def _open(self, frame: MergedFrame, body: Buffer) -> None:
        """Somebody else's merged partition, checked against its hash."""
        if frame.blob and self._store is not None:
            grant = self._store.presign_get(BlobHash(frame.blob), frame.size_bytes)
            body = await self._store.blobs.get(grant, deadline=Deadline.after(ROUND_S))
            self._down += len(body)

        def opened() -> memoryview:
            data = self._merge.unpack(frame.partition, body, self._cell.microbatches)
            if blob_hash(data) != frame.hash:
                raise RuntimeError("merged bytes are not those of their hash")
            return data

        self._merged[frame.partition] = await self._beside("unpack", opened)
        self._changed.set()

    async def _check(self) -> None:
        seed, total = bytes.fromhex(self._seed), self._cell.microbatches
        mine = await self._on_compute(
            "check", lambda: self._merge.partial_fingerprints(self._partial, seed, total_items=total)
        )
        values = tuple(mine[index] for index in sorted(mine))
        self._prints[self._me] = values
        self._tell(PrintsFrame(values, self._me))
        left = set(self._merge.partitions)
        while left:
            await self._until(lambda: any(index in self._merged for index in left))
            for index in sorted(left & self._merged.keys()):
                left.discard(index)
                look = partial(
                    self._merge.examine,
                    index,
                    self._merged[index],
                    hash=self._told[index].hash,
                    seed=seed,
                    total_items=total,
                )
                await self._on_compute("check", look)
        await self._until(lambda: len(self._prints) == len(self._members))

        def verify() -> None:
            for index in self._merge.partitions:
                told = self._told[index]
                wrong = self._merge.check_merged(
                    index,
                    self._merged[index],
                    hash=told.hash,
                    squares=int(told.squares, 16),
                    total_items=total,
                    seed=seed,
                    contributions=[values[index] for values in self._prints.values()],
                    partial=self._partial,
                    hash_known=True,
                )
                if wrong is not None:
                    raise RuntimeError(wrong)
            hashes = {index: told.hash for index, told in self._told.items()}
            self._merge.merged_sections(self._merged, total_items=total, hashes=hashes)

        await self._on_compute("check", verify)

    # --- moving ------------------------------------------------------------------------------------------------

    async def _on_frame(self, hotkey: str, header: Header, body: Buffer) -> None:
        self._down += len(body)
        if not self._began:
            self._early.append((header, body))
            return
        await self._take(header, body)

    async def _take(self, header: Header, body: Buffer) -> None:
        match header:
            case SliceFrame():
                data = await self._beside(
                    "unpack",
                    lambda: self._merge.accept_slice(
                        header.partition, body, header.num_items, header.hash, packed=header.packing == "bits"
                    ),
                )
                self._have(header.partition, header.sender, header.hash, data)
            case HashesFrame():
                self._hashes[header.sender] = header.hashes
                self._sum_ready()
            case MergedFrame():
                if header.partition in self._told:
                    self._agrees(header.partition, header.hash)
                else:
                    self._told[header.partition] = header
                    self._spawn(self._open(header, body))
            case SeedFrame():
                self._seed = header.seed
            case PrintsFrame():
                self._prints[header.sender] = header.values
        self._changed.set()

    def _tell(self, header: Header, body: Buffer = b"") -> None:
        for member in self._addresses:
            self._spawn(self._send(member, header, body))

    async def _send(self, to: Member, header: Header, body: Buffer) -> None:
        await self._transport.send(self._addresses[to], header, body, deadline=Deadline.after(ROUND_S))
        self._up += memoryview(body).nbytes

    def _spawn(self, work: Any) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(lambda _: self._changed.set())

    async def _on_compute(self, kind: str, work: Callable[[], T]) -> T:
        return await self._compute.submit(kind, (0,), partial(self._timed, kind, work))

    async def _beside(self, kind: str, work: Callable[[], T]) -> T:
        async with self._slots:
            return await asyncio.to_thread(self._timed, kind, work)

    def _timed(self, kind: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return work()
        finally:
            self._split[kind] += time.thread_time() - began
