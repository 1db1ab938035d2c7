"""A run whose work is done live by executors, as miners do it, with the cases that a validator would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from model_cases import tiny_plan

from subnet.audit.case import (
    CASE_VERSION,
    Case,
    ItemCase,
    LogStep,
    MergeCase,
    MergedCase,
    PartialCase,
    StateRef,
)
from subnet.audit.shadow import ShadowPool
from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.engine.stage_merge import HashedSlice, StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import NotFound
from subnet.model.checkpoints import initial_weights
from subnet.model.data import DataManifest, SampleOrder, Shard, TokenStream, encode_manifest, row_group_hashes
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import join_manifests
from subnet.run.events import RunPlanned
from subnet.run.schedule import norm_and_coefficient, step_scalars
from subnet.words import CALIBRATION_STEP, BlobHash, Commitment, GroupShape, ItemKey, Member

SEED = "5b" * 32


@dataclass
class Done:
    """What one member said of one (step, stage)."""

    items: list[ItemCase] = field(default_factory=list)
    slices: dict[int, HashedSlice] = field(default_factory=dict)
    fingerprints: tuple[tuple[int, tuple[int, ...]], ...] = ()


class LiveRun:
    """Steps from calibration on; microbatch m is worked by member m mod ``num_members``, at every stage."""

    def __init__(
        self, plan: ModelPlan, *, num_members: int = 2, graph_bytes: int = 1 << 30, hotkeys: Sequence[str] = ()
    ) -> None:
        self.plan = plan
        self.blobs: dict[str, bytes] = {}
        names = hotkeys or [f"hotkey{i}" for i in range(num_members)]
        self.members = [Member(name, 1, number) for number, name in enumerate(names)]
        self.order, data = self._data()
        self.states = [StageState(plan, stage) for stage in range(plan.num_stages)]
        for state in self.states:
            state.load_weights(initial_weights(plan))
        first = join_manifests(plan, [state.snapshot(self._put_at) for state in self.states])
        self.planned = _planned(plan, data, self.put(first.encode()))
        self.executors = [
            [StageExecutor(plan, s, state, graph_budget_bytes=graph_bytes) for s, state in enumerate(self.states)]
            for _ in self.members
        ]
        self.next_step = CALIBRATION_STEP
        self.done: dict[tuple[int, int, Member], Done] = {}
        self.merged: dict[tuple[int, int], dict[int, MergedCase]] = {}
        self.log: dict[int, list[LogStep]] = {stage: [] for stage in range(plan.num_stages)}
        self.snapshots: dict[tuple[int, int], tuple[str, str]] = {}
        """By (stage, version): manifest and root."""

    def put(self, data: Any) -> str:
        hash_ = blake3(data).hexdigest()
        self.blobs[hash_] = bytes(data)
        return hash_

    def _put_at(self, blob: str, data: memoryview) -> None:
        self.blobs[blob] = bytes(data)

    def _data(self) -> tuple[SampleOrder, str]:
        """Enough tokens for several row groups."""
        tokens = np.random.default_rng(11).integers(0, self.plan.vocab_size, 80_000).astype("<u2").tobytes()
        shard = Shard(BlobHash(self.put(tokens)), len(tokens), row_group_hashes(tokens))
        manifest = DataManifest(
            tokenizer=BlobHash("0" * 64),
            vocab_size=self.plan.vocab_size,
            end_of_text=0,
            token_bytes=2,
            train=TokenStream(len(tokens) // 2, (shard,)),
            holdout=TokenStream(0),
        )
        return SampleOrder(self.plan.config, manifest), self.put(encode_manifest(manifest))

    # --- work --------------------------------------------------------------------------------------------------

    def run(self, end_step: int) -> LiveRun:
        """Up to the state after so many updates."""
        while self.next_step < end_step:
            self._work()
            self._seal()
            self.next_step += 1
        return self

    def _work(self) -> None:
        for m in range(self.plan.config.pipeline.microbatches):
            number = m % len(self.members)
            self._item(self.executors[number], self.members[number], m)

    def rows(self, item: ItemKey) -> np.ndarray:
        groups = {}
        for shard, index in self.order.ranges_for(item):
            start, end = shard.row_group_range(index)
            groups[shard.blob, index] = self.blobs[shard.blob][start:end]
        return self.order.assemble(item, groups)

    def _item(self, stages: list[StageExecutor], member: Member, m: int) -> None:
        step, count = self.next_step, len(stages)
        x: list[Any] = [None]
        for stage, executor in enumerate(stages[:-1]):
            item = ItemKey(step, m, stage)
            x.append(executor.forward(item, x[-1], self.rows(item), keep_graph=True).output)
        gradient: Any = None
        for stage in reversed(range(count)):
            item = ItemKey(step, m, stage)
            key = PartialKey(step, 1, member.number, 0)
            made = stages[stage].backward(item, gradient, x[stage], self.rows(item), partial=key)
            self.done.setdefault((step, stage, member), Done()).items.append(
                ItemCase(
                    microbatch=m,
                    x="" if x[stage] is None else self.put(x[stage]),
                    gradient="" if gradient is None else self.put(gradient),
                    forward="" if stage == count - 1 else self.put(x[stage + 1]),
                    backward="" if made.output is None else self.put(made.output),
                    loss_bits=made.loss_bits,
                )
            )
            gradient = made.output

    def _seal(self) -> None:
        plan, step = self.plan, self.next_step
        total, squares = plan.config.pipeline.microbatches, 0
        packs = plan.config.merge.packing == "bits" and step != CALIBRATION_STEP
        merges = [StageMerge(plan, stage, state) for stage, state in enumerate(self.states)]
        canonical: dict[tuple[int, int], bytes] = {}
        for group in plan.layout.groups:
            given: dict[int, list[tuple[memoryview, int]]] = {}
            for stage in group.stages:
                for number, member in enumerate(self.members):
                    partial = self.executors[number][stage].partials[PartialKey(step, 1, member.number, 0)]
                    done = self.done[step, stage, member]
                    done.slices = merges[stage].slices(partial)
                    prints = merges[stage].partial_fingerprints(partial, bytes.fromhex(SEED), total_items=total)
                    done.fingerprints = tuple(sorted(prints.items()))
                    for index, made in done.slices.items():
                        given.setdefault(index, []).append((made.data, made.num_items))
            found: dict[int, MergedCase] = {}
            for index, slices in sorted(given.items()):
                merge = next(merges[s] for s in group.stages if index in merges[s].partitions)
                one = merge.merge_partition(index, slices, total_items=total)
                stored = merge.pack(index, one.data, total) if packs else one.data
                owner = self.members[index % len(self.members)]
                found[index] = MergedCase(index, owner, one.hash, self.put(stored), stored.nbytes, one.squares_hex)
                canonical[group.index, index] = bytes(one.data)
                squares += one.squares
            self.merged[step, group.index] = found
        calibrating = step == CALIBRATION_STEP
        coefficient = 0 if calibrating else norm_and_coefficient(squares, total, plan.config.optimizer.clip_norm)[1]
        scalars = None if calibrating else step_scalars(plan.config, step)
        for stage, state in enumerate(self.states):
            merge = merges[stage]
            own = {index: canonical[merge.group, index] for index in merge.partitions}
            sections = merge.merged_sections(own, total_items=total)
            state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)
            told = self.merged[step, merge.group]
            named = tuple((i, told[i].hash, told[i].blob, told[i].size_bytes) for i in sorted(merge.partitions))
            self.log[stage].append(LogStep(step, scalars, total, coefficient, named, state.stage_root()))
            manifest = state.snapshot(self._put_at)
            self.snapshots[stage, step + 1] = (self.put(manifest.encode()), state.stage_root())
            for executors in self.executors:
                executors[stage].drop_graphs()
                for key in list(executors[stage].partials):
                    executors[stage].drop_partial(key)

    # --- cases -------------------------------------------------------------------------------------------------

    def state_ref(self, stage: int, version: int, *, snapshot: int = CALIBRATION_STEP) -> StateRef:
        log = tuple(step for step in self.log[stage] if snapshot <= step.step < version)
        if snapshot == CALIBRATION_STEP:
            return StateRef(snapshot, self.planned.snapshot, True, "", log)
        manifest, root = self.snapshots[stage, snapshot]
        return StateRef(snapshot, manifest, False, root, log)

    def case(
        self,
        step: int,
        stage: int,
        members: Sequence[Member] | None = None,
        *,
        snapshot: int = CALIBRATION_STEP,
        seed: str = SEED,
        update: bool = True,
    ) -> Case:
        chosen = list(self.members if members is None else members)
        whole = len(chosen) == len(self.members)
        group = self.plan.layout.group_of_stage[stage]
        held = {index for index, *_ in self.log[stage][0].partitions}
        merged = tuple(one for index, one in sorted(self.merged[step, group].items()) if index in held)
        total = self.plan.config.pipeline.microbatches
        return Case(
            version=CASE_VERSION,
            planned=self.planned,
            branch=0,
            step=step,
            stage=stage,
            state=self.state_ref(stage, self.plan.config.version_of(step), snapshot=snapshot),
            partials=tuple(self.partial(step, stage, member, seed=seed) for member in chosen),
            merge=MergeCase(group, 1, seed, total, merged, whole),
            update=self.log[stage][step + 1] if whole and update else None,
        )

    def partial(self, step: int, stage: int, member: Member, *, seed: str = SEED) -> PartialCase:
        done = self.done[step, stage, member]
        hashes = tuple((index, made.hash) for index, made in sorted(done.slices.items()))
        commitment = Commitment(member, stage, tuple(item.microbatch for item in done.items), hashes)
        return PartialCase(member, commitment, tuple(done.items), done.fingerprints if seed else ())

    # --- replays -----------------------------------------------------------------------------------------------

    def pool(self, budget_bytes: int = 1 << 40) -> ShadowPool:
        return ShadowPool(self.plan, budget_bytes=budget_bytes)

    def read(self, hash_: str) -> bytes:
        if hash_ not in self.blobs:
            raise NotFound(f"no blob {hash_[:10]}")
        return self.blobs[hash_]

    def all_blobs(self) -> dict[str, bytes]:
        """With row groups under their own hashes, as bundles have them."""
        groups: dict[str, bytes] = {}
        for shard in self.order.manifest.shards:
            data = self.blobs[shard.blob]
            for index, hash_ in enumerate(shard.row_group_hashes):
                start, end = shard.row_group_range(index)
                groups[hash_] = data[start:end]
        return {**self.blobs, **groups}


def a_plan(*args: Any, packing: str = "bytes", threads: int = 1, **changes: Any) -> ModelPlan:
    plan = tiny_plan(*args, **changes)
    config = msgspec.structs.replace(
        plan.config,
        merge=msgspec.structs.replace(plan.config.merge, packing=packing),
        precision=msgspec.structs.replace(plan.config.precision, num_threads=threads),
    )
    return ModelPlan(config, plan.model_config, plan.units, plan.cuts)


def _planned(plan: ModelPlan, data: str, snapshot: str) -> RunPlanned:
    groups = tuple(
        GroupShape(group.stages, tuple(plan.layout.sections[p.section].stages for p in group.partitions))
        for group in plan.layout.groups
    )
    return RunPlanned(
        run_id="audited",
        config=plan.config,
        model_config=dict(plan.model_config),
        unit_tensors=plan.units.units,
        unit_flops_per_token=plan.units.unit_flops_per_token,
        tied=plan.units.tied,
        cuts=plan.cuts,
        groups=groups,
        data=data,
        snapshot=snapshot,
        tokenizer="tokenizer",
        submitter="submitter",
    )


def other_hash(value: str) -> str:
    """A hash of nothing, that differs."""
    return blake3(b"other" + value.encode()).hexdigest()


def edit_partial(case: Case, number: int = 0, **changes: Any) -> Case:
    partials = list(case.partials)
    partials[number] = msgspec.structs.replace(partials[number], **changes)
    return msgspec.structs.replace(case, partials=tuple(partials))


def edit_item(case: Case, index: int = 0, **changes: Any) -> Case:
    items = list(case.partials[0].items)
    items[index] = msgspec.structs.replace(items[index], **changes)
    return edit_partial(case, items=tuple(items))


def edit_slice(case: Case, partition: int, value: str) -> Case:
    commitment = case.partials[0].commitment
    hashes = tuple((index, value if index == partition else hash_) for index, hash_ in commitment.hashes)
    return edit_partial(case, commitment=msgspec.structs.replace(commitment, hashes=hashes))


def edit_merged(case: Case, index: int = 0, **changes: Any) -> Case:
    assert case.merge is not None
    merged = list(case.merge.merged)
    merged[index] = msgspec.structs.replace(merged[index], **changes)
    return msgspec.structs.replace(case, merge=msgspec.structs.replace(case.merge, merged=tuple(merged)))


def edit_log(case: Case, index: int, **changes: Any) -> Case:
    log = list(case.state.log)
    log[index] = msgspec.structs.replace(log[index], **changes)
    return msgspec.structs.replace(case, state=msgspec.structs.replace(case.state, log=tuple(log)))
