"""The state of the stage that a member holds: restored from disk or snapshot and log, updated by seals, stored as snapshots.

A joiner, a restarted miner and one that fell behind take the same way: restore the newest state that can be had (this
machine's own last one, where the log goes on from it; else a snapshot), then apply the log of merged gradients. What a
state is worth is decided by its root, which the fold compares with others'.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from blake3 import blake3
from loguru import logger

from miner.compute import URGENT
from miner.context import RunContext, StageWork
from miner.local_view import StoredLocally
from miner.member_merge import Buffer, MergeWork
from miner.owes import ApplySeal, MakeSnapshot, Restore
from miner.saved_state import Saved, SavedState
from subnet.allocator import give_back
from subnet.errors import InputError, IotaError, NotFound
from subnet.logs import ReasonLog
from subnet.model.snapshots import array_bytes, decode_manifest, select_entries
from subnet.run.audits import branch, evidence_from
from subnet.run.state import agreed_root, group_of, oldest_needed, partitions_of
from subnet.timing import Deadline
from subnet.words import CALIBRATION_STEP, BlobHash

RESTORE_S = 600.0
APPLY_S = 120.0
SNAPSHOT_S = 300.0
SAVE_EVERY_S = 60.0
"""A state isn't written to disk oftener: with many miners on a disk it would slow down what has to be synced."""


@dataclass
class _Saving:
    """A state being written: ``stop`` asks it to let go, ``read`` is set once the state may change."""

    stop: threading.Event = field(default_factory=threading.Event)
    read: asyncio.Event = field(default_factory=asyncio.Event)


class StateWork:
    def __init__(self, context: RunContext, merges: MergeWork) -> None:
        self._context, self._merges = context, merges
        settings = context.settings
        self._saved = SavedState(
            settings.directory.expanduser() / "state",
            context.run_id,
            budget_bytes=settings.state_disk_bytes,
            reserve_bytes=settings.disk_reserve_bytes,
        )
        self._saving: _Saving | None = None
        self._save_task: asyncio.Task[None] | None = None
        self._saved_step, self._not_before_s = CALIBRATION_STEP, 0.0
        self._reasons = ReasonLog()

    # --- restoring ---------------------------------------------------------------------------------------------

    async def restore(self, owe: Restore) -> None:
        """Load the stage's newest state: this machine's own, or a snapshot's part for the stage."""
        context = self._context
        await self._let_go()
        context.local.version = None
        stage = context.stage
        if stage is None or stage.stage != owe.stage:
            context.stage = None
            stage = await context.compute.submit(owe, (URGENT, 0), lambda: self._new_stage(owe.stage))
            context.stage = stage
            context.local.lane_slots = 1  # until it is known what one holds
        root = await self._from_disk(owe, stage) or await self._from_snapshot(owe, stage)
        stage.forget_merge()
        context.local.restored_stage, context.local.root = owe.stage, root
        context.local.version, context.local.version_before = stage.state.next_step, None

    async def _from_disk(self, owe: Restore, stage: StageWork) -> str | None:
        """The root of this machine's own last state, now loaded; None where it is no use."""
        saved = await asyncio.to_thread(self._saved.find, owe.stage)
        if saved is None or not self._goes_on(saved, owe):
            return None

        def load() -> str:
            _drop_sums(stage, None)
            stage.state.load(saved.manifest, saved.chunk)
            root = stage.state.stage_root()
            if root != saved.root:
                raise InputError(f"the saved state of step {saved.step} has another root than was written down")
            return root

        try:
            root = await self._context.compute.submit(owe, (URGENT, 0), load)
        except (IotaError, OSError) as error:
            logger.warning("the saved state is no use: {}", error)
            await asyncio.to_thread(self._saved.discard)
            return None
        self._saved_step = saved.step
        logger.info("stage {} restored at step {} from this machine's disk", owe.stage, saved.step)
        return root

    def _goes_on(self, saved: Saved, owe: Restore) -> bool:
        """Whether it is newer than the snapshot, the log goes on from it, and the fold doesn't know better."""
        state = self._context.run_state
        if saved.branch != branch(state):
            return False  # its steps may have been done again
        if saved.step <= max(owe.version, CALIBRATION_STEP + 1):
            return False
        if saved.step > oldest_needed(state):
            return False
        if saved.step == state.next_step:
            return agreed_root(state, owe.stage) in (None, saved.root)
        return saved.step in state.sealed

    async def _from_snapshot(self, owe: Restore, stage: StageWork) -> str:
        context, deadline = self._context, Deadline.after(RESTORE_S)
        data = await context.sources.fetch((owe.manifest, 0), deadline)
        manifest = decode_manifest(memoryview(data))
        context.sources.holdings.learn(owe.manifest, manifest)
        part = select_entries(manifest, stage.state.specs)
        refs = [(ref.hash, ref.size_bytes) for ref in part.chunks]
        found = await context.sources.fetch_many(refs, deadline)
        chunks: dict[BlobHash, Buffer] = {ref.hash: data for ref, data in zip(part.chunks, found, strict=True)}

        def load() -> str:
            _drop_sums(stage, None)
            stage.state.load(part, lambda ref: chunks[ref.hash])
            return stage.state.stage_root()

        root = await context.compute.submit(owe, (URGENT, 0), load)
        came = ", ".join(f"{count} bytes from {name}" for name, count in sorted(context.sources.bytes_from.items()))
        logger.info("stage {} restored at step {} ({} so far)", owe.stage, stage.state.next_step, came or "nothing")
        return root

    def _new_stage(self, stage: int) -> StageWork:
        context = self._context
        return StageWork(context.plan, stage, context.device, context.settings.graph_budget_bytes)

    def distrust(self) -> None:
        """The fold says that this state is wrong: neither it nor what is on disk of it is worked with again."""
        self._context.local.version = None
        self._saved.discard()
        self._saved_step = CALIBRATION_STEP

    def rewind(self) -> None:
        """The run has left the branch that this state is of; one that is being written is of no use either."""
        if self._saving is not None:
            self._saving.stop.set()
        self.distrust()

    # --- updating ----------------------------------------------------------------------------------------------

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
        hashes = {p: seal.hashes[p] for p in indices}
        merged = {p: context.merged[hash_] for p, hash_ in hashes.items()}
        merge = stage.merge()
        await self._let_go()

        def update() -> str:
            if stage.state.intact and stage.state.next_step == step + 1:
                return stage.state.stage_root()  # an attempt that was cancelled has come to its end meanwhile
            sections = merge.merged_sections(merged, total_items=log.num_counted, hashes=hashes)
            _drop_sums(stage, step)
            stage.state.apply_step(step, sections, coefficient_bits=log.coefficient_bits, scalars=log.scalars)
            del sections
            give_back()
            return stage.state.stage_root()

        try:
            root = await context.compute.submit(owe, (URGENT, 0), update)
        except Exception:
            if not stage.state.intact:
                context.local.version = None  # it failed half-way: restore
                if stage.executor.partials:
                    context.new_incarnation()  # the sums of the step ahead can't be kept over that
            raise
        context.local.root, context.local.version = root, stage.state.next_step
        context.local.version_before = stage.state.version_before
        if step == CALIBRATION_STEP:
            context.compute.restart_clock()
        self.end_step(step)

    def end_step(self, step: int) -> None:
        """What of ``step`` is needed no more goes; what I made stays for as long as an audit may want it."""
        context = self._context
        first = evidence_from(context.run_state)
        context.local.end_step(step, first)
        context.slices.clear()
        context.merged.clear()
        context.cache.drop_received(step, context.plan.config.num_items)
        context.cache.drop_before(min(first, step + 1))
        context.background(context.sources.holdings.tidy())

    # --- storing -----------------------------------------------------------------------------------------------

    async def snapshot(self, owe: MakeSnapshot) -> None:
        """Store the state; it doesn't change meanwhile, since the next seal waits for this."""
        context, stage = self._context, self._context.held_stage()
        deadline = Deadline.after(SNAPSHOT_S)
        blobs: dict[str, Buffer] = {}

        def collect() -> tuple[bytes, str]:
            manifest = stage.state.snapshot(lambda blob, data: blobs.__setitem__(blob, data), frozen=False)
            return manifest.encode(), stage.state.stage_root()

        encoded, root = await context.compute.submit(owe, (URGENT, 3), collect)
        await context.blobs.put_many(list(blobs.items()), "snapshot", deadline)
        manifest_hash = blake3(encoded).hexdigest()
        await context.blobs.put_many([(manifest_hash, encoded)], "snapshot", deadline)
        await self._keep([*blobs.items(), (manifest_hash, encoded)])
        context.local.snapshots[owe.step] = StoredLocally(manifest_hash, root)
        logger.info("snapshot of stage {} after {} updates stored", owe.stage, owe.step)

    async def _keep(self, blobs: Sequence[tuple[str, Buffer]]) -> None:
        """Joiners may have it from here too; the manifest is the last of the blobs."""
        holdings = self._context.sources.holdings
        await holdings.keep_many(blobs)
        holdings.learn(blobs[-1][0], decode_manifest(memoryview(blobs[-1][1])))

    def save_when_due(self) -> None:
        """Every so many steps, beside the work and once the root is agreed, the state goes to this machine's disk."""
        context, stage = self._context, self._context.stage
        step, state = context.local.version, context.run_state
        if self._saving is not None or stage is None or step is None or step != state.next_step:
            return
        now_s = asyncio.get_running_loop().time()
        if step < self._saved_step + context.settings.state_every_steps or step <= 0 or now_s < self._not_before_s:
            return
        if agreed_root(state, stage.stage) != context.local.root:
            return
        self._saved_step, self._not_before_s = step, now_s + SAVE_EVERY_S
        saving = self._saving = _Saving()
        self._save_task = asyncio.create_task(self._save(stage, context.local.root, saving), name="save state")
        self._save_task.add_done_callback(lambda _: self._save_ended(saving))

    async def _save(self, stage: StageWork, root: str, saving: _Saving) -> None:
        held = stage.state
        size_bytes = sum(array_bytes(spec, kind) for spec in held.specs for kind in held.kinds_of(spec.name))
        write = partial(
            self._saved.write,
            *(stage.stage, root, size_bytes, stage.state.snapshot, saving.stop.is_set),
            branch=branch(self._context.run_state),
        )
        try:
            written = await _finish_in_thread(write, saving.stop)
            saving.read.set()
            if written:
                await asyncio.to_thread(self._saved.commit)
        except IotaError as error:
            self._reasons.note("saved state", error.code, str(error))
        except OSError as error:
            self._reasons.note("saved state", f"os_error_{error.errno}", str(error))

    def _save_ended(self, saving: _Saving) -> None:
        saving.read.set()
        self._saving = None

    async def close(self) -> None:
        """Let a state that is being written go."""
        await self._let_go()
        if self._save_task is not None:
            await asyncio.wait({self._save_task})

    async def _let_go(self) -> None:
        """Before the state changes: nobody reads it any more."""
        saving = self._saving
        if saving is not None:
            saving.stop.set()
            await saving.read.wait()


async def _finish_in_thread(write: Callable[[], bool], stop: threading.Event) -> bool:
    """Like ``to_thread``, but a cancelled caller still waits for the thread: it reads what is about to change."""
    work = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({work})
        raise


def _drop_sums(stage: StageWork, step: int | None) -> None:
    """Sums and graphs up to this step; all of them where the state is loaded anew."""
    stage.drop_work(step)
