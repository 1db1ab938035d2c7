"""Text to token shards: the same inputs give the same bytes, a directory is whole or not there, memory is bounded.

A prepared directory holds ``manifest.json``, ``tokenizer.json``, ``train-00000.tokens`` ..., ``holdout-00000.tokens``
... and ``prepared.json``, whose key (of inputs and settings) makes a second call with the same inputs do nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from blake3 import blake3

from iota.corpus import PIECE_BYTES, find_by_source, read_pieces
from iota.prepare_write import MIN_WHOLE_DOCUMENTS, DialogueSettings, Job, Progress, Report, write_all, write_file
from iota.tokenizer import RunTokenizer, load_tokenizer, train_tokenizer
from subnet.errors import ConfigError, Corrupt, InputError, OutOfSpace
from subnet.model.data import (
    ROW_GROUP_BYTES,
    DataManifest,
    Shard,
    decode_manifest,
    encode_manifest,
)
from subnet.run.config import DataSection
from subnet.run.objective import ObjectiveSection
from subnet.words import BlobHash

SHARD_BYTES = 64 * 1024 * 1024


_RECEIPT_VERSION = 1
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PreparedData(msgspec.Struct, frozen=True):
    """A prepared directory, checked."""

    directory: Path
    manifest: DataManifest
    reused: bool = False
    words: str = ""
    """What became of dialogues, where they were prepared just now."""

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"

    @property
    def manifest_path(self) -> Path:
        return self.directory / "manifest.json"

    def files(self) -> dict[BlobHash, Path]:
        """Blob hash to file, of the shards, the tokenizer and the manifest: what the store is given."""
        found = {shard.blob: path for path, shard in _shard_files(self.directory, self.manifest)}
        found[self.manifest.tokenizer] = self.tokenizer_path
        found[BlobHash(blake3(encode_manifest(self.manifest)).hexdigest())] = self.manifest_path
        return found


class _Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    key: str


def prepare_data(
    sources: Sequence[str | Path],
    out_dir: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    holdout_fraction: float = 0.05,
    shard_bytes: int = SHARD_BYTES,
    dialogues: DialogueSettings | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PreparedData:
    """Prepare text in ``out_dir``; with ``tokenizer``, ``vocab_size`` is the most tokens that it may have.

    Sources are text files, directories of them, or JSONL; with ``dialogues`` JSONL of them. Without a tokenizer one of
    ``vocab_size`` tokens is trained on the training text; dialogues need one.
    """
    out = Path(out_dir)
    if tokenizer is None and vocab_size is None:
        raise ConfigError("neither a tokenizer nor a vocabulary size is given", hint="give one of the two")
    if shard_bytes <= 0 or shard_bytes % ROW_GROUP_BYTES:
        raise ConfigError(
            f"shard_bytes = {shard_bytes} is not allowed", hint=f"allowed: multiples of {ROW_GROUP_BYTES}"
        )
    if tokenizer is None and dialogues is not None:
        raise ConfigError("dialogues need a tokenizer", hint="set data.tokenizer, or model.pretrained with one")
    by_source = find_by_source(sources)
    path = None if tokenizer is None else Path(tokenizer)
    job = Job(by_source, _names(sources), path, dialogues, shard_bytes)
    given = None if tokenizer is None else load_tokenizer(Path(tokenizer))
    if given is not None and vocab_size is not None and given.vocab_size > vocab_size:
        raise ConfigError(
            f"{tokenizer} has {given.vocab_size} tokens, the model's vocab_size is {vocab_size}",
            hint=f"set vocab_size to {given.vocab_size} or more in the model's config, or give a smaller tokenizer",
        )
    _check_out_dir(out)
    progress(Progress("read", 0, sum(file.stat().st_size for file in job.files)))
    found = job.survey()
    if found.num_documents == 0:
        names = ", ".join(str(source) for source in sources)
        raise ConfigError(f"no text in {names}", hint="data.sources must name files that are not empty")
    split = job.split(found.num_documents, holdout_fraction)
    key = _key(found.digest, given, vocab_size, holdout_fraction, job)
    if (ready := _load_if_same(out, key)) is not None:
        progress(Progress("done", found.text_bytes, found.text_bytes, ready.manifest.train.num_tokens))
        return ready
    with _new_directory(out) as directory:
        report = Report(progress, found.text_bytes)
        if given is None:
            assert vocab_size is not None
            texts = (
                piece.text
                for piece in report.watch("train tokenizer", read_pieces(job.files, split))
                if not piece.holdout
            )
            given = train_tokenizer(texts, vocab_size)
        manifest = write_all(directory, job, split, given, report)
        write_file(directory / "prepared.json", msgspec.json.encode(_Receipt(_RECEIPT_VERSION, key)))
    progress(Progress("done", found.text_bytes, found.text_bytes, manifest.train.num_tokens))
    return PreparedData(out, manifest, words=report.words)


def _names(sources: Sequence[str | Path]) -> tuple[str, ...]:
    """What the sources are called, each once."""
    names: list[str] = []
    for source in sources:
        name = Path(source).name
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return tuple(names)


def prepare_for_run(
    data: DataSection,
    vocab_size: int,
    out_dir: str | Path,
    *,
    objective: ObjectiveSection = ObjectiveSection(),
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PreparedData:
    """The data of a run file: a prepared directory if that is what ``sources`` names, else prepared in ``out_dir``."""
    if len(data.sources) == 1 and is_prepared(Path(data.sources[0])):
        return load_prepared(data.sources[0])
    sft = objective.kind == "sft"
    return prepare_data(
        data.sources,
        out_dir,
        tokenizer=data.tokenizer or None,
        vocab_size=vocab_size,
        holdout_fraction=data.holdout_fraction,
        dialogues=DialogueSettings(data.sequence_length, objective.packing) if sft else None,
        progress=progress,
    )


def load_prepared(directory: str | Path) -> PreparedData:
    """A directory made by :func:`prepare_data`, its files present and of the right size."""
    path = Path(directory)
    if not is_prepared(path):
        raise ConfigError(f"{path} is not a prepared data directory", hint="make one with: iota data prepare")
    try:
        manifest = decode_manifest((path / "manifest.json").read_bytes())
    except InputError as error:
        raise Corrupt(f"{path / 'manifest.json'}: {error.reason}", hint="prepare the data again") from error
    except OSError as error:
        raise Corrupt(f"{path / 'manifest.json'}: {error.strerror}", hint="prepare the data again") from error
    for file, shard in _shard_files(path, manifest):
        if not file.is_file() or file.stat().st_size != shard.size_bytes:
            raise Corrupt(f"{file} is not {shard.size_bytes} bytes long", hint="prepare the data again")
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file() or blake3(tokenizer.read_bytes()).hexdigest() != manifest.tokenizer:
        raise Corrupt(f"{tokenizer} is not the manifest's", hint="prepare the data again")
    return PreparedData(path, manifest, reused=True)


def is_prepared(directory: Path) -> bool:
    """Whether a directory is one that :func:`prepare_data` made."""
    return (directory / "prepared.json").is_file() and (directory / "manifest.json").is_file()


def _key(digest: str, given: RunTokenizer | None, vocab_size: int | None, fraction: float, job: Job) -> str:
    tokenizer = f"train {vocab_size}" if given is None else blake3(given.json).hexdigest()
    settings = (_RECEIPT_VERSION, digest, tokenizer, fraction.hex(), job.shard_bytes, PIECE_BYTES, MIN_WHOLE_DOCUMENTS)
    settings = (*settings, *job.settings)
    return blake3(msgspec.json.encode(settings)).hexdigest()


def _check_out_dir(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file", hint="name a directory for the prepared data")
    if out.is_dir() and any(out.iterdir()) and not is_prepared(out):
        raise ConfigError(f"{out} is not empty and holds no prepared data", hint="name another directory")


def _load_if_same(out: Path, key: str) -> PreparedData | None:
    if not is_prepared(out):
        return None
    try:
        receipt = msgspec.json.decode((out / "prepared.json").read_bytes(), type=_Receipt)
        return load_prepared(out) if receipt.key == key else None
    except (msgspec.MsgspecError, Corrupt):
        return None  # damaged: it is made again and replaced as a whole


@contextmanager
def _new_directory(out: Path) -> Generator[Path]:
    """A temporary directory that becomes ``out`` in one rename when the block ends well, and is gone otherwise."""
    made: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        yield made
        made.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
            out.rename(old)
            made.rename(out)
            shutil.rmtree(old)
        else:
            made.rename(out)
        made = None
        _sync_directory(out.parent)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise OutOfSpace(
                f"no space left for {out}", hint="free some, or name a directory on another disk"
            ) from error
        raise ConfigError(f"{out} cannot be written: {error.strerror}", hint="check the path and its rights") from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _shard_files(directory: Path, manifest: DataManifest) -> Iterator[tuple[Path, Shard]]:
    for name, stream in (("train", manifest.train), ("holdout", manifest.holdout)):
        for number, shard in enumerate(stream.shards):
            yield directory / f"{name}-{number:05d}.tokens", shard
