"""Text of files, directories and JSONL as a stream of pieces: bounded memory, the same each time, errors with a place.

A text file is one document, a line of JSONL (field ``text``) is one document; blank documents are left out.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from blake3 import blake3

from subnet.errors import ConfigError

PIECE_BYTES = 256 * 1024
"""Text is tokenised in pieces of about this size, cut after a line. Changing it changes the tokens of long texts."""

MAX_LINE_BYTES = 256 * 1024 * 1024
SUFFIXES = (".txt", ".md", ".text", ".jsonl", ".jsonl.gz")


class Piece(msgspec.Struct, frozen=True):
    text: str
    document: int
    ends_part: bool
    """Whether the document's training or hold-out part ends here."""
    holdout: bool
    file: int = 0
    """Which of the files it is of."""


class Split(msgspec.Struct, frozen=True):
    """Which text is held out: whole documents, evenly spaced, where there are many; else the tail of each."""

    fraction: float
    whole_documents: bool

    def takes(self, document: int) -> bool:
        return self.whole_documents and int((document + 1) * self.fraction) > int(document * self.fraction)

    @property
    def tail(self) -> float:
        return 0.0 if self.whole_documents else self.fraction


NO_SPLIT = Split(fraction=0.0, whole_documents=True)


class Survey(msgspec.Struct, frozen=True):
    """What one reading of everything finds."""

    digest: str
    num_documents: int
    text_bytes: int


class _Line(msgspec.Struct):
    text: str


def find_files(sources: Sequence[str | Path]) -> list[Path]:
    """The files that the sources name, directories searched in sorted order."""
    return [file for found in find_by_source(sources) for file in found]


def find_by_source(sources: Sequence[str | Path]) -> list[list[Path]]:
    """The same, for each source."""
    if not sources:
        raise ConfigError("data.sources is empty", hint='name text or JSONL files, for example sources = ["book.txt"]')
    by_source: list[list[Path]] = []
    for source in map(Path, sources):
        if source.is_dir():
            found = [p for p in sorted(source.rglob("*")) if p.name.endswith(SUFFIXES) and p.is_file()]
            visible = [p for p in found if not any(part.startswith(".") for part in p.relative_to(source).parts)]
            if not visible:
                raise ConfigError(f"{source} holds no text files", hint=f"looked for {', '.join(SUFFIXES)}")
            by_source.append(visible)
        elif source.is_file():
            by_source.append([source])
        else:
            raise ConfigError(f"{source} does not exist", hint="data.sources are paths relative to the run file")
    return by_source


def survey(files: Sequence[Path]) -> Survey:
    """Read and check all of the text once: its hash, documents and bytes."""
    digest, num_documents, text_bytes = blake3(b"iota/corpus/1\0"), 0, 0
    for piece in read_pieces(files, NO_SPLIT):
        data = piece.text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data + (b"\1" if piece.ends_part else b"\0"))
        num_documents += piece.ends_part
        text_bytes += len(data)
    return Survey(digest=digest.hexdigest(), num_documents=num_documents, text_bytes=text_bytes)


def read_pieces(files: Sequence[Path], split: Split) -> Iterator[Piece]:
    """All of the text, in order, cut into pieces and marked as training or held out."""
    document = 0
    for index, file in enumerate(files):
        try:
            if file.name.endswith((".jsonl", ".jsonl.gz")):
                for text in _read_jsonl(file):
                    for piece in _document_pieces([text], len(text.encode("utf-8")), document, split):
                        yield msgspec.structs.replace(piece, file=index)
                    document += 1
            elif not _is_blank(file):
                size = file.stat().st_size
                for piece in _document_pieces(_read_text(file), size, document, split):
                    yield msgspec.structs.replace(piece, file=index)
                document += 1
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}", hint="check the path and its rights"
            ) from error


def _document_pieces(texts: Iterable[str], size_bytes: int, document: int, split: Split) -> Iterator[Piece]:
    """Pieces of one document of about ``size_bytes``, each marked once it is known whether its part goes on."""
    waiting: tuple[str, bool] | None = None
    for text, in_tail in _cut_tail(texts, int(size_bytes * (1 - split.tail)) if split.tail else None):
        holdout = in_tail or split.takes(document)
        if waiting is not None:
            yield Piece(waiting[0], document, ends_part=waiting[1] != holdout, holdout=waiting[1])
        waiting = text, holdout
    if waiting is not None:
        yield Piece(waiting[0], document, ends_part=True, holdout=waiting[1])


def _cut_tail(texts: Iterable[str], cut: int | None) -> Iterator[tuple[str, bool]]:
    """Pieces with whether they lie behind byte ``cut``, cut there after a line or a space."""
    at, in_tail = 0, False
    for part in (part for text in texts for part in _chop(text)):
        data, rest = part.encode("utf-8"), part
        if cut is not None and not in_tail and at + len(data) > cut:
            where = _after_blank(part, len(data[: max(0, cut - at)].decode("utf-8", errors="ignore")))
            if where:
                yield part[:where], False
            in_tail, rest = True, part[where:]
        if rest:
            yield rest, in_tail
        at += len(data)


def _after_blank(text: str, start: int) -> int:
    """The first place at or after ``start`` behind a line, else behind a space, else the end."""
    for mark in ("\n", " "):
        found = text.find(mark, start)
        if found >= 0:
            return found + 1
    return len(text)


def _chop(text: str) -> Iterator[str]:
    """A long text in pieces cut after a line or a space."""
    at = 0
    while len(text) - at > PIECE_BYTES:
        end = max(text.rfind("\n", at, at + PIECE_BYTES), text.rfind(" ", at + PIECE_BYTES // 2, at + PIECE_BYTES)) + 1
        end = end if end > at else at + PIECE_BYTES
        yield text[at:end]
        at = end
    if at < len(text):
        yield text[at:]


def _is_blank(file: Path) -> bool:
    with file.open("rb") as stream:
        while block := stream.read(PIECE_BYTES):
            if block.strip():
                return False
    return True


def _read_text(file: Path) -> Iterator[str]:
    offset, carry = 0, b""
    with file.open("rb") as stream:
        while block := stream.read(PIECE_BYTES):
            data = carry + block
            end = data.rfind(b"\n") + 1
            if end == 0 and len(data) >= 4 * PIECE_BYTES:  # a line without end: cut before a character
                end = next((i for i in range(len(data) - 1, len(data) - 5, -1) if data[i] & 0xC0 != 0x80), len(data))
            carry = data[end:]
            if end:
                yield _decode(file, data[:end], offset)
                offset += end
        if carry:
            yield _decode(file, carry, offset)


def _decode(file: Path, data: bytes, offset: int) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 at byte {offset + error.start}",
            hint=f"convert it, for example: iconv -f LATIN1 -t UTF-8 {file.name} > fixed.txt",
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _open(file: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.GzipFile(file, "rb")) if file.name.endswith(".gz") else file.open("rb")


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line of a JSONL file that isn't blank, checked to be UTF-8 of bounded length."""
    offset, number = 0, 0
    try:
        with _open(file) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{file} line {number} is longer than {MAX_LINE_BYTES} bytes", hint="split the document"
                    )
                if line.strip():
                    _decode(file, line, offset)
                    yield number, line
                offset += len(line)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"{file} is not a whole gzip file: {error}", hint="compress it again") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="check the path and its rights") from error


def _read_jsonl(file: Path) -> Iterator[str]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in read_lines(file):
        try:
            text = decoder.decode(line).text
        except msgspec.ValidationError as error:
            hint = 'a line is {"text": "..."}'
            raise ConfigError(f'{file} line {number} has no string field "text"', hint=hint) from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file} line {number} is not JSON", hint='a line is {"text": "..."}') from error
        if text.strip():
            yield text
