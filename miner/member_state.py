"""The state of the stage that a member holds: restored from snapshot and log, updated by seals, stored as snapshots.

A joiner, a restarted miner and one that fell behind take the same way: restore, then apply the log of merged gradients.
"""

from __future__ import annotations

import asyncio

from blake3 import blake3
from loguru import logger

from miner.allocator import give_back
from miner.compute import URGENT
from miner.context import RunContext, StageWork
from miner.local_view import StoredLocally
from miner.member_merge import Buffer, MergeWork
from miner.owes import ApplySeal, MakeSnapshot, Restore
from subnet.errors import IotaError, NotFound
from subnet.model.snapshots import ChunkRef, decode_manifest, select_entries
from subnet.run.state import group_of, partitions_of
from subnet.timing import Deadline
from subnet.words import CALIBRATION_STEP, BlobHash

RESTORE_S = 600.0
APPLY_S = 120.0
SNAPSHOT_S = 300.0
RETENTION_STEPS = 8


class StateWork:
    def __init__(self, context: RunContext, merges: MergeWork) -> None:
        self._context, self._merges = context, merges

    async def restore(self, owe: Restore) -> None:
        """Load a snapshot's part for the stage; chunks come from the local cache where they are there already."""
        context = self._context
        deadline = Deadline.after(RESTORE_S)
        context.local.version = None
        stage = context.stage
        if stage is None or stage.stage != owe.stage:
            context.stage = None
            stage = await context.compute.submit(owe, (URGENT, 0), lambda: self._new_stage(owe.stage))
            context.stage = stage
        manifest = decode_manifest(bytes((await context.blobs.get_many([(owe.manifest, 0)], deadline))[0]))
        part = select_entries(manifest, stage.state.specs)
        chunks = await self._chunks(part.chunks, deadline)

        def load() -> str:
            stage.drop_partials()
            stage.executor.drop_graphs()
            stage.state.load(part, lambda ref: chunks[ref.hash])
            return stage.state.stage_root()

        root = await context.compute.submit(owe, (URGENT, 0), load)
        context.local.restored_stage, context.local.root = owe.stage, root
        context.local.version = stage.state.next_step
        logger.info("stage {} restored at step {}", owe.stage, stage.state.next_step)

    def _new_stage(self, stage: int) -> StageWork:
        context = self._context
        return StageWork(context.plan, stage, context.device, context.settings.graph_memory_bytes)

    async def _chunks(self, refs: tuple[ChunkRef, ...], deadline: Deadline) -> dict[BlobHash, Buffer]:
        found: dict[BlobHash, Buffer] = {}
        lacking: list[ChunkRef] = []
        for ref in refs:
            cached = await asyncio.to_thread(self._context.chunk_cache.get, ref.hash)
            if cached is None:
                lacking.append(ref)
            else:
                found[ref.hash] = cached
        for data, ref in zip(
            await self._context.blobs.get_many([(ref.hash, ref.size_bytes) for ref in lacking], deadline),
            lacking,
            strict=True,
        ):
            found[ref.hash] = data
            try:
                await asyncio.to_thread(self._context.chunk_cache.put, ref.hash, data)
            except IotaError as error:
                logger.debug("chunk not cached: {}", error)
        return found

    async def apply_seal(self, owe: ApplySeal) -> None:
        """The update of one sealed step, from the merged partitions' bytes."""
        context, stage, step = self._context, self._context.held_stage(), owe.step
        state = context.run_state
        log = state.sealed.get(step)
        if log is None:
            raise NotFound(f"the seal of step {step} isn't kept any more")
        group = group_of(state, stage.stage)
        seal = log.groups[group]
        indices = partitions_of(state, group, stage.stage)
        await self._merges.gather([(p, seal.hashes[p], *seal.blobs[p]) for p in indices], log.num_counted)
        merged = {p: context.merged[seal.hashes[p]] for p in indices}
        merge = stage.merge()

        def update() -> str:
            sections = merge.merged_sections(merged, total_items=log.num_counted)
            stage.drop_partials()
            stage.executor.drop_graphs()
            stage.state.apply_step(step, sections, coefficient_bits=log.coefficient_bits, scalars=log.scalars)
            del sections
            give_back()
            return stage.state.stage_root()

        root = await context.compute.submit(owe, (URGENT, 0), update)
        context.local.root, context.local.version = root, stage.state.next_step
        if step == CALIBRATION_STEP:
            context.compute.restart_clock()
        self.end_step(step)

    def end_step(self, step: int) -> None:
        context = self._context
        context.local.end_step(step)
        context.slices.clear()
        context.merged.clear()
        context.cache.drop_received(context.held_stage().stage, step)
        context.cache.drop_before(step - RETENTION_STEPS)

    async def snapshot(self, owe: MakeSnapshot) -> None:
        """Store the state; it doesn't change meanwhile, since the next seal waits for this."""
        context, stage = self._context, self._context.held_stage()
        deadline = Deadline.after(SNAPSHOT_S)
        blobs: dict[str, Buffer] = {}

        def collect() -> tuple[bytes, str]:
            manifest = stage.state.snapshot(lambda blob, data: blobs.__setitem__(blob, data))
            return manifest.encode(), stage.state.stage_root()

        encoded, root = await context.compute.submit(owe, (URGENT, 3), collect)
        await context.blobs.put_many(list(blobs.items()), "snapshot", deadline)
        manifest_hash = blake3(encoded).hexdigest()
        await context.blobs.put_many([(manifest_hash, encoded)], "snapshot", deadline)
        context.local.snapshots[owe.step] = StoredLocally(manifest_hash, root)
        logger.info("snapshot of stage {} after {} updates stored", owe.stage, owe.step)
