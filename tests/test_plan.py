"""`iota plan`: saved tensors, bytes and shares follow from shapes, and the formulas are what autograd and the wire do."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from iota.plan import Plan, human_bytes, human_count, make_plan, measure_unit_costs, render, snapshot_bytes
from subnet.errors import ConfigError
from subnet.model.items import ItemShape
from subnet.model.memory import (
    Budgets,
    LayerWidths,
    bf16_copy_bytes,
    boundary_bytes,
    boundary_bytes_per_token,
    graph_bytes,
    graphs_in_flight,
    layer_saved_bytes,
    stage_memory,
    stage_slice_bytes,
)
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.stage import build_stage
from subnet.numerics.codes import encode
from subnet.numerics.slices import slice_size
from subnet.run.audits import evidence_steps
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    MergeSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)
from subnet.run.runfile import load_run_file

ROOT = Path(__file__).parent.parent
SMALL = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
FACTS_MODEL = {
    **SMALL,
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}


def run_config(
    model: dict[str, Any] = SMALL,
    *,
    stages: int = 2,
    rows: int = 2,
    length: int = 32,
    compute: str = "fp32",
    chunks: int = 1,
    attention: str = "sdpa",
    packing: str = "bytes",
    microbatches: int = 8,
    code: str = "raw",
) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name="r"),
        model=ModelSection(config=model, attention=attention),
        data=DataSection(sequence_length=length),
        pipeline=PipelineSection(
            stages=stages, microbatches=microbatches, microbatch_rows=rows, chunks=chunks, boundary_code=code
        ),
        precision=PrecisionSection(compute=compute),
        merge=MergeSection(packing=packing),
    )


def model_plan(config: RunConfig, cuts: tuple[int, ...]) -> ModelPlan:
    assert config.model.config is not None
    return plan_model(config, load_architecture(config.model.config), cuts)


def saved_bytes(plan: ModelPlan, stage: int) -> int:
    """Storages that one chunk's forward leaves with autograd, without weights and the constants of the shape."""
    module = build_stage(plan, stage)
    leaves = module.bind({spec.name: torch.full(spec.shape, 0.01) for spec in plan.stage_tensors[stage]})
    rows, length = plan.config.pipeline.microbatch_rows, plan.config.data.sequence_length
    shared = {leaf.parameter.untyped_storage().data_ptr() for leaf in leaves}
    if plan.is_first(stage):
        x = torch.zeros(rows, length, dtype=torch.int64)
    else:
        x = torch.randn(rows, length, plan.hidden_size).requires_grad_()
    held: list[torch.Tensor] = []
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    module(x.detach())  # makes the constants of the shape
    constants = next(iter(module._constants.values()))
    (rotary,), (mask,) = constants.rotary.values(), constants.masks.values()
    shared |= {table.untyped_storage().data_ptr() for table in rotary}
    assert mask is None or plan.config.model.attention == "eager"
    if mask is not None:
        shared.add(mask.untyped_storage().data_ptr())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    sizes[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("groups", [2, 4])
def test_saved_tensors_are_what_autograd_saves(attention: str, compute: str, groups: int) -> None:
    model = {**SMALL, "num_key_value_heads": groups}
    config = run_config(model, stages=3, attention=attention, compute=compute)
    plan = model_plan(config, (0, 1, 3))
    for stage in range(3):
        assert graph_bytes(plan, stage) == saved_bytes(plan, stage), (stage, attention, compute)


def bound_copies(plan: ModelPlan, stage: int) -> list[torch.Tensor]:
    """The module's parameters that don't share their weight's memory."""
    weights = {spec.name: torch.zeros(spec.shape) for spec in plan.stage_tensors[stage]}
    leaves = build_stage(plan, stage).bind(weights)
    return [leaf.parameter for leaf in leaves if leaf.parameter.data_ptr() != weights[leaf.tensor].data_ptr()]


def test_layers_add_and_chunks_split() -> None:
    one, two = (model_plan(run_config(chunks=chunks), (0, 2)) for chunks in (1, 2))
    assert graph_bytes(two, 0) == graph_bytes(one, 0)
    widths = LayerWidths.of({**SMALL, "head_dim": 32})
    assert (widths.attention, widths.key_value) == (128, 64)
    cast = model_plan(run_config(compute="bf16"), (0, 2))
    copies = [2 * p.numel() for s in range(2) for p in bound_copies(cast, s)]
    assert sum(copies) == bf16_copy_bytes(cast, 0) + bf16_copy_bytes(cast, 1) > 0
    assert bf16_copy_bytes(one, 0) == 0
    small, large = (layer_saved_bytes(widths, rows=r, length=8, compute="fp32", attention="sdpa") for r in (1, 3))
    assert large == 3 * small


def test_graphs_in_flight() -> None:
    plan = model_plan(run_config(stages=4), (0, 1, 2, 3))
    assert [graphs_in_flight(plan, stage) for stage in range(4)] == [5, 4, 3, 1]
    assert graphs_in_flight(model_plan(run_config(stages=4, microbatches=2), (0, 1, 2, 3)), 0) == 2
    assert graphs_in_flight(model_plan(run_config(stages=1), (0,)), 0) == 1


def test_memory_of_the_29m_model() -> None:
    config = run_config(FACTS_MODEL, rows=4, length=256, microbatches=16)
    plan = model_plan(config, (0, 4))
    assert plan.units.num_parameters == 29_499_904
    first, last = (stage_memory(plan, stage) for stage in range(2))
    elements = sum(spec.num_elements for spec in plan.stage_tensors[0])
    assert first.size_of("weights") == first.size_of("accumulator") == 4 * elements
    assert first.size_of("moments") == 8 * elements
    layer = 1024 * (4 * (6 * 512 + 4 * 512 + 4 * 1376) + 4 * 8 + 8)
    assert first.size_of("retained graphs") == 3 * (4 * layer + 1024 * (8 + 4 * 512))
    assert last.size_of("retained graphs") == 4 * layer + 1024 * (8 * 512 + 4 + 4 * 512)
    assert first.size_of("boundary blobs") == 9 * 16 * boundary_bytes(plan)
    tight = stage_memory(plan, 0, Budgets(replicas=2, kept_steps=2, boundary_memory_bytes=1, graph_memory_bytes=1))
    assert tight.size_of("boundary blobs") == 8 * boundary_bytes(plan)
    assert tight.size_of("retained graphs") == graph_bytes(plan, 0)
    assert tight.peak_bytes < first.peak_bytes
    for memory in (first, last, tight):
        assert memory.peak_bytes == memory.phase_bytes("always") + max(
            memory.phase_bytes("compute"), memory.phase_bytes("merge")
        )
        assert {term.phase for term in memory.terms} == {"always", "compute", "merge"}


@pytest.mark.parametrize("code", ["raw", "int8", "int4"])
def test_boundaries_are_as_long_as_they_are_sent(code: str) -> None:
    config = run_config(rows=4, chunks=2, code=code)
    plan = model_plan(config, (0, 2))
    sent = encode(code, torch.randn(4 * 32, 48).numpy(), 2)
    assert boundary_bytes(plan) == sent.nbytes == ItemShape.of(plan).boundary_size_bytes
    assert boundary_bytes_per_token(plan) == sent.nbytes / 128
    memory = stage_memory(plan, 0)
    assert memory.size_of("received boundaries") == 8 * sent.nbytes
    assert memory.size_of("coding") == (0 if code == "raw" else 4 * 128 * 48)
    made = make_plan(config)
    assert (made.boundary_code, made.boundary_bytes_per_token) == (code, sent.nbytes / 128)
    assert made.stages[0].wire.boundaries_up == 8 * sent.nbytes
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(made))
    expected = {"raw": "raw, 192 bytes a token", "int8": "int8, 51 bytes a token", "int4": "int4, 27 bytes a token"}
    assert expected[code] in console.export_text()


def test_slices_are_as_long_as_the_wire_has_them() -> None:
    plan = model_plan(run_config(), (0, 2))
    for stage in range(2):
        held = plan.layout.stage_sections[stage]
        group = plan.layout.groups[plan.layout.group_of_stage[stage]]
        sizes = [slice_size(plan.layout.sections[p.section], p, 8) for p in group.partitions if p.section in held]
        assert stage_slice_bytes(plan, stage) == sum(sizes)
    bits = model_plan(run_config(packing="bits"), (0, 2))
    assert stage_slice_bytes(bits, 0) < stage_slice_bytes(plan, 0)


def demo(**changes: Any) -> Plan:
    return make_plan(load_run_file(ROOT / "examples" / "demo.toml"), **changes)


def test_demo_plan_adds_up() -> None:
    plan = demo(replicas=(3, 2, 2))
    assert plan.num_parameters == 3_443_136
    assert sum(stage.num_layers for stage in plan.stages) == 6
    assert sum(stage.cost_share for stage in plan.stages) == pytest.approx(1)
    assert not plan.measured
    assert plan.step_compute_s is None
    first, middle, last = (stage.wire for stage in plan.stages)
    a_boundary = 2 * 128 * 192 * 4
    assert middle.boundaries_up == middle.boundaries_down == 8 * a_boundary  # half of 8 items, two ways
    assert last.boundaries_up == 4 * a_boundary
    usual_steps, most_steps = evidence_steps(load_run_file(ROOT / "examples" / "demo.toml"))
    assert plan.evidence == (usual_steps * middle.boundaries_up, most_steps * middle.boundaries_up)
    assert middle.tokens_down == 0
    assert first.tokens_down > 0 < last.tokens_down
    assert middle.slices_up == middle.slices_down == middle.merged_up == middle.merged_down
    lonely = demo(replicas=1).stages[1].wire
    assert lonely.slices_up == lonely.slices_down == lonely.merged_down == 0
    assert lonely.merged_up == pytest.approx(2 * middle.merged_up, abs=2)
    store = plan.store
    assert store.to_horizon == 100 * (store.merged_per_step + store.journal_per_step) + 2 * store.snapshot
    assert store.snapshot > 12 * plan.num_parameters
    assert store.snapshot == snapshot_bytes(model_plan(load_run_file(ROOT / "examples" / "demo.toml"), plan.cuts))


def test_render_names_every_term() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with console.file:
        console.print(render(demo(unit_costs=[1, 2, 2, 2, 2, 2, 2, 5], replicas=2)))
    shown = console.export_text()
    assert "run demo: llama, 3.4M parameters, 150 steps of 2048 tokens; cut measured here" in shown
    for term in demo().stages[0].memory.terms:
        assert term.name in shown
    for words in (
        "boundaries",
        "evidence: ",
        "packed slices",
        "merged slices",
        "snapshot (average)",
        "retention horizon",
    ):
        assert words in shown
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(3 << 30) == "3.00 GiB"
    assert human_count(29_499_904) == "29.5M"


def test_measured_costs_cut_the_model() -> None:
    config = run_config(stages=2)
    assert config.model.config is not None
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        costs = measure_unit_costs(config, config.model.config, budget_s=5)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert len(costs) == 6
    assert all(cost > 0 for cost in costs)
    assert len(set(costs[1:-1])) == 1
    plan = make_plan(config, unit_costs=costs)
    assert plan.measured
    assert plan.step_compute_s == pytest.approx(sum(costs) * 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: make_plan(run_config(stages=5)),
            "pipeline.stages = 5 is not allowed: the model has 4 layers (allowed: 1 to 4)",
        ),
        (
            lambda: make_plan(run_config(), unit_costs=[1.0, 1.0]),
            "2 unit costs for 4 layers (embedding, each layer, head)",
        ),
        (
            lambda: make_plan(run_config(), replicas=(1, 0)),
            "replicas = [1, 0] is not allowed (one number above 0 for each of 2 stages)",
        ),
        (
            lambda: make_plan(
                RunConfig(audit=NO_AUDITS, run=RunSection(name="r"), model=ModelSection(pretrained="llm"))
            ),
            "the run's model config isn't known (give the config.json of model.pretrained)",
        ),
    ],
)
def test_bad_plans_are_one_line(build: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value) == message


def test_memory_needs_no_torch() -> None:
    script = "import sys, subnet.model.memory, subnet.model.data, subnet.run.runfile, validator.stage_plan; "
    script += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=False).returncode == 0
