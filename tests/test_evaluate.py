"""``iota eval``: losses are those of plain ``transformers`` on the same windows, bad input says what is wrong; spikes are seen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from iota.cli.main import main
from iota.evaluate import Scorer, run_tasks, texts_of
from subnet.errors import ConfigError
from subnet.model.data import DataManifest, Domain, SampleOrder, Shard, TokenStream, row_group_hashes
from subnet.run import events as ev
from subnet.run.alarms import AlarmsSection, spike
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
)
from subnet.run.schedule import step_scalars
from validator.decide_steps import fp64_bits
from validator.history import History

WORDS = "the whale and the sea and the ship and the captain went down to the deep blue water again " * 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([WORDS], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_losses_are_those_of_plain_transformers(model: Path) -> None:
    scorer = Scorer(model, sequence_length=16)
    score = scorer.score("words", WORDS)
    ids = scorer._tokenizer(WORDS, add_special_tokens=False).input_ids
    total = 0.0
    for start in range(0, len(ids) - 1, 16):
        window = torch.tensor([ids[start : start + 17]])
        with torch.no_grad():
            out = scorer._model(window, labels=window)
        total += float(out.loss) * (window.shape[1] - 1)
    assert score.tokens == len(ids) - 1
    assert score.loss == pytest.approx(total / score.tokens, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(score.loss))
    assert score.bits_per_byte == pytest.approx(total / math.log(2) / len(WORDS.encode()), rel=1e-5)
    part = scorer.score("words", WORDS, max_tokens=20)
    assert (part.tokens, part.bits_per_byte) == (20, None)


def test_the_command_takes_files_and_directories(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(WORDS[:200])
    (tmp_path / "texts" / "b.jsonl").write_text(json.dumps({"text": WORDS[200:500]}) + "\n\n")
    assert main(["eval", str(model), "--text", str(tmp_path / "texts"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [Path(text["name"]).name for text in said["texts"]] == ["a.txt", "b.jsonl"]
    assert all(5 < text["loss"] < 7 for text in said["texts"])  # an untrained model of 320 tokens: about ln 320
    assert main(["eval", str(model), "--text", str(tmp_path / "texts")]) == 0
    assert "all of them: loss" in capsys.readouterr().out


def test_what_cannot_be_evaluated_says_why(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n')
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "short.txt").write_text("a")
    for path, said in (
        ("nowhere", "does not exist"),
        ("empty", "no .txt"),
        ("bad.jsonl", "line 1"),
        ("bytes.txt", "not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=said):
            texts_of([tmp_path / path])
    for arguments, said in (
        ([str(tmp_path / "empty"), "--text", str(tmp_path / "short.txt")], "has no config.json"),
        ([str(model), "--text", str(tmp_path / "short.txt")], "has 1 tokens"),
        ([str(model), "--text", str(tmp_path / "short.txt"), "--sequence-length", "65"], "2 to 64"),
        ([str(model)], "--text FILE or --tasks"),
    ):
        assert main(["eval", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_tasks_need_lm_eval_or_a_task_that_is_there(model: Path, tmp_path: Path) -> None:
    try:
        import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        with pytest.raises(ConfigError, match="lm-eval isn't installed"):
            run_tasks(model, ["mine"], task_dir=None, limit=None)
        return
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"q": "the", "a": " whale"}) + "\n" for _ in range(4)))
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'docs.jsonl'}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list:\n  - metric: perplexity\n"
    )
    found = run_tasks(model, ["mine"], task_dir=tmp_path, limit=None)
    assert any(name.startswith("perplexity") and value > 1 for name, value in found["mine"].items())
    with pytest.raises(ConfigError, match="no task 'other'"):
        run_tasks(model, ["other"], task_dir=tmp_path, limit=None)


# ---- hold-out rows by source


def test_a_hold_out_item_is_of_one_source() -> None:
    counts = (100, 40, 0, 61)
    tokens = sum(counts)
    data = bytes(2 * tokens)
    stream = TokenStream(tokens, (Shard("0" * 64, len(data), row_group_hashes(data)),))  # type: ignore[arg-type]
    domains = tuple(Domain(f"d{i}", count, count) for i, count in enumerate(counts))
    manifest = DataManifest("0" * 64, 10, 0, 2, stream, stream, domains=domains)  # type: ignore[arg-type]
    config = RunConfig(
        run=RunSection("r"),
        model=ModelSection(config={"model_type": "llama"}),
        data=DataSection(sequence_length=10),
        pipeline=PipelineSection(microbatch_rows=2),
        evaluation=EvaluationSection(rows=12),
        audit=NO_AUDITS,
    )
    order = SampleOrder(config, manifest)
    assert [order.holdout_domains(item) for item in range(4)] == [[0, 0], [1, 1], [3, 3], [0, 0]]
    assert order._holdout_tokens(0) == [0, 10]
    assert order._holdout_tokens(3) == [20, 30]
    assert order._holdout_tokens(1) == [100, 110]
    assert order._holdout_tokens(4) == [120, 100]  # 39 tokens: three rows, then round again


# ---- spikes


def test_a_spike_is_a_step_far_above_the_median_of_those_before() -> None:
    section, calm = AlarmsSection(window_steps=20), [2.0] * 20
    assert spike(section, calm, calm, 2.5, 9.9) == ""
    assert "loss 2.7 is 1.35 times the median of 20 steps" in spike(section, calm, calm, 2.7, 2.0)
    assert "gradient norm" in spike(section, calm, calm, 2.0, 10.1)
    assert spike(section, calm[:9], calm[:9], 9.0, 99.0) == ""  # too few
    assert "loss is nan" in spike(section, [], [], math.nan, 1.0)
    assert spike(AlarmsSection(loss_factor=0, norm_factor=0), calm, calm, math.inf, 99.0) == ""
    with pytest.raises(ConfigError):
        AlarmsSection(loss_factor=0.9)


def test_history_marks_spikes_and_keeps_rates_over_a_restart() -> None:
    config = RunConfig(
        run=RunSection("r", steps=40), model=ModelSection(config={"model_type": "llama"}), audit=NO_AUDITS
    )
    history = History()
    planned = ev.RunPlanned("id", config, {}, (), (), None, (), (), "", "", "", "")
    history.fold(ev.Record(0, 1, planned))
    for step in range(20):
        scalars = step_scalars(config, step)
        history.fold(ev.Record(1, 1, ev.StepPlanned(step, 1, 0, scalars)))
        if step == 10:
            history = History.load(history.dump())
        loss, norm = (9.0, 1.0) if step == 15 else (3.0, 1.0)
        sealed = ev.StepSealed(step, 1, fp64_bits(norm), 0, fp64_bits(loss), 8, (1, 2))
        history.fold(ev.Record(2, 2, sealed))
    views = list(history.steps)
    assert [view.step for view in views if view.alarm] == [15]
    assert [mark.kind for mark in history.marks] == ["alarm"]
    assert any("alarm at step 15" in line for line in history.lines)
    assert views[10].learning_rate == pytest.approx(1e-3, rel=0.2)
    assert len(views[3].holdout_items) == 2
    assert msgspec.json.decode(msgspec.json.encode(views[15]))["alarm"].startswith("loss 9 is 3 times")
