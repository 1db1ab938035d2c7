"""A member's part in the merge of its group, from commitment to check; tensor work on the compute thread, first in line."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from loguru import logger

from miner.compute import URGENT
from miner.context import RunContext
from miner.local_view import MergedLocally
from miner.owes import Check, Commit, Fingerprint, Reduce
from subnet.errors import InputError, NotFound
from subnet.numerics.packing import pack_slice, unpack_slice
from subnet.protocol import wire
from subnet.run.state import Merge, StepWork, merge_of, num_counted
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import Commitment

Buffer = bytes | bytearray | memoryview


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
        context = self._context
        stage, member = context.held_stage(), context.me()
        partial = context.partial(owe.step, owe.epoch)
        if partial is None or tuple(sorted(partial.microbatches)) != owe.microbatches:
            raise NotFound(f"the sum of {list(owe.microbatches)} isn't held")
        merge = stage.merge()
        slices = await context.compute.submit(owe, (URGENT, 1), lambda: merge.slices(partial))
        hashes = tuple((index, made.hash) for index, made in sorted(slices.items()))
        for made in slices.values():
            context.slices[made.hash] = made.data
        commitment = Commitment(member, stage.stage, owe.microbatches, hashes)
        context.local.commitments[owe.step, owe.epoch, owe.microbatches] = commitment

    async def reduce(self, owes: Sequence[Reduce]) -> None:
        """All partitions that can be merged now: sums on the compute thread, then one round of uploads."""
        context = self._context
        stage = context.held_stage()
        merge_work = stage.merge()
        first = owes[0]
        work, merge = self._open(first.step, first.group, first.version)
        total = num_counted(work)
        items = {value: len(entry.microbatches) for entry in merge.entries for _, value in entry.hashes}
        blobs: list[tuple[str, Buffer]] = []
        done: list[tuple[Reduce, MergedLocally]] = []
        for owe in owes:
            slices: list[tuple[Buffer, int]] = [(self._slice(value), items[value]) for value in owe.hashes]
            result = await context.compute.submit(
                owe,
                (URGENT, 2),
                lambda owe=owe, slices=slices: merge_work.merge_partition(owe.partition, slices, total_items=total),
            )
            stored = self._packed(owe.partition, result.data, total)
            blob = result.hash if stored is result.data else blake3(stored).hexdigest()
            context.merged[result.hash] = result.data
            blobs.append((blob, stored))
            done.append((owe, MergedLocally(result.hash, blob, memoryview(stored).nbytes, result.squares_hex)))
        await context.blobs.put_many(blobs, "log", Deadline.after(TIMEOUTS.store_request_s))
        context.background(context.sources.holdings.keep_many(blobs))
        for owe, merged in done:
            context.local.merged[(owe.step, owe.group, owe.version), owe.partition] = merged

    def _slice(self, hash_: str) -> memoryview:
        data = self._context.slices.get(hash_)
        if data is None:
            self._context.local.slices.discard(hash_)
            raise NotFound("a slice is no longer held")
        return data

    def _packed(self, partition: int, data: memoryview, total: int) -> Buffer:
        """How a merged partition is stored: as it is, or in exact widths on slow links."""
        context, merge = self._context, self._context.held_stage().merge()
        if context.plan.config.merge.packing == "bytes" or merge.calibration:
            return data
        found = merge.partitions[partition]
        return pack_slice(context.plan.layout.sections[found.section], found, data, total)

    def _unpacked(self, partition: int, data: memoryview, total: int) -> memoryview:
        context, merge = self._context, self._context.held_stage().merge()
        if context.plan.config.merge.packing == "bytes" or merge.calibration:
            return data
        found = merge.partitions[partition]
        return unpack_slice(context.plan.layout.sections[found.section], found, data, total)

    async def fingerprint(self, owe: Fingerprint) -> None:
        context = self._context
        work, merge = self._open(owe.step, owe.group, owe.version)
        entry = next(entry for entry in merge.entries if entry.member == context.me())
        key = next(key for key, value in context.local.commitments.items() if value == entry)
        partial = context.partial(owe.step, key[1])
        if partial is None:
            raise NotFound("the committed sum is gone")
        total, merge_work = num_counted(work), context.held_stage().merge()
        found = await context.compute.submit(
            owe,
            (URGENT, 0),
            lambda: merge_work.partial_fingerprints(partial, bytes.fromhex(owe.seed), total_items=total),
        )
        version = (owe.step, owe.group, owe.version)
        context.local.fingerprints[version, owe.seed] = tuple((index, found[index]) for index in owe.partitions)

    async def check(self, owe: Check) -> None:
        """Fetch what others merged, and compare all of it with what was reported."""
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
                told = merged[p]
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
        deadline = Deadline.after(TIMEOUTS.store_request_s)
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
        context = self._context
        lacking = [entry for entry in partitions if entry[1] not in context.merged]
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        refs = [(blob, size) for _, _, blob, size in lacking]
        found = await context.sources.fetch_many(refs, deadline, store_first=store_first)
        for (index, hash_, blob, _), data in zip(lacking, found, strict=True):
            view = memoryview(data)
            if blob != hash_:
                view = self._unpacked(index, view, total)
                if wire.blob_hash(view) != hash_:
                    raise InputError(f"merged partition {index} is not what its hash says")
            context.merged[hash_] = view
