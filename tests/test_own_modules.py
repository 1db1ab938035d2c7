"""A sequence of a builder's own modules: stages are the whole model to the bit, and no code runs that wasn't allowed."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from family_cases import LENGTH, StagedRun, family_plan, streams
from own_modules_case import build
from torch import Tensor, nn

import benchmarks.reference as reference_module
import iota
from benchmarks.reference import Reference
from iota.own_modules import for_others, keep, load_modules
from iota.swarm import LocalSwarm, SwarmOptions
from miner.settings import MinerSettings
from subnet.errors import ConfigError
from subnet.model import own_code
from subnet.model.checkpoints import write_pretrained
from subnet.model.hardware_class import hardware_class
from subnet.model.memory import stage_memory
from subnet.model.model_card import model_card
from subnet.model.own_code import CodeNotAllowed
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.sequence import SequenceArchitecture, build_modules, check_behaviour, describe
from subnet.model.sequence_files import load_directory
from subnet.model.stage import prepare_torch
from subnet.model.unit_costs import measure_unit_costs
from subnet.run.config import DataSection, ModelSection, ObjectiveSection, RunConfig, RunSection
from subnet.run.runfile import config_to_toml, parse_run
from subnet.timing import Deadline

CASE = Path(__file__).with_name("own_modules_case.py")
HASH = own_code.hash_of(CASE)
CUTS = (0, 1, 3)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    prepare_torch(1)
    monkeypatch.setenv(own_code.VARIABLE, str(CASE))
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def plan_of(cuts: tuple[int, ...] = CUTS, compute: str = "fp32", **arguments: Any) -> ModelPlan:
    config = family_plan("llama", CUTS, compute=compute).config
    pipeline = msgspec.structs.replace(config.pipeline, stages=len(cuts))
    model = ModelSection(config=arguments, modules=f"{CASE}:build", modules_hash=HASH)
    config = msgspec.structs.replace(config, model=model, pipeline=pipeline)
    return plan_model(config, load_architecture(describe(f"{CASE.name}:build", HASH, arguments)), cuts)


class _Inner(nn.Module):
    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = modules[0]
        self.layers = nn.ModuleList(modules[1:-1])

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x).float()
        return SimpleNamespace(last_hidden_state=x)


class _Whole(nn.Module):
    """The builder's modules as the reference wants a model: a module with a head."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.model, self.lm_head = _Inner(modules), modules[-1]
        self.config = SimpleNamespace()


def reference_of(plan: ModelPlan, monkeypatch: pytest.MonkeyPatch) -> Reference:
    """One process, one model, from the builder's own draws."""
    digest = blake3(b"iota/init/1\0" + plan.config.run.seed.to_bytes(8, "little") + f"{CASE.name}:build".encode())
    torch.manual_seed(int.from_bytes(digest.digest()[:8], "little") & (2**63 - 1))
    modules = [module.eval() for module in build(**(plan.config.model.config or {}))]
    drawn = {name: tensor.detach().clone() for name, tensor in _Whole(modules).state_dict().items()}
    if modules[-1].weight is modules[0].weight:
        modules[-1] = nn.Linear(24, 64, bias=False)
    monkeypatch.setattr(reference_module, "build_model", lambda *_, **__: _Whole(modules))
    monkeypatch.setattr(reference_module, "draw", lambda name, *_, **__: drawn[name].clone())
    return Reference(plan.config, dict(plan.model_config), *streams())


@pytest.mark.parametrize(("compute", "tied"), [("fp32", False), ("bf16", False), ("fp32", True)])
def test_three_stages_are_one_process_to_the_bit(
    compute: str, tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_of(compute=compute, tied=tied)
    reference, run, whole = (
        reference_of(plan, monkeypatch),
        StagedRun(plan),
        StagedRun(plan_of((0,), compute, tied=tied)),
    )
    assert [entry.name for entry in reference.entries] == [spec.name for spec in plan.canonical]
    reference.calibrate()
    run.step(-1)
    whole.step(-1)
    losses = []
    for step in range(3):
        losses.append(reference.step(step).loss)
        assert losses[-1] == sum(run.step(step)) / 2 == sum(whole.step(step)) / 2
    assert run.root() == whole.root() == reference.state_root()
    assert losses[-1] < losses[0]
    weights = run.weights()
    card = model_card(plan.config, plan.model_config, step=3, root=run.root(), num_parameters=1)
    write_pretrained(tmp_path / "m", plan.model_config, plan.canonical, lambda spec: weights[spec.name], card=card)
    loaded = by_the_card(tmp_path / "m")
    again = load_directory(tmp_path / "m")
    tokens_BL = torch.from_numpy(streams()[1][: 2 * LENGTH].astype(np.int64)).view(2, LENGTH)
    with torch.no_grad():
        x: Any = tokens_BL
        for executor in run.stages:
            x = executor.state.module(x)
        if compute == "fp32":
            assert torch.equal(loaded(tokens_BL), run.stages[-1].state.module.logits(x))
        assert torch.equal(loaded(tokens_BL), again(tokens_BL))


def by_the_card(directory: Path) -> nn.Module:
    """What the model card says to do, in the directory."""
    words = (directory / "README.md").read_text().split("```python\n")[1].split("```")[0]
    source = words.replace('"config.json"', f'"{directory}/config.json"')
    source = source.replace('"model.safetensors"', f'"{directory}/model.safetensors"')
    source = source.replace("from modules import build", f"exec(Path('{directory}/modules.py').read_text())")
    found: dict[str, Any] = {"__name__": "by_the_card"}
    exec(source, found)
    return found["model"]


def test_costs_memory_and_golden_tasks_are_had_of_any_module() -> None:
    plan = plan_of()
    architecture = load_architecture(plan.model_config)
    costs = measure_unit_costs(plan.config, architecture, budget_s=0.5)
    assert len(costs) == len(plan.units.units)
    assert min(costs) > 0
    assert hardware_class(plan) == hardware_class(plan)
    assert all(stage_memory(plan, stage).peak_bytes > 0 for stage in range(3))


def test_the_initial_weights_are_the_builders_draws_and_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, other = (build_modules(f"{CASE.name}:build", HASH, {}, seed=seed) for seed in (1, 2))
    assert torch.equal(torch.rand(2), expected)
    again = build_modules(f"{CASE.name}:build", HASH, {}, seed=1)
    assert torch.equal(one[1].conv.weight, again[1].conv.weight)
    assert not torch.equal(one[1].conv.weight, other[1].conv.weight)


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        ("with_block", "whole", "module 1 lets a position see later ones"),
        ("with_block", "noisy", "module 1 gives other numbers the second time"),
        ("with_block", "idle", "spare.weight of module 1 got no gradient"),
        ("with_block", "wide", "module 1 gives (1, 12, 25)"),
        ("with_block", "double", "weight of module 1 is torch.float64"),
        ("with_block", "bare", "module 1 has no weights"),
        ("with_block", "frozen", "weight of module 1 is frozen"),
        ("with_block", "twice", "modules 1 and 2 share norm.weight"),
        ("biased", "", "the last module is no nn.Linear without bias"),
        ("narrow", "", "the head is 24 to 60, the embedding 64 by 24"),
        ("not_modules", "", "gives no sequence of modules"),
        ("falls", "", "fails: RuntimeError: no modules today"),
        ("nothing", "", "is no function of that file"),
    ],
)
def test_what_cant_be_trained_is_refused_in_one_line(function: str, kind: str, words: str) -> None:
    arguments = {"kind": kind} if kind else {}
    with pytest.raises(ConfigError) as caught:
        tried(function, arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def tried(function: str, arguments: dict[str, Any]) -> None:
    """As a submission does."""
    architecture = load_architecture(describe(f"{CASE.name}:{function}", HASH, arguments))
    assert isinstance(architecture, SequenceArchitecture)
    check_behaviour(architecture, LENGTH)


def test_code_that_isnt_allowed_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap, mark = tmp_path / "trap.py", tmp_path / "mark"
    trap.write_text(f"open({str(mark)!r}, 'w').close()\ndef build(): return []\n")
    hash_ = own_code.hash_of(trap)
    described = {"model_type": "modules", "modules": "trap.py:build", "modules_hash": hash_, "arguments": {}}
    with pytest.raises(CodeNotAllowed, match=rf"isn't allowed here .*--allow-code FILE.py@{hash_}"):
        load_architecture(described)
    with pytest.raises(CodeNotAllowed):
        own_code.check_code(described)
    assert not mark.exists()
    own_code.allow([f"{trap}@{hash_}"])
    trap.write_text(trap.read_text() + "# another file now\n")
    with pytest.raises(CodeNotAllowed):
        load_architecture(described)
    assert not mark.exists()
    with pytest.raises(ConfigError, match="has hash"):
        own_code.allow([f"{trap}@{hash_}"])
    with pytest.raises(ConfigError, match=rf"names no hash \(.*{own_code.hash_of(trap)}"):
        own_code.allow([str(trap)])
    kept = keep(trap, tmp_path / "code")
    (tmp_path / "code" / f"{kept}.py").write_text("changed")
    own_code.allow(folder=tmp_path / "code")
    with pytest.raises(own_code.Corrupt):
        load_architecture({**described, "modules_hash": kept})
    assert not mark.exists()


def test_a_miner_and_a_validator_begin_with_what_their_operator_allowed_alone() -> None:
    own_code.allow()
    with pytest.raises(CodeNotAllowed):
        load_architecture(describe_unchecked())


def describe_unchecked() -> dict[str, Any]:
    return {"model_type": "modules", "modules": f"{CASE.name}:build", "modules_hash": HASH, "arguments": {}}


def test_a_run_file_names_a_function_and_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CASE.read_text())
    text = '[run]\nname = "a"\n[model]\nmodules = "net.py:build"\n[model.config]\ndepth = 2\n'
    config = parse_run(text, tmp_path)
    assert config.model.modules == f"{tmp_path}/net.py:build"
    assert parse_run(config_to_toml(config), Path("/")) == config
    assert load_modules(config).num_layers == 3
    shown = for_others(config)
    assert (shown.model.modules, shown.model.modules_hash) == ("net.py:build", HASH)
    pinned = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, modules_hash="0" * 64))
    with pytest.raises(ConfigError, match="has hash"):
        load_modules(pinned)
    for wrong, words in (
        ('modules = "net.py"', "write it as"),
        ('modules = "gone.py:build"', "there is no file"),
        ('modules = "nowhere.at_all:build"', "nowhere"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_modules(parse_run(text.replace('modules = "net.py:build"', wrong), tmp_path))
    with pytest.raises(ConfigError, match="exactly one of the two"):
        parse_run(text.replace("[model.config]", 'pretrained = "x"\n[model.config]'), tmp_path)


def test_the_sdk_names_a_functions_file_and_allows_it_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(own_code.VARIABLE)
    model = iota.Model.from_modules(build, depth=2)
    assert model.section(tmp_path) == {"modules": f"{CASE}:build", "config": {"depth": 2}}
    assert model.family == "modules"
    assert own_code.code_of(HASH, "") == CASE.read_bytes()
    with pytest.raises(ConfigError, match="no function at the top of a Python file"):
        iota.Model.from_modules(lambda: [])


def test_adapters_and_dialogues_are_for_library_models() -> None:
    plan = plan_of()
    config = msgspec.structs.replace(plan.config, objective=ObjectiveSection(kind="sft"))
    with pytest.raises(ConfigError, match="not allowed with model"):
        plan_model(config, load_architecture(plan.model_config), CUTS)


def run_config(tmp_path: Path) -> RunConfig:
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 200)
    base = family_plan("llama", CUTS).config
    return msgspec.structs.replace(
        base,
        run=RunSection(name="own", steps=2),
        model=ModelSection(config={"vocab_size": 300}, modules=f"{CASE}:build"),
        data=DataSection(sources=(str(text),), sequence_length=LENGTH, holdout_fraction=0.2),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("private", [False, True])
def test_a_private_swarm_trains_them_and_an_open_one_refuses(private: bool, tmp_path: Path) -> None:
    options = SwarmOptions(private=private, measure_costs=False)
    with LocalSwarm(tmp_path / "swarm", run_config(tmp_path), 3, options) as swarm:
        if not private:
            with pytest.raises(Exception, match=f"hash {HASH}, which isn't allowed here"):
                swarm.wait_finished(Deadline.after(300))
            return
        root = swarm.wait_finished(Deadline.after(500))
    assert len(root) == 64


class Careful(LocalSwarm):
    """Its validator allows the code, its miners don't."""

    def _miner_settings(self, number: int) -> MinerSettings:
        return msgspec.structs.replace(super()._miner_settings(number), private_code=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_miner_takes_no_part_in_a_run_of_code_that_it_doesnt_allow(tmp_path: Path) -> None:
    options = SwarmOptions(private=True, measure_costs=False, hardware_class=False)
    with Careful(tmp_path / "swarm", run_config(tmp_path), 1, options) as swarm:
        deadline, log = Deadline.after(300), swarm.log_of(0)
        while not log.exists() or "takes no part in run own" not in log.read_text():
            swarm.check()
            deadline.check("waiting for the miner's refusal")
            time.sleep(0.5)
        assert f"hash {HASH}, which isn't allowed here" in log.read_text()
        status = swarm.status()
    assert status is None or status.summary.step == 0
