"""With `update_delay = 1` a step computed while the one before it is merged gives the reference's bits, whatever overlaps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from model_cases import tiny_plan
from test_stage_executor import executors
from test_stage_merge import Swarm, merge_all, root_of

from benchmarks.plain import Plain
from benchmarks.reference import Reference
from benchmarks.setting import holdout_rows, training_rows
from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import ConfigError, InputError
from subnet.model.memory import stage_memory
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import KINDS, LIMIT_BEFORE, SnapshotManifest, decode_manifest, kinds_of
from subnet.run.config import PipelineSection
from subnet.run.schedule import norm_and_coefficient, step_scalars
from subnet.words import CALIBRATION_STEP, ItemKey

STEPS = 4


def streams() -> tuple[np.ndarray, np.ndarray]:
    """Tokens with something to learn: each follows from the one before, most of the time."""
    rng = np.random.default_rng(0)
    out = [0]
    for noise in rng.integers(0, 97, 3000):
        out.append(int(noise) if noise % 5 == 0 else (out[-1] * 5 + 3) % 97)
    tokens = np.array(out, np.uint16)
    return tokens[:2500], tokens[2500:]


def a_reference(plan: ModelPlan) -> Reference:
    assert plan.config.model.config is not None
    return Reference(plan.config, plan.config.model.config, *streams())


@dataclass
class Flight:
    """One microbatch on its way through one member's stages."""

    plan: ModelPlan
    stages: list[StageExecutor]
    step: int
    microbatch: int
    rows: np.ndarray
    boundaries: list[memoryview | None] = field(default_factory=lambda: [None])

    def forward(self, *, keep: bool = True) -> Flight:
        for stage, executor in enumerate(self.stages):
            item = ItemKey(self.step, self.microbatch, stage)
            keeps = keep and stage < len(self.stages) - 1
            self.boundaries.append(executor.forward(item, self.boundaries[-1], self.rows, keep_graph=keeps).output)
        return self

    def backward(self, *, adds: bool = True) -> list[bytes]:
        """The gradients between the stages; added to the sums, or only made again."""
        grads: list[memoryview | None] = [None]
        key = PartialKey(self.step, 1, 0, 0) if adds else None
        for stage in reversed(range(len(self.stages))):
            item = ItemKey(self.step, self.microbatch, stage)
            x = self.boundaries[stage]
            grads.append(self.stages[stage].backward(item, grads[-1], x, self.rows, partial=key).output)
        return [bytes(grad) for grad in grads if grad is not None]


class Overlap:
    """A fleet whose members work on step t + 1 before, during and after the update of step t."""

    def __init__(self, plan: ModelPlan, num_members: int) -> None:
        self.plan, self.config = plan, plan.config
        self.swarm: Swarm = [executors(plan) for _ in range(num_members)]
        self.tokens = streams()[0]
        self.begun: dict[int, list[Flight]] = {}

    def flight(self, step: int, m: int) -> Flight:
        rows = training_rows(self.config, self.tokens, step, m)
        return Flight(self.plan, self.swarm[m % len(self.swarm)], step, m, rows)

    def compute(self, step: int) -> None:
        for m in range(self.config.pipeline.microbatches):
            self.flight(step, m).forward().backward()

    def begin(self, step: int) -> None:
        """One item whole, one with its graphs kept, one without; the last isn't begun."""
        first, kept, bare = (self.flight(step, m) for m in range(3))
        first.forward().backward()
        self.begun[step] = [kept.forward(), bare.forward(keep=False)]

    def finish(self, step: int) -> None:
        for flight in self.begun.pop(step):
            flight.backward()
        self.flight(step, 3).forward().backward()

    def again(self, step: int, before: list[bytes]) -> list[bytes]:
        """An item of the step that is merged is made again, although the next one has begun."""
        made = self.flight(step, 0).forward().backward(adds=False)
        assert made == before or not before
        return made

    def update(self, step: int) -> None:
        counted = self.config.pipeline.microbatches
        merged, squares = merge_all(self.plan, self.swarm, step)
        coefficient = norm_and_coefficient(squares, counted, self.config.optimizer.clip_norm)[1]
        for member in self.swarm:
            for executor in member:
                merge = StageMerge(self.plan, executor.stage, executor.state)
                mine = {index: merged[merge.group, index] for index in merge.partitions}
                sections = merge.merged_sections(mine, total_items=counted)
                executor.drop_partial(PartialKey(step, 1, 0, 0))
                executor.drop_graphs(step)
                if step == CALIBRATION_STEP:
                    executor.state.apply_step(step, sections)
                else:
                    scalars = step_scalars(self.config, step)
                    executor.state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)

    def run(self, num_steps: int = STEPS) -> bytes:
        self.compute(CALIBRATION_STEP)
        self.update(CALIBRATION_STEP)
        self.compute(0)
        for step in range(num_steps):
            before = self.again(step, [])
            if step + 1 < num_steps:
                self.begin(step + 1)
            self.again(step, before)
            self.update(step)
            if step + 1 < num_steps:
                self.finish(step + 1)
        return root_of(self.plan, self.swarm[0])


def reference_root(plan: ModelPlan, num_steps: int = STEPS) -> str:
    reference = a_reference(plan)
    reference.calibrate()
    for step in range(num_steps):
        reference.step(step)
    return reference.state_root()


@pytest.mark.parametrize(
    ("cuts", "members", "compute", "tied"),
    [((0, 2), 2, "fp32", False), ((0, 1, 3), 1, "bf16", True), ((0,), 2, "fp32", True)],
)
def test_whatever_overlaps_the_root_is_the_references(
    cuts: tuple[int, ...], members: int, compute: str, tied: bool
) -> None:
    plan = tiny_plan(cuts, compute=compute, tie_word_embeddings=tied, update_delay=1)
    assert Overlap(plan, members).run().hex() == reference_root(plan)


def test_the_delay_changes_the_run_and_nothing_else_does() -> None:
    roots = [reference_root(tiny_plan((0,), update_delay=delay)) for delay in (0, 1)]
    assert roots[0] != roots[1]
    assert roots[1] == reference_root(tiny_plan((0, 2), update_delay=1))


def test_the_first_two_steps_are_of_the_same_state() -> None:
    """And so the weights after the first update don't show in the second's gradients, but in the third's."""
    plan = tiny_plan(update_delay=1)
    assert [plan.config.version_of(step) for step in (-1, 0, 1, 2, 3)] == [-1, 0, 0, 1, 2]
    assert [tiny_plan().config.version_of(step) for step in (-1, 0, 1, 2)] == [-1, 0, 1, 2]
    reference, early = a_reference(plan), a_reference(plan)
    for each in (reference, early):
        each.calibrate()
    early.updates = 1  # step 1 without step 0: its losses are of the first state
    assert early.step(1).loss == (reference.step(0), reference.step(1))[1].loss


def test_delayed_fixed_point_learns_as_delayed_fp32_does(tmp_path) -> None:
    plan = tiny_plan(update_delay=1)
    fixed = a_reference(plan)
    assert plan.config.model.config is not None
    plain, other = (Plain(plan.config, plan.config.model.config, *streams()) for _ in range(2))
    fixed.calibrate()
    for step in range(STEPS):
        assert math.isclose(fixed.step(step).loss, plain.step(step), rel_tol=0.01)
    plain.save(tmp_path / "plain.pt")
    other.load(tmp_path / "plain.pt")
    assert other.step(STEPS) == plain.step(STEPS)
    fixed.save(tmp_path / "fixed.npz")
    again = a_reference(plan)
    again.load(tmp_path / "fixed.npz")
    assert again.step(STEPS).loss == fixed.step(STEPS).loss
    assert again.state_root() == fixed.state_root()


def test_a_held_out_item_is_of_the_state_that_its_step_updates() -> None:
    plan = tiny_plan(update_delay=1)
    run = Overlap(plan, 1)
    run.run(2)
    reference = a_reference(plan)
    reference.calibrate()
    for step in range(2):
        reference.step(step)
    (executor,) = run.swarm[0]
    rows = holdout_rows(plan.config, streams()[1], 0)
    found = executor.forward(ItemKey(2, 4, 0), None, rows, keep_graph=False).loss_bits
    assert found is not None
    losses = [float(np.uint32(found).view(np.float32))]
    assert np.float32(losses[0]) == np.float32(holdout_of(reference, rows))


def holdout_of(reference: Reference, rows: np.ndarray) -> float:
    import torch

    with torch.no_grad():
        parts = [reference._chunk_loss(chunk) for chunk in reference._chunks(rows)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.item()


# --- a joiner ------------------------------------------------------------------------------------------------------


def snapshots_of(member: list[StageExecutor], blobs: dict[str, bytes]) -> list[SnapshotManifest]:
    return [
        decode_manifest(e.state.snapshot(lambda blob, data: blobs.__setitem__(blob, bytes(data))).encode())
        for e in member
    ]


def test_a_joiner_restores_goes_through_the_log_and_computes_both_open_steps() -> None:
    """From the snapshot after one update, with the second from the log, it makes items of steps 2 and 3."""
    plan = tiny_plan((0, 2), update_delay=1)
    run = Overlap(plan, 1)
    run.compute(CALIBRATION_STEP)
    run.update(CALIBRATION_STEP)
    run.compute(0)
    run.update(0)
    blobs: dict[str, bytes] = {}
    manifests = snapshots_of(run.swarm[0], blobs)
    assert {kinds_of(entry) for manifest in manifests for entry in manifest.entries} == {(*KINDS, LIMIT_BEFORE)}
    joiner = executors(plan)
    for executor, manifest in zip(joiner, manifests, strict=True):
        executor.state.load(manifest, lambda ref: blobs[ref.hash])
        assert executor.state.version_before is None
    assert root_of(plan, joiner) == root_of(plan, run.swarm[0])
    run.swarm.append(joiner)
    run.compute(1) if run.config.version_of(1) == 1 else None
    with pytest.raises(InputError, match="needs the state before update 0"):
        run.flight(1, 1).forward()  # what it would need to redo step 1 is older than its snapshot
    run.swarm.pop()
    run.compute(1)
    run.swarm.append(joiner)
    merged_by_all(run, 1, skip=joiner)
    assert root_of(plan, joiner) == root_of(plan, run.swarm[0])
    for step in (2, 3):  # of the states after one and two updates
        assert run.flight(step, 1).forward().backward() == _made_by(run.swarm[0], run, step)


def merged_by_all(run: Overlap, step: int, *, skip: list[StageExecutor]) -> None:
    """The others' sum, applied by everyone."""
    others = [member for member in run.swarm if member is not skip]
    whole, run.swarm = run.swarm, others
    counted = run.config.pipeline.microbatches
    merged, squares = merge_all(run.plan, run.swarm, step)
    run.swarm = whole
    coefficient = norm_and_coefficient(squares, counted, run.config.optimizer.clip_norm)[1]
    for member in run.swarm:
        for executor in member:
            merge = StageMerge(run.plan, executor.stage, executor.state)
            sections = merge.merged_sections({p: merged[merge.group, p] for p in merge.partitions}, total_items=counted)
            scalars = step_scalars(run.config, step)
            executor.state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)


def _made_by(member: list[StageExecutor], run: Overlap, step: int) -> list[bytes]:
    rows = training_rows(run.config, run.tokens, step, 1)
    return Flight(run.plan, member, step, 1, rows).forward().backward()


def test_what_is_no_delayed_state_is_refused() -> None:
    plain, delayed = tiny_plan(), tiny_plan(update_delay=1)
    made: dict[str, tuple[list[SnapshotManifest], dict[str, bytes]]] = {}
    for name, plan in (("plain", plain), ("delayed", delayed)):
        run = Overlap(plan, 1)
        run.compute(CALIBRATION_STEP)
        run.update(CALIBRATION_STEP)
        run.compute(0)
        run.update(0)
        blobs: dict[str, bytes] = {}
        made[name] = (snapshots_of(run.swarm[0], blobs), blobs)
    manifests, blobs = made["plain"]
    with pytest.raises(InputError, match="lacks the scales"):
        StageState(delayed, 0).load(manifests[0], lambda ref: blobs[ref.hash])
    manifests, blobs = made["delayed"]
    with pytest.raises(InputError, match="leaf"):
        StageState(plain, 0).load(manifests[0], lambda ref: blobs[ref.hash])


# --- what it costs -------------------------------------------------------------------------------------------------


def test_only_no_delay_and_a_delay_of_one_are_allowed() -> None:
    assert [PipelineSection(update_delay=delay).update_delay for delay in (0, 1)] == [0, 1]
    with pytest.raises(ConfigError, match="update_delay"):
        PipelineSection(update_delay=2)


def test_the_plan_counts_a_second_set_of_weights_and_sums() -> None:
    plans = {delay: stage_memory(tiny_plan((0, 2), update_delay=delay), 0) for delay in (0, 1)}
    for name in ("weights", "accumulator", "received boundaries"):
        assert plans[1].size_of(name) + plans[1].size_of(f"{name} of the step ahead") == 2 * plans[0].size_of(name)
    assert plans[1].peak_bytes > plans[0].peak_bytes
    assert [term.name for term in plans[0].terms if "ahead" in term.name] == []
