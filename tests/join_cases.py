"""A run of one stage with its snapshot and its log, and miners' contexts over it without a validator."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from model_cases import tiny_plan, tokens_of
from test_stage_executor import executors, run_item
from test_stage_merge import merge_all

from miner.blobs import BlobRef, Buffer
from miner.boundaries import BoundaryCache
from miner.compute import ComputeThread
from miner.context import RunContext
from miner.member_merge import MergeWork
from miner.member_state import StateWork
from miner.owes import ApplySeal, Restore
from miner.settings import MinerSettings
from subnet.engine.stage_executor import PartialKey
from subnet.engine.stage_merge import StageMerge
from subnet.errors import NotFound, Unreachable
from subnet.protocol.wire import blob_hash
from subnet.run import state as st
from subnet.run.events import RunPlanned
from subnet.run.schedule import norm_and_coefficient, step_scalars
from subnet.store.disk import BlobCache
from subnet.timing import Deadline
from subnet.words import CALIBRATION_STEP, GroupShape, Member

NUM_STEPS = 4


@dataclass
class StoredBlobs:
    """The store as :class:`miner.blobs.Blobs` shows it; counts, and can be down."""

    there: dict[str, bytes] = field(default_factory=dict)
    gets: Counter[str] = field(default_factory=Counter)
    down: bool = False
    slow: asyncio.Event | None = None

    async def get(self, ref: BlobRef, deadline: Deadline) -> bytearray:
        if self.slow is not None:
            await self.slow.wait()
        if self.down:
            raise Unreachable("the store is away")
        if ref[0] not in self.there:
            raise NotFound(f"no blob {ref[0][:10]}")
        self.gets[ref[0]] += 1
        return bytearray(self.there[ref[0]])

    async def get_many(self, refs: Sequence[BlobRef], deadline: Deadline) -> list[bytearray]:
        return [await self.get(ref, deadline) for ref in refs]

    async def put_many(self, blobs: Sequence[tuple[str, Buffer]], retention: str, deadline: Deadline) -> None:
        if self.down:
            raise Unreachable("the store is away")
        self.there.update((name, bytes(data)) for name, data in blobs)

    def put(self, data: bytes) -> str:
        name = str(blob_hash(data))
        self.there[name] = bytes(data)
        return name


@dataclass
class TrainedRun:
    """The stage after each step, with everything a joiner needs of it."""

    state: st.RunState
    store: StoredBlobs
    plan: Any
    roots: dict[int, str]
    """By the step whose state it is."""
    log_blobs: set[str]


def trained_run(**changes: Any) -> TrainedRun:
    """``changes``: of the model's config."""
    plan = tiny_plan((0,), **changes)
    store, state = StoredBlobs(), st.new_state()
    (executor,) = swarm_member = executors(plan)
    manifest = store.put(executor.state.snapshot(lambda blob, data: store.there.update({blob: bytes(data)})).encode())
    groups = tuple(
        GroupShape(group.stages, tuple(plan.layout.sections[p.section].stages for p in group.partitions))
        for group in plan.layout.groups
    )
    state.run = RunPlanned(
        run_id="joining",
        config=plan.config,
        model_config=plan.model_config,
        unit_tensors=plan.units.units,
        unit_flops_per_token=plan.units.unit_flops_per_token,
        tied=plan.units.tied,
        cuts=plan.cuts,
        groups=groups,
        data="data",
        snapshot=manifest,
        tokenizer="tokenizer",
        submitter="submitter",
    )
    run = TrainedRun(state, store, plan, {CALIBRATION_STEP: executor.state.stage_root()}, set())
    counted = plan.config.pipeline.microbatches
    for step in range(CALIBRATION_STEP, NUM_STEPS):
        for microbatch in range(counted):
            run_item(plan, swarm_member, microbatch, tokens_of(100 * max(step, 0) + microbatch), step=step)
        merged, squares = merge_all(plan, [swarm_member], step)
        _, coefficient = norm_and_coefficient(squares, counted, plan.config.optimizer.clip_norm)
        coefficient = 0 if step == CALIBRATION_STEP else coefficient
        merge = StageMerge(plan, 0, executor.state)
        sections = merge.merged_sections({p: merged[0, p] for p in merge.partitions}, total_items=counted)
        scalars = None if step == CALIBRATION_STEP else step_scalars(plan.config, step)
        executor.state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)
        executor.drop_partial(PartialKey(step, 1, 0, 0))
        hashes = tuple(store.put(merged[0, p]) for p in sorted(merge.partitions))
        run.log_blobs.update(hashes)
        blobs = tuple((name, len(store.there[name])) for name in hashes)
        seal = st.GroupSeal(hashes, blobs, f"{squares:x}")
        state.sealed[step] = st.StepLog(scalars, counted, coefficient, (seal,))
        run.roots[step + 1] = executor.state.stage_root()
    state.next_step = NUM_STEPS
    return run


def joined(state: st.RunState, hotkey: str, number: int, *, port: int = 1, version: int | None = None) -> Member:
    member = Member(hotkey, 1, number)
    info = st.MemberInfo(f"cold-{hotkey}", 0, f"boot-{number}", "127.0.0.1", port, version)
    state.members[member] = info
    return member


class Miner:
    """Everything of a miner that restores and updates a state; its directory outlives it."""

    def __init__(self, run: TrainedRun, directory: Path, member: Member, **settings: Any) -> None:
        assert run.state.run is not None
        chosen = MinerSettings(directory=directory, disk_reserve_bytes=0, **settings)
        self.run, self.compute = run, ComputeThread()
        self.tasks: set[asyncio.Task[None]] = set()
        self.context = RunContext(
            settings=chosen,
            signer=SimpleNamespace(hotkey=member.hotkey),  # type: ignore[arg-type]
            planned=run.state.run,
            plan=run.plan,
            directives=SimpleNamespace(state=run.state),  # type: ignore[arg-type]
            blobs=run.store,  # type: ignore[arg-type]
            tokens=SimpleNamespace(),  # type: ignore[arg-type]
            cache=BoundaryCache(directory / "boundaries", memory_bytes=1 << 20, disk_bytes=1 << 20),
            compute=self.compute,
            device="cpu",
            chunk_cache=BlobCache(directory / "cache", chosen.cache_disk_bytes),
            member=member,
        )
        self.context.background = self._background
        self.states = StateWork(self.context, MergeWork(self.context))

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def catch_up(self) -> None:
        """As the pump would: the restore that is owed, then one seal after the other."""
        point = st.restore_point(self.run.state, 0)
        await self.states.restore(Restore(0, point.version, point.manifest, point.whole))
        while (step := self.context.local.version) in self.run.state.sealed:
            assert step is not None
            await self.states.apply_seal(ApplySeal(step))

    @property
    def root(self) -> str:
        return self.context.local.root

    async def close(self) -> None:
        await self.states.close()
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await asyncio.to_thread(self.compute.stop)
