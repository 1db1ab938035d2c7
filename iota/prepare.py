"""Text to token shards: the same inputs give the same bytes, a directory is whole or not there, memory is bounded.

A prepared directory holds ``manifest.json``, ``tokenizer.json``, ``train-00000.tokens`` ..., ``holdout-00000.tokens``
... and ``prepared.json``, whose key (of inputs and settings) makes a second call with the same inputs do nothing.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from iota.corpus import PIECE_BYTES, Piece, Split, find_files, read_pieces, survey
from iota.tokenizer import RunTokenizer, load_tokenizer, train_tokenizer
from subnet.errors import ConfigError, Corrupt, InputError, OutOfSpace
from subnet.model.data import (
    ROW_GROUP_BYTES,
    DataManifest,
    Shard,
    TokenStream,
    decode_manifest,
    encode_manifest,
)
from subnet.run.config import DataSection
from subnet.words import BlobHash

SHARD_BYTES = 64 * 1024 * 1024
_BATCH_PIECES = 16
_MIN_WHOLE_DOCUMENTS = 4
"""Whole documents are held out where the fraction gives at least so many."""

_RECEIPT_VERSION = 1
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Progress(msgspec.Struct, frozen=True):
    """How far a preparation is: ``phase`` is ``read``, ``train tokenizer``, ``encode`` or ``done``."""

    phase: str
    done_bytes: int
    total_bytes: int
    num_tokens: int = 0


class PreparedData(msgspec.Struct, frozen=True):
    """A prepared directory, checked."""

    directory: Path
    manifest: DataManifest
    reused: bool = False

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
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PreparedData:
    """Prepare text in ``out_dir``; with ``tokenizer``, ``vocab_size`` is the most tokens that it may have.

    Sources are text files, directories of them, or JSONL. Without a tokenizer one of ``vocab_size`` tokens is trained
    on the training text.
    """
    out = Path(out_dir)
    if tokenizer is None and vocab_size is None:
        raise ConfigError("neither a tokenizer nor a vocabulary size is given", hint="give one of the two")
    if shard_bytes <= 0 or shard_bytes % ROW_GROUP_BYTES:
        raise ConfigError(
            f"shard_bytes = {shard_bytes} is not allowed", hint=f"allowed: multiples of {ROW_GROUP_BYTES}"
        )
    files = find_files(sources)
    given = None if tokenizer is None else load_tokenizer(Path(tokenizer))
    if given is not None and vocab_size is not None and given.vocab_size > vocab_size:
        raise ConfigError(
            f"{tokenizer} has {given.vocab_size} tokens, the model's vocab_size is {vocab_size}",
            hint=f"set vocab_size to {given.vocab_size} or more in the model's config, or give a smaller tokenizer",
        )
    _check_out_dir(out)
    progress(Progress("read", 0, sum(file.stat().st_size for file in files)))
    found = survey(files)
    if found.num_documents == 0:
        names = ", ".join(str(source) for source in sources)
        raise ConfigError(f"no text in {names}", hint="data.sources must name files that are not empty")
    whole = found.num_documents * holdout_fraction >= _MIN_WHOLE_DOCUMENTS
    split = Split(fraction=holdout_fraction, whole_documents=whole)
    key = _key(found.digest, given, vocab_size, holdout_fraction, shard_bytes)
    if (ready := _load_if_same(out, key)) is not None:
        progress(Progress("done", found.text_bytes, found.text_bytes, ready.manifest.train.num_tokens))
        return ready
    with _new_directory(out) as directory:
        report = _Report(progress, found.text_bytes)
        if given is None:
            assert vocab_size is not None
            texts = (
                piece.text for piece in report.watch("train tokenizer", read_pieces(files, split)) if not piece.holdout
            )
            given = train_tokenizer(texts, vocab_size)
        manifest = _write_all(directory, files, split, given, shard_bytes, report)
        _write(directory / "prepared.json", msgspec.json.encode(_Receipt(_RECEIPT_VERSION, key)))
    progress(Progress("done", found.text_bytes, found.text_bytes, manifest.train.num_tokens))
    return PreparedData(out, manifest)


def prepare_for_run(
    data: DataSection,
    vocab_size: int,
    out_dir: str | Path,
    *,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PreparedData:
    """The data of a run file: a prepared directory if that is what ``sources`` names, else prepared in ``out_dir``."""
    if len(data.sources) == 1 and is_prepared(Path(data.sources[0])):
        return load_prepared(data.sources[0])
    return prepare_data(
        data.sources,
        out_dir,
        tokenizer=data.tokenizer or None,
        vocab_size=vocab_size,
        holdout_fraction=data.holdout_fraction,
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


def _key(digest: str, given: RunTokenizer | None, vocab_size: int | None, fraction: float, shard_bytes: int) -> str:
    tokenizer = f"train {vocab_size}" if given is None else blake3(given.json).hexdigest()
    settings = (_RECEIPT_VERSION, digest, tokenizer, fraction.hex(), shard_bytes, PIECE_BYTES, _MIN_WHOLE_DOCUMENTS)
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


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


class _Report:
    """Tells the caller how far a reading of all of the text is."""

    def __init__(self, progress: Callable[[Progress], None], total_bytes: int) -> None:
        self._progress, self._total = progress, total_bytes
        self.num_tokens = 0

    def watch(self, phase: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
        done = 0
        for piece in pieces:
            yield piece
            done += len(piece.text.encode("utf-8"))
            self._progress(Progress(phase, done, self._total, self.num_tokens))


class _ShardWriter:
    """Writes one stream of tokens as shards, hashing row groups on the way."""

    def __init__(self, directory: Path, name: str, token_bytes: int, shard_bytes: int) -> None:
        self._directory, self._name = directory, name
        self._dtype = "<u2" if token_bytes == 2 else "<u4"
        self._shard_bytes = shard_bytes
        self._buffer = bytearray()
        self._file: BinaryIO | None = None
        self._shards: list[Shard] = []
        self._num_tokens = 0

    def add(self, tokens: npt.NDArray[Any]) -> None:
        self._num_tokens += tokens.size
        self._buffer += tokens.astype(self._dtype).tobytes()
        whole = len(self._buffer) // ROW_GROUP_BYTES * ROW_GROUP_BYTES
        for start in range(0, whole, ROW_GROUP_BYTES):
            self._write_group(bytes(self._buffer[start : start + ROW_GROUP_BYTES]))
        del self._buffer[:whole]

    def _write_group(self, group: bytes) -> None:
        if self._file is None:
            self._file = (self._directory / f"{self._name}-{len(self._shards):05d}.tokens").open("wb")
            self._hash, self._size = blake3(), 0
            self._groups: list[BlobHash] = []
        self._file.write(group)
        self._hash.update(group)
        self._groups.append(BlobHash(blake3(group).hexdigest()))
        self._size += len(group)
        if self._size >= self._shard_bytes:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._file is not None:
            with self._file as stream:
                stream.flush()
                os.fsync(stream.fileno())
            self._shards.append(Shard(BlobHash(self._hash.hexdigest()), self._size, tuple(self._groups)))
            self._file = None

    def finish(self) -> TokenStream:
        if self._buffer:
            self._write_group(bytes(self._buffer))
            self._buffer.clear()
        self._end_shard()
        return TokenStream(self._num_tokens, tuple(self._shards))

    def close(self) -> None:
        """Let go of an unfinished file; after :meth:`finish` it does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(
    directory: Path, files: list[Path], split: Split, tokenizer: RunTokenizer, shard_bytes: int, report: _Report
) -> DataManifest:
    token_bytes = 2 if tokenizer.vocab_size <= 2**16 else 4
    train = _ShardWriter(directory, "train", token_bytes, shard_bytes)
    holdout = _ShardWriter(directory, "holdout", token_bytes, shard_bytes)
    end = np.array([tokenizer.end_of_text])
    try:
        for batch in _batches(report.watch("encode", read_pieces(files, split))):
            for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                writer = holdout if piece.holdout else train
                writer.add(tokens)
                if piece.ends_part:
                    writer.add(end)
                report.num_tokens += tokens.size + piece.ends_part
        streams = train.finish(), holdout.finish()
    finally:
        train.close()
        holdout.close()
    _write(directory / "tokenizer.json", tokenizer.json)
    manifest = DataManifest(
        tokenizer=BlobHash(blake3(tokenizer.json).hexdigest()),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        token_bytes=token_bytes,
        train=streams[0],
        holdout=streams[1],
    )
    _write(directory / "manifest.json", encode_manifest(manifest))
    return manifest


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    while batch := list(itertools.islice(pieces, _BATCH_PIECES)):
        yield batch


def _shard_files(directory: Path, manifest: DataManifest) -> Iterator[tuple[Path, Shard]]:
    for name, stream in (("train", manifest.train), ("holdout", manifest.holdout)):
        for number, shard in enumerate(stream.shards):
            yield directory / f"{name}-{number:05d}.tokens", shard
