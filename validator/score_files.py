"""Books of runs that have finished, one file a run, so that what was earned in them still counts after a restart.

Written before the run is marked as finished. Where the file is missing or can't be used the book is made anew from the run's
journal; where that doesn't go either, it costs that run's scores, never the validator's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import Corrupt, IotaError, NotFound, OutOfSpace
from subnet.run.apply import apply_record
from subnet.run.chain_hash import GENESIS_HEAD, fold_heads
from subnet.run.events import Record
from subnet.run.invariants import InvariantBroken
from subnet.run.state import new_state
from subnet.score.book import RunBook
from subnet.store.disk import atomic_write
from validator.journal import JournalDatabase
from validator.journal_file import SqliteJournal
from validator.journal_rows import WAY_OUT
from validator.journal_store import JournalStore
from validator.log_reader import get_segment
from validator.run_archive import NamedStore
from validator.run_registry import RunEntry, RunRegistry
from validator.scoring import ScoreBook

NAME = "scores.msgpack"
_record_decoder = msgspec.msgpack.Decoder(Record)


def keep_book(directory: Path, book: RunBook) -> None:
    """Beside the journal of its run. A full disk costs the file, not the run."""
    try:
        atomic_write(directory / NAME, book.dump())
    except (OSError, OutOfSpace) as error:
        logger.warning("the scores of {} aren't kept: {}", directory.name, error)


def load_books(registry: RunRegistry, scores: ScoreBook) -> None:
    """The books of all finished runs; that of the active one comes with its journal."""
    for entry in registry.entries.values():
        if not entry.finished:
            continue
        book = scores.begin(entry.stored.run_id)
        try:
            book.load((entry.directory / NAME).read_bytes())
        except (OSError, Corrupt) as error:
            _from_journal(entry, book, error)
        scores.catch_up(entry.stored.run_id)


def _from_journal(entry: RunEntry, book: RunBook, why: Exception) -> None:
    fresh = book.fresh()
    try:
        found = read_journal(entry.journal(), fresh)
    except (OSError, IotaError) as error:
        logger.warning("what was earned in run {} is forgotten: {}; {}", entry.directory.name, why, error)
        return
    logger.warning(
        "scores of run {} counted anew from {} records of its journal: {}", entry.directory.name, found.number, why
    )
    book.load(fresh.dump())
    keep_book(entry.directory, book)


# --- from the log store --------------------------------------------------------------------------------------------


async def recount(book: RunBook, run_id: str, journal: JournalStore, store: NamedStore) -> None:
    """Make the book of the run's journal anew: from the log store as far as it goes, then from the journal.

    Where that doesn't go, the book stays as it is, and it is said.
    """
    fresh, head = book.fresh(), GENESIS_HEAD
    try:
        for number in range(journal.num_segments):
            segment = await get_segment(store, run_id, number)
            head = fold_heads(head, segment.records) if segment is not None else ""
            if segment is None or segment.head != head:
                raise Corrupt(f"segment {number} of run {run_id} is missing, or doesn't fit")
            _note(fresh, segment.records)
        if journal.acknowledged >= journal.base and head != journal.head_after(journal.acknowledged):
            raise Corrupt(f"the log store has another journal of run {run_id}")
        _note(fresh, journal.records_between(journal.acknowledged, len(journal)))
    except (IotaError, msgspec.MsgspecError) as error:
        logger.warning("what was earned in run {} before this copy is forgotten here: {}", run_id, error)
        return
    book.load(fresh.dump())
    logger.info("scores of run {} counted anew from {} records", run_id, len(journal))


def _note(book: RunBook, records: Sequence[bytes]) -> None:
    for data in records:
        book.note(_record_decoder.decode(data))


# --- from the file -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JournalRead:
    run_id: str
    number: int
    """Records it has."""
    from_copy: int
    """Those before this one are no longer in the file: what was earned in them is as the copy of the fold says."""
    head: str
    last_ns: int
    """When the last record was stamped; 0 where there is none behind the copy."""


def read_journal(where: Path | JournalDatabase, book: RunBook) -> JournalRead:
    """Fill an empty book from a journal (``Path``: its file): from record 0 where it is there, else from the oldest copy used.

    Chain, copy and every step are checked; a validator that is writing it isn't disturbed.
    """
    journal = SqliteJournal(where) if isinstance(where, Path) else where
    if not journal.exists():
        raise NotFound(f"there is no {journal.name}", hint="name a run's directory, or its journal.db")
    found = journal.load(read_only=True)
    state, first = new_state(), 0
    if found.copy is not None and found.base:
        state, first = found.copy.load(), found.copy.number
        book.load(found.copy.load_beside().projection)
    last_ns = 0
    for number, data in enumerate(found.records[first - found.base :], start=first):
        try:
            record = _record_decoder.decode(data)
            apply_record(state, record)
        except (msgspec.MsgspecError, InvariantBroken, LookupError) as error:
            raise Corrupt(f"{journal.name}: record {number} can't follow: {error}", hint=WAY_OUT) from error
        book.note(record)
        last_ns = record.time_ns
    run_id = state.run.run_id if state.run is not None else ""
    head = found.heads[-1] if found.heads else found.base_head
    return JournalRead(run_id, found.length, first, head, last_ns)
