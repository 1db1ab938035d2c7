"""The journal on disk: append-only, hash-chained, one writer thread, group commit; what ``append`` acknowledged survives kill -9.

Opening verifies the chain from the newest-but-one copy of the state on (:mod:`validator.journal_file`); what lies before that
copy is deleted from this file, since the log store keeps it. So file and memory stay bounded however long a run lasts.
Evidence (signed receipts) lies beside the records in a table of its own, bounded by ``forget_receipts``.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import Corrupt, IotaError
from subnet.run.chain_hash import next_head
from subnet.run.events import AnyEvent, Record
from subnet.run.state import RunState, new_state
from subnet.run.views import scope_of
from validator import journal_file
from validator.copies import Copy

DELETED_AT_ONCE = 5_000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


@dataclass
class _Work:
    records: list[tuple[int, str, bytes]] = field(default_factory=lambda: [])
    segments: list[tuple[int, int, int]] = field(default_factory=lambda: [])
    receipts: list[tuple[int, str, bytes]] = field(default_factory=lambda: [])
    forget_before_step: int | None = None
    torn: int | None = None
    copy: Copy | None = None
    keep_from: int = 0
    """With a copy: copies and records before this number may go."""
    done: Future[None] | None = None

    @property
    def empty(self) -> bool:
        return not (self.records or self.segments or self.receipts or self.copy) and self.forget_before_step is None


def first_bytes(records: Sequence[bytes], limit_bytes: int) -> Sequence[bytes]:
    """As many of the first records as fit; one at least."""
    size_bytes = 0
    for index, data in enumerate(records):
        size_bytes += len(data)
        if size_bytes > limit_bytes and index:
            return records[:index]
    return records


class JournalStore:
    """One run's journal. ``stage`` encodes and chains; ``commit`` returns when all staged records are on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with journal_file.readable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            found = journal_file.load(path)
            self._tip = journal_file.Tip(path)
        self.base = found.base
        """Number of the oldest record that is kept."""
        self._base_head = found.base_head
        self._records, self._heads = found.records, found.heads
        self._scopes: list[int | None] = [None] * len(found.records)
        """Whom each record concerns (:mod:`subnet.run.views`), as far as somebody asked."""
        self.size_bytes = sum(len(data) for data in found.records)
        """Of the records that were found, and of those added since."""
        self.head = found.heads[-1] if found.heads else found.base_head
        self.copy = found.copy
        """The newest copy of the state that is on disk or staged: :meth:`replay` begins with it."""
        self.acknowledged = found.acknowledged
        """Records below this number are in the log store."""
        self.num_segments = found.num_segments
        self.num_dropped = found.num_dropped
        """Committed records that the disk lost, so that members may have seen what isn't here: a new term must begin."""
        self.committed = found.length
        """Records below this number are on disk."""
        self._staged = _Work(torn=found.torn)
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._failure: IotaError | None = None
        self._delete_below = found.base
        self._thread = threading.Thread(target=self._write_forever, name="journal-writer", daemon=True)
        self._thread.start()

    @staticmethod
    def create(path: Path, records: Sequence[bytes], segments: Sequence[tuple[int, int]]) -> None:
        """Write a journal whose ``records`` are already in the log store as ``segments``: (first, next) of each, in order.

        It appears under ``path`` complete or not at all; :class:`~subnet.errors.Exists` where one is there.
        """
        journal_file.create(path, records, segments)

    # --- what is there -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.base + len(self._records)

    def start_state(self) -> RunState:
        """What :meth:`replay` is to be applied to."""
        return self.copy.load() if self.copy is not None else new_state()

    def replay(self) -> Iterator[Record]:
        """The records behind :meth:`start_state`, decoded. One that no longer decodes is corrupt and names its number."""
        first = self.copy.number if self.copy is not None else 0
        for number, data in enumerate(self._records[first - self.base :], start=first):
            try:
                yield _decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise Corrupt(
                    f"journal {self.path}: record {number} does not decode: {error}",
                    hint=f"was it written by a newer version? Else {journal_file.WAY_OUT}",
                ) from error

    def records_between(self, first: int, end: int) -> list[bytes]:
        """Encoded records ``first .. end - 1``; ``first`` isn't before :attr:`base`."""
        if first < self.base:
            raise IndexError(f"record {first} is no longer kept; the oldest is {self.base}")
        return self._records[first - self.base : end - self.base]

    def scopes_between(self, first: int, end: int) -> list[int]:
        """Whom records ``first .. end - 1`` concern; ``first`` isn't before :attr:`base`."""
        found = self._scopes[first - self.base : end - self.base]
        for index, scope in enumerate(found):
            if scope is None:
                event = _decoder.decode(self._records[first - self.base + index]).event
                found[index] = self._scopes[first - self.base + index] = scope_of(event)
        return [scope or 0 for scope in found]

    def head_after(self, number: int) -> str:
        """The chain value after ``number`` records; ``number`` isn't before :attr:`base`."""
        if number < self.base:
            raise IndexError(f"record {number} is no longer kept; the oldest is {self.base}")
        return self._heads[number - self.base - 1] if number > self.base else self._base_head

    def size_bytes_from(self, number: int) -> int:
        """Of the kept records from ``number`` on."""
        return sum(len(data) for data in self._records[max(0, number - self.base) :])

    # --- what is added -----------------------------------------------------------------------------------------

    def stage(self, event: AnyEvent, time_ns: int) -> Record:
        """Give the event its number and place in the chain; on disk only after ``commit``."""
        record = Record(len(self), time_ns, event)
        data = _encoder.encode(record)
        self.head = next_head(self.head, data)
        self._records.append(data)
        self._scopes.append(scope_of(event))
        self._heads.append(self.head)
        self.size_bytes += len(data)
        self._staged.records.append((record.number, self.head, data))
        return record

    def stage_receipts(self, step: int, hotkey: str, data: bytes) -> None:
        self._staged.receipts.append((step, hotkey, data))

    def forget_receipts(self, before_step: int) -> None:
        """Drop evidence of steps before ``before_step`` (the audit window has closed)."""
        self._staged.forget_before_step = before_step

    def receipts_between(self, hotkey: str, first_step: int, end_step: int) -> list[bytes]:
        """Reports of the hotkey that were kept (and committed) while these steps were open, in order. Blocks; any thread."""
        with journal_file.readable(self.path), closing(journal_file.connect_to_read(self.path)) as connection:
            rows = connection.execute(
                "SELECT data FROM receipts WHERE step >= ? AND step < ? AND hotkey = ? ORDER BY id",
                (first_step, end_step, hotkey),
            )
            return [data for (data,) in rows]

    def stage_segment(self, first: int, next_number: int) -> None:
        """Records ``first .. next_number - 1`` are in the log store as segment ``num_segments``."""
        self._staged.segments.append((self.num_segments, first, next_number))
        self.num_segments += 1
        self.acknowledged = next_number

    def stage_copy(self, copy: Copy) -> None:
        """Keep a copy of the fold at a number the log store has; records before the copy before it go."""
        if copy.number > self.acknowledged:
            raise ValueError(f"a copy at {copy.number}, acknowledged are {self.acknowledged} records")
        keep_from = self.copy.number if self.copy is not None else self.base
        self._base_head, dropped = self.head_after(keep_from), keep_from - self.base
        del self._records[:dropped]
        del self._scopes[:dropped]
        del self._heads[:dropped]
        self.base, self.copy = keep_from, copy
        self._staged.copy, self._staged.keep_from = copy, keep_from

    async def commit(self) -> None:
        """Wait until everything staged so far is on disk. Many callers share one fsync."""
        if self._failure is not None:
            raise self._failure
        if self._staged.empty:
            return
        work, self._staged = self._staged, _Work()
        work.done = Future()
        self._queue.put(work)
        await asyncio.wrap_future(work.done)
        if work.records:
            self.committed = max(self.committed, work.records[-1][0] + 1)

    def close(self, timeout_s: float = 10.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    # --- the writer thread -------------------------------------------------------------------------------------

    def _write_forever(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            while True:
                work = self._next_work(connection)
                batch: list[_Work] = []
                while work is not None:
                    batch.append(work)
                    if self._queue.empty():
                        break
                    work = self._queue.get()
                if batch and self._failure is None:
                    try:
                        connection = connection or journal_file.connect(self.path)
                        self._write(connection, batch)
                    except sqlite3.DatabaseError as error:
                        self._failure = journal_file.database_error(self.path, "be written", error)
                self._answer(batch)
                if work is None:
                    return
        finally:
            if connection is not None:
                connection.close()
            self._tip.close()

    def _answer(self, batch: Sequence[_Work]) -> None:
        for work in batch:
            if work.done is not None and work.done.set_running_or_notify_cancel():
                if self._failure is not None:
                    work.done.set_exception(self._failure)
                else:
                    work.done.set_result(None)

    def _write(self, connection: sqlite3.Connection, batch: Sequence[_Work]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for work in batch:
                if work.torn is not None:
                    connection.execute("DELETE FROM records WHERE number >= ?", (work.torn,))
                connection.executemany("INSERT INTO records VALUES (?, ?, ?)", work.records)
                connection.executemany("INSERT INTO segments VALUES (?, ?, ?)", work.segments)
                connection.executemany("INSERT INTO receipts (step, hotkey, data) VALUES (?, ?, ?)", work.receipts)
                if work.forget_before_step is not None:
                    connection.execute("DELETE FROM receipts WHERE step < ?", (work.forget_before_step,))
                if work.copy is not None:
                    self._write_copy(connection, work.copy, work.keep_from)
            connection.execute("COMMIT")
        except sqlite3.DatabaseError:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        numbers = [work.records[-1][0] + 1 for work in batch if work.records]
        segments = [work.segments[-1][2] for work in batch if work.segments]
        self._tip.committed(numbers[-1] if numbers else None, segments[-1] if segments else None)

    def _write_copy(self, connection: sqlite3.Connection, copy: Copy, keep_from: int) -> None:
        row = (copy.number, copy.head, copy.digest, copy.state, copy.beside)
        connection.execute("DELETE FROM copies WHERE number != ?", (keep_from,))
        connection.execute("INSERT INTO copies VALUES (?, ?, ?, ?, ?)", row)
        connection.execute(
            "DELETE FROM segments WHERE next <= ? AND number < (SELECT max(number) FROM segments)", (keep_from,)
        )
        self._delete_below = keep_from

    def _next_work(self, connection: sqlite3.Connection | None) -> _Work | None:
        """The next work; before it, and as long as there is none, a piece of what a copy made superfluous is deleted."""
        while connection is not None and self._delete_below and self._failure is None:
            try:
                self._delete_piece(connection)
            except sqlite3.DatabaseError as error:
                logger.warning("journal {}: old records not deleted: {}", self.path, error)
                self._delete_below = 0
            if not self._queue.empty():
                break
        return self._queue.get()

    def _delete_piece(self, connection: sqlite3.Connection) -> None:
        done = connection.execute(
            "DELETE FROM records WHERE number IN (SELECT number FROM records WHERE number < ? LIMIT ?)",
            (self._delete_below, DELETED_AT_ONCE),
        )
        if done.rowcount < DELETED_AT_ONCE:
            self._delete_below = 0
            connection.execute("PRAGMA incremental_vacuum").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
