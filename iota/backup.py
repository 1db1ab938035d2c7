"""A validator's directory in one file, while it runs: saved, rehearsed (every journal is opened and folded), and restored.

The archive is a tar packed with zstandard: ``manifest.json`` first (size and BLAKE3 of each file), then the files. Journals are
copied by SQLite's own backup, so each is as it was at one moment; one in PostgreSQL becomes such a file. Left out is what can
be made again: audit work, stack dumps, temporary files. A backup older than the log store is no loss: start once with
``--lead-from STORE``, which goes on from there.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

import msgspec
import zstandard
from blake3 import blake3

from subnet.errors import ConfigError, Corrupt, Exists, InputError
from subnet.store.disk import sync_directory
from subnet.words import PROTOCOL_VERSION
from validator.journal_file import SqliteJournal, copy_whole
from validator.journals import FILE, PLACE_NAME, Journals, place_of
from validator.run_registry import RunRegistry

MANIFEST = "manifest.json"
LIMIT_MANIFEST_BYTES, LIMIT_FILES = 16 << 20, 100_000
LEFT_OUT = frozenset({"audits", "stalls", "lead-from.tmp"})
BESIDE_JOURNALS = ("-wal", "-shm", "-tip", "-new")
CHUNK_BYTES = 1 << 20
OF_A_VALIDATOR = ("runs", "follow")
"""What a leader's, and a follower's directory has."""


class SavedFile(msgspec.Struct, frozen=True):
    """``path`` is relative to the validator's directory, with forward slashes."""

    path: str
    size_bytes: int
    hash: str


class Manifest(msgspec.Struct, frozen=True):
    format: int
    protocol: int
    saved_ns: int
    files: tuple[SavedFile, ...]


class RunFound(msgspec.Struct, frozen=True):
    """What a rehearsal found of a run."""

    name: str
    run_id: str
    finished: bool
    records: int
    acknowledged: int
    """Records that the log store had."""
    step: int
    head: str


def save(directory: Path, target: Path, journals: Journals | None = None) -> Manifest:
    """Write the archive: temp, fsync, rename. :class:`ConfigError` for a directory that is no validator's.

    ``journals``: where the validator keeps its journals, files by default. A follower's directory has ``follow/``.
    """
    directory, journals = directory.expanduser(), journals or Journals()
    if not any((directory / name).is_dir() for name in OF_A_VALIDATOR):
        raise ConfigError(
            f"{directory} is no validator's directory: it has neither runs/ nor follow/", hint="give its --dir"
        )
    if target.exists():
        raise Exists(f"{target} is there already", hint="give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=target.parent) as scratch:
        files = [*_collect(directory, Path(scratch)), *_from_databases(directory, Path(scratch), journals)]
        manifest = Manifest(1, PROTOCOL_VERSION, time.time_ns(), tuple(saved for saved, _ in files))
        temporary = Path(scratch) / "archive"
        with temporary.open("wb") as out:
            with zstandard.ZstdCompressor(level=6).stream_writer(out, closefd=False) as packed:
                with tarfile.open(fileobj=cast(IO[bytes], packed), mode="w|") as tar:
                    _add_bytes(tar, MANIFEST, msgspec.json.encode(manifest))
                    for saved, source in files:
                        tar.add(source, arcname=saved.path, recursive=False, filter=_plain)
            out.flush()
            _fsync(out)
        temporary.replace(target)
    sync_directory(target.parent)
    return manifest


def _collect(directory: Path, scratch: Path) -> Iterator[tuple[SavedFile, Path]]:
    """Each file with where its bytes are to be taken from: journals from a copy, what may change while we read as well."""
    for index, path in enumerate(sorted(directory.rglob("*"))):
        relative = path.relative_to(directory)
        if not path.is_file() or path.is_symlink() or _skipped(relative):
            continue
        copy = scratch / f"file-{index}"
        try:
            if path.suffix == ".db":
                copy_whole(path, copy)
            else:
                shutil.copyfile(path, copy)
        except FileNotFoundError:
            continue  # replaced or removed by the validator, which runs
        size_bytes, hash_ = _hash(copy)
        yield SavedFile(relative.as_posix(), size_bytes, hash_), copy


def _from_databases(directory: Path, scratch: Path, journals: Journals) -> Iterator[tuple[SavedFile, Path]]:
    """Journals that aren't files, as files: restored, they can be led from or moved where they are wanted."""
    for entry in RunRegistry(directory, journals=journals).entries.values() if (directory / "runs").is_dir() else ():
        if place_of(entry.directory) in (None, FILE):
            continue
        copy = scratch / f"journal-{entry.name}.db"
        SqliteJournal(copy).fill(entry.journal().rows())
        yield SavedFile(entry.journal_path.relative_to(directory).as_posix(), *_hash(copy)), copy


def _skipped(relative: Path) -> bool:
    if LEFT_OUT & set(relative.parts) or relative.name == PLACE_NAME or relative.name.startswith("."):
        return True
    return any(relative.name.endswith(f".db{end}") for end in BESIDE_JOURNALS)


def restore(archive: Path, directory: Path) -> Manifest:
    """Unpack into a directory that isn't there or is empty; it appears whole or not at all, every file checked."""
    directory = directory.expanduser()
    if directory.exists() and any(directory.iterdir()):
        raise Exists(f"{directory} isn't empty", hint="restore into a new directory, then start with --dir")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".restore-", dir=directory.parent))
    try:
        manifest = _unpack(archive, scratch)
        if directory.exists():
            directory.rmdir()
        scratch.chmod(0o755)
        scratch.replace(directory)
        sync_directory(directory.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def rehearse(archive: Path) -> tuple[Manifest, tuple[RunFound, ...]]:
    """Restore into a temporary directory, open every run there and fold its journal; nothing of it is kept."""
    with tempfile.TemporaryDirectory(prefix="iota-rehearsal-") as scratch:
        directory = Path(scratch) / "validator"
        manifest = restore(archive, directory)
        return manifest, tuple(runs_of(directory))


def runs_of(directory: Path) -> Iterator[RunFound]:
    """Every run of a validator's directory, its journal opened and folded. :class:`Corrupt` names the record that is bad."""
    from subnet.run.apply import apply_record
    from validator.journal_store import JournalStore

    for entry in RunRegistry(directory).entries.values():
        if not entry.has_journal:
            yield RunFound(entry.name, entry.stored.run_id, entry.finished, 0, 0, 0, "")
            continue
        journal = JournalStore(entry.journal())
        try:
            state = journal.start_state()
            for record in journal.replay():
                apply_record(state, record)
            yield RunFound(
                entry.name,
                entry.stored.run_id,
                entry.finished,
                len(journal),
                journal.acknowledged,
                max(0, state.next_step),
                journal.head,
            )
        finally:
            journal.close()


@contextmanager
def _opened(archive: Path) -> Generator[tarfile.TarFile]:
    try:
        with archive.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as packed:
            with tarfile.open(fileobj=cast(IO[bytes], packed), mode="r|") as tar:
                yield tar
    except (OSError, tarfile.TarError, zstandard.ZstdError) as error:
        raise Corrupt(f"{archive} can't be read: {error}", hint="is it a backup that iota backup save made?") from error


def _unpack(archive: Path, into: Path) -> Manifest:
    with _opened(archive) as tar:
        members = iter(tar)
        manifest = _manifest(archive, tar, next(members, None))
        wanted = {saved.path: saved for saved in manifest.files}
        for member in members:
            saved = wanted.pop(member.name, None)
            source = tar.extractfile(member) if saved is not None and member.isreg() else None
            if saved is None or source is None or member.size != saved.size_bytes:
                raise Corrupt(f"{archive}: {member.name!r} isn't what its manifest says", hint="take another backup")
            _write(into / _safe(saved.path), source, saved, archive)
    if wanted:
        raise Corrupt(f"{archive} ends before {min(wanted)!r}", hint="it was cut short: take another backup")
    return manifest


def _manifest(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo | None) -> Manifest:
    source = tar.extractfile(member) if member is not None and member.name == MANIFEST and member.isreg() else None
    if member is None or source is None or member.size > LIMIT_MANIFEST_BYTES:
        raise Corrupt(f"{archive} has no manifest", hint="is it a backup that iota backup save made?")
    try:
        manifest = msgspec.json.decode(source.read(), type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{archive}: its manifest can't be read: {error}", hint="take another backup") from error
    if manifest.format != 1 or manifest.protocol != PROTOCOL_VERSION:
        raise InputError(
            f"{archive} is of format {manifest.format}, protocol {manifest.protocol}; this is format 1, {PROTOCOL_VERSION}",
            hint="restore with the version that made it",
        )
    if len(manifest.files) > LIMIT_FILES:
        raise InputError(f"{archive} names {len(manifest.files)} files, allowed are {LIMIT_FILES}")
    return manifest


def _safe(path: str) -> Path:
    """Inside of the directory, whatever the archive says."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\\" in path or "\0" in path:
        raise InputError(f"the archive names {path!r}, which leads out of the directory")
    return Path(*pure.parts)


def _write(target: Path, source: IO[bytes], saved: SavedFile, archive: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    hasher = blake3()
    with target.open("xb") as out:
        while chunk := source.read(CHUNK_BYTES):
            hasher.update(chunk)
            out.write(chunk)
        out.flush()
        _fsync(out)
    if hasher.hexdigest() != saved.hash:
        raise Corrupt(f"{archive}: {saved.path} isn't as it was saved", hint="take another backup")


def _hash(path: Path) -> tuple[int, str]:
    hasher, size_bytes = blake3(), 0
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            hasher.update(chunk)
            size_bytes += len(chunk)
    return size_bytes, hasher.hexdigest()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(time.time())
    tar.addfile(info, io.BytesIO(data))


def _fsync(out: IO[bytes]) -> None:
    os.fsync(out.fileno())
