"""The SDK without a swarm: what its words become in a run file, which data it takes, what it says of statuses."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import iota
from iota.sdk.calls import Calls
from iota.sdk.forking import forked_config
from iota.sdk.report import Disruption, Evaluation, Reader, StepReport, disruption_of, new_lines
from iota.sdk.settings import make_config
from iota.words import length_argument, rate_argument
from subnet.errors import ConfigError, NotFound, Refusal, Refused, Unreachable
from subnet.protocol.api import RunStatus, RunSummary, StepView
from subnet.run.config import RunConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def config_of(**changes: object) -> RunConfig:
    values: dict[str, object] = {
        "name": "n",
        "seed": 3,
        "steps": None,
        "stages": 2,
        "model": {"config": LLAMA},
        "data": {"sources": ["/book.txt"]},
        "objective": iota.Pretrain(seq_len=64, batch_items=4, item_rows=2),
        "optimizer": iota.AdamW(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, clip_norm=0.5),
        "schedule": iota.Cosine(steps=30, warmup_steps=5, final_fraction=0.2),
        "sections": {},
    }
    return make_config(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def test_importing_iota_imports_nothing_heavy_and_every_public_name_is_there() -> None:
    code = (
        "import sys, iota; heavy = {'torch', 'transformers', 'aiohttp', 'msgspec', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy; assert set(iota.__all__) <= set(dir(iota));"
        "print(all(getattr(iota, name) is not None for name in iota.__all__), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr
    with pytest.raises(AttributeError, match="Modell"):
        iota.Modell  # noqa: B018 # pyright: ignore


def test_the_words_of_a_trainer_become_the_run_files() -> None:
    config = config_of(sections={"precision": {"compute": "bf16"}, "pipeline": {"boundary_code": "int8"}})
    assert (config.run.name, config.run.seed, config.run.steps) == ("n", 3, 30)
    assert (config.data.sequence_length, config.data.sources) == (64, ("/book.txt",))
    p = config.pipeline
    assert (p.stages, p.microbatches, p.microbatch_rows, p.boundary_code) == (2, 4, 2, "int8")
    o = config.optimizer
    assert (o.learning_rate, o.betas, o.epsilon, o.weight_decay, o.clip_norm) == (0.01, (0.8, 0.9), 1e-6, 0.0, 0.5)
    s = config.schedule
    assert (s.kind, s.warmup_steps, s.final_fraction) == ("cosine", 5, 0.2)
    assert config.precision.compute == "bf16"
    constant = config_of(schedule=iota.Constant(steps=7, warmup_steps=2), steps=9)
    assert (constant.schedule.kind, constant.schedule.warmup_steps, constant.run.steps) == ("constant", 2, 9)
    plain = config_of(optimizer={"learning_rate": 0.5}, schedule={"kind": "constant"}, steps=4, objective={})
    assert (plain.optimizer.learning_rate, plain.run.steps) == (0.5, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sections": {"precission": {"compute": "bf16"}}}, "did you mean [precision]?"),
        ({"sections": {"precision": {"computes": "bf16"}}}, "did you mean compute in [precision]?"),
        ({"sections": {"precision": "bf16"}}, "precision={...}"),
        ({"optimizer": iota.AdamW(lr=-1.0)}, "optimizer.learning_rate = -1.0"),
        ({"objective": iota.Pretrain(seq_len=4)}, "data.sequence_length = 4"),
        ({"schedule": {"kind": "cosine"}}, "the number of steps is missing"),
        ({"stages": 0}, "pipeline.stages = 0"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(**changes)
    assert words in str(refused.value)


def test_files_are_found_by_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    found = iota.Data.from_files("*.txt", tmp_path / "c.md", holdout_fraction=0.2)
    assert [path.name for path in found.files] == ["a.txt", "b.txt", "c.md"]
    assert found.section(tmp_path)["holdout_fraction"] == 0.2
    for pattern, words in (("*.jsonl", "no file matches"), ("gone.txt", "does not exist")):
        with pytest.raises(ConfigError, match=words):
            iota.Data.from_files(pattern)
    with pytest.raises(ConfigError, match="no files are named"):
        iota.Data.from_files()


def test_texts_are_written_once_under_their_hash(tmp_path: Path) -> None:
    texts = ["Call me Ishmael.", "line\nbreaks and “quotes”"]
    first = iota.Data.from_iterable(iter(texts)).section(tmp_path)["sources"]
    again = iota.Data.from_iterable(texts).section(tmp_path)["sources"]
    assert first == again
    lines = Path(first[0]).read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts
    endless = iota.Data.from_iterable((f"text {n}" for n in itertools.count()), max_documents=3)
    assert len(Path(endless.section(tmp_path)["sources"][0]).read_text().splitlines()) == 3
    assert [path.suffix for path in (tmp_path / "texts").iterdir()] == [".jsonl", ".jsonl"]
    for wrong, words in (([], "no documents"), ([1], "document 0 is a int")):
        with pytest.raises(ConfigError, match=words):
            iota.Data.from_iterable(wrong).section(tmp_path)  # pyright: ignore
    with pytest.raises(ConfigError, match="single text"):
        iota.Data.from_iterable("a text")


def test_a_datasets_split_is_taken_and_a_dictionary_of_them_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_dict({"body": ["one", "two"], "id": [1, 2]})
    written = iota.Data.from_datasets(split, column="body").section(tmp_path)["sources"][0]
    assert [json.loads(line)["text"] for line in Path(written).read_text().splitlines()] == ["one", "two"]
    streamed = split.to_iterable_dataset()
    assert iota.Data.from_datasets(streamed, column="body").section(tmp_path)["sources"] == [written]
    with pytest.raises(ConfigError, match=r"no column 'text' \(there are: body, id"):
        iota.Data.from_datasets(split).section(tmp_path)
    with pytest.raises(ConfigError, match=r'dataset\["train"\]'):
        iota.Data.from_datasets(datasets.DatasetDict({"train": split}))


def test_a_tokenizer_is_a_path_or_an_object_that_has_one(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from iota.tokenizer import load_tokenizer, train_tokenizer

    made = train_tokenizer(["call me ishmael " * 20], 300)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(made.json)
    wrapped = PreTrainedTokenizerFast(tokenizer_file=str(path))
    for given_, expected in ((path, path), (wrapped, None)):
        section = iota.Data.from_iterable(["x"], tokenizer=given_).section(tmp_path)
        assert load_tokenizer(Path(section["tokenizer"])).vocab_size == made.vocab_size
        assert expected is None or section["tokenizer"] == str(expected)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        iota.Data.from_iterable(["x"], tokenizer=object()).section(tmp_path)


def test_a_model_is_a_config_a_directory_or_the_librarys_object(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from iota.submission import load_model

    config = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, max_position_embeddings=64)
    from_object = iota.Model.from_config(config)
    assert from_object.family == "llama"
    assert "eos_token_id" not in (from_object.config or {})  # the library's defaults aren't the data's
    assert config_of(model=from_object.section(tmp_path)).model.config is not None
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    section = iota.Model.from_transformers(model).section(tmp_path)
    assert section == iota.Model.from_transformers(model).section(tmp_path)
    assert load_model(config_of(model=section))[0].model_config["hidden_size"] == 32
    assert iota.Model.from_pretrained(section["pretrained"]).family == "llama"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert iota.Model.from_config(tmp_path).config == iota.Model.from_config(LLAMA).config == LLAMA
    for wrong in (iota.Model.from_pretrained, iota.Model.from_config):
        with pytest.raises(ConfigError, match=r"config\.json"):
            wrong(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="modules of your own"):
        iota.Model.from_transformers(torch.nn.Linear(2, 2))


# ---- what statuses become


def status_of(
    steps: list[StepView], *, lines: tuple[str, ...] = (), state: str = "running", step: int | None = None
) -> RunStatus:
    done = (steps[-1].step + 1 if steps else 0) if step is None else step
    summary = RunSummary("r", "r-1", state, 0, done, 10, None, None)
    final = 2.0 if state == "finished" else None
    return RunStatus(summary, 0, (), tuple(steps), 0.0, 0, 0, 0, 0, lines, 0, "", 0, final_holdout_loss=final)


def view(step: int, holdout: float | None = None) -> StepView:
    return StepView(step, 5.0 - step / 10, 1.0, 100, 0.5, holdout)


class Validator:
    """Answers with what it is told, the last steps of it as asked for."""

    def __init__(self) -> None:
        self.now = status_of([])
        self.runs: tuple[RunSummary, ...] = ()
        self.active = True

    def status(self, steps: int) -> RunStatus:
        if not self.active:
            raise Refused(Refusal("not_found", "not active"))
        return msgspec.structs.replace(self.now, steps=self.now.steps[-steps:])

    def reader(self) -> Reader:
        return Reader("r", self.status, lambda: self.runs, lambda: None)


def steps_in(items: list[StepReport | Evaluation | Disruption]) -> list[int]:
    return [item.step for item in items if isinstance(item, StepReport)]


def test_every_step_comes_once_however_rarely_one_looks() -> None:
    validator = Validator()
    reader, got = validator.reader(), list[int]()
    for known in (0, 1, 1, 3, 200, 200, 201):
        validator.now = status_of([view(step) for step in range(known)])
        got += steps_in(reader.look().items)
    assert got == list(range(1, 202))
    assert reader.last is not None
    assert (reader.last.step, reader.last.tokens_per_s) == (201, 200.0)


def test_evaluations_come_before_the_step_that_made_them_and_the_final_one_at_the_end() -> None:
    validator = Validator()
    reader = validator.reader()
    validator.now = status_of([view(0, 6.0), view(1), view(2, 4.0)], state="finished")
    seen = reader.look()
    kinds = [(type(item).__name__, item.step) for item in seen.items]
    assert kinds == [
        ("Evaluation", 0), ("StepReport", 1), ("StepReport", 2), ("Evaluation", 2), ("StepReport", 3), ("Evaluation", 3),
    ]  # fmt: skip
    assert seen.over
    assert reader.over
    assert reader.evaluation == Evaluation(3, 2.0)


def test_steps_that_are_done_again_after_a_rewind_come_again() -> None:
    validator = Validator()
    reader = validator.reader()
    validator.now = status_of([view(step) for step in range(5)], lines=("one",))
    reader.look()
    line = "12:00:00 rewound to step 2, branch 1: a sealed lie is undone (case 1)"
    validator.now = status_of([view(0), view(1), view(2)], lines=("one", line))
    seen = reader.look()
    assert steps_in(seen.items) == [3]
    assert [item.kind for item in seen.items if isinstance(item, Disruption)] == ["rewound"]


def test_a_queued_run_waits_a_finished_one_is_over_an_unknown_one_is_refused() -> None:
    validator = Validator()
    validator.active = False
    validator.runs = (RunSummary("r", "r-1", "queued", 1, 0, 10, None, None),)
    reader = validator.reader()
    assert not reader.look().over
    validator.runs = (RunSummary("r", "r-1", "finished", 0, 10, 10, None, None),)
    assert reader.look().over
    validator.runs = ()
    with pytest.raises(NotFound, match="no run called 'r'"):
        validator.reader().look()


@given(
    st.lists(st.text("ab", min_size=1, max_size=2), max_size=30),
    st.integers(0, 30),
    st.integers(1, 8),
)
def test_new_lines_are_those_behind_what_was_seen(lines: list[str], at: int, window: int) -> None:
    """With lines that all differ it is exact; with equal ones it never invents a line."""
    at = min(at, len(lines))
    numbered = [f"{number} {line}" for number, line in enumerate(lines)]
    before, now = numbered[:at][-window:], numbered[-window:]
    assert list(new_lines(before, now)) == numbered[max(at, len(lines) - window) :]
    assert len(new_lines(lines[:at][-window:], lines[-window:])) <= window


def test_disruptions_are_told_from_the_everyday_lines_of_a_journal() -> None:
    from subnet.run.events import Gone, Joined, OwnerFailed, Record, TermStarted, Voided
    from subnet.words import Member
    from validator.history import describe

    member = Member("5Hot", 1, 2)
    expected = {
        Gone(member, "silent"): "gone",
        Gone(member, "left"): None,
        Voided(3, 1, member, "gone"): "void",
        OwnerFailed(3, 0, member): "owner",
        TermStarted(1, "5Val", "n"): None,
        TermStarted(2, "5Val", "n"): "leader",
        Joined(member, "5Cold", 0, "b", "h", 1): None,
    }
    for event, kind in expected.items():
        found = disruption_of(f"12:00:00 {describe(Record(0, 0, event))}", 3)
        assert (found.kind if found else None) == kind, event


async def test_calls_work_where_an_event_loop_runs() -> None:
    """As in a notebook: what starts a loop of its own runs in a thread that has none."""

    async def answer() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    calls = Calls(1)
    first = calls.blocking(lambda: asyncio.run(answer()))
    assert first == await calls.waited(lambda: asyncio.run(answer())) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        calls.blocking(lambda: 1 // 0)
    calls.close()


def test_a_validator_that_does_not_answer_is_said_at_once() -> None:
    with pytest.raises(Unreachable):
        iota.connect("http://127.0.0.1:1", timeout_s=3.0)


def test_a_detached_swarm_takes_no_options_and_miners_are_counted() -> None:
    with pytest.raises(ConfigError, match="allowed: 1 to 200"):
        iota.local(miners=0)


def test_other_optimizers_and_schedules_become_the_run_files() -> None:
    muon = config_of(optimizer=iota.Muon(lr=4e-3, momentum=0.9), schedule=iota.WSD(steps=50, decay_fraction=0.4))
    assert (muon.optimizer.kind, muon.optimizer.learning_rate, muon.optimizer.momentum) == ("muon", 4e-3, 0.9)
    assert (muon.schedule.kind, muon.schedule.decay_fraction, muon.schedule.final_fraction) == ("wsd", 0.4, 0.0)
    eight = config_of(optimizer=iota.AdamW(state_bits=8, decay_embeddings=False), schedule=iota.Linear(steps=9))
    assert (eight.optimizer.state_bits, eight.optimizer.decay_embeddings) == (8, False)
    assert (eight.schedule.kind, eight.run.steps) == ("linear", 9)


def test_what_is_no_learning_rate_or_length_is_refused_before_anybody_is_asked() -> None:
    assert (rate_argument(0.5, None), rate_argument(None, 2e-4)) == ("factor 0.5", "value 0.0002")
    assert (length_argument(9, keep_schedule=False), length_argument(9, keep_schedule=True)) == ("9", "9 keep")
    for factor, value in ((None, None), (1.0, 1.0), (0.0, None), (None, float("nan"))):
        with pytest.raises(ConfigError):
            rate_argument(factor, value)
    with pytest.raises(ConfigError):
        length_argument(0, keep_schedule=False)


def test_a_forks_settings_are_its_parents_but_for_what_is_changed() -> None:
    parent = config_of(sections={"snapshot": {"every_steps": 7}})
    fork = forked_config(
        msgspec.to_builtins(parent), "fork", {"optimizer": {"learning_rate": 0.5}, "run": {"steps": 9}}
    )
    assert (fork.run.name, fork.run.steps, fork.run.seed) == ("fork", 9, 3)
    assert (fork.optimizer.learning_rate, fork.optimizer.betas, fork.snapshot.every_steps) == (0.5, (0.8, 0.9), 7)
    assert fork.data == parent.data
    with pytest.raises(ConfigError, match="optimizer"):
        forked_config(msgspec.to_builtins(parent), "fork", {"optimizer": "muon"})  # type: ignore[dict-item]
