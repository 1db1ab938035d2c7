"""Dialogues to rows, and sources in given shares: what is learnt, what shares a row, which row comes when."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from iota.chat import ChatTemplate, Message, load_template
from iota.prepare import DialogueSettings, PreparedData, load_prepared, prepare_data
from subnet.errors import ConfigError
from subnet.model.data import SampleOrder, decode_manifest, encode_manifest
from subnet.model.data_checks import check_data
from subnet.model.mixture import PERIOD, quotas
from subnet.model.token_bits import LEARNT, STARTS, TOKEN_BITS
from subnet.run.config import DataSection, ModelSection, PipelineSection, RunConfig, RunSection
from subnet.run.objective import ObjectiveSection
from subnet.words import ItemKey

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH = 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["what is two and two? four. user assistant"], trainer)
    made.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def asked(question: str, answer: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], **settings: Any) -> PreparedData:
    file = lines(tmp_path / "d.jsonl", rows)
    packing = settings.pop("packing", True)
    return prepare_data(
        [file],
        tmp_path / "out",
        tokenizer=tokenizer,
        holdout_fraction=settings.pop("holdout", 0.0),
        dialogues=DialogueSettings(LENGTH, packing),
    )


def rows_of(prepared: PreparedData) -> np.ndarray:
    data = b"".join(prepared.files()[shard.blob].read_bytes() for shard in prepared.manifest.train.shards)
    return np.frombuffer(data, "<u4")[:-1].reshape(-1, LENGTH)


def test_the_answer_with_its_end_is_learnt_and_nothing_else(tmp_path: Path, tokenizer: Path) -> None:
    rows = rows_of(prepare(tmp_path, tokenizer, [asked("two?", "four")]))
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert rows.shape == (1, LENGTH)
    learnt = rows[0][(rows[0] & LEARNT) != 0] & TOKEN_BITS
    assert loaded.decode(list(learnt), skip_special_tokens=False) == "four<|im_end|>\n"
    assert (rows[0] & STARTS != 0).sum() == 2  # the dialogue and what the row is filled with
    whole = loaded.decode(list(rows[0] & TOKEN_BITS), skip_special_tokens=False)
    assert whole.startswith("<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n<|endoftext|>")


def test_every_answer_of_a_long_dialogue_is_learnt(tokenizer: Path) -> None:
    template = load_template(tokenizer)
    assert template is not None
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))
    made = template.answered(turns)
    assert [made.text[a:b] for a, b in made.answers] == ["b<|im_end|>\n", "d<|im_end|>\n"]


def test_a_template_that_writes_earlier_turns_anew_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}", {})
    with pytest.raises(ValueError, match="earlier turns anew"):
        template.answered((Message("user", "a"), Message("assistant", "b"), Message("user", "c")))


def test_prompt_and_answer_need_no_template(tmp_path: Path, tokenizer: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    rows = rows_of(prepare(tmp_path, bare, [{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+1=", "completion": "2"}]))
    loaded = Tokenizer.from_file(str(bare / "tokenizer.json"))
    learnt = rows[0][(rows[0] & LEARNT) != 0] & TOKEN_BITS
    assert loaded.decode(list(learnt), skip_special_tokens=False) == "4<|endoftext|>2<|endoftext|>"


def test_dialogues_share_rows_where_they_fit_and_are_cut_where_they_must_be(tmp_path: Path, tokenizer: Path) -> None:
    sizes = [{"prompt": "p" * n, "answer": "a" * m} for n, m in ((5, 4), (10, 5), (3, 2), (40, 3), (10, 60))]
    packed = prepare(tmp_path, tokenizer, sizes)
    rows = rows_of(packed)
    assert rows.shape == (2, LENGTH)
    assert packed.words.startswith("5 dialogues in 2 rows, ")
    assert "2 cut at a row's end, 1 left out" in packed.words
    assert packed.manifest.dialogues == LENGTH
    (tmp_path / "each").mkdir()
    alone = prepare(tmp_path / "each", tokenizer, sizes, packing=False)
    assert rows_of(alone).shape == (4, LENGTH)
    again = prepare(tmp_path, tokenizer, sizes)
    assert again.reused
    assert load_prepared(tmp_path / "out").manifest == packed.manifest
    assert not prepare(tmp_path, tokenizer, sizes, packing=False).reused


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a"}, 'line 1 is no dialogue: give either "messages" or "prompt"'),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message has the role assistant"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        ({"prompt": "a"}, '"answer" is missing or empty'),
    ],
)
def test_what_is_no_dialogue_is_refused_with_its_place(
    tmp_path: Path, tokenizer: Path, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, tokenizer, [row])
    assert words in caught.value.reason


def test_a_missing_template_is_said_with_the_remedy(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="no chat template") as caught:
        prepare(tmp_path, tmp_path / "tokenizer.json", [asked("a", "b")])
    assert "chat_template.jinja beside tokenizer.json" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="need a tokenizer"):
        prepare_data([tmp_path], tmp_path / "x", vocab_size=300, dialogues=DialogueSettings(LENGTH))


def config_of(**changes: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(name="r", seed=3),
        model=ModelSection(config={"model_type": "llama"}),
        data=DataSection(sequence_length=LENGTH, weights=changes.pop("weights", ())),
        objective=ObjectiveSection(kind=changes.pop("objective", "causal_lm")),
        pipeline=PipelineSection(microbatches=4, microbatch_rows=8),
        **changes,
    )


def test_data_and_objective_must_fit(tmp_path: Path, tokenizer: Path) -> None:
    manifest = prepare(tmp_path, tokenizer, [asked("a", "b")] * 40, holdout=0.1).manifest
    check_data(config_of(objective="sft"), manifest, 300)
    with pytest.raises(ConfigError, match="the data are dialogues"):
        check_data(config_of(), manifest, 300)
    short = msgspec.structs.replace(config_of(objective="sft"), data=DataSection(sequence_length=16))
    with pytest.raises(ConfigError, match="rows of 32 tokens"):
        check_data(short, manifest, 300)
    with pytest.raises(ConfigError, match="2 numbers, the data has 1 sources"):
        check_data(config_of(objective="sft", weights=(0.5, 0.5)), manifest, 300)


def test_shares_are_kept_in_every_period() -> None:
    assert quotas([0.7, 0.3]) == (717, 307)
    assert sum(quotas([1.0] * 256)) == PERIOD
    assert quotas([1e6, 1.0, 1.0]) == (1022, 1, 1)


def test_rows_come_from_each_source_in_its_share(tmp_path: Path, tokenizer: Path) -> None:
    for name, word, count in (("a.txt", "two ", 4000), ("b.txt", "four ", 1200), ("c.txt", "user ", 700)):
        (tmp_path / name).write_text(word * count)
    sources = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    prepared = prepare_data(sources, tmp_path / "out", tokenizer=tokenizer, holdout_fraction=0.1)
    manifest = decode_manifest(encode_manifest(prepared.manifest))
    assert manifest.domain_names == ("a.txt", "b.txt", "c.txt")
    config = config_of(weights=(0.5, 0.3, 0.2))
    check_data(config, manifest, 300)
    order = SampleOrder(config, manifest)
    seen = [d for step in range(PERIOD // 32) for m in range(4) for d in order.domains_of(step, m)]
    assert Counter(seen) == Counter(dict(enumerate(quotas((0.5, 0.3, 0.2)))))
    assert seen != sorted(seen)
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words = ("two", "four", "user")
    for microbatch in range(6):  # of training rows four, of hold-out rows two
        item = ItemKey(2, microbatch, 0)
        order_of = order.domains_of(2, microbatch) if microbatch < 4 else order.holdout_domains(microbatch - 4)
        groups = {(s.blob, g): _group(prepared, s, g) for s, g in order.ranges_for(item)}
        for row, domain in zip(order.assemble(item, groups), order_of, strict=True):
            text = loaded.decode(list(row[1:-1]))
            assert words[domain] in text
            assert not any(word in text for word in words if word != words[domain])
    assert [order.holdout_domains(item) for item in (0, 1, 5)] == [[0] * 8, [1] * 8, [2] * 8]
    without = SampleOrder(config_of(), manifest)
    assert len({tuple(without.row_indices(0, m)) for m in range(4)}) == 4


def _group(prepared: PreparedData, shard: Any, index: int) -> bytes:
    start, end = shard.row_group_range(index)
    return prepared.files()[shard.blob].read_bytes()[start:end]


def test_a_source_of_one_is_as_ever(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("two " * 4000)
    manifest = prepare_data([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tokenizer).manifest
    assert b"domains" not in encode_manifest(manifest)
    assert b"dialogues" not in encode_manifest(manifest)
