"""Text for a run: files, a ``datasets`` dataset or anything that gives texts; written once where it isn't a file already.

A text's file is named by the hash of all of it, so the same texts again are found, with their tokens.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from subnet.errors import ConfigError
from subnet.store.disk import atomic_write, full_disk_is_ours

_WILD = frozenset("*?[")


@dataclass(frozen=True)
class Data:
    """The training text of a run; make one with :meth:`from_files`, :meth:`from_datasets` or :meth:`from_iterable`.

    ``tokenizer``: a ``tokenizer.json``, a directory with one, or a fast tokenizer of ``transformers`` or ``tokenizers``;
    None: that of the pretrained directory, else a byte-level BPE of the model's vocabulary size is trained.
    ``holdout_fraction`` of the text is never trained on; :meth:`iota.Run.evaluate` tells its loss.
    """

    files: tuple[Path, ...] = ()
    texts: Iterable[str | Mapping[str, Any]] | None = None
    tokenizer: Any = None
    holdout_fraction: float = 0.05
    weights: tuple[float, ...] = ()

    @staticmethod
    def from_files(
        *patterns: str | Path, tokenizer: Any = None, holdout_fraction: float = 0.05, weights: Sequence[float] = ()
    ) -> Data:
        """Text files, JSONL with a field ``text``, directories of them, a directory of ``iota data prepare``, or globs.

        ``weights``: each file's (or directory's) share of the training rows. Raises ConfigError where a pattern matches
        nothing.
        """
        if not patterns:
            raise ConfigError("no files are named", hint='for example iota.Data.from_files("books/*.txt")')
        files = tuple(path for pattern in patterns for path in _matching(str(pattern)))
        return Data(files=files, tokenizer=tokenizer, holdout_fraction=holdout_fraction, weights=tuple(weights))

    @staticmethod
    def from_dialogues(
        dialogues: Iterable[Mapping[str, Any]], *, tokenizer: Any = None, holdout_fraction: float = 0.05
    ) -> Data:
        """For :class:`iota.SFT`: each ``{"messages": [...]}``, or ``{"prompt": ..., "answer": ...}``.

        ``tokenizer``: the directory of one with a chat template; None: that of the pretrained directory.
        """
        return Data(texts=dialogues, tokenizer=tokenizer, holdout_fraction=holdout_fraction)

    @staticmethod
    def from_datasets(
        dataset: Iterable[Any],
        column: str = "text",
        *,
        max_documents: int | None = None,
        tokenizer: Any = None,
        holdout_fraction: float = 0.05,
    ) -> Data:
        """One split of a ``datasets`` dataset, also a streaming one; each row's ``column`` is a document."""
        if hasattr(dataset, "keys"):
            splits = ", ".join(map(str, dataset.keys()))  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError(f"this is a dictionary of datasets: {splits}", hint='choose one, as in dataset["train"]')
        texts = _Rows(dataset, column)
        return Data.from_iterable(
            texts, max_documents=max_documents, tokenizer=tokenizer, holdout_fraction=holdout_fraction
        )

    @staticmethod
    def from_iterable(
        texts: Iterable[str],
        *,
        max_documents: int | None = None,
        tokenizer: Any = None,
        holdout_fraction: float = 0.05,
    ) -> Data:
        """Each text is a document; read to its end, or ``max_documents``, when the run is submitted."""
        if isinstance(texts, str):
            raise ConfigError("a single text is no iterable of documents", hint="give a list: [text]")
        chosen = texts if max_documents is None else _First(texts, max_documents)
        return Data(texts=chosen, tokenizer=tokenizer, holdout_fraction=holdout_fraction)

    def section(self, directory: Path) -> dict[str, Any]:
        """``[data]``; what isn't a file yet is written below ``directory``."""
        sources = self.files if self.texts is None else (_write_texts(self.texts, directory / "texts"),)
        section: dict[str, Any] = {
            "sources": [str(source) for source in sources],
            "holdout_fraction": self.holdout_fraction,
        }
        if self.weights:
            section["weights"] = list(self.weights)
        if self.tokenizer is not None:
            section["tokenizer"] = str(_tokenizer_file(self.tokenizer, directory / "tokenizers"))
        return section


class _Rows:
    """The texts of a dataset's rows; may be read again."""

    def __init__(self, dataset: Iterable[Any], column: str) -> None:
        self._dataset, self._column = dataset, column

    def __iter__(self) -> Iterator[str]:
        for row in self._dataset:
            try:
                yield row[self._column]
            except (KeyError, TypeError):
                known = ", ".join(map(str, row)) if hasattr(row, "keys") else type(row).__name__
                raise ConfigError(
                    f"a row has no column {self._column!r}", hint=f"there are: {known}; give column=..."
                ) from None


class _First:
    def __init__(self, texts: Iterable[str], number: int) -> None:
        self._texts, self._number = texts, number

    def __iter__(self) -> Iterator[str]:
        return islice(self._texts, self._number)


def _matching(pattern: str) -> list[Path]:
    expanded = os.path.expanduser(pattern)  # noqa: PTH111 - a pattern is no path
    if not _WILD & set(expanded):
        path = Path(expanded).absolute()
        if not path.exists():
            raise ConfigError(f"{path} does not exist", hint="paths are relative to the working directory")
        return [path]
    found = sorted(Path(name).absolute() for name in glob.glob(expanded, recursive=True))  # noqa: PTH207 - absolute too
    if not found:
        raise ConfigError(f"no file matches {pattern!r}", hint=f"patterns are relative to {Path.cwd()}")
    return found


def _write_texts(texts: Iterable[str | Mapping[str, Any]], directory: Path) -> Path:
    """The texts (or dialogues) as one JSONL file named by its hash."""
    encode, digest, num_documents = msgspec.json.encode, blake3(), 0
    with full_disk_is_ours(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".texts.", dir=directory)
        scratch = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                for number, text in enumerate(texts):
                    if not isinstance(text, str | Mapping):
                        raise ConfigError(
                            f"document {number} is a {type(text).__name__}", hint="every document is a text (str)"
                        )
                    line = encode({"text": text} if isinstance(text, str) else dict(text)) + b"\n"
                    digest.update(line)
                    stream.write(line)
                    num_documents += 1
                stream.flush()
                os.fsync(stream.fileno())
            if not num_documents:
                raise ConfigError("there are no documents", hint="an iterator can be read only once")
            path = directory / f"{digest.hexdigest()[:32]}.jsonl"
            scratch.chmod(0o644)
            scratch.rename(path)
        finally:
            with suppress(FileNotFoundError):
                scratch.unlink()
    return path


def _tokenizer_file(tokenizer: Any, directory: Path) -> Path:
    if isinstance(tokenizer, str | Path):
        return Path(tokenizer).expanduser().absolute()
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of transformers' fast tokenizers
    if not hasattr(backend, "to_str"):
        raise ConfigError(
            f"a {type(tokenizer).__name__} has no tokenizer.json",
            hint="give a fast tokenizer, or the path of a tokenizer.json",
        )
    data = str(backend.to_str()).encode()
    path = directory / blake3(data).hexdigest()[:32] / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data)
    return path
