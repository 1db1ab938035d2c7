"""The journal on disk: append-only, hash-chained, one writer thread, group commit; what ``append`` acknowledged survives kill -9.

SQLite in WAL mode with ``synchronous=FULL``. Opening verifies the whole chain: a record that doesn't fit its hash stops the
start with its number and the way out. Evidence (signed receipts) lies beside the records in a table of its own, bounded by
``forget_receipts``.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from subnet.errors import ConfigError, Corrupt
from subnet.run.chain_hash import GENESIS_HEAD, next_head
from subnet.run.events import AnyEvent, Record

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, head TEXT NOT NULL, data BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS segments (number INTEGER PRIMARY KEY, first INTEGER NOT NULL, next INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS receipts (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, hotkey TEXT NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS receipts_by_step ON receipts (step);
"""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


@dataclass
class _Work:
    records: list[tuple[int, str, bytes]] = field(default_factory=lambda: [])
    segments: list[tuple[int, int, int]] = field(default_factory=lambda: [])
    receipts: list[tuple[int, str, bytes]] = field(default_factory=lambda: [])
    forget_before_step: int | None = None
    done: Future[None] | None = None


class JournalStore:
    """One run's journal. ``stage`` encodes and chains; ``commit`` returns when all staged records are on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = GENESIS_HEAD
        self.records: list[bytes] = []
        self.heads: list[str] = []
        self.acknowledged = 0
        """Records below this number are in the log store."""
        self.num_segments = 0
        self.committed = 0
        """Records below this number are on disk."""
        self._staged = _Work()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._load()
        except sqlite3.DatabaseError as error:
            raise Corrupt(
                f"journal {path} is not a readable database: {error}",
                hint="start a new leader from the log store, or restore the file from a copy",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot open the journal {path}: {error.strerror or error}", hint="check path and rights"
            ) from error
        self._thread = threading.Thread(target=self._write_forever, name="journal-writer", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(_SCHEMA)
        return connection

    def _load(self) -> None:
        connection = self._connect()
        try:
            rows = cast(
                "Iterator[tuple[int, str, bytes]]",
                connection.execute("SELECT number, head, data FROM records ORDER BY number"),
            )
            for expected, (number, head, data) in enumerate(rows):
                self.head = next_head(self.head, data)
                if number != expected or head != self.head:
                    raise Corrupt(
                        f"journal {self.path}: record {expected} does not fit the hash chain",
                        hint=f"records 0 to {expected - 1} are good; start a new leader from the log store",
                    )
                self.records.append(data)
                self.heads.append(head)
            segments = connection.execute("SELECT number, next FROM segments ORDER BY number DESC LIMIT 1").fetchone()
            if segments is not None:
                self.num_segments, self.acknowledged = int(segments[0]) + 1, int(segments[1])
            self.committed = len(self.records)
        finally:
            connection.close()

    def replay(self) -> Iterator[Record]:
        """All records, decoded. A record that no longer decodes is corrupt and names its number."""
        for number, data in enumerate(self.records):
            try:
                yield _decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise Corrupt(
                    f"journal {self.path}: record {number} does not decode: {error}",
                    hint="was it written by a newer version?",
                ) from error

    def __len__(self) -> int:
        return len(self.records)

    def stage(self, event: AnyEvent, time_ns: int) -> Record:
        """Give the event its number and place in the chain; on disk only after ``commit``."""
        record = Record(len(self.records), time_ns, event)
        data = _encoder.encode(record)
        self.head = next_head(self.head, data)
        self.records.append(data)
        self.heads.append(self.head)
        self._staged.records.append((record.number, self.head, data))
        return record

    def stage_receipts(self, step: int, hotkey: str, data: bytes) -> None:
        self._staged.receipts.append((step, hotkey, data))

    def forget_receipts(self, before_step: int) -> None:
        """Drop evidence of steps before ``before_step`` (the audit window has closed)."""
        self._staged.forget_before_step = before_step

    def stage_segment(self, first: int, next_number: int) -> None:
        """Records ``first .. next_number - 1`` are in the log store as segment ``num_segments``."""
        self._staged.segments.append((self.num_segments, first, next_number))
        self.num_segments += 1
        self.acknowledged = next_number

    async def commit(self) -> None:
        """Wait until everything staged so far is on disk. Many callers share one fsync."""
        if self._failure is not None:
            raise Corrupt(f"journal {self.path} cannot be written: {self._failure}") from self._failure
        work, self._staged = self._staged, _Work()
        if not (work.records or work.segments or work.receipts or work.forget_before_step is not None):
            return
        work.done = Future()
        self._queue.put(work)
        await asyncio.wrap_future(work.done)
        if work.records:
            self.committed = max(self.committed, work.records[-1][0] + 1)

    def close(self, timeout_s: float = 10.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _write_forever(self) -> None:
        connection = self._connect()
        try:
            while True:
                work = self._queue.get()
                batch: list[_Work] = []
                while work is not None:
                    batch.append(work)
                    if self._queue.empty():
                        break
                    work = self._queue.get()
                if batch:
                    self._write(connection, batch)
                if work is None:
                    return
        finally:
            connection.close()

    def _write(self, connection: sqlite3.Connection, batch: list[_Work]) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
            for work in batch:
                connection.executemany("INSERT INTO records VALUES (?, ?, ?)", work.records)
                connection.executemany("INSERT INTO segments VALUES (?, ?, ?)", work.segments)
                connection.executemany("INSERT INTO receipts (step, hotkey, data) VALUES (?, ?, ?)", work.receipts)
                if work.forget_before_step is not None:
                    connection.execute("DELETE FROM receipts WHERE step < ?", (work.forget_before_step,))
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._failure = error
            for work in batch:
                if work.done is not None and work.done.set_running_or_notify_cancel():
                    work.done.set_exception(
                        Corrupt(
                            f"journal {self.path} cannot be written: {error}",
                            hint="is the disk full? free space and restart",
                        )
                    )
            return
        for work in batch:
            if work.done is not None and work.done.set_running_or_notify_cancel():
                work.done.set_result(None)
