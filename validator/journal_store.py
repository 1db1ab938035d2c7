"""The journal as a validator uses it: append-only, hash-chained, one writer thread, group commit; what was acknowledged stays.

The records that members may still ask for are in memory; the rest is in a database (:mod:`validator.journal`). Opening
verifies the chain from the newest-but-one copy of the state on; what lies before that copy is deleted, since the log store
keeps it. So database and memory stay bounded however long a run lasts. Evidence (signed receipts) lies beside the records,
bounded by ``forget_receipts``.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import Corrupt, IotaError
from subnet.run.chain_hash import next_head
from subnet.run.events import AnyEvent, Record
from subnet.run.state import RunState, new_state
from subnet.run.views import scope_of
from subnet.timing import TIMEOUTS
from validator import journal_file
from validator.copies import Copy
from validator.journal import JournalDatabase, JournalWriter, Work
from validator.journal_rows import WAY_OUT, Tip

DELETED_AT_ONCE = 5_000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


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

    def __init__(
        self,
        where: Path | JournalDatabase,
        *,
        read_only: bool = False,
        answer_s: float = TIMEOUTS.journal_answer_s,
    ) -> None:
        """``read_only``: as it is now, beside the one who may be writing it; nothing can be committed. ``answer_s``: after
        so long a commit's connection, where there is one, is given up and made anew."""
        self._database = journal_file.SqliteJournal(where) if isinstance(where, Path) else where
        self.path, self.name = self._database.path, self._database.name
        found = self._database.load(read_only=read_only)
        with journal_file.readable(self.path):
            self._tip = None if read_only else Tip(self.path)
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
        self._staged = Work(torn=found.torn)
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._failure: IotaError | None = None
        self._delete_below = found.base
        self._opened = False
        self._read_only, self._answer_s = read_only, answer_s
        self._thread = threading.Thread(target=self._write_forever, name="journal-writer", daemon=True)
        if not read_only:
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
                    f"{self.name}: record {number} does not decode: {error}",
                    hint=f"was it written by a newer version? Else {WAY_OUT}",
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
        return self._database.receipts_between(hotkey, first_step, end_step)

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
        if self._read_only:
            raise RuntimeError("this journal was opened to be read")
        work, self._staged = self._staged, Work()
        work.done = Future()
        self._queue.put(work)
        answer = asyncio.wrap_future(work.done)
        try:
            while not (await asyncio.wait({answer}, timeout=self._answer_s))[0]:
                self._database.interrupt()
        except asyncio.CancelledError:
            answer.cancel()
            raise
        answer.result()
        if work.records:
            self.committed = max(self.committed, work.records[-1][0] + 1)

    @property
    def trouble(self) -> str:
        """What is wrong with the journal's database now, in words; empty while it answers."""
        return self._database.trouble

    def close(self, timeout_s: float = 10.0) -> None:
        if self._read_only:
            self._database.close()
            return
        self._queue.put(None)
        self._thread.join(timeout_s)

    # --- the writer thread -------------------------------------------------------------------------------------

    def _write_forever(self) -> None:
        writer = self._database.writer()
        try:
            while True:
                work = self._next_work(writer)
                batch: list[Work] = []
                while work is not None:
                    batch.append(work)
                    if self._queue.empty():
                        break
                    work = self._queue.get()
                if batch and self._failure is None:
                    try:
                        writer.write(batch)
                        self._written(batch)
                    except IotaError as error:
                        self._failure = error
                self._answer(batch)
                if work is None:
                    return
        finally:
            writer.close()
            self._database.close()
            if self._tip is not None:
                self._tip.close()

    def _answer(self, batch: Sequence[Work]) -> None:
        for work in batch:
            if work.done is not None and work.done.set_running_or_notify_cancel():
                if self._failure is not None:
                    work.done.set_exception(self._failure)
                else:
                    work.done.set_result(None)

    def _written(self, batch: Sequence[Work]) -> None:
        numbers = [work.records[-1][0] + 1 for work in batch if work.records]
        segments = [work.segments[-1][2] for work in batch if work.segments]
        if self._tip is not None:
            self._tip.committed(numbers[-1] if numbers else None, segments[-1] if segments else None)
        for work in batch:
            if work.copy is not None:
                self._delete_below = work.keep_from

    def _next_work(self, writer: JournalWriter) -> Work | None:
        """The next work; before it, and as long as there is none, a piece of what a copy made superfluous is deleted."""
        while self._opened and self._delete_below and self._failure is None:
            try:
                if not writer.delete_below(self._delete_below, DELETED_AT_ONCE):
                    self._delete_below = 0
            except IotaError as error:
                logger.warning("{}: old records not deleted: {}", self.name, error)
                self._delete_below = 0
            if not self._queue.empty():
                break
        work = self._queue.get()
        self._opened = True
        return work
