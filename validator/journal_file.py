"""A journal's file as it is found: checked from its copy on, a torn tail dropped, whatever else is wrong named by its number.

SQLite in WAL mode with ``synchronous=FULL``: a commit that was acknowledged is on the disk. What the disk lost all the same is
told by the *tip*, a small file beside the journal that says how many records were committed; it is written without a sync, so
that it may lag behind the journal but is never ahead of what was acknowledged.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from loguru import logger

from subnet.errors import ConfigError, Corrupt, Exists, IotaError, OutOfSpace
from subnet.run.chain_hash import GENESIS_HEAD, next_head
from validator.copies import Copy

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, head TEXT NOT NULL, data BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS copies (
    number INTEGER PRIMARY KEY, head TEXT NOT NULL, hash TEXT NOT NULL, state BLOB NOT NULL, history BLOB NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS receipts (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, hotkey TEXT NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS receipts_by_step ON receipts (step);
"""
_LENGTHS = "SELECT (SELECT count(*) FROM records), (SELECT coalesce(max(next), 0) FROM segments)"
WAL_LIMIT_BYTES = 16 << 20
WAY_OUT = "the way out: start with --lead-from STORE, which reads the run from its log store"
_DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_CONFIG = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}


@dataclass
class Found:
    """A journal as it was found; ``base``: the number of ``records[0]``, whose predecessor's head is ``base_head``."""

    base: int = 0
    base_head: str = GENESIS_HEAD
    records: list[bytes] = field(default_factory=lambda: [])
    heads: list[str] = field(default_factory=lambda: [])
    copy: Copy | None = None
    """The newest good copy of the state: replay begins with it."""
    acknowledged: int = 0
    num_segments: int = 0
    num_dropped: int = 0
    """Records at the end that were committed once and are lost."""
    torn: int | None = None
    """Number of a record at the end that is still in the file and must be deleted before another takes its place."""

    @property
    def length(self) -> int:
        return self.base + len(self.records)


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=10.0)
    try:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # counts for a new file only; an old one re-uses its pages
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA journal_size_limit={WAL_LIMIT_BYTES}")
        connection.executescript(SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Beside the one writer; what it has committed is seen."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, timeout=10.0)


def copy_whole(source: Path, target: Path) -> None:
    """A database as it is at one moment, beside a process that writes it."""
    with readable(source), closing(connect_to_read(source)) as one, closing(sqlite3.connect(target)) as other:
        one.backup(other, pages=4096)


def _connect_aside(path: Path) -> sqlite3.Connection:
    """One snapshot for all that is read. A journal without a write-ahead log beside it has no writer: it may be on a disk
    that can't be written."""
    alone = not path.with_name(path.name + "-wal").exists()
    uri = f"file:{quote(str(path))}?mode=ro{'&immutable=1' if alone else ''}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)
    try:
        connection.execute("BEGIN")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def readable(path: Path) -> Generator[None]:
    """What SQLite and the system say while a journal is opened, as errors of ours that name the remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise database_error(path, "be opened", error) from error
    except OSError as error:
        raise ConfigError(
            f"cannot open the journal {path}: {error.strerror or error}", hint="check path and rights"
        ) from error


def database_error(path: Path, what: str, error: sqlite3.DatabaseError) -> IotaError:
    """``what``: be opened, be written."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    reason = f"journal {path} can't {what}: {error}"
    if code in _DISK:
        return OutOfSpace(reason, hint="is the disk full? make room and start again: nothing acknowledged is lost")
    if code in _CONFIG:
        return ConfigError(reason, hint="check path and rights")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or isinstance(error, sqlite3.IntegrityError):
        return ConfigError(reason, hint="another process uses it: one validator a directory")
    return Corrupt(reason, hint=WAY_OUT)


def load(path: Path, *, read_only: bool = False) -> Found:
    """Everything in the file that is good, or the error that says which record isn't and what to do.

    ``read_only``: as it is at one moment, beside a validator that may be writing it; nothing in the directory changes.
    """
    tip, tip_acknowledged = Tip.read(path)  # first: what a writer adds meanwhile is more than it says
    with closing(_connect_aside(path) if read_only else connect(path)) as connection:
        found = _anchored(path, connection)
    if max(found.acknowledged, tip_acknowledged) > found.length:
        raise Corrupt(
            f"journal {path} ends before record {found.length}, but records up to "
            f"{max(found.acknowledged, tip_acknowledged) - 1} are in the log store",
            hint=WAY_OUT,
        )
    found.num_dropped = max(found.num_dropped, tip - found.length)
    if found.num_dropped:
        logger.warning(
            "journal {}: the last {} record(s), from {} on, are lost or torn and were dropped; a new term begins",
            path,
            found.num_dropped,
            found.length,
        )
    return found


def _anchored(path: Path, connection: sqlite3.Connection) -> Found:
    """From the newest-but-one copy on, as far back as members may still ask; from a later one where that can't be read."""
    segment = connection.execute("SELECT number, next FROM segments ORDER BY number DESC LIMIT 1").fetchone()
    last, acknowledged = _typed(segment, int, int) if segment is not None else (-1, 0)
    num_segments = last + 1
    copies, bad = _copies(path, connection)
    (lowest,) = connection.execute("SELECT min(number) FROM records").fetchone()
    anchors = [(copy.number, copy.head) for copy in copies[:2]]
    if not lowest and len(anchors) < 2:  # nothing was deleted yet
        anchors.append((0, GENESIS_HEAD))
    if not anchors:
        why = f"its copies of the state ({bad}) don't fit their hashes" if bad else "it has no copy of the state"
        raise Corrupt(f"journal {path} begins with record {lowest}, and {why}", hint=WAY_OUT)
    for anchor in reversed(anchors[1:]):
        try:
            return _read(path, connection, Found(*anchor, [], [], None, acknowledged, num_segments), copies)
        except _BadRecord as error:
            if error.number >= copies[0].number:
                raise
            logger.warning("{}; it lies before the copy of the state at {}, which is good", error, copies[0].number)
    return _read(path, connection, Found(*anchors[0], [], [], None, acknowledged, num_segments), copies)


def _copies(path: Path, connection: sqlite3.Connection) -> tuple[list[Copy], int]:
    """The good ones, newest first, and how many aren't."""
    numbers = [int(row[0]) for row in connection.execute("SELECT number FROM copies ORDER BY number DESC")]
    copies: list[Copy] = []
    for number in numbers:
        try:
            row = connection.execute("SELECT head, hash, state, history FROM copies WHERE number = ?", (number,))
            head, digest, state, history = _typed(row.fetchone(), str, str, bytes, bytes)
            copy = Copy(number, head, state, history)
            why = "" if copy.digest == digest and copy.decodes else "it doesn't fit its hash"
        except sqlite3.DatabaseError as error:
            copy, why = None, str(error)
        if copy is not None and not why:
            copies.append(copy)
        else:
            logger.warning("journal {}: the copy of the state at record {} is not used: {}", path, number, why)
    return copies, len(numbers) - len(copies)


def _typed(row: Any, *kinds: type) -> tuple[Any, ...]:
    """The row, if it is what the schema says: a damaged page may give anything."""
    if not isinstance(row, tuple) or not all(map(isinstance, cast("tuple[Any, ...]", row), kinds)):
        raise sqlite3.DatabaseError("a row is damaged")
    return cast("tuple[Any, ...]", row)


class _BadRecord(Corrupt):
    """Names the record that can't be used."""

    def __init__(self, path: Path, number: int, why: str) -> None:
        super().__init__(f"journal {path}: record {number} {why}; those before it are good", hint=WAY_OUT)
        self.number = number


def _read(path: Path, connection: sqlite3.Connection, found: Found, copies: Sequence[Copy]) -> Found:
    """The records behind ``found.base``, each checked against the chain, and the chain against the copies."""
    heads = {copy.number: copy.head for copy in copies}
    last = connection.execute("SELECT max(number) FROM records").fetchone()[0]
    rows = connection.execute("SELECT number, head, data FROM records WHERE number >= ? ORDER BY number", (found.base,))
    head = found.base_head
    try:
        for row in rows:
            number, stored, data = _typed(row, int, str, bytes)
            head, fits = next_head(head, data), number == found.length
            if not fits or stored != head or heads.get(number + 1, head) != head:
                if fits and number == last and number >= found.acknowledged:
                    found.torn, found.num_dropped = number, 1
                    break
                raise _BadRecord(path, found.length, "does not fit the hash chain" if fits else "is missing")
            found.records.append(data)
            found.heads.append(head)
    except sqlite3.DatabaseError as error:
        raise _BadRecord(path, found.length, f"can't be read ({error})") from error
    found.copy = copies[0] if copies else None
    if found.copy is not None and found.length < found.copy.number:
        raise _BadRecord(path, found.length, "is missing")
    return found


class Tip:
    """How many records were committed, and how many of them acknowledged, in a file beside the journal."""

    def __init__(self, path: Path) -> None:
        self._number, self._acknowledged = self.read(path)
        self._descriptor = os.open(_tip_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def committed(self, number: int | None, acknowledged: int | None) -> None:
        """So many records are committed, and known as acknowledged; None: as many as before."""
        self._number = self._number if number is None else number
        self._acknowledged = self._acknowledged if acknowledged is None else acknowledged
        try:
            os.pwrite(self._descriptor, _tip_line(self._number, self._acknowledged), 0)
        except OSError as error:
            logger.warning("the journal's tip can't be written: {}", error)

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def say(path: Path, number: int, acknowledged: int) -> None:
        """Of a journal that is written whole."""
        _tip_path(path).write_bytes(_tip_line(number, acknowledged))

    @staticmethod
    def read(path: Path) -> tuple[int, int]:
        """(records, acknowledged records); zeros where there is none or it can't be read: it only ever adds a warning."""
        with suppress(OSError, ValueError):
            number, acknowledged = _tip_path(path).read_text(encoding="ascii").split()
            return int(number), int(acknowledged)
        return 0, 0


def _tip_line(number: int, acknowledged: int) -> bytes:
    return f"{number:20d} {acknowledged:20d}\n".encode()


def _tip_path(path: Path) -> Path:
    return path.with_name(path.name + "-tip")


def create(path: Path, records: Iterable[bytes], segments: Iterable[tuple[int, int]]) -> None:
    """Write a journal whole: it appears under ``path`` complete or not at all. ``segments``: (first, next) of each."""
    if path.exists():
        raise Exists(f"there is a journal already: {path}", hint="move it away, or start without --lead-from")
    temporary = path.with_name(path.name + "-new")
    with readable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (temporary, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-tip"))):
            leftover.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(SCHEMA)
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO records VALUES (?, ?, ?)", _chained(records))
            rows = ((number, first, after) for number, (first, after) in enumerate(segments))
            connection.executemany("INSERT INTO segments VALUES (?, ?, ?)", rows)
            connection.execute("COMMIT")
            Tip.say(path, *connection.execute(_LENGTHS).fetchone())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _chained(records: Iterable[bytes]) -> Iterator[tuple[int, str, bytes]]:
    head = GENESIS_HEAD
    for number, data in enumerate(records):
        head = next_head(head, data)
        yield number, head, data
