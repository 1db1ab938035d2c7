"""Lanes: one, two or three stages, any members, graphs kept or not, give the bits of the one-process reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_cases import tiny_config, tiny_plan
from test_stage_executor import executors
from test_stage_merge import Swarm, merge_all, root_of
from test_update_delay import streams

from benchmarks.lane_reference import LaneReference
from benchmarks.setting import holdout_rows, lane_rows
from subnet.engine.stage_executor import BackwardResult, ItemFailed, PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import ConfigError, InputError
from subnet.model.memory import Budgets, lane_bytes, stage_memory
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.snapshots import decode_manifest, kinds_of
from subnet.numerics.state_arrays import OUTER_MOMENTUM
from subnet.run.config import EvaluationSection, LanesSection, OptimizerSection, PipelineSection, RunConfig
from subnet.run.schedule import Terms, bits_fp32, fp32_bits, inner_scalars, norm_and_coefficient, step_scalars
from subnet.run.trainable import TrainableSection
from subnet.words import CALIBRATION_STEP, ItemKey

LANES, STEPS, EACH = 2, 3, 2


def lane_plan(
    cuts: tuple[int, ...] = (0,),
    *,
    optimizer: OptimizerSection | None = None,
    lanes: dict[str, Any] | None = None,
    **changes: Any,
) -> ModelPlan:
    """A tiny model, two lanes of three inner steps of two microbatches each."""
    plan = tiny_plan(cuts, **changes)
    config = msgspec.structs.replace(
        plan.config,
        pipeline=msgspec.structs.replace(plan.config.pipeline, microbatches=EACH),
        lanes=LanesSection(**{"count": LANES, "inner_steps": STEPS, **(lanes or {})}),
        optimizer=optimizer or OptimizerSection(learning_rate=5e-3),
        evaluation=EvaluationSection(rows=4),
    )
    return dataclasses.replace(plan, config=config)


class Trip:
    """A lane through the stages of one member: every part's boundaries, as a store would have them."""

    def __init__(self, plan: ModelPlan, stages: list[StageExecutor], step: int, lane: int) -> None:
        self.plan, self.stages, self.step, self.lane = plan, stages, step, lane
        self.inputs: dict[tuple[int, int], memoryview | None] = {}
        """By part and stage: what came forward."""
        self.grads: dict[tuple[int, int], memoryview | None] = {}
        self.last: list[BackwardResult] = []

    def rows(self, part: int) -> np.ndarray:
        return lane_rows(self.plan.config, streams()[0], self.step, self.lane, part)

    def forward(self, part: int, *, keep: bool) -> None:
        x: memoryview | None = None
        for stage, executor in enumerate(self.stages):
            self.inputs[part, stage] = x
            if stage < len(self.stages) - 1:
                item = ItemKey(self.step, self.lane, stage)
                x = executor.forward(item, x, self.rows(part), keep_graph=keep, part=part).output

    def backward(self, part: int) -> None:
        grad: memoryview | None = None
        for stage in reversed(range(len(self.stages))):
            self.grads[part, stage] = grad
            result = self.backward_at(part, stage, self.stages[stage], add=True)
            grad = result.output
            self.last.append(result)

    def backward_at(self, part: int, stage: int, executor: StageExecutor, *, add: bool) -> BackwardResult:
        item, key = ItemKey(self.step, self.lane, stage), PartialKey(self.step, 1, 0, 0)
        x, grad = self.inputs[part, stage], self.grads[part, stage]
        return executor.backward(item, grad, x, self.rows(part), partial=key if add else None, part=part)

    def inner_step(self, h: int, *, keep: bool) -> None:
        parts = range(h * EACH + 1, (h + 1) * EACH + 1)
        for part in reversed(parts):
            self.forward(part, keep=keep)
        for part in parts:
            self.backward(part)


def run_round(plan: ModelPlan, swarm: Swarm, step: int, *, keep: bool = True) -> list[Trip]:
    """All lanes, interleaved, dealt over the members; merge, seal and update everywhere."""
    trips = [Trip(plan, swarm[lane % len(swarm)], step, lane) for lane in range(LANES)]
    for h in range(STEPS):
        for trip in trips:
            trip.inner_step(h, keep=keep)
    update(plan, swarm, step)
    return trips


def update(plan: ModelPlan, swarm: Swarm, step: int) -> None:
    merged, squares = merge_all(plan, swarm, step)
    _, coefficient = norm_and_coefficient(squares, LANES, plan.config.merged_clip_norm)
    for member in swarm:
        for executor in member:
            merge = StageMerge(plan, executor.stage, executor.state)
            mine = {index: merged[merge.group, index] for index in merge.partitions}
            sections = merge.merged_sections(mine, total_items=LANES)
            if step == CALIBRATION_STEP:
                executor.state.apply_step(step, sections)
            else:
                scalars = step_scalars(plan.config, step)
                executor.state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)
            executor.drop_partial(PartialKey(step, 1, 0, 0))
            assert not executor.lanes
            assert not executor.retained


def a_reference(plan: ModelPlan) -> LaneReference:
    assert plan.config.model.config is not None
    cuts = plan.cuts if plan.config.pipeline.boundary_code != "raw" else (0,)
    return LaneReference(plan.config, plan.config.model.config, *streams(), cuts=cuts)


CASES: dict[str, dict[str, Any]] = {
    "one stage": {"cuts": (0,)},
    "two stages": {"cuts": (0, 2)},
    "three stages": {"cuts": (0, 1, 3)},
    "one stage, tied": {"cuts": (0,), "tie_word_embeddings": True},
    "three stages, tied": {"cuts": (0, 1, 3), "tie_word_embeddings": True},
    "bf16": {"cuts": (0, 2), "compute": "bf16"},
    "coded boundaries": {"cuts": (0, 2), "code": "int8"},
    "clipped": {"cuts": (0, 2), "lanes": {"inner_clip_norm": 0.05}},
    "4 bits": {"cuts": (0, 2), "lanes": {"pseudo_gradient_bits": 4}},
    "muon": {"cuts": (0, 2), "optimizer": OptimizerSection(kind="muon", learning_rate=5e-3)},
    "8-bit moments": {"cuts": (0, 2), "optimizer": OptimizerSection(state_bits=8, learning_rate=5e-3)},
}


LONG = {"one stage", "two stages", "one stage, tied", "clipped", "4 bits", "8-bit moments"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in CASES])
def test_stages_give_the_references_bits(case: str) -> None:
    plan = lane_plan(**CASES[case])
    reference = a_reference(plan)
    swarm = [executors(plan), executors(plan)]
    reference.calibrate()
    run_round(plan, swarm, CALIBRATION_STEP)
    assert root_of(plan, swarm[0]).hex() == reference.state_root()
    before = reference.holdout_loss()
    for step in range(2):
        trips = run_round(plan, swarm, step, keep=step == 0)
        losses = [[r.loss_bits for r in trip.last if r.loss_bits is not None][-1] for trip in trips]
        assert sum(bits_fp32(bits) for bits in losses) / LANES == reference.step(step).loss
        assert [root_of(plan, member).hex() for member in swarm] == [reference.state_root()] * 2
    assert reference.holdout_loss() < before


def test_cuts_dont_matter_to_tied_embeddings_in_a_lane() -> None:
    roots = set[bytes]()
    for cuts in [(0,), (0, 2)]:
        plan = lane_plan(cuts, tie_word_embeddings=True, lanes={"inner_clip_norm": 0.05})
        swarm = [executors(plan)]
        for step in (-1, 0):
            run_round(plan, swarm, step)
        roots.add(root_of(plan, swarm[0]))
    assert len(roots) == 1


def test_a_lost_lane_stage_is_redone_alone_from_what_was_recorded() -> None:
    plan = lane_plan((0, 2))
    swarm = [executors(plan)]
    run_round(plan, swarm, CALIBRATION_STEP)
    trip = Trip(plan, swarm[0], 0, 1)
    for h in range(STEPS):
        trip.inner_step(h, keep=True)
    fresh = executors(plan)
    run_round(plan, [fresh], CALIBRATION_STEP)
    for stage in (0, 1):
        for part in range(1, EACH + 2):  # a member that dies in the middle
            trip.backward_at(part, stage, fresh[stage], add=True)
        assert fresh[stage].lane_next(ItemKey(0, 1, stage)) == EACH + 2
        fresh[stage].drop_lane(ItemKey(0, 1, stage))
        for part in range(1, STEPS * EACH + 1):
            again = trip.backward_at(part, stage, fresh[stage], add=True)
            if stage:
                assert again.output == trip.grads[part, stage - 1]
        assert again.stats is not None
        key = PartialKey(0, 1, 0, 0)
        slices = [StageMerge(plan, stage, e.state).slices(e.partials[key]) for e in (fresh[stage], swarm[0][stage])]
        assert {i: made.hash for i, made in slices[0].items()} == {i: made.hash for i, made in slices[1].items()}


def test_a_replay_adds_nothing_and_gives_the_same_boundaries() -> None:
    plan = lane_plan((0, 2))
    stages = executors(plan)
    trip = Trip(plan, stages, CALIBRATION_STEP, 0)
    for h in range(STEPS):
        trip.inner_step(h, keep=True)
    for part in range(1, STEPS * EACH + 1):
        item = ItemKey(CALIBRATION_STEP, 0, 0)
        made = stages[0].forward(item, None, trip.rows(part), keep_graph=False, part=part)
        assert made.output == trip.inputs[part, 1]
        assert trip.backward_at(part, 0, stages[0], add=False).stats is None
    assert stages[0].partials[PartialKey(CALIBRATION_STEP, 1, 0, 0)].microbatches == {0}
    assert not stages[0].lanes


def test_parts_out_of_order_are_refused_and_change_nothing() -> None:
    plan = lane_plan((0, 2))
    stages = executors(plan)
    trip = Trip(plan, stages, CALIBRATION_STEP, 0)
    trip.forward(1, keep=True)
    trip.forward(2, keep=True)
    first, item = stages[0], ItemKey(CALIBRATION_STEP, 0, 0)
    for part in range(1, EACH + 1):
        trip.grads[part, 1] = None
        trip.grads[part, 0] = trip.backward_at(part, 1, stages[1], add=True).output
    with pytest.raises(InputError, match="waits for the backward of part 1, not 2"):
        trip.backward_at(2, 0, first, add=True)
    with pytest.raises(InputError, match="not of the present inner step: it has parts 1 to 2"):
        first.forward(item, None, trip.rows(3), keep_graph=True, part=3)
    with pytest.raises(InputError, match=r"part 7 of .* is not one of its 1 to 6"):
        first.forward(item, None, trip.rows(1), keep_graph=True, part=7)
    with pytest.raises(InputError, match="part 0 of"):
        first.forward(item, None, trip.rows(1), keep_graph=True)
    with pytest.raises(InputError, match="has not begun"):
        first.forward(ItemKey(CALIBRATION_STEP, 1, 0), None, trip.rows(1), keep_graph=True, part=EACH + 1)
    assert first.retained == (item,)
    assert first.lanes == (item,)
    for part in range(1, EACH + 1):
        assert trip.backward_at(part, 0, first, add=True).stats is None
    assert first.lane_next(item) == EACH + 1
    assert not first.partials
    first.drop_lanes(CALIBRATION_STEP)
    assert not first.lanes


def test_without_lanes_there_are_no_parts_and_holdout_items_have_none() -> None:
    plain = executors(tiny_plan())[0]
    rows = lane_rows(lane_plan().config, streams()[0], 0, 0, 1)
    with pytest.raises(InputError, match="no parts"):
        plain.backward(ItemKey(-1, 0, 0), None, None, rows, partial=None, part=1)
    plan = lane_plan()
    swarm = [executors(plan)]
    reference = a_reference(plan)
    item = ItemKey(0, LANES, 0)
    run_round(plan, swarm, CALIBRATION_STEP)
    seen = swarm[0][0].forward(item, None, holdout_rows(plan.config, streams()[1], 0), keep_graph=False)
    assert seen.loss_bits == fp32_bits(reference.holdout_loss())


def test_a_lane_that_fails_is_gone_and_fails_alike_everywhere() -> None:
    plan = lane_plan()
    hashes = set[str]()
    for _ in range(2):
        executor = executors(plan)[0]
        trip = Trip(plan, [executor], CALIBRATION_STEP, 0)
        trip.inner_step(0, keep=False)
        lane = executor._lanes.live[ItemKey(CALIBRATION_STEP, 0, 0)]
        with torch.no_grad():
            lane.module.bound[3].master.fill_(float("inf"))
        with pytest.raises(ItemFailed) as failed:
            trip.inner_step(1, keep=False)
        hashes.add(failed.value.hash)
        assert not executor.lanes
        assert not executor.partials
    assert len(hashes) == 1


def test_a_snapshot_holds_the_outer_momentum_and_no_moments() -> None:
    plan = lane_plan((0, 2))
    swarm = [executors(plan)]
    for step in (-1, 0):
        run_round(plan, swarm, step)
    state = swarm[0][1].state
    blobs: dict[str, bytes] = {}
    manifest = decode_manifest(state.snapshot(lambda blob, data: blobs.update({blob: bytes(data)})).encode())
    assert all(kinds_of(entry) == ("weight", OUTER_MOMENTUM, "decayed", "limit") for entry in manifest.entries)
    again = StageState(plan, 1)
    again.load(manifest, lambda ref: blobs[ref.hash])
    assert again.stage_root() == state.stage_root()
    plain = StageState(tiny_plan((0, 2)), 1)
    with pytest.raises(InputError, match="another optimizer"):
        plain.load(manifest, lambda ref: blobs[ref.hash])


@pytest.mark.parametrize("optimizer", [OptimizerSection(), OptimizerSection(state_bits=8)])
def test_the_plan_counts_what_a_lane_holds(optimizer: OptimizerSection) -> None:
    for cuts, tied in [((0,), True), ((0, 2), False), ((0, 2), True)]:
        plan = lane_plan(cuts, optimizer=optimizer, tie_word_embeddings=tied)
        for executor in executors(plan):
            assert executor.lane_bytes == 0
            executor._lane(ItemKey(CALIBRATION_STEP, 0, executor.stage), 1)
            assert executor.lane_bytes == lane_bytes(plan, executor.stage)
            memory = stage_memory(plan, executor.stage, Budgets(replicas=1))
            assert memory.size_of("lanes") == LANES * executor.lane_bytes
            assert memory.size_of("moments") == 4 * sum(spec.num_elements for spec in executor.state.specs)


def test_adapters_are_trained_in_lanes_and_nothing_else() -> None:
    roots = set[bytes]()
    for cuts in [(0,), (0, 2)]:
        base = lane_plan(cuts)
        config = msgspec.structs.replace(base.config, trainable=TrainableSection("lora", targets=("q_proj",), rank=2))
        plan = plan_model(config, load_architecture(tiny_config()), cuts)
        swarm = [executors(plan)]
        before = {s.name: e.state.weight(s.name).clone() for e in swarm[0] for s in e.state.specs}
        for step in (-1, 0):
            run_round(plan, swarm, step)
        after = {s.name: e.state.weight(s.name) for e in swarm[0] for s in e.state.specs}
        changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
        assert changed == {name for name in after if ".lora_" in name}
        assert changed
        roots.add(root_of(plan, swarm[0]))
    assert len(roots) == 1


def test_the_outer_step_is_torchs_nesterov() -> None:
    plan = lane_plan()
    reference = a_reference(plan)
    entry = reference.entries[1]
    other = torch.nn.Parameter(entry.weight.clone())
    torchs = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(1)
    for t in range(5):
        other.grad = torch.randn(entry.shape, generator=generator)
        torchs.step()
        reference._update(entry, other.grad * 2, 0.5, t)
    assert torch.allclose(entry.weight, other, rtol=1e-6, atol=1e-6)


def test_inner_rates_follow_the_schedule_and_the_owners_terms() -> None:
    plan = lane_plan()
    config = msgspec.structs.replace(
        plan.config, schedule=msgspec.structs.replace(plan.config.schedule, warmup_steps=4, kind="linear")
    )
    top = config.optimizer.learning_rate
    rates = [bits_fp32(inner_scalars(config, r, h).lr) for r in range(2) for h in range(STEPS)]
    assert rates[:4] == pytest.approx([top / 4, top / 2, top * 3 / 4, top])
    assert rates[4] == pytest.approx(top)
    assert rates[5] < rates[4]
    assert inner_scalars(config, -1, 1) == inner_scalars(config, 0, 1)
    assert inner_scalars(config, 1, 0).bias_correction1 == inner_scalars(config, 0, 0).bias_correction1
    assert bits_fp32(inner_scalars(config, 0, 0, Terms(lr_value=0.5)).lr) == 0.5
    outer = step_scalars(config, 1)
    assert (bits_fp32(outer.lr), outer.momentum) == (bits_fp32(fp32_bits(0.7)), fp32_bits(0.9))


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ({"count": 0}, "lanes.count"),
        ({"inner_steps": 5000}, "lanes.inner_steps"),
        ({"outer_learning_rate": 0.0}, "lanes.outer_learning_rate"),
        ({"outer_momentum": 1.0}, "lanes.outer_momentum"),
        ({"inner_clip_norm": -1.0}, "lanes.inner_clip_norm"),
        ({"pseudo_gradient_bits": 2}, "lanes.pseudo_gradient_bits"),
    ],
)
def test_wrong_lanes_are_refused(lanes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LanesSection(**lanes)


def test_lanes_dont_go_with_a_delay_and_bound_the_sums_by_their_number() -> None:
    config = lane_plan().config
    assert not config.merged_clip_norm
    assert config.qmax == 1023
    with pytest.raises(ConfigError, match="update_delay"):
        msgspec.structs.replace(config, pipeline=PipelineSection(microbatches=2, update_delay=1))
    many = RunConfig(config.run, config.model, pipeline=PipelineSection(microbatches=2**14), lanes=LanesSection(2, 1))
    assert many.qmax == 1023
    assert RunConfig(config.run, config.model, lanes=LanesSection(4, 5, pseudo_gradient_bits=8)).qmax == 127
    assert RunConfig(config.run, config.model, lanes=LanesSection(pseudo_gradient_bits=8)).qmax == 1023
    assert many.num_items == 2
