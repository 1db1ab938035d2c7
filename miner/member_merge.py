"""A member's part in the merge of its group, from commitment to check; tensor work on the compute thread, first in line.

What :mod:`miner.owed_ahead` gives a head start is done here too, in pieces, so that nothing waits long behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial as partial_of

from blake3 import blake3
from loguru import logger

from miner.compute import BACKWARD, URGENT
from miner.context import RunContext
from miner.local_view import CommitKey, MergedLocally
from miner.owes import Check, Commit, Examine, FetchMerged, Fingerprint, Reduce
from subnet.engine.stage_merge import HashedSlice, MergedPartition, SliceEncoder, StageMerge
from subnet.errors import InputError, IotaError, NotFound
from subnet.protocol import wire
from subnet.run.state import FROZEN, Merge, StepWork, merge_of, num_counted
from subnet.timing import TIMEOUTS, Deadline, transfer_deadline
from subnet.words import Commitment

Buffer = bytes | bytearray | memoryview
STORED_TOGETHER_BYTES = 16 << 20
"""Sums wait for company on their way to the store until they are so many bytes, while others are on theirs."""
AHEAD = (BACKWARD, -1)
"""Nobody waits for it yet, and nothing is left to compute that it could keep waiting for long."""


@dataclass(frozen=True)
class _Summed:
    """A partition merged, and the bytes that go into the store."""

    owe: Reduce
    result: MergedPartition
    stored: memoryview
    blob: str


class MergeWork:
    def __init__(self, context: RunContext) -> None:
        self._context = context

    def _open(self, step: int, group: int, version: int | None) -> tuple[StepWork, Merge]:
        """The merge as the fold shows it; a later version makes the work pointless."""
        state = self._context.run_state
        merge = merge_of(state, step, group)
        if state.work is None or merge is None or (version is not None and merge.version != version):
            raise NotFound(f"version {version} of group {group} at step {step} is past")
        return state.work, merge

    async def commit(self, owe: Commit) -> None:
        """Slice by slice, so that each can be on its way while the next is hashed; refused once the sum has grown."""
        context = self._context
        stage, member = context.held_stage(), context.me()
        partial, held = context.partial(owe.step, owe.epoch), context.partial_key(owe.step, owe.epoch)
        if partial is None:
            raise NotFound(f"the sum of {list(owe.microbatches)} isn't held")
        key = (owe.step, owe.epoch, owe.microbatches)
        self._forget_others(key)
        merge, made = stage.merge(), context.local.made.setdefault(key, {})
        encoder = SliceEncoder(merge, partial)

        def hashed(index: int) -> HashedSlice | None:
            whole = stage.executor.partials.get(held) is partial and sorted(partial.microbatches) == [*owe.microbatches]
            return encoder.make(index) if whole else None

        state = context.run_state
        asked = state.work is not None and state.work.merges[owe.group].phase == FROZEN
        priority = (URGENT, 1) if asked else AHEAD
        for index in merge.partitions:
            if made.get(index) in context.slices:
                continue
            found = await context.compute.submit(owe, priority, partial_of(hashed, index))
            if found is None or context.member != member or context.local.made.get(key) is not made:
                raise NotFound(f"the sum is no longer that of {list(owe.microbatches)}")
            context.slices[found.hash] = found.data
            made[index] = found.hash
            context.wake()
        commitment = Commitment(member, stage.stage, owe.microbatches, tuple(sorted(made.items())))
        context.local.commitments[key] = commitment

    def _forget_others(self, key: CommitKey) -> None:
        """Slices of the step's sum as it was before: nobody will ask for them."""
        local = self._context.local
        for other in [other for other in local.made if other[0] == key[0] and other != key]:
            for hash_ in local.made.pop(other).values():
                self._context.slices.pop(hash_, None)
            local.commitments.pop(other, None)

    async def reduce(self, owes: Sequence[Reduce]) -> None:
        """All partitions that can be merged now, one by one; what is summed is stored meanwhile, and nothing waits its turn."""
        first = owes[0]
        work, merge = self._open(first.step, first.group, first.version)
        total = num_counted(work)
        items = {value: len(entry.microbatches) for entry in merge.entries for _, value in entry.hashes}
        summed: list[_Summed] = []
        storing: set[asyncio.Task[None]] = set()
        try:
            for number, owe in enumerate(owes, 1):
                slices: list[tuple[Buffer, int]] = [(self._slice(value), items[value]) for value in owe.hashes]
                summed.append(await self._sum(owe, slices, total))
                idle = all(task.done() for task in storing)
                if idle or number == len(owes) or sum(one.stored.nbytes for one in summed) >= STORED_TOGETHER_BYTES:
                    storing.add(asyncio.create_task(self._store(summed), name="store merged"))
                    summed = []
            await asyncio.gather(*storing)
        finally:
            for task in storing:
                task.cancel()
            if storing:
                await asyncio.wait(storing)

    async def _sum(self, owe: Reduce, slices: Sequence[tuple[Buffer, int]], total: int) -> _Summed:
        """On the compute thread: the sum, and the bytes to store: as it is, or in exact widths on slow links."""
        merge_work = self._context.held_stage().merge()
        packs = self._packs(merge_work)

        def work() -> _Summed:
            result = merge_work.merge_partition(owe.partition, slices, total_items=total)
            stored = merge_work.pack(owe.partition, result.data, total) if packs else result.data
            blob = blake3(stored).hexdigest() if packs else result.hash
            return _Summed(owe, result, stored, blob)

        return await self._context.compute.submit(owe, (URGENT, 2), work)

    async def _store(self, summed: Sequence[_Summed]) -> None:
        context = self._context
        blobs = [(one.blob, one.stored) for one in summed]
        size_bytes = sum(one.stored.nbytes for one in summed)
        await context.blobs.put_many(blobs, "log", transfer_deadline(TIMEOUTS.store_request_s, size_bytes))
        context.background(context.sources.holdings.keep_many(blobs))
        for one in summed:
            owe, result = one.owe, one.result
            context.merged[result.hash] = result.data
            context.local.fetched.add(result.hash)
            merged = MergedLocally(result.hash, one.blob, one.stored.nbytes, result.squares_hex)
            context.local.merged[(owe.step, owe.group, owe.version), owe.partition] = merged
        context.wake()

    def _packs(self, merge: StageMerge) -> bool:
        """Whether sums travel in exact widths."""
        return self._context.plan.config.merge.packing == "bits" and not merge.calibration

    def _slice(self, hash_: str) -> memoryview:
        data = self._context.slices.get(hash_)
        if data is None:
            self._context.local.slices.discard(hash_)
            raise NotFound("a slice is no longer held")
        return data

    async def fingerprint(self, owe: Fingerprint) -> None:
        context = self._context
        work, merge = self._open(owe.step, owe.group, owe.version)
        entry = next(entry for entry in merge.entries if entry.member == context.me())
        key = next(key for key, value in context.local.commitments.items() if value == entry)
        partial = context.partial(owe.step, key[1])
        if partial is None or sorted(partial.microbatches) != [*entry.microbatches]:
            raise NotFound("the committed sum is gone")
        total, merge_work = num_counted(work), context.held_stage().merge()
        found = await context.compute.submit(
            owe,
            (URGENT, 0),
            lambda: merge_work.partial_fingerprints(partial, bytes.fromhex(owe.seed), total_items=total),
        )
        version = (owe.step, owe.group, owe.version)
        context.local.fingerprints[version, owe.seed] = tuple((index, found[index]) for index in owe.partitions)

    async def fetch_merged(self, owes: Sequence[FetchMerged]) -> None:
        """Merged partitions as they come, before anybody asks about them."""
        work, _ = self._open(owes[0].step, owes[0].group, owes[0].version)
        named = [(owe.partition, owe.hash, owe.blob, owe.size_bytes) for owe in owes]
        await self.gather(named, num_counted(work), store_first=True)
        self._context.wake()

    async def examine(self, owe: Examine) -> None:
        """Fingerprints of what was merged, one by one; what can't be a sum at all is the check's to say."""
        context, merge_work = self._context, self._context.held_stage().merge()
        for p in owe.partitions:
            work, merge = self._open(owe.step, owe.group, owe.version)
            told, total = merge.merged[p], num_counted(work)
            data = context.merged.get(told.hash)
            if data is None or merge.seed != owe.seed:
                context.local.fetched.discard(told.hash)
                raise NotFound(f"merged partition {p} isn't held")
            look = partial_of(
                merge_work.examine, p, data, hash=told.hash, seed=bytes.fromhex(owe.seed), total_items=total
            )
            try:
                await context.compute.submit(owe, (URGENT, 1), look)
            except InputError as error:
                logger.warning("step {} group {} version {}: {}", owe.step, owe.group, owe.version, error)
        context.local.examined.add(((owe.step, owe.group, owe.version), owe.seed))

    async def check(self, owe: Check) -> None:
        """Have what others merged, and compare all of it with what was reported."""
        context = self._context
        work, merge = self._open(owe.step, owe.group, owe.version)
        total, merge_work, seed = num_counted(work), context.held_stage().merge(), bytes.fromhex(merge.seed)
        merged, entries, fingerprints = dict(merge.merged), merge.entries, dict(merge.fingerprints)
        named = [(p, merged[p].hash, merged[p].blob, merged[p].size_bytes) for p in owe.partitions]
        await self.gather(named, total, store_first=True)
        if merge_work.calibration:
            context.local.checks[owe.step, owe.group, owe.version] = await self._maxima_hold(owe, merge, total)
            return
        own = next((entry for entry in entries if entry.member == context.member), None)
        epoch = next((key[1] for key, value in context.local.commitments.items() if value == own), None)
        partial = context.partial(owe.step, epoch) if epoch is not None else None

        def verify() -> str | None:
            for p in owe.partitions:
                told, mine = merged[p], context.local.merged.get(((owe.step, owe.group, owe.version), p))
                if mine is not None and mine.hash != told.hash:
                    return f"partition {p}: its other owner's sum is another one"
                parts = [dict(fingerprints[e.member])[p] for e in entries if p in dict(e.hashes)]
                wrong = merge_work.check_merged(
                    p,
                    context.merged[told.hash],
                    hash=told.hash,
                    squares=int(told.squares, 16),
                    total_items=total,
                    seed=seed,
                    contributions=parts,
                    partial=partial,
                    hash_known=True,
                )
                if wrong is not None:
                    return wrong
            return None

        wrong = await context.compute.submit(owe, (URGENT, 0), verify)
        if wrong is not None:
            logger.warning("step {} group {} version {}: {}", owe.step, owe.group, owe.version, wrong)
        context.local.checks[owe.step, owe.group, owe.version] = wrong is None

    async def _maxima_hold(self, owe: Check, merge: Merge, total: int) -> bool:
        """Maxima have no linear fingerprint: merge the slices, which all contributors have stored, once more."""
        context, merge_work = self._context, self._context.held_stage().merge()
        told = {p: merge.merged[p] for p in owe.partitions}
        parts = {p: [(e, dict(e.hashes)[p]) for e in merge.entries if p in dict(e.hashes)] for p in owe.partitions}
        lacking = sorted({value for named in parts.values() for _, value in named} - set(context.slices))
        size_bytes = sum(merge_work.slice_bytes(p, total, packed=False) * len(named) for p, named in parts.items())
        deadline = transfer_deadline(TIMEOUTS.store_request_s, size_bytes)
        found = await context.blobs.get_many([(value, 0) for value in lacking], deadline)
        slices = {**context.slices, **{value: memoryview(d) for value, d in zip(lacking, found, strict=True)}}

        def verify() -> bool:
            for p, named in parts.items():
                given: list[tuple[Buffer, int]] = [(slices[value], len(e.microbatches)) for e, value in named]
                again = merge_work.merge_partition(p, given, total_items=total)
                if again.hash != told[p].hash or int(told[p].squares, 16) != 0:
                    logger.warning(
                        "step {} group {}: partition {} isn't the maxima of its slices", owe.step, owe.group, p
                    )
                    return False
            return True

        return await context.compute.submit(owe, (URGENT, 0), verify)

    async def gather(
        self, partitions: Sequence[tuple[int, str, str, int]], total: int, *, store_first: bool = False
    ) -> None:
        """Have the canonical bytes of these merged partitions: (index, hash, blob, size).

        ``store_first``: they have just been merged, so everybody wants them at once and the store has them.
        """
        lacking = [entry for entry in partitions if entry[1] not in self._context.merged]
        deadline = transfer_deadline(TIMEOUTS.store_request_s, sum(entry[3] for entry in lacking))
        works = [self._have(entry, total, deadline, store_first=store_first) for entry in lacking]
        results = await asyncio.gather(*works, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, IotaError)), failures[0])
        self._context.local.fetched.update(entry[1] for entry in partitions)

    async def _have(
        self, named: tuple[int, str, str, int], total: int, deadline: Deadline, *, store_first: bool
    ) -> None:
        """One merged partition, checked against its hash."""
        index, hash_, blob, size_bytes = named
        merge_work = self._context.held_stage().merge()
        found = memoryview(await self._context.sources.fetch((blob, size_bytes), deadline, store_first=store_first))

        def opened() -> memoryview:
            data = merge_work.unpack(index, found, total)
            if wire.blob_hash(data) != hash_:
                raise InputError(f"merged partition {index} is not what its hash says")
            return data

        data = found if blob == hash_ else await asyncio.to_thread(opened)
        self._context.merged[hash_] = data
        self._context.local.fetched.add(hash_)
