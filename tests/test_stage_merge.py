"""Partials merged and applied give the same state for every cut and every split of the work; liars are found."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from model_cases import tiny_plan, tokens_of
from test_stage_executor import executors, run_item

from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import HashMismatch, InputError
from subnet.model.checkpoints import initial_weights
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import SnapshotManifest, check_manifest, decode_manifest, join_manifests
from subnet.numerics.roots import run_root
from subnet.run.schedule import norm_and_coefficient, step_scalars

Swarm = list[list[StageExecutor]]
SEED = b"\x05" * 32


def merge_all(plan: ModelPlan, swarm: Swarm, step: int) -> tuple[dict[tuple[int, int], bytes], int]:
    """Every partition of every group from all members' slices, and the whole model's square-sum."""
    merged: dict[tuple[int, int], bytes] = {}
    total = 0
    counted = plan.config.num_items
    for group in plan.layout.groups:
        found: dict[int, list[tuple[memoryview, int]]] = {}
        prints: dict[int, list[tuple[int, ...]]] = {}
        mergers: dict[int, StageMerge] = {}
        for member in swarm:
            for stage in group.stages:
                executor = member[stage]
                merge = mergers[stage] = StageMerge(plan, stage, executor.state)
                partial = executor.partials[PartialKey(step, 1, 0, 0)]
                for index, made in merge.slices(partial).items():
                    merge.check_slice(index, made.data, made.num_items, made.hash)
                    found.setdefault(index, []).append((made.data, made.num_items))
                for index, value in merge.partial_fingerprints(partial, SEED, total_items=counted).items():
                    prints.setdefault(index, []).append(value)
        assert sorted(found) == [partition.index for partition in group.partitions]
        for index, slices in found.items():
            owner = next(m for m in mergers.values() if index in m.partitions)
            done = owner.merge_partition(index, slices, total_items=counted)
            backwards = owner.merge_partition(index, slices[::-1], total_items=counted)
            assert (done.hash, done.squares) == (backwards.hash, backwards.squares)
            for member in swarm:
                for stage in group.stages:
                    checker = StageMerge(plan, stage, member[stage].state)
                    if index in checker.partitions:
                        verdict = checker.check_merged(
                            index,
                            done.data,
                            hash=done.hash,
                            squares=done.squares,
                            total_items=counted,
                            seed=SEED,
                            contributions=prints[index],
                            partial=member[stage].partials[PartialKey(step, 1, 0, 0)],
                        )
                        assert verdict is None
            merged[group.index, index] = bytes(done.data)
            total += done.squares
    return merged, total


def run_step(plan: ModelPlan, swarm: Swarm, step: int) -> float:
    """All microbatches, dealt over the members, then merge, seal and update everywhere; returns the norm."""
    for microbatch in range(plan.config.pipeline.microbatches):
        rows = tokens_of(100 * max(step, 0) + microbatch)
        run_item(plan, swarm[microbatch % len(swarm)], microbatch, rows, step=step)
    counted = plan.config.num_items
    merged, squares = merge_all(plan, swarm, step)
    norm, coefficient = norm_and_coefficient(squares, counted, plan.config.merged_clip_norm)
    for member in swarm:
        for executor in member:
            merge = StageMerge(plan, executor.stage, executor.state)
            mine = {index: merged[merge.group, index] for index in merge.partitions}
            sections = merge.merged_sections(mine, total_items=counted)
            if step < 0:
                executor.state.apply_step(step, sections)
            else:
                scalars = step_scalars(plan.config, step)
                executor.state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)
            executor.drop_partial(PartialKey(step, 1, 0, 0))
    return norm


def root_of(plan: ModelPlan, member: Sequence[StageExecutor]) -> bytes:
    leaves: dict[str, bytes] = {}
    for executor in member:
        for name, leaf in executor.state.leaves():
            assert leaves.setdefault(name, leaf) == leaf
    return run_root(member[0].state.num_updates, [leaves[spec.name] for spec in plan.canonical])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_state_root_knows_no_cuts_and_no_fleet(tied: bool) -> None:
    roots: set[bytes] = set()
    norms: set[float] = set()
    for cuts, members in [((0,), 1), ((0, 2), 2), ((0, 1, 3), 1)]:
        plan = tiny_plan(cuts, tie_word_embeddings=tied)
        swarm = [executors(plan) for _ in range(members)]
        norms.add(tuple(run_step(plan, swarm, step) for step in (-1, 0, 1))[-1])
        assert {executor.state.stage_root() for executor in swarm[0]} == {e.state.stage_root() for e in swarm[-1]}
        roots.add(root_of(plan, swarm[0]))
    assert len(roots) == 1
    assert len(norms) == 1
    assert norms.pop() > 0


def test_the_update_is_adamws() -> None:
    plan = tiny_plan()
    swarm = [executors(plan)]
    run_step(plan, swarm, -1)
    state = swarm[0][0].state
    before = {name: state.weight(name).clone() for name in ("model.norm.weight", "lm_head.weight")}
    run_step(plan, swarm, 0)
    lr = plan.config.optimizer.learning_rate
    for name, old in before.items():
        change = (state.weight(name) - old).abs()
        assert 0 < change.max() < 1.2 * lr
    bound = {leaf.name: leaf.parameter for leaf in state.module.bound}
    assert bound["lm_head.weight"].data_ptr() == state.weight("lm_head.weight").data_ptr()


def test_bf16_copies_follow_the_update() -> None:
    plan = tiny_plan((0, 2), compute="bf16")
    swarm = [executors(plan)]
    run_step(plan, swarm, -1)
    run_step(plan, swarm, 0)
    for executor in swarm[0]:
        for leaf in executor.state.module.bound:
            assert torch.equal(leaf.parameter, leaf.master.to(leaf.parameter.dtype))
    assert any(leaf.parameter.dtype == torch.bfloat16 for leaf in swarm[0][0].state.module.bound)


def test_a_changed_merge_is_found() -> None:
    plan = tiny_plan()
    swarm = [executors(plan), executors(plan)]
    run_step(plan, swarm, -1)
    for microbatch in range(4):
        run_item(plan, swarm[microbatch % 2], microbatch, tokens_of(microbatch), step=0)
    merges = [StageMerge(plan, 0, member[0].state) for member in swarm]
    partials = [member[0].partials[PartialKey(0, 1, 0, 0)] for member in swarm]
    slices = [merge.slices(partial)[0] for merge, partial in zip(merges, partials, strict=True)]
    done = merges[0].merge_partition(0, [(made.data, made.num_items) for made in slices], total_items=4)
    prints = [m.partial_fingerprints(p, SEED, total_items=4)[0] for m, p in zip(merges, partials, strict=True)]
    assert prints[0] == merges[1].slice_fingerprint(0, slices[0].data, 2, SEED, total_items=4)

    def verdict(data: bytes, *, squares: int = done.squares, rehash: bool = True) -> str | None:
        from blake3 import blake3

        return merges[1].check_merged(
            0,
            data,
            hash=blake3(data).hexdigest() if rehash else done.hash,
            squares=squares,
            total_items=4,
            seed=SEED,
            contributions=prints,
            partial=partials[1],
        )

    good = bytes(done.data)
    assert verdict(good) is None
    assert "square-sum" in str(verdict(good, squares=done.squares + 1))
    changed = bytearray(good)
    changed[0] ^= 1
    assert "not the sum" in str(verdict(bytes(changed)))
    assert "hash" in str(verdict(bytes(changed), rehash=False))
    assert "bytes instead of" in str(verdict(good[:-1]))
    lower = good[:-4] + struct.pack("<f", 0.0)
    assert "block maximum" in str(verdict(lower))
    num_blocks = merges[1].find(0)[0].num_blocks
    maxima = np.frombuffer(good, dtype="<f4", offset=len(good) - 4 * num_blocks)
    assert "is not the largest" in str(verdict(good[: -4 * num_blocks] + (maxima * np.float32(8)).tobytes()))
    with pytest.raises(HashMismatch):
        merges[0].check_slice(0, slices[0].data, 2, slices[1].hash)
    with pytest.raises(InputError, match="not held"):
        merges[0].merge_partition(999, [], total_items=4)
    with pytest.raises(InputError, match="missing"):
        merges[0].merged_sections({}, total_items=4)


def test_a_wrong_update_is_refused_and_an_interrupted_one_breaks_the_state() -> None:
    plan = tiny_plan()
    swarm = [executors(plan)]
    run_step(plan, swarm, -1)
    (executor,) = swarm[0]
    state = executor.state
    root = state.stage_root()
    for microbatch in range(4):
        run_item(plan, swarm[0], microbatch, tokens_of(microbatch), step=0)
    merged, _ = merge_all(plan, swarm, 0)
    sections = StageMerge(plan, 0, state).merged_sections({p: d for (_, p), d in merged.items()}, total_items=4)
    scalars = step_scalars(plan.config, 0)
    for step, given, numbers in [(1, sections, scalars), (0, {}, scalars), (0, sections, None), (-1, sections, None)]:
        with pytest.raises(InputError):
            state.apply_step(step, given, coefficient_bits=0x3F800000, scalars=numbers)
    assert state.intact
    assert state.stage_root() == root
    state._exponents = {0: torch.zeros(3, dtype=torch.int16)}  # an update that can't end well
    with pytest.raises(InputError):
        state.apply_step(0, sections, coefficient_bits=0x3F800000, scalars=scalars)
    assert not state.intact
    with pytest.raises(InputError, match="half-way"):
        state.stage_root()


def _trained(plan: ModelPlan) -> list[StageExecutor]:
    swarm = [executors(plan)]
    run_step(plan, swarm, -1)
    run_step(plan, swarm, 0)
    return swarm[0]


def test_a_snapshot_joins_and_loads_into_other_cuts() -> None:
    plan = tiny_plan((0, 2), tie_word_embeddings=True)
    member = _trained(plan)
    blobs: dict[str, bytes] = {}
    manifests: list[SnapshotManifest] = []
    for executor in member:
        made = executor.state.snapshot(lambda blob, data: blobs.__setitem__(blob, bytes(data)))
        manifests.append(decode_manifest(made.encode()))
    whole = join_manifests(plan, manifests)
    assert set(blobs) == {ref.hash for ref in whole.chunks}
    other = tiny_plan((0, 1, 3), tie_word_embeddings=True)
    leaves: dict[str, bytes] = {}
    for stage in range(3):
        state = StageState(other, stage)
        with pytest.raises(InputError, match="not loaded"):
            state.leaves()
        held = {spec.name for spec in other.stage_tensors[stage]}
        part = SnapshotManifest(whole.step, tuple(entry for entry in whole.entries if entry.name in held))
        state.load(part, lambda ref: blobs[ref.hash])
        assert state.next_step == 1
        leaves.update(state.leaves())
    assert run_root(1, [leaves[spec.name] for spec in other.canonical]) == root_of(plan, member)
    altered = {hash: bytes(len(data)) for hash, data in blobs.items()}
    broken = StageState(plan, 0)
    with pytest.raises(HashMismatch):
        broken.load(manifests[0], lambda ref: altered[ref.hash])
    assert not broken.intact
    with pytest.raises(InputError, match="not those of the plan"):
        check_manifest(whole, plan.stage_tensors[0])
    with pytest.raises(InputError, match="one manifest a stage"):
        join_manifests(plan, manifests[:1])


def test_snapshot_zero_has_weights_only() -> None:
    plan = tiny_plan()
    fresh = StageState(plan, 0)
    fresh.load_weights(initial_weights(plan))
    entries = []
    blobs: dict[str, bytes] = {}
    full = fresh.snapshot(lambda blob, data: blobs.__setitem__(blob, bytes(data)))
    for entry in full.entries:
        arrays = {kind: refs if kind == "weight" else () for kind, refs in entry.arrays.items()}
        entries.append(type(entry)(entry.name, entry.shape, arrays, entry.leaf))
    state = StageState(plan, 0)
    state.load(SnapshotManifest(0, tuple(entries)), lambda ref: blobs[ref.hash])
    assert state.next_step == -1
    assert state.stage_root() == fresh.stage_root()
