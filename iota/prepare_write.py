"""What is prepared, and the writing of it: text or dialogues, source by source, into the two streams of shards."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from iota.chat import load_template
from iota.corpus import Piece, Split, Survey, read_pieces, survey
from iota.dialogues import OPEN_ROWS, DialogueCounts, DialogueReader, RowPacker, split_of, survey_dialogues
from iota.shards import ShardWriter
from iota.tokenizer import RunTokenizer
from subnet.errors import ConfigError
from subnet.model.data import DataManifest, Domain, encode_manifest
from subnet.model.token_bits import STARTS
from subnet.words import BlobHash

_BATCH_PIECES = 16
MIN_WHOLE_DOCUMENTS = 4
"""Whole documents are held out where the fraction gives at least so many."""


class Progress(msgspec.Struct, frozen=True):
    """How far a preparation is: ``phase`` is ``read``, ``train tokenizer``, ``encode`` or ``done``."""

    phase: str
    done_bytes: int
    total_bytes: int
    num_tokens: int = 0


class DialogueSettings(msgspec.Struct, frozen=True):
    """The sources are lines of dialogues (:mod:`iota.dialogues`), to be laid out in rows of ``length`` tokens."""

    length: int
    packing: bool = True


@dataclass(frozen=True)
class Job:
    """What is to be prepared."""

    by_source: list[list[Path]]
    names: tuple[str, ...]
    tokenizer: Path | None
    dialogues: DialogueSettings | None
    shard_bytes: int

    @property
    def files(self) -> list[Path]:
        return [file for files in self.by_source for file in files]

    @cached_property
    def source_of(self) -> list[int]:
        """By file, the number of its source."""
        return [number for number, files in enumerate(self.by_source) for _ in files]

    def survey(self) -> Survey:
        if self.dialogues is None:
            return survey(self.files)
        digest, count, size_bytes = survey_dialogues(self.files)
        return Survey(digest=digest, num_documents=count, text_bytes=size_bytes)

    def split(self, num_documents: int, fraction: float) -> Split:
        if self.dialogues is not None:
            return split_of(num_documents, fraction)
        return Split(fraction=fraction, whole_documents=num_documents * fraction >= MIN_WHOLE_DOCUMENTS)

    @property
    def settings(self) -> tuple[object, ...]:
        """What the key of a directory has beside text and tokenizer, where it isn't one source of running text."""
        if self.dialogues is None:
            return (self.names, [len(files) for files in self.by_source]) if len(self.names) > 1 else ()
        template = None if self.tokenizer is None else load_template(self.tokenizer)
        described = None if template is None else template.described
        return (self.names, [len(f) for f in self.by_source], self.dialogues, OPEN_ROWS, described)


class Report:
    """Tells the caller how far a reading of all of the text is."""

    def __init__(self, progress: Callable[[Progress], None], total_bytes: int) -> None:
        self._progress, self._total = progress, total_bytes
        self.num_tokens = 0
        self.words = ""

    def watch(self, phase: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
        done = 0
        for piece in pieces:
            yield piece
            done += len(piece.text.encode("utf-8"))
            self._progress(Progress(phase, done, self._total, self.num_tokens))


class Streams:
    """Both streams on their way to disk, and what each source has put into them."""

    def __init__(self, directory: Path, token_bytes: int, shard_bytes: int, names: Sequence[str]) -> None:
        self.token_bytes, self._names = token_bytes, names
        self.writers = [ShardWriter(directory, name, token_bytes, shard_bytes) for name in ("train", "holdout")]
        self._tokens = [[0, 0] for _ in names]

    def add(self, source: int, tokens: npt.NDArray[Any], *, holdout: bool) -> None:
        self.writers[holdout].add(tokens)
        self._tokens[source][holdout] += tokens.size

    def domains(self) -> tuple[Domain, ...] | msgspec.UnsetType:
        if len(self._names) < 2:
            return msgspec.UNSET
        return tuple(Domain(name, *counts) for name, counts in zip(self._names, self._tokens, strict=True))

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def _write_text(streams: Streams, job: Job, split: Split, tokenizer: RunTokenizer, report: Report) -> None:
    end = np.array([tokenizer.end_of_text])
    for batch in _batches(report.watch("encode", read_pieces(job.files, split))):
        for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            source = job.source_of[piece.file]
            streams.add(source, tokens, holdout=piece.holdout)
            if piece.ends_part:
                streams.add(source, end, holdout=piece.holdout)
            report.num_tokens += tokens.size + piece.ends_part


def _write_dialogues(streams: Streams, job: Job, split: Split, tokenizer: RunTokenizer, report: Report) -> None:
    """Rows of each source, then a token that the last row's last position has something to point at."""
    assert job.dialogues is not None
    counts, number = DialogueCounts(), 0
    reader = DialogueReader(tokenizer, job.tokenizer)
    for source, files in enumerate(job.by_source):
        settings = job.dialogues.length, tokenizer.end_of_text, counts
        packers = [RowPacker(*settings, packing=job.dialogues.packing) for _ in ("train", "holdout")]
        for file in files:
            for tokens in reader.read(file):
                holdout = split.takes(number)
                number += 1
                for row in packers[holdout].add(tokens):
                    streams.add(source, row, holdout=holdout)
        for holdout, packer in enumerate(packers):
            for row in packer.finish():
                streams.add(source, row, holdout=bool(holdout))
    last = np.array([tokenizer.end_of_text | STARTS], dtype=np.uint32)
    for holdout, writer in enumerate(streams.writers):
        if writer.num_tokens:
            streams.add(len(job.by_source) - 1, last, holdout=bool(holdout))
    report.num_tokens, report.words = streams.writers[0].num_tokens, counts.words()
    if not counts.rows:
        raise ConfigError(
            f"no dialogue has an answer within a row of {job.dialogues.length} tokens ({counts.words()})",
            hint="raise data.sequence_length",
        )


def write_all(directory: Path, job: Job, split: Split, tokenizer: RunTokenizer, report: Report) -> DataManifest:
    wide = job.dialogues is not None or tokenizer.vocab_size > 2**16
    streams_out = Streams(directory, 4 if wide else 2, job.shard_bytes, job.names)
    try:
        write = _write_text if job.dialogues is None else _write_dialogues
        write(streams_out, job, split, tokenizer, report)
        streams = tuple(writer.finish() for writer in streams_out.writers)
    finally:
        streams_out.close()
    write_file(directory / "tokenizer.json", tokenizer.json)
    manifest = DataManifest(
        tokenizer=BlobHash(blake3(tokenizer.json).hexdigest()),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        token_bytes=streams_out.token_bytes,
        train=streams[0],
        holdout=streams[1],
        domains=streams_out.domains(),
        dialogues=msgspec.UNSET if job.dialogues is None else job.dialogues.length,
    )
    write_file(directory / "manifest.json", encode_manifest(manifest))
    return manifest


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    while batch := list(itertools.islice(pieces, _BATCH_PIECES)):
        yield batch


def write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
