"""Every family of models: three stages are the one-process reference to the bit, and the export is plain transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from family_cases import CUTS, LENGTH, NAMES, ROUTED, StagedRun, family_config, family_plan, streams
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.reference import Reference
from subnet.errors import ConfigError, InputError
from subnet.model.boundary_check import is_unusable
from subnet.model.checkpoints import initial_weights, write_pretrained
from subnet.model.families import FAMILIES
from subnet.model.hardware_class import hardware_class
from subnet.model.items import ItemShape
from subnet.model.memory import boundary_bytes, boundary_parts, stage_memory
from subnet.model.plan import ModelPlan
from subnet.model.pretrained import PretrainedDirectory
from subnet.model.registry import check_run, load_architecture
from subnet.model.routing import router_loss
from subnet.model.stage import Boundary, prepare_torch
from subnet.model.unit_costs import measure_unit_costs
from subnet.protocol.wire import blob_hash
from subnet.run.config import ModelSection
from subnet.words import ItemKey

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE.*")


@pytest.fixture(autouse=True)
def _torch_settings():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    prepare_torch(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def reference_of(plan: ModelPlan) -> Reference:
    return Reference(plan.config, dict(plan.model_config), *streams(), cuts=plan.cuts)


def plain_logits(directory: Path, tokens_BL: torch.Tensor, compute: str = "fp32") -> torch.Tensor:
    """Of plain ``transformers``; under bf16 by autocast, with the experts' matrices in bf16 (docs/models.md)."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    bf16 = compute == "bf16"
    for name, parameter in model.named_parameters():
        if bf16 and ".experts." in name and parameter.dim() == 3:
            parameter.data = parameter.data.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        return model(input_ids=tokens_BL, use_cache=False).logits.float()


def staged_logits(run: StagedRun, tokens_BL: torch.Tensor) -> torch.Tensor:
    x, last = Boundary(tokens_BL), run.stages[-1].state.module
    with torch.no_grad():
        for executor in run.stages:
            x = executor.state.module.through(x)
        with last.region(tokens_BL.device):
            return last.logits(x.hidden_BLH).float()


def check_family(name: str, steps: int, directory: Path, compute: str = "fp32") -> list[float]:
    """Trains both, compares their states, exports and compares logits; gives the mean losses."""
    plan = family_plan(name, compute=compute, steps=steps)
    reference, run = reference_of(plan), StagedRun(plan)
    assert [(e.name, e.shape) for e in reference.entries] == [(s.name, s.shape) for s in plan.canonical]
    reference.calibrate()
    run.step(-1)
    losses: list[float] = []
    for step in range(steps):
        report, ours = reference.step(step), run.step(step)
        assert report.loss == sum(ours) / len(ours)
        losses.append(report.loss)
    assert run.root() == reference.state_root()
    weights = run.weights()
    write_pretrained(directory, plan.model_config, plan.canonical, lambda s: weights[s.name], max_shard_bytes=1 << 15)
    tokens_BL = torch.from_numpy(streams()[1][: 2 * LENGTH].astype(np.int64)).view(2, LENGTH)
    assert torch.equal(plain_logits(directory, tokens_BL, compute), staged_logits(run, tokens_BL))
    read = {spec.name: tensor for spec, tensor in PretrainedDirectory(directory).read(plan.canonical)}
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_three_stages_are_the_reference_and_the_export_is_plain_transformers(name: str, tmp_path: Path) -> None:
    losses = check_family(name, 3, tmp_path / "model")
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps(name: str, compute: str, tmp_path: Path) -> None:
    losses = check_family(name, 50, tmp_path / "model", compute)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_bf16_stages_are_the_reference(name: str, tmp_path: Path) -> None:
    check_family(name, 1, tmp_path / "model", "bf16")


def test_experts_are_multiplied_in_bf16_under_bf16() -> None:
    for compute, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        module = StagedRun(family_plan("mixtral", compute=compute)).stages[1].state.module
        leaves = {leaf.name: leaf for leaf in module.bound if ".experts." in leaf.name}
        assert {leaf.parameter.dtype for leaf in leaves.values()} == {expected}
        assert {leaf.master.dtype for leaf in leaves.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "deepseek_v3"])
def test_a_directory_that_the_library_wrote_is_read(name: str, tmp_path: Path) -> None:
    architecture = load_architecture(family_config(name))
    settings = AutoConfig.for_model(**{**architecture.model_config, "model_type": name})
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    held = model.state_dict()
    specs = [spec for unit in architecture.units(LENGTH).units for spec in unit]
    source = PretrainedDirectory(tmp_path)
    source.check(specs)
    for spec, tensor in source.read(specs):
        assert torch.equal(tensor, held[spec.name]), spec.name


@pytest.mark.parametrize("name", [*ROUTED, "deepseek_v3"])
def test_an_item_is_the_same_bytes_whatever_was_done_before_it(name: str) -> None:
    plan = family_plan(name)
    kept, redone = StagedRun(plan), StagedRun(plan, graph_budget_bytes=0)
    first, second = kept.item(-1, 0), kept.item(-1, 1)
    assert (redone.item(-1, 1), redone.item(-1, 0)) == (second, first)
    for run in (kept, redone):
        for executor in run.stages:
            executor.drop_partial(next(iter(executor.partials)))
    kept.step(-1)
    redone.step(-1)
    kept.step(0)
    redone.step(0)
    assert kept.root() == redone.root()


def test_equal_probabilities_are_ordered_the_same_wherever_a_token_stands() -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor([0.25, 0.125, 0.25, 0.25, 0.0, 0.125])
    chosen = torch.topk(row[None], 2, dim=-1).indices[0]
    for rows in (2, 17, 64, 1000):
        table = torch.rand(rows, 6, generator=generator)
        table[rows // 2] = row
        assert torch.equal(torch.topk(table, 2, dim=-1).indices[rows // 2], chosen)


@pytest.mark.parametrize("name", ROUTED)
def test_the_router_loss_is_the_librarys_of_the_whole_model(name: str, tmp_path: Path) -> None:
    plan = family_plan(name, chunks=1)
    run, architecture = StagedRun(plan), load_architecture(plan.model_config)
    weights = initial_weights(plan)
    write_pretrained(tmp_path / "m", plan.model_config, plan.canonical, lambda s: weights[s.name])
    library: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    tokens_BL = torch.from_numpy(streams()[0][: 4 * LENGTH].astype(np.int64)).view(4, LENGTH)
    with torch.no_grad():
        expected = library(input_ids=tokens_BL, output_router_logits=True, use_cache=False).aux_loss
        x = Boundary(tokens_BL)
        for executor in run.stages:
            x = executor.state.module.through(x)
    assert x.routing_2E is not None
    assert torch.equal(router_loss(x.routing_2E, 4 * LENGTH * architecture.num_sparse_layers, 1.0), expected)
    assert expected > 1  # 1 is a perfect balance of one expert each


@pytest.mark.parametrize("code", ["int8", "int4"])
def test_router_sums_cross_a_coded_boundary_as_they_are(code: str) -> None:
    plan = family_plan("mixtral", code=code)
    reference, run = reference_of(plan), StagedRun(plan)
    reference.calibrate()
    run.step(-1)
    assert reference.step(0).loss == sum(run.step(0)) / 2
    assert run.root() == reference.state_root()
    crossed, _ = run.item(1, 0)
    sizes = {len(data) for data in crossed if data}
    assert sizes == {boundary_bytes(plan)} == {ItemShape.of(plan).boundary_size_bytes}
    assert sum(size for size, _ in boundary_parts(plan)) == boundary_bytes(plan)
    without = family_plan("mixtral", code=code, output_router_logits=False)
    assert boundary_bytes(plan) - boundary_bytes(without) == 2 * 4 * 4 * 2


def test_router_sums_of_a_peer_are_checked() -> None:
    plan = family_plan("mixtral")
    run, size = StagedRun(plan), boundary_bytes(plan)
    good = bytearray(run.item(-1, 0)[0][0])
    shape, device = ItemShape.of(plan), torch.device("cpu")
    assert len(shape.boundary(bytes(good), device, "input")) == 2
    with pytest.raises(InputError, match=f"has {size - 4} bytes instead of {size}"):
        shape.boundary(bytes(good[:-4]), device, "input")
    assert not is_unusable(plan, blob_hash(bytes(good)), bytes(good))
    good[-4:] = np.float32(np.nan).tobytes()
    assert is_unusable(plan, blob_hash(bytes(good)), bytes(good))
    assert is_unusable(plan, blob_hash(bytes(good[:-4])), bytes(good[:-4]))
    with pytest.raises(InputError, match="router sums of the input are not finite"):
        shape.boundary(bytes(good), device, "input")
    with pytest.raises(InputError, match="not finite"):
        run.stages[1].forward(ItemKey(-1, 0, 1), bytes(good), None, keep_graph=False)


def test_the_hold_out_loss_has_no_router_loss() -> None:
    plan, silent = family_plan("olmoe"), family_plan("olmoe", output_router_logits=False)
    rows = streams()[1][: 4 * (LENGTH + 1)].astype(np.int64).reshape(4, LENGTH + 1)

    def loss(plan: ModelPlan, microbatch: int) -> int | None:
        x, made = None, None
        for executor in StagedRun(plan).stages:
            item = ItemKey(-1, microbatch, executor.stage)
            made = executor.forward(item, x, rows, keep_graph=False)
            x = made.output
        return made.loss_bits if made else None

    holdout = plan.config.pipeline.microbatches
    assert loss(plan, holdout) == loss(silent, holdout) == loss(silent, 0)
    assert loss(plan, 0) != loss(silent, 0)


def test_the_routing_bias_is_state_without_a_gradient(tmp_path: Path) -> None:
    plan = family_plan("deepseek_v3")
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    weights = initial_weights(plan)
    assert not weights[bias].any()
    run, pushed = StagedRun(plan), StagedRun(plan)
    push = torch.linspace(-0.4, 0.4, 8)
    for executor in pushed.stages:
        held = {**weights, bias: push}
        executor.state.load_weights({spec.name: held[spec.name] for spec in executor.state.specs})
    roots = {run.root(), pushed.root()}
    for each in (run, pushed):
        each.step(-1)
        each.step(0)
    assert torch.equal(pushed.weights()[bias], push)
    assert len(roots | {run.root(), pushed.root()}) == 4
    name = "model.layers.2.mlp.gate.weight"
    assert not torch.equal(run.weights()[name], pushed.weights()[name])
    held = pushed.weights()
    write_pretrained(tmp_path / "m", plan.model_config, plan.canonical, lambda s: held[s.name])
    tokens_BL = torch.from_numpy(streams()[1][: 2 * LENGTH].astype(np.int64)).view(2, LENGTH)
    assert torch.equal(plain_logits(tmp_path / "m", tokens_BL), staged_logits(pushed, tokens_BL))


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_plans_costs_and_golden_tasks_know_the_kinds_of_layers(name: str) -> None:
    plan = family_plan(name)
    architecture = load_architecture(plan.model_config)
    kinds = [architecture.layer_kind(layer) for layer in range(architecture.num_layers)]
    assert len(set(kinds)) == 2
    costs = measure_unit_costs(plan.config, architecture, budget_s=0.5)
    assert len(costs) == architecture.num_layers + 2
    assert min(costs) > 0
    assert len({costs[1 + kinds.index(kind)] for kind in set(kinds)}) == 2
    hashes = hardware_class(plan)
    assert hashes == hardware_class(plan)
    assert len(set(hashes)) == len(CUTS)
    assert all(stage_memory(plan, stage).peak_bytes > 0 for stage in range(len(CUTS)))


def test_flops_count_the_experts_a_token_meets() -> None:
    sizes = {count: family_plan("mixtral", num_experts_per_tok=count).units for count in (1, 2)}
    per_expert = 6.0 * 3 * 32 * 48
    assert sizes[2].unit_flops_per_token[1] - sizes[1].unit_flops_per_token[1] == per_expert
    assert sizes[1].num_parameters == sizes[2].num_parameters


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bloom", {}, "'bloom' is not in the table of families"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 is not allowed: a layer has 4 experts"),
        ("olmoe", {"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group = 5"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"hidden_activation": "sulu"}, "hidden_activation = 'sulu'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised weights can't be trained"),
        ("qwen3_moe", {"num_expert_per_tok": 2}, "did you mean num_experts_per_tok"),
    ],
)
def test_what_cant_be_trained_is_refused_with_the_remedy(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_architecture(family_config(name, **changes))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint or "did you mean" in words


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_attention_that_the_library_lacks_is_refused(name: str) -> None:
    plan = family_plan(name)
    run = msgspec.structs.replace(plan.config, model=ModelSection(config=dict(plan.model_config), attention="sdpa"))
    with pytest.raises(ConfigError, match=r"set model\.attention = 'eager'"):
        check_run(run, load_architecture(plan.model_config))


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")][1:]
    expected = [
        f"| `{f.model_type}` | {f.causal_lm} | {', '.join(f.attentions)} | {f.notes or 'the plain case'} |"
        for f in FAMILIES.values()
    ]
    assert rows == expected
