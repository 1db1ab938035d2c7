"""A journal in a SQLite file: the run's own, in its directory.

WAL mode with ``synchronous=FULL``: a commit that was acknowledged is on the disk. Nothing here waits for another machine.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from subnet.errors import ConfigError, Corrupt, Exists, IotaError, OutOfSpace
from validator.copies import Copy
from validator.journal import TABLES, JournalWriter, Row, Table, Work
from validator.journal_rows import WAY_OUT, Found, RowDamaged, Tip, chained, read_rows

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
_DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_CONFIG = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}


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
    tip = Tip.read(path)  # first: what a writer adds meanwhile is more than it says
    with closing(_connect_aside(path) if read_only else connect(path)) as connection:
        return read_rows(f"journal {path}", SqliteRows(connection), tip)


class SqliteRows:
    """:class:`validator.journal_rows.Rows`"""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def last_segment(self) -> tuple[Any, ...] | None:
        return self._connection.execute("SELECT number, next FROM segments ORDER BY number DESC LIMIT 1").fetchone()

    def lowest(self) -> int | None:
        return self._connection.execute("SELECT min(number) FROM records").fetchone()[0]

    def highest(self) -> int | None:
        return self._connection.execute("SELECT max(number) FROM records").fetchone()[0]

    def copy_numbers(self) -> list[int]:
        return [int(row[0]) for row in self._connection.execute("SELECT number FROM copies ORDER BY number DESC")]

    def copy(self, number: int) -> tuple[Any, ...] | None:
        try:
            rows = self._connection.execute("SELECT head, hash, state, history FROM copies WHERE number = ?", (number,))
            return rows.fetchone()
        except sqlite3.DatabaseError as error:
            raise RowDamaged(str(error)) from error

    def records_from(self, number: int) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._connection.execute(
                "SELECT number, head, data FROM records WHERE number >= ? ORDER BY number", (number,)
            )
        except sqlite3.DatabaseError as error:
            raise RowDamaged(str(error)) from error


class SqliteJournal:
    """:class:`validator.journal.JournalDatabase`"""

    trouble = ""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, f"journal {path}"

    def exists(self) -> bool:
        return self.path.exists()

    def load(self, *, read_only: bool = False) -> Found:
        with readable(self.path):
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            return load(self.path, read_only=read_only)

    def writer(self) -> JournalWriter:
        return SqliteWriter(self.path)

    def interrupt(self) -> None:
        """A disk can't be interrupted."""

    def receipts_between(self, hotkey: str, first_step: int, end_step: int) -> list[bytes]:
        with readable(self.path), closing(connect_to_read(self.path)) as connection:
            rows = connection.execute(
                "SELECT data FROM receipts WHERE step >= ? AND step < ? AND hotkey = ? ORDER BY id",
                (first_step, end_step, hotkey),
            )
            return [data for (data,) in rows]

    def create(self, records: Iterable[bytes], segments: Iterable[tuple[int, int]]) -> None:
        create(self.path, records, segments)

    def rows(self) -> Iterator[Row]:
        with readable(self.path), closing(_connect_aside(self.path)) as connection:
            for table in TABLES:
                for row in connection.execute(_ALL[table]):
                    yield table, row

    def fill(self, rows: Iterable[Row]) -> None:
        self.discard()
        with written_whole(self.path) as connection:
            for table, row in rows:
                connection.execute(_ADD[table], row)

    def set_aside(self, name: str) -> None:
        """Its directory is renamed."""

    def discard(self) -> None:
        with readable(self.path):
            for end in ("", "-wal", "-shm", "-new"):
                self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is held open."""


_ALL: dict[Table, str] = {
    "records": "SELECT number, head, data FROM records ORDER BY number",
    "segments": "SELECT number, first, next FROM segments ORDER BY number",
    "copies": "SELECT number, head, hash, state, history FROM copies ORDER BY number",
    "receipts": "SELECT step, hotkey, data FROM receipts ORDER BY id",
}
_ADD: dict[Table, str] = {
    "records": "INSERT INTO records VALUES (?, ?, ?)",
    "segments": "INSERT INTO segments VALUES (?, ?, ?)",
    "copies": "INSERT INTO copies VALUES (?, ?, ?, ?, ?)",
    "receipts": "INSERT INTO receipts (step, hotkey, data) VALUES (?, ?, ?)",
}


class SqliteWriter:
    """:class:`validator.journal.JournalWriter`"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = connect(self._path)
        return self._connection

    def write(self, batch: Sequence[Work]) -> None:
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                for work in batch:
                    _write(connection, work)
                connection.execute("COMMIT")
            except sqlite3.DatabaseError:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.DatabaseError as error:
            raise database_error(self._path, "be written", error) from error

    def delete_below(self, number: int, most: int) -> bool:
        try:
            connection = self._open()
            done = connection.execute(
                "DELETE FROM records WHERE number IN (SELECT number FROM records WHERE number < ? LIMIT ?)",
                (number, most),
            )
            if done.rowcount >= most:
                return True
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return False
        except sqlite3.DatabaseError as error:
            raise database_error(self._path, "be written", error) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _write(connection: sqlite3.Connection, work: Work) -> None:
    if work.torn is not None:
        connection.execute("DELETE FROM records WHERE number >= ?", (work.torn,))
    connection.executemany(_ADD["records"], work.records)
    connection.executemany(_ADD["segments"], work.segments)
    connection.executemany(_ADD["receipts"], work.receipts)
    if work.forget_before_step is not None:
        connection.execute("DELETE FROM receipts WHERE step < ?", (work.forget_before_step,))
    if work.copy is not None:
        _write_copy(connection, work.copy, work.keep_from)


def _write_copy(connection: sqlite3.Connection, copy: Copy, keep_from: int) -> None:
    connection.execute("DELETE FROM copies WHERE number != ?", (keep_from,))
    connection.execute(_ADD["copies"], (copy.number, copy.head, copy.digest, copy.state, copy.beside))
    connection.execute(
        "DELETE FROM segments WHERE next <= ? AND number < (SELECT max(number) FROM segments)", (keep_from,)
    )


def create(path: Path, records: Iterable[bytes], segments: Iterable[tuple[int, int]]) -> None:
    """Write a journal whole: it appears under ``path`` complete or not at all. ``segments``: (first, next) of each."""
    if path.exists():
        raise Exists(f"there is a journal already: {path}", hint="move it away, or start without --lead-from")
    with written_whole(path) as connection:
        connection.executemany(_ADD["records"], chained(iter(records)))
        rows = ((number, first, after) for number, (first, after) in enumerate(segments))
        connection.executemany(_ADD["segments"], rows)
        Tip.say(path, *connection.execute(_LENGTHS).fetchone())


@contextmanager
def written_whole(path: Path) -> Generator[sqlite3.Connection]:
    """A new database under another name, in one transaction; it takes its place once it is on the disk."""
    temporary = path.with_name(path.name + "-new")
    with readable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (temporary, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
            leftover.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(SCHEMA)
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
