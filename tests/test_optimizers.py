"""Muon and 8-bit moments: stages equal the reference to the bit, states travel whole, and both learn; schedules and groups."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from family_cases import StagedRun, family_config, family_plan, streams
from torch import Tensor

from benchmarks.reference import Reference
from benchmarks.setting import learning_rate as second_learning_rate
from subnet.engine.stage_state import StageState
from subnet.errors import ConfigError, InputError
from subnet.model.plan import ModelPlan
from subnet.numerics.layout import TensorSpec, build_layout
from subnet.numerics.muon import orthogonal, update_scale
from subnet.numerics.optimizer import adamw_update_, decays, is_muons, update_
from subnet.numerics.state_arrays import MOMENTS_8BIT, ordered, state_kinds
from subnet.run.config import OptimizerSection, RunConfig, ScheduleSection
from subnet.run.schedule import Terms, bits_fp32, fp32_bits, learning_rate, step_scalars
from subnet.words import BlobHash

MUON = OptimizerSection(kind="muon", learning_rate=3e-3)
EIGHT = OptimizerSection(state_bits=8, learning_rate=3e-3, decay_embeddings=False)


def plan_of(optimizer: OptimizerSection, name: str = "llama", cuts: tuple[int, ...] = (0, 2)) -> ModelPlan:
    plan = family_plan(name, cuts)
    return dataclasses.replace(plan, config=msgspec.structs.replace(plan.config, optimizer=optimizer))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("optimizer", [MUON, EIGHT], ids=["muon", "8bit"])
def test_two_stages_are_one_process_to_the_bit(optimizer: OptimizerSection, name: str) -> None:
    plan = plan_of(optimizer, name)
    staged = StagedRun(plan)
    reference = Reference(plan.config, family_config(name), *streams())
    staged.step(-1)
    reference.calibrate()
    losses: list[float] = []
    for step in range(4):
        report = reference.step(step)
        found = staged.step(step)
        losses.append(report.loss)
        assert sum(found) / len(found) == report.loss
        assert staged.root() == reference.state_root()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", [MUON, EIGHT], ids=["muon", "8bit"])
def test_a_state_travels_whole_and_another_optimizers_is_refused(optimizer: OptimizerSection) -> None:
    plan = plan_of(optimizer)
    staged = StagedRun(plan)
    for step in range(-1, 2):
        staged.step(step)
    blobs: dict[str, bytes] = {}

    def put(blob: BlobHash, data: memoryview) -> None:
        blobs[blob] = bytes(data)

    first = staged.stages[0].state
    manifest = first.snapshot(put)
    other = StageState(plan, 0)
    other.load(manifest, lambda ref: blobs[ref.hash])
    assert other.stage_root() == first.stage_root()
    size = sum(len(data) for name in (spec.name for spec in first.specs) for data in first.export_arrays(name).values())
    elements = sum(spec.num_elements for spec in first.specs)
    assert size < (7 if optimizer.state_bits == 8 else 13) * elements
    if optimizer.state_bits == 8:
        plain = StageState(plan_of(OptimizerSection()), 0)
        with pytest.raises(InputError, match="another optimizer"):
            plain.load(manifest, lambda ref: blobs[ref.hash])


def test_the_list_of_arrays_is_the_optimizers() -> None:
    plain = plan_of(OptimizerSection()).config
    assert state_kinds(plain) == ("weight", "exp_avg", "exp_avg_sq", "decayed", "limit")
    delayed = msgspec.structs.replace(plain, pipeline=msgspec.structs.replace(plain.pipeline, update_delay=1))
    assert state_kinds(delayed)[-1] == "limit_before"
    assert state_kinds(plan_of(EIGHT).config) == ("weight", *MOMENTS_8BIT, "decayed", "limit")
    assert ordered(["limit", "nonsense", "weight"]) == ("weight", "limit")


# ---- Muon


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_an_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    made = orthogonal(matrix * 1e-6)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    singular = torch.linalg.svdvals(made)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    assert torch.nn.functional.cosine_similarity(made.flatten(), (u @ v).flatten(), dim=0) > 0.95
    assert orthogonal(torch.zeros(shape)).eq(0).all()
    assert update_scale(16, 100) == 2.0


def test_muon_stays_with_torchs_own() -> None:
    """Which iterates in bf16, so closely only."""
    spec, generator = TensorSpec("layer.weight", (48, 64)), torch.Generator().manual_seed(2)
    section = build_layout([[spec]], tied=None, qmax=1023).sections[0]
    start = torch.randn(spec.num_elements, generator=generator) * 0.02
    arrays = {"weight": start.clone(), "exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    param = start.clone().view(spec.shape).requires_grad_()
    config = plan_of(MUON).config
    theirs = torch.optim.Muon(
        [param], lr=3e-3, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    ks = torch.full((section.num_blocks,), -14, dtype=torch.int16)
    for step in range(5):
        q = torch.randint(-4000, 4001, (spec.num_elements,), generator=generator).float()
        scalars = step_scalars(config, step)
        update_(section, arrays, q, ks, fp32_bits(1 / 8), scalars, MUON)
        param.grad = (q * 2.0**-14 / 8).view(spec.shape)
        for group in theirs.param_groups:
            group["lr"] = bits_fp32(scalars.lr)
        theirs.step()
    moved, apart = arrays["weight"] - start, arrays["weight"] - param.detach().flatten()
    assert apart.norm() < 0.03 * moved.norm()
    assert arrays["exp_avg_sq"].eq(0).all()


# ---- 8-bit moments


def test_eight_bits_stay_near_thirty_two() -> None:
    spec = TensorSpec("layer.weight", (40, 100))
    section = build_layout([[spec]], tied=None, qmax=1023).sections[0]
    n, generator, config = spec.num_elements, torch.Generator().manual_seed(3), plan_of(EIGHT).config
    spread = torch.exp(torch.randn(n, generator=generator) * 1.5)  # gradients of very different sizes in one block
    plain = {kind: torch.zeros(n) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    sizes = {kind: section.num_blocks if kind.endswith("scale") else n for kind in MOMENTS_8BIT}
    kinds = {"exp_avg_code": torch.int8, "exp_avg_sq_code": torch.uint8}
    small: dict[str, Tensor] = {k: torch.zeros(size, dtype=kinds.get(k, torch.float32)) for k, size in sizes.items()}
    small["weight"] = torch.zeros(n)
    ks = torch.full((section.num_blocks,), -14, dtype=torch.int16)
    for step in range(30):
        q = torch.round(torch.randn(n, generator=generator) * spread * 100).clamp(-16000, 16000)
        scalars = step_scalars(config, step)
        coefficient = fp32_bits(1.0)
        adamw_update_(section, plain["weight"], plain["exp_avg"], plain["exp_avg_sq"], q, ks, coefficient, scalars)
        update_(section, small, q, ks, coefficient, scalars, EIGHT)
    apart = small["weight"] - plain["weight"]
    assert apart.norm() < 0.1 * plain["weight"].norm()
    code = small["exp_avg_sq_code"]
    assert code[plain["exp_avg_sq"] > 0].gt(0).all()  # no update is divided by epsilon alone
    assert apart.abs().max() < 30 * 3e-3


# ---- decay groups


def test_norms_biases_and_by_choice_the_embedding_do_not_decay() -> None:
    settings, without = OptimizerSection(), OptimizerSection(decay_embeddings=False)
    embedding = TensorSpec("model.embed_tokens.weight", (8, 4), True)
    cases = {
        TensorSpec("model.layers.0.mlp.up_proj.weight", (4, 4)): (True, True),
        TensorSpec("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 8)): (False, False),
        TensorSpec("model.norm.weight", (4,)): (False, False),
        TensorSpec("lm_head.weight", (8, 4), True): (True, True),
        embedding: (True, False),
    }
    for spec, (plainly, chosen) in cases.items():
        assert (decays(spec, settings), decays(spec, without)) == (plainly, chosen), spec.name
    muons = [spec.name for spec in cases if is_muons(spec, MUON)]
    assert muons == ["model.layers.0.mlp.up_proj.weight"]
    assert not any(is_muons(spec, settings) for spec in cases)


# ---- schedules


def scheduled(steps: int = 100, **schedule: object) -> RunConfig:
    config = plan_of(OptimizerSection(learning_rate=1.0)).config
    run = msgspec.structs.replace(config.run, steps=steps)
    return msgspec.structs.replace(config, run=run, schedule=ScheduleSection(**schedule))  # type: ignore[arg-type]


def test_stable_then_decay() -> None:
    config = scheduled(kind="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0.0)
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[0] == 0.1
    assert set(rates[9:81]) == {1.0}
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == 0.0
    root = scheduled(kind="wsd", decay_steps=16, decay_shape="sqrt", final_fraction=0.0)
    assert learning_rate(root, 84) == 1.0
    assert learning_rate(root, 88) == 0.5
    linear = scheduled(kind="linear", final_fraction=0.5)
    assert [learning_rate(linear, step) for step in (0, 50, 100, 150)] == [1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_the_page_is_written_twice(kind: str) -> None:
    for shape in ("linear", "sqrt"):
        config = scheduled(kind=kind, warmup_steps=7, decay_shape=shape, decay_fraction=0.33)
        assert [learning_rate(config, t) for t in range(100)] == [second_learning_rate(config, t) for t in range(100)]


def test_an_owners_terms_change_rate_and_length() -> None:
    config = scheduled(kind="wsd", decay_fraction=0.5, final_fraction=0.0)
    assert learning_rate(config, 75, Terms(lr_factor=0.5)) == 0.25
    assert learning_rate(config, 75, Terms(lr_value=0.125)) == 0.125
    longer = Terms(steps=200)
    assert [learning_rate(config, step, longer) for step in (100, 150)] == [1.0, 0.5]
    scalars = step_scalars(config, 75, Terms(lr_factor=0.5))
    assert bits_fp32(scalars.lr) == 0.25
    assert scalars.decay == int(np.float32(1 - 0.25 * 0.1).view(np.uint32))


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("optimizer", {"kind": "lion"}, "adamw, muon"),
        ("optimizer", {"kind": "muon", "state_bits": 8}, "8 is for adamw"),
        ("optimizer", {"state_bits": 16}, "8, 32"),
        ("schedule", {"kind": "poly"}, "wsd"),
        ("schedule", {"decay_shape": "cubic"}, "sqrt"),
        ("schedule", {"decay_fraction": 0.0}, "above 0"),
    ],
)
def test_wrong_settings_name_what_is_allowed(section: str, values: dict[str, object], said: str) -> None:
    made = {"optimizer": OptimizerSection, "schedule": ScheduleSection}[section]
    with pytest.raises(ConfigError) as caught:
        made(**values)  # type: ignore[arg-type]
    assert said in str(caught.value.hint)
    with pytest.raises(ConfigError, match="decay_steps"):
        scheduled(steps=10, kind="wsd", warmup_steps=5, decay_steps=6)
