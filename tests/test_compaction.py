"""A journal that begins with a copy of the fold says the same as one that begins with record 0, at every cut, and stays small."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from journal_cases import NEVER, OFTEN, SEEDS, Keys, Rig, records_of
from long_run import LongRun

from subnet.run.apply import fold
from subnet.run.events import NotAccumulated
from subnet.run.state import RunState
from subnet.run.state_codec import dump_state, state_bytes
from subnet.score.book import RunBook
from subnet.words import Cursor
from validator.copies import Beside, Copy, encode_beside
from validator.history import History
from validator.journal_core import JournalCore
from validator.journal_store import JournalStore
from validator.log_publisher import SegmentFile
from validator.projection import SessionProjection


def check_says_the_same(found: Rig, whole: Rig, length: int) -> None:
    """State, ledger, history, core, heads and projection of ``found`` are those of a journal that keeps everything."""
    assert len(found.journal) == len(whole.journal) == length
    assert found.journal.head == whole.journal.head
    assert state_bytes(found.coordinator.state) == state_bytes(whole.coordinator.state)
    assert found.coordinator.history.dump() == whole.coordinator.history.dump()
    assert found.coordinator.watch.audits.ledger.dump() == whole.coordinator.watch.audits.ledger.dump()
    assert found.coordinator.core == whole.coordinator.core
    assert found.coordinator.feed.term == whole.coordinator.feed.term
    assert found.counter.dump() == whole.counter.dump()
    for term in range(found.coordinator.state.term + 2):
        for number in (0, length // 2, length):
            at = Cursor(term, number)
            assert found.coordinator.core.resume(at) == whole.coordinator.core.resume(at)
    first = found.journal.base
    assert found.journal.records_between(first, length) == whole.journal.records_between(first, length)
    assert all(found.journal.head_after(n) == whole.journal.head_after(n) for n in range(first, length + 1))


async def test_at_every_cut_copy_and_tail_equal_the_whole_replay(tmp_path: Path) -> None:
    records = LongRun().records(250)
    rig, whole = Rig(tmp_path / "a" / "j.db"), Rig(tmp_path / "b" / "j.db", copies=NEVER)
    begun = set[int]()
    for number, record in enumerate(records, start=1):
        await rig.emit([record])
        await whole.emit([record])
        if number % 3 and number < len(records) - 3:
            continue
        found = Rig(rig.copy_files(tmp_path / f"cut{number}"), rig.keys)
        check_says_the_same(found, whole, number)
        begun.add(found.journal.copy.number if found.journal.copy else 0)
        found.close()
    assert len(begun) >= 4, f"too few copies to say anything: {begun}"
    rig.close()
    whole.close()


@settings(max_examples=12, deadline=None)
@given(seed=some.sampled_from(SEEDS), cut=some.floats(0.2, 1), published=some.floats(0.2, 1))
async def test_at_any_cut_with_any_acknowledgement(seed: int, cut: float, published: float) -> None:
    """The log store stops answering somewhere; the process dies later; what is started again goes on alike."""
    records = records_of(seed)
    at = int(cut * len(records))
    until = min(at, int(published * len(records)))
    with tempfile.TemporaryDirectory() as directory:
        rig, whole = Rig(Path(directory) / "a" / "j.db"), Rig(Path(directory) / "b" / "j.db", copies=NEVER)
        for each in (rig, whole):
            await each.emit(records[:until])
            await each.emit(records[until:at], publish=False)
        found = Rig(rig.copy_files(Path(directory) / "cut"), rig.keys)
        check_says_the_same(found, whole, at)
        if found.journal.copy is not None:
            assert found.journal.copy.number <= found.journal.acknowledged, "a copy that isn't final"
        for each in (found, whole):
            await each.settle()
            await each.emit(records[at:])
        check_says_the_same(found, whole, len(records))
        assert state_bytes(found.coordinator.state) == state_bytes(fold(records))
        for each in (rig, found, whole):
            each.close()


async def test_what_is_deleted_here_is_in_the_log_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "j.db")
    await rig.emit(LongRun().records(250))
    assert rig.journal.base > 0
    segments = [msgspec.msgpack.decode(data, type=SegmentFile) for data in rig.keys.keys.values()]
    kept = [record for segment in segments for record in segment.records]
    JournalStore.create(tmp_path / "again.db", kept, [(s.first, s.first + len(s.records)) for s in segments])
    again = Rig(tmp_path / "again.db", rig.keys, copies=NEVER)
    acknowledged = again.journal.acknowledged
    assert acknowledged == rig.journal.acknowledged >= rig.journal.base
    assert again.journal.head == rig.journal.head_after(acknowledged)
    rig.close()
    again.close()


def counts(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(path)
    found = {
        table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("records", "copies", "segments")
    }
    connection.close()
    return found


def size_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


async def test_file_and_memory_stay_bounded(tmp_path: Path) -> None:
    journal, sizes = JournalStore(tmp_path / "j.db"), list[int]()
    for round_number in range(12):
        for i in range(2_000):
            journal.stage(NotAccumulated(round_number, i, 0, 1), i)
        await journal.commit()
        journal.stage_segment(journal.acknowledged, len(journal))
        state = dump_state(RunState(number=len(journal)))
        journal.stage_copy(Copy(len(journal), journal.head, state, encode_beside(Beside((), b"", b""))))
        await journal.commit()
        assert len(journal) - journal.base <= 4_000
        sizes.append(size_bytes(tmp_path))
    length, head = len(journal), journal.head
    journal.close()
    assert counts(tmp_path / "j.db") == {"records": 2_000, "copies": 2, "segments": 1}
    assert (tmp_path / "j.db").stat().st_size < 600_000
    assert max(sizes[6:]) <= 1.5 * max(sizes[:6]), sizes
    again = JournalStore(tmp_path / "j.db")
    assert (len(again), again.head, again.acknowledged, again.num_segments) == (length, head, length, 12)
    with pytest.raises(IndexError, match="no longer kept"):
        again.records_between(0, 10)
    again.close()


async def test_a_copy_counts_only_when_it_is_final(tmp_path: Path) -> None:
    rig, records = Rig(tmp_path / "j.db"), LongRun().records(250)
    await rig.emit(records, publish=False)
    assert rig.journal.copy is None
    with pytest.raises(ValueError, match="acknowledged are 0"):
        rig.journal.stage_copy(Copy(5, rig.journal.head_after(5), b"", b""))
    await rig.settle()
    assert rig.journal.acknowledged == len(records)
    assert rig.journal.copy is not None
    rig.close()


def test_the_core_from_a_copy_is_the_whole_core() -> None:
    records = LongRun().records(60)
    events = [record.event for record in records]
    whole = JournalCore.of(3, events, 40, 4)
    for cut in range(0, 41, 5):
        before = JournalCore.of(3, events[:cut], 40, 4)
        assert JournalCore.of(3, events[cut:], 40, 4, first=cut, terms=before.terms) == whole


def test_history_survives_its_dump() -> None:
    history = History()
    for record in LongRun().records(250):
        history.fold(record)
    assert history.steps
    again = History.load(history.dump())
    assert (list(again.steps), list(again.lines)) == (list(history.steps), list(history.lines))
    assert again.dump() == history.dump()


def test_scores_survive_their_dump() -> None:
    records = LongRun().records(250)
    book, again = RunBook(), RunBook()
    for record in records[:200]:
        book.note(record)
    data = SessionProjection(book).dump()
    projection = SessionProjection(again)
    projection.load(data)
    assert projection.dump() == data
    for record in records[200:]:
        book.note(record)
        again.note(record)
    assert again.tallies(10_000.0) == book.tallies(10_000.0) != {}
    old = RunBook()
    SessionProjection(old).load(b"\x93\x80\x80\x90")  # what an older version wrote
    assert old.tallies(0.0) == {}


async def test_keeping_less_asks_for_a_copy_now_and_then(tmp_path: Path) -> None:
    """Copies come at the policy's distance, not at every seal."""
    often, never = Rig(tmp_path / "a.db", Keys(), OFTEN), Rig(tmp_path / "b.db", Keys(), NEVER)
    numbers = set[int]()
    for record in LongRun().records(250):
        for rig in (often, never):
            await rig.emit([record])
        numbers.add(often.journal.copy.number if often.journal.copy else 0)
    distances = [b - a for a, b in zip(sorted(numbers), sorted(numbers)[1:], strict=False)]
    assert len(distances) >= 3
    assert min(distances) >= OFTEN.records_after_snapshot
    assert never.journal.copy is None
    assert never.journal.base == 0
    often.close()
    never.close()
