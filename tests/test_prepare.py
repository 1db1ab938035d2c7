"""Preparing data gives the same bytes each time, is whole or not there, and refuses bad input in one line."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from iota import prepare
from iota.corpus import NO_SPLIT, PIECE_BYTES, Split, find_files, read_pieces, survey
from iota.prepare import PreparedData, Progress, load_prepared, prepare_data, prepare_for_run
from iota.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
from subnet.errors import ConfigError, Corrupt, OutOfSpace
from subnet.model.data import ROW_GROUP_BYTES, TokenStream
from subnet.run.config import DataSection

ROOT = Path(__file__).parent.parent
BOOK = ROOT / "iota" / "assets" / "moby_dick.txt"
LINE = "The sea, the sea: “whale” and spar, and all the rolling waters of the world.\n"


def tokens(data: PreparedData, stream: TokenStream) -> np.ndarray:
    files = data.files()
    raw = b"".join(files[shard.blob].read_bytes() for shard in stream.shards)
    found = np.frombuffer(raw, dtype=data.manifest.token_dtype)
    assert len(found) == stream.num_tokens
    return found


def text_of(data: PreparedData, stream: TokenStream) -> list[str]:
    """The documents of a stream, decoded."""
    tokenizer = load_tokenizer(data.tokenizer_path)
    found = tokens(data, stream)
    ends = np.flatnonzero(found == data.manifest.end_of_text)
    assert len(found) == 0 or ends[-1] == len(found) - 1
    return [tokenizer.decode(part[:-1].tolist()) for part in np.split(found, ends + 1)[:-1]]


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i}. {LINE}" for i in range(800)))
    return path


def test_the_shipped_book_trains_a_bpe(tmp_path: Path) -> None:
    seen: list[Progress] = []
    data = prepare_data([BOOK], tmp_path / "out", vocab_size=4096, progress=seen.append)
    manifest = data.manifest
    assert manifest.vocab_size == 4096
    assert manifest.token_bytes == 2
    assert manifest.train.num_tokens > 300_000
    assert 0.04 < manifest.holdout.num_tokens / manifest.train.num_tokens < 0.06
    (train,), (holdout,) = text_of(data, manifest.train), text_of(data, manifest.holdout)
    assert train + holdout == BOOK.read_text(encoding="utf-8")
    assert seen[0].phase == "read"
    assert seen[-1].phase == "done"
    assert {p.phase for p in seen} == {"read", "train tokenizer", "encode", "done"}
    assert all(p.done_bytes <= p.total_bytes for p in seen)


def test_other_processes_make_the_same_bytes(book: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from iota.prepare import prepare_data; prepare_data([sys.argv[1]], sys.argv[2], vocab_size=400)"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, str(book), str(tmp_path / seed)]
        subprocess.run(command, check=True, timeout=60, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed})
    assert tree(tmp_path / "1") == tree(tmp_path / "2")


def test_second_call_does_nothing_and_changes_do(book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare_data([book], out, vocab_size=300)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    again = prepare_data([book], out, vocab_size=300)
    assert (first.reused, again.reused) == (False, True)
    assert again.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    copy = tmp_path / "copy.txt"
    copy.write_bytes(book.read_bytes())
    assert prepare_data([copy], out, vocab_size=300).reused  # the text counts, not its name
    assert not prepare_data([book], out, vocab_size=301).reused
    assert not prepare_data([book], out, vocab_size=301, holdout_fraction=0.1).reused
    book.write_text(book.read_text() + "More.")
    assert not prepare_data([book], out, vocab_size=301, holdout_fraction=0.1).reused
    assert sorted(p.name for p in tmp_path.iterdir()) == ["book.txt", "copy.txt", "out"]


def test_damage_is_found_and_mended(book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = prepare_data([book], out, vocab_size=300)
    shard = out / "train-00000.tokens"
    good = shard.read_bytes()
    for path, data in ((shard, b""), (out / "tokenizer.json", b"{}"), (out / "manifest.json", b"{")):
        path.write_bytes(data)
        with pytest.raises(Corrupt):
            load_prepared(out)
        assert not prepare_data([book], out, vocab_size=300).reused
        assert shard.read_bytes() == good
    assert load_prepared(out).manifest == whole.manifest


def test_shards_and_pieces(tmp_path: Path) -> None:
    """Text longer than a piece, in several shards, with and without line ends, comes back whole."""
    path = tmp_path / "long.txt"
    path.write_text(LINE * 4000 + "x" * 10 + " é" * (PIECE_BYTES // 2) + "é" * PIECE_BYTES)
    data = prepare_data([path], tmp_path / "out", vocab_size=300, holdout_fraction=0.0, shard_bytes=ROW_GROUP_BYTES)
    sizes = [shard.size_bytes for shard in data.manifest.train.shards]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {ROW_GROUP_BYTES}
    assert text_of(data, data.manifest.train) == [path.read_text()]
    assert data.manifest.holdout == TokenStream(0)


def test_many_documents_are_held_out_whole(tmp_path: Path) -> None:
    documents = [f"Document {i}: {LINE}" for i in range(100)]
    lines = "\n".join(json.dumps({"text": text, "id": i}) for i, text in enumerate(documents))
    (tmp_path / "a.jsonl").write_text(lines[: lines.index('{"text": "Document 50')])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n" + lines[lines.index('{"text": "Document 50') :] + '\n{"text": " "}\n')
    data = prepare_data([tmp_path], tmp_path / "out", vocab_size=300, holdout_fraction=0.05)
    held = text_of(data, data.manifest.holdout)
    assert held == documents[19::20]
    assert text_of(data, data.manifest.train) == [text for text in documents if text not in held]


def test_few_documents_lose_their_tails(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", ".hidden.txt", "ignored.csv"):
        (tmp_path / name).write_text(name + LINE * 50)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "word " * 1000}))
    data = prepare_data([tmp_path], tmp_path / "out", vocab_size=300, holdout_fraction=0.1)
    train, held = text_of(data, data.manifest.train), text_of(data, data.manifest.holdout)
    assert [a + b for a, b in zip(train, held, strict=True)] == [
        "a.md" + LINE * 50,
        "b.txt" + LINE * 50,
        "word " * 1000,
    ]
    for a, b in zip(train, held, strict=True):
        assert 0.05 < len(b) / len(a + b) < 0.15


def test_split_is_exact() -> None:
    split = Split(fraction=0.05, whole_documents=True)
    assert sum(split.takes(i) for i in range(1000)) == 50
    assert not any(NO_SPLIT.takes(i) for i in range(1000))


def test_a_given_tokenizer_is_used(book: Path, tmp_path: Path) -> None:
    made = train_tokenizer([book.read_text()], 280)
    (tmp_path / "tokenizer.json").write_bytes(made.json)
    data = prepare_data([book], tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", vocab_size=280)
    assert data.manifest.vocab_size == 280
    assert data.tokenizer_path.read_bytes() == made.json
    from_directory = prepare_data([book], tmp_path / "out", tokenizer=tmp_path, vocab_size=280)
    assert from_directory.reused


def test_text_cannot_end_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{LINE}{END_OF_TEXT}{LINE}" * 20)
    data = prepare_data([tmp_path / "a.txt"], tmp_path / "out", vocab_size=300, holdout_fraction=0.0)
    assert int((tokens(data, data.manifest.train) == data.manifest.end_of_text).sum()) == 1


def test_run_takes_a_prepared_directory_or_prepares(book: Path, tmp_path: Path) -> None:
    section = DataSection(sources=(str(book),))
    made = prepare_for_run(section, 300, tmp_path / "out")
    ready = prepare_for_run(DataSection(sources=(str(tmp_path / "out"),)), 300, tmp_path / "unused")
    assert ready.manifest == made.manifest
    assert ready.reused
    assert not (tmp_path / "unused").exists()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def bad_inputs(home: Path) -> dict[str, tuple[dict[str, object], str]]:
    good = write(home / "good.txt", (LINE * 50).encode())
    latin = write(home / "latin.txt", LINE.encode() * 5000 + b"caf\xe9\n" + LINE.encode())
    place = len(LINE.encode()) * 5000 + 3
    empty = write(home / "empty.txt", b" \n\n")
    broken = write(home / "broken.jsonl", b'{"text": "a"}\n\n{"text": \n')
    number = write(home / "number.jsonl", b'{"text": "a"}\n{"text": 3}\n')
    half = write(home / "half.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100)[:-9])
    nonsense = write(home / "nonsense.json", b'{"a": 1}')
    endless = json.loads(train_tokenizer([LINE], 260).json)
    endless["added_tokens"][0]["content"] = "<|stop|>"
    endless["model"]["vocab"]["<|stop|>"] = endless["model"]["vocab"].pop(END_OF_TEXT)
    stopless = write(home / "stopless.json", json.dumps(endless).encode())
    big = write(home / "big.json", train_tokenizer([LINE], 270).json)
    (home / "nothing").mkdir()
    return {
        "no sources": (
            {"sources": []},
            'data.sources is empty (name text or JSONL files, for example sources = ["book.txt"])',
        ),
        "missing": (
            {"sources": [home / "no.txt"]},
            f"{home / 'no.txt'} does not exist (data.sources are paths relative to the run file)",
        ),
        "empty directory": (
            {"sources": [home / "nothing"]},
            f"{home / 'nothing'} holds no text files (looked for .txt, .md, .text, .jsonl, .jsonl.gz)",
        ),
        "empty": ({"sources": [empty]}, f"no text in {empty} (data.sources must name files that are not empty)"),
        "latin-1": (
            {"sources": [good, latin]},
            f"{latin} is not UTF-8 at byte {place} (convert it, for example: iconv -f LATIN1 -t UTF-8 latin.txt > fixed.txt)",
        ),
        "broken JSON": ({"sources": [broken]}, f'{broken} line 3 is not JSON (a line is {{"text": "..."}})'),
        "no text field": (
            {"sources": [number]},
            f'{number} line 2 has no string field "text" (a line is {{"text": "..."}})',
        ),
        "half a gzip": (
            {"sources": [half]},
            f"{half} is not a whole gzip file: Compressed file ended before the end-of-stream marker was reached "
            "(compress it again)",
        ),
        "no tokenizer file": (
            {"tokenizer": home / "no.json"},
            f"{home / 'no.json'} does not exist (data.tokenizer is the path of a tokenizer.json; empty trains one)",
        ),
        "not a tokenizer": (
            {"tokenizer": nonsense},
            f"{nonsense} is not a tokenizer.json (save one with Tokenizer.save or save_pretrained)",
        ),
        "no end of text": (
            {"tokenizer": stopless},
            f"{stopless} has no token that ends a text (add one of <|endoftext|>, <|end_of_text|>, </s>, <eos>, <|eos|>, "
            "<|im_end|>)",
        ),
        "tokenizer beyond the model": (
            {"tokenizer": big, "vocab_size": 269},
            f"{big} has 270 tokens, the model's vocab_size is 269 (set vocab_size to 270 or more in the model's config, "
            "or give a smaller tokenizer)",
        ),
        "vocabulary too small": (
            {"vocab_size": 256},
            "a byte-level vocabulary of 256 tokens is too small (set the model's vocab_size to 257 or more, or give "
            "data.tokenizer)",
        ),
        "neither": (
            {"vocab_size": None},
            "neither a tokenizer nor a vocabulary size is given (give one of the two)",
        ),
        "out is a file": ({"out": good}, f"{good} is a file (name a directory for the prepared data)"),
        "out is not ours": (
            {"out": home},
            f"{home} is not empty and holds no prepared data (name another directory)",
        ),
    }


CASES = [
    *("no sources", "missing", "empty directory", "empty", "latin-1", "broken JSON", "no text field", "half a gzip"),
    *("no tokenizer file", "not a tokenizer", "no end of text", "tokenizer beyond the model", "vocabulary too small"),
    *("neither", "out is a file", "out is not ours"),
]


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    table = bad_inputs(tmp_path)
    assert set(table) == set(CASES)
    changes, message = table[case]
    arguments = {"sources": [tmp_path / "good.txt"], "out": tmp_path / "out", "vocab_size": 300, **changes}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        prepare_data(arguments.pop("sources"), arguments.pop("out"), **arguments)
    assert str(caught.value) == message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_the_old_directory(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = prepare_data([book], out, vocab_size=300)
    before = tree(out)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "write_file", full)
    with pytest.raises(OutOfSpace) as caught:
        prepare_data([book], out, vocab_size=310)
    assert str(caught.value) == f"no space left for {out} (free some, or name a directory on another disk)"
    assert tree(out) == before
    assert load_prepared(out).manifest == first.manifest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["book.txt", "out"]


def test_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_prepared(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a prepared data directory (make one with: iota data prepare)"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"\xef\xbb\xbfHello")
    files = find_files([tmp_path / "a.txt"])
    assert [piece.text for piece in read_pieces(files, NO_SPLIT)] == ["Hello"]
    assert survey(files).num_documents == 1
