"""The tokenizer of a run: a given ``tokenizer.json``, or a byte-level BPE trained the same way each time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from subnet.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
_LONG_RUN = re.compile(r"\S{1024}|\s{1024}")
MIN_VOCAB_SIZE = 257
"""The bytes and the end of text."""


class RunTokenizer:
    """Text to tokens, and the bytes of the ``tokenizer.json`` that does it."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        ends = [vocab[name] for name in _KNOWN_ENDS if name in vocab]
        if not ends:
            raise ConfigError(f"{source} has no token that ends a text", hint=f"add one of {', '.join(_KNOWN_ENDS)}")
        self.json = tokenizer.to_str(pretty=True).encode("utf-8")
        self.vocab_size = max(vocab.values()) + 1
        self.end_of_text = ends[0]
        self._parsing: Tokenizer | None = None
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a text is text

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_marked(self, text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens and where in the text each begins, in characters; special tokens written in the text are themselves."""
        if self._parsing is None:
            self._parsing = Tokenizer.from_str(self.json.decode())
            self._parsing.no_truncation()
            self._parsing.no_padding()
        encoding = self._parsing.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.uint32), starts

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def _short_runs(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut within runs without a word boundary, whose training time grows with the square of their length."""
    for text in texts:
        at = 0
        for run in _LONG_RUN.finditer(text):
            yield text[at : run.end()]
            at = run.end()
        yield text[at:]


def load_tokenizer(path: Path) -> RunTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of the directory that holds one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist", hint="data.tokenizer is the path of a tokenizer.json; empty trains one"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for each malformed file
        raise ConfigError(
            f"{file} is not a tokenizer.json", hint="save one with Tokenizer.save or save_pretrained"
        ) from error
    return RunTokenizer(tokenizer, str(file))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> RunTokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens; a short text gives fewer."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a byte-level vocabulary of {vocab_size} tokens is too small",
            hint=f"set the model's vocab_size to {MIN_VOCAB_SIZE} or more, or give data.tokenizer",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_short_runs(texts), trainer)
    return RunTokenizer(tokenizer, "the trained tokenizer")
