"""A run starts from a Hugging Face directory and ends as one: what doesn't fit is one line, what comes out is the swarm's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pretrained_cases import CHAT, SHAPE, book, change_tensors, save_model, save_tokenizer, weights_of

from benchmarks.reference import Reference
from benchmarks.setting import stream_tokens
from iota.export import Exported, export_run
from iota.export_check import check_logits
from iota.prepare import prepare_data
from iota.submission import PreparedRun, cut_model, load_model, pin_weights, prepare_run
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError, Corrupt, Refused
from subnet.model.checkpoints import check_carried
from subnet.model.plan import ModelPlan
from subnet.model.pretrained import PretrainedDirectory
from subnet.run.config import ModelSection, RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline
from subnet.words import BlobHash

Q0 = "model.layers.0.self_attn.q_proj.weight"
RUN = """
[run]
name = "{name}"
steps = {steps}
[model]
pretrained = "{base}"
[data]
sources = ["{book}"]
sequence_length = 32
[optimizer]
learning_rate = 1e-2
[pipeline]
stages = 2
microbatches = 3
microbatch_rows = 2
[snapshot]
every_steps = 3
[evaluation]
rows = 0
"""


def a_run(directory: Path, base: Path, name: str = "tuned", steps: int = 4) -> RunConfig:
    text = directory / "book.txt"
    text.write_text(book(), encoding="utf-8")
    return parse_run(RUN.format(name=name, steps=steps, base=base, book=text), directory)


def specs_of(config: RunConfig) -> list[Any]:
    architecture, _ = load_model(config)
    return [spec for unit in architecture.units(32).units for spec in unit]


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def lose_a_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[1].unlink()


def cut_a_shard(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:100])


BAD: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda d: (d / "config.json").unlink(), "config.json can't be read", ""),
    (lambda d: edit_config(d, model_type="bloom"), "'bloom' is not in the table", "docs/models.md"),
    (lambda d: edit_config(d, intermediate_size=64), "is (48, 32), not (64, 32)", "config.json must be"),
    (lambda d: edit_config(d, num_hidden_layers=3), "has no tensor model.layers.2.", "config.json must be"),
    (
        lambda d: edit_config(d, num_hidden_layers=1),
        "9 tensors that the model of its config.json hasn't",
        "config.json",
    ),
    (lambda d: change_tensors(d, {Q0: None}), f"has no tensor {Q0}", "config.json must be"),
    (lambda d: change_tensors(d, {"lm_head.weight": None}), "no tensor lm_head.weight", "tie_word_embeddings"),
    (lambda d: change_tensors(d, {"extra.weight": torch.ones(2)}), "1 tensors that", "config.json must be"),
    (lambda d: change_tensors(d, {Q0: torch.ones(32, 32, dtype=torch.int8)}), f"{Q0} is I8", "F32, BF16, F16"),
    (lambda d: change_tensors(d, {Q0: torch.ones(32, 32).to(torch.float8_e4m3fn)}), f"{Q0} is F8", "F32, BF16, F16"),
    (lambda d: change_tensors(d, {Q0: torch.ones(32, 32).double()}), f"{Q0} is F64", "F32, BF16, F16"),
    (lose_a_shard, "lacks model-00002-of", "copy the whole directory"),
    (cut_a_shard, "can't be read", "copy the file again"),
    (lambda d: edit_config(d, quantization_config={"quant_method": "fp8"}), "quantised", "dequantised"),
]


@pytest.mark.parametrize(("spoil", "words", "remedy"), BAD, ids=[words[:40] for _, words, _ in BAD])
def test_weights_that_dont_fit_are_refused_in_a_line(
    spoil: Callable[[Path], object], words: str, remedy: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base")
    config = a_run(tmp_path, base)
    load_model(config)
    spoil(base)
    with pytest.raises(ConfigError) as caught:
        load_model(config)
    assert words in str(caught.value)
    assert remedy in caught.value.hint
    assert "\n" not in str(caught.value)


def test_more_experts_a_token_than_experts(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "mixtral", num_local_experts=4)
    edit_config(base, num_experts_per_tok=6)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok = 6 .* a layer has 4 experts \(allowed: 1 to 4\)"):
        load_model(a_run(tmp_path, base))


def test_bf16_is_read_as_the_same_numbers_in_fp32(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    config = a_run(tmp_path, base)
    stored = weights_of(base)
    assert len({path.name for path in base.glob("*.safetensors")}) > 1
    read = dict(PretrainedDirectory(base).read(specs_of(config)))
    assert {spec.name for spec in read} == set(stored)
    for spec, tensor in read.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.to(torch.bfloat16), stored[spec.name])


def test_the_hash_is_of_what_the_run_starts_from(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    config, before = a_run(tmp_path, base), PretrainedDirectory(base).content_hash()
    pinned = pin_weights(config, PretrainedDirectory(base))
    assert pinned.model.pretrained_hash == before
    (base / "README.md").write_text("words")
    assert PretrainedDirectory(base).content_hash() == before
    changed = weights_of(base)[Q0].clone()
    changed[3, 4] += 1
    change_tensors(base, {Q0: changed})
    assert PretrainedDirectory(base).content_hash() != before
    with pytest.raises(ConfigError, match=rf"has hash [0-9a-f]+, the run file says model.pretrained_hash = {before}"):
        pin_weights(pinned, PretrainedDirectory(base))
    for section in ({"pretrained": "x", "pretrained_hash": "12"}, {"config": {}, "pretrained_hash": before}):
        with pytest.raises(ConfigError, match=r"model\.pretrained_hash"):
            ModelSection(**section)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    config = a_run(tmp_path, base)
    run = prepare_run(config, tmp_path / "work")
    assert run.data.tokenizer_path.read_bytes() == (base / "tokenizer.json").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    save_tokenizer(other, 290)
    with_other = msgspec.structs.replace(
        config, data=msgspec.structs.replace(config.data, tokenizer=str(other / "tokenizer.json"))
    )
    with pytest.raises(ConfigError, match="another vocabulary") as caught:
        prepare_run(with_other, tmp_path / "work")
    assert "leave data.tokenizer out" in caught.value.hint
    prepared = prepare_data([tmp_path / "book.txt"], tmp_path / "prepared", vocab_size=290)
    with_data = msgspec.structs.replace(
        config, data=msgspec.structs.replace(config.data, sources=(str(prepared.directory),))
    )
    with pytest.raises(ConfigError, match="another vocabulary"):
        prepare_run(with_data, tmp_path / "work")
    (base / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json, and a new one would not fit"):
        prepare_run(config, tmp_path / "work")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (base / name).unlink()
    assert prepare_run(config, tmp_path / "work").data.manifest.train.num_tokens > 0  # no trace of one: it is trained


def test_only_a_tokenizers_files_are_carried(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    assert set(PretrainedDirectory(base).carried_files()) == {
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    with pytest.raises(ConfigError, match="is no file of a tokenizer"):
        check_carried({"../evil.py": b""})
    with pytest.raises(ConfigError, match="at most"):
        check_carried({"merges.txt": bytes(17 << 20)})


# --- a swarm ---------------------------------------------------------------------------------------------------------

MOE = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.05, "tie_word_embeddings": True}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save_model(tmp_path_factory.mktemp("base") / "base", "mixtral", **MOE))


@pytest.fixture(scope="module")
def swarm(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Three miners on a mixture of experts with tied ends; all of their work is audited before its seal."""
    directory = tmp_path_factory.mktemp("tuned")
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=240.0)
    with LocalSwarm(directory / "swarm", a_run(directory, base), 3, options) as running:
        running.wait_finished(Deadline.after(240))
        yield running


def reference_from(config: RunConfig, base: Path, work: Path) -> tuple[Reference, ModelPlan]:
    """The one-process reference, started from the directory's weights."""
    run: PreparedRun = prepare_run(config, work)
    plan = cut_model(run, run.architecture.units(32).unit_flops_per_token)
    files, manifest = run.data.files(), run.data.manifest

    def tokens(stream: Any) -> Any:
        return stream_tokens(manifest, stream, lambda blob: files[BlobHash(blob)].read_bytes())

    reference = Reference(config, dict(plan.model_config), tokens(manifest.train), tokens(manifest.holdout))
    read = {spec.name: tensor for spec, tensor in PretrainedDirectory(base).read(plan.canonical)}
    for entry in reference.entries:
        entry.weight.copy_(read[entry.name])
    reference.calibrate()
    return reference, plan


def exported(swarm: LocalSwarm, name: str, directory: Path, **how: Any) -> Exported:
    return export_run(swarm.remote(), name, directory, deadline=Deadline.after(120), **how)


def check_weights(directory: Path, plan: ModelPlan, reference: Reference) -> None:
    weights = {entry.name: entry.weight for entry in reference.entries}
    for spec, tensor in PretrainedDirectory(directory).read(plan.canonical):
        assert torch.equal(tensor, weights[spec.name]), spec.name


def test_from_a_directory_and_back_at_any_step(swarm: LocalSwarm, base: Path, tmp_path: Path) -> None:
    config = a_run(tmp_path, base)
    reference, plan = reference_from(config, base, tmp_path / "work")
    start = exported(swarm, "tuned", tmp_path / "start", step=0, check=True)
    check_weights(start.directory, plan, reference)
    for step in range(2):
        reference.step(step)
    middle = exported(swarm, "tuned", tmp_path / "middle", step=2, check=True)
    check_weights(middle.directory, plan, reference)
    assert middle.root == reference.state_root()
    for step in range(2, 4):
        reference.step(step)
    end = exported(swarm, "tuned", tmp_path / "end", check=True)
    check_weights(end.directory, plan, reference)
    status = swarm.status()
    assert status is not None
    assert status.summary.root == end.root == reference.state_root()
    hashes = {done.checked.hash for done in (start, middle, end) if done.checked is not None}
    assert len(hashes) == 3
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (end.directory / name).read_bytes() == (base / name).read_bytes()
    card = (end.directory / "README.md").read_text()
    assert end.root in card
    assert PretrainedDirectory(base).content_hash() in card
    assert "| Updates | 4 of 4 |" in card
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(end.directory).chat_template == CHAT
    with pytest.raises(Refused, match="no state after 9 updates"):
        exported(swarm, "tuned", tmp_path / "never", step=9)

    def other(spec: Any) -> torch.Tensor:
        return torch.zeros(spec.shape)

    with pytest.raises(Corrupt, match="logits are not the swarm's"):
        check_logits(end.directory, plan, other)


def test_a_run_goes_on_from_an_export(swarm: LocalSwarm, tmp_path: Path) -> None:
    first = exported(swarm, "tuned", tmp_path / "first")
    config = a_run(tmp_path, first.directory, "again", 2)
    swarm.submit(config)
    root = swarm.wait_until(
        lambda status: status.summary.name == "again" and status.summary.state == "finished", Deadline.after(240)
    ).summary.root
    reference, _ = reference_from(config, first.directory, tmp_path / "work")
    for step in range(2):
        reference.step(step)
    assert root == reference.state_root()
    assert SHAPE["vocab_size"] == reference.entries[0].shape[0]
