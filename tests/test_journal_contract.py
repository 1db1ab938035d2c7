"""What any journal must do, in a file as in PostgreSQL: a real server, started for these tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from journal_cases import OFTEN, SEEDS, Rig, records_of

from subnet.errors import ConfigError, Corrupt, Exists, IotaError
from subnet.run.apply import apply_record
from subnet.run.events import NotAccumulated, TermStarted
from validator.journal import JournalDatabase, JournalWriter, Work
from validator.journal_file import SqliteJournal
from validator.journal_postgres import PostgresJournal
from validator.journal_store import JournalStore

ROOT = Path(__file__).resolve().parent.parent
_numbers = itertools.count()


class Place:
    """One run's journal: opened as often as wanted, and changed behind its back."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.path, self.url, self.run_id = folder / "j.db", url, f"run-{next(_numbers)}"

    def open(self) -> JournalDatabase:
        if not self.url:
            return SqliteJournal(self.path)
        return PostgresJournal(self.url, self.run_id, self.path, open_s=0.5, away_s=20.0)

    def execute(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """``statement``: of the file's tables, with ``?``."""
        if not self.url:
            with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
                return connection.execute(statement, values).fetchall()
        with psycopg.connect(self.url, autocommit=True) as connection:
            (number,) = connection.execute("SELECT id FROM iota_journals WHERE run_id = %s", (self.run_id,)).fetchone()  # type: ignore[misc]
            of_run = statement.replace("?", "%s").replace("records", "iota_records") + f" AND journal = {number}"
            done = connection.execute(of_run.encode(), values)
            return done.fetchall() if done.description else []


@pytest.fixture(params=["file", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "file":
        return Place(tmp_path)
    return Place(tmp_path, request.getfixturevalue("postgres").url())


@pytest.fixture
def other(place: Place, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """Of the other kind."""
    folder = tmp_path / "other"
    folder.mkdir()
    return Place(folder) if place.url else Place(folder, request.getfixturevalue("postgres").url())


def plain(journal: JournalStore) -> tuple[object, ...]:
    return len(journal), journal.head, journal.base, journal.acknowledged, journal.num_segments, journal.num_dropped


async def filled(place: Place, count: int) -> JournalStore:
    journal = JournalStore(place.open())
    for i in range(count):
        journal.stage(NotAccumulated(0, i, 0, 1), i)
    await journal.commit()
    return journal


async def test_what_was_committed_is_there_with_its_chain(place: Place) -> None:
    journal = JournalStore(place.open())
    events = [TermStarted(1, "hk", "n"), NotAccumulated(0, 1, 2, 3)]
    for event in events:
        journal.stage(event, 7)
    journal.stage_segment(0, 1)
    await journal.commit()
    journal.stage(NotAccumulated(0, 9, 9, 9), 8)  # never committed
    before = (2, journal.head_after(2), 0, 1, 1, 0)
    journal.close()
    again = JournalStore(place.open())
    assert [record.event for record in again.replay()] == events
    assert plain(again) == before
    assert again.trouble == ""
    again.close()


@pytest.mark.parametrize("seed", SEEDS[:2])
async def test_a_run_with_copies_is_kept_as_it_would_be_in_the_other_kind(
    place: Place, other: Place, seed: int
) -> None:
    """Copies of the fold, deletion of what is before them, segments: the same rows, the same state."""
    rows, states = [], []
    for one in (place, other):
        rig = Rig(one.open(), copies=OFTEN)  # type: ignore[arg-type]
        await rig.emit(records_of(seed))
        rig.close()
        again = JournalStore(one.open())
        assert again.base > 0
        state = again.start_state()
        for record in again.replay():
            apply_record(state, record)
        states.append((plain(again), state))
        again.close()
        rows.append([row for row in one.open().rows() if row[0] != "records" or row[1][0] >= again.base])
    assert states[0] == states[1]
    assert rows[0] == rows[1]


async def test_many_commits_share_a_write_and_each_waits_for_its_own(place: Place) -> None:
    database, writes = place.open(), list[int]()
    inner = database.writer

    class Counted:
        def __init__(self) -> None:
            self.writer: JournalWriter = inner()

        def write(self, batch: Sequence[Work]) -> None:
            writes.append(sum(len(work.records) for work in batch))
            self.writer.write(batch)

        def delete_below(self, number: int, most: int) -> bool:
            return self.writer.delete_below(number, most)

        def close(self) -> None:
            self.writer.close()

    database.writer = Counted  # type: ignore[method-assign]
    journal = JournalStore(database)

    async def one(i: int) -> None:
        number = journal.stage(NotAccumulated(0, i, 0, 1), i).number
        await journal.commit()
        assert journal.committed > number

    await asyncio.gather(*(one(i) for i in range(200)))
    assert sum(writes) == 200
    assert len(writes) < 100
    journal.close()


@pytest.mark.parametrize("number", [0, 2, 3])
async def test_a_changed_record_stops_the_start_and_names_its_number(place: Place, number: int) -> None:
    (await filled(place, 5)).close()
    ((data,),) = place.execute("SELECT data FROM records WHERE number = ?", number)
    place.execute("UPDATE records SET data = ? WHERE number = ?", b"\x00" + data[1:], number)  # type: ignore[index]
    with pytest.raises(Corrupt, match=f"record {number} does not fit.*--lead-from STORE"):
        JournalStore(place.open())


async def test_a_missing_record_stops_the_start_and_names_its_number(place: Place) -> None:
    (await filled(place, 5)).close()
    place.execute("DELETE FROM records WHERE number = ?", 2)
    with pytest.raises(Corrupt, match="record 2 is missing"):
        JournalStore(place.open())


async def test_what_was_put_back_to_an_older_state_asks_for_a_new_term(place: Place) -> None:
    """A restored dump, a disk that lied: members may have seen the records that are gone."""
    (await filled(place, 5)).close()
    place.execute("DELETE FROM records WHERE number > ?", 2)
    again = JournalStore(place.open())
    assert (len(again), again.num_dropped) == (3, 2)
    again.stage(NotAccumulated(0, 7, 0, 1), 9)
    await again.commit()
    again.close()
    assert len(JournalStore(place.open(), read_only=True)) == 4


async def test_a_torn_record_at_the_end_is_dropped_and_its_place_taken(place: Place) -> None:
    (await filled(place, 5)).close()
    place.execute("UPDATE records SET data = ? WHERE number = ?", b"torn", 4)
    again = JournalStore(place.open())
    assert (len(again), again.num_dropped) == (4, 1)
    again.stage(NotAccumulated(0, 44, 0, 1), 9)
    await again.commit()
    again.close()
    last = JournalStore(place.open(), read_only=True)
    assert (len(last), last.num_dropped) == (5, 0)


async def test_of_two_writers_one_is_refused(place: Place) -> None:
    first = await filled(place, 3)
    with pytest.raises(ConfigError, match="one validator a"):
        await _write_too(place, first)
    first.stage(NotAccumulated(0, 4, 0, 1), 9)
    await first.commit()
    first.close()
    assert len(JournalStore(place.open(), read_only=True)) == len(first)


async def _write_too(place: Place, first: JournalStore) -> None:
    second = JournalStore(place.open())
    try:
        first.stage(NotAccumulated(0, 3, 0, 1), 9)
        await first.commit()
        second.stage(TermStarted(9, "other", "n"), 9)
        await second.commit()
    finally:
        second.close()


async def test_a_write_that_fails_leaves_nothing_of_itself(place: Place) -> None:
    (await filled(place, 3)).close()
    database = place.open()
    head = database.load().head
    writer = database.writer()
    good = Work(records=[(3, "x", b"good")], receipts=[(1, "hk", b"r")])
    with pytest.raises(IotaError):
        writer.write([good, Work(records=[(1, "x", b"taken")])])
    writer.close()
    again = place.open()
    found = again.load(read_only=True)
    assert (found.length, found.head) == (3, head)
    assert again.receipts_between("hk", 0, 9) == []


async def test_a_reader_beside_the_writer_sees_what_is_committed_and_writes_nothing(place: Place) -> None:
    journal = await filled(place, 3)
    journal.stage(NotAccumulated(0, 3, 0, 1), 9)
    reader = JournalStore(place.open(), read_only=True)
    assert len(reader) == 3
    reader.stage(NotAccumulated(0, 4, 0, 1), 9)
    with pytest.raises(RuntimeError, match="to be read"):
        await reader.commit()
    reader.close()
    await journal.commit()
    assert len(JournalStore(place.open(), read_only=True)) == 4
    journal.close()


async def test_receipts_are_kept_by_step_and_hotkey_until_they_are_forgotten(place: Place) -> None:
    journal = JournalStore(place.open())
    for step in range(6):
        for hotkey in ("a", "b"):
            journal.stage_receipts(step, hotkey, f"{hotkey}{step}".encode())
    await journal.commit()
    assert journal.receipts_between("a", 1, 4) == [b"a1", b"a2", b"a3"]
    journal.forget_receipts(3)
    await journal.commit()
    assert journal.receipts_between("b", 0, 9) == [b"b3", b"b4", b"b5"]
    journal.close()


async def test_a_journal_is_created_whole_and_never_over_another(place: Place) -> None:
    source = await filled(place, 5)
    records = source.records_between(0, 5)
    source.close()
    fresh = Place(place.path.parent / "fresh", place.url)
    fresh.open().create(records, [(0, 2), (2, 4)])
    journal = JournalStore(fresh.open())
    assert plain(journal) == (5, source.head, 0, 4, 2, 0)
    journal.close()
    with pytest.raises(Exists):
        fresh.open().create(records, [])
    fresh.open().discard()
    assert not fresh.open().exists()


async def test_filled_from_the_other_kind_it_has_the_same_rows(place: Place, other: Place) -> None:
    rig = Rig(place.open(), copies=OFTEN)  # type: ignore[arg-type]
    rig.journal.stage_receipts(3, "hk", b"\x00\xff\\x00\n\t")
    await rig.emit(records_of(SEEDS[0]))
    rig.close()
    target = other.open()
    target.fill(place.open().rows())
    assert list(target.rows()) == list(place.open().rows())
    broken = list(place.open().rows())

    def breaks_off() -> object:
        yield from broken[: len(broken) // 2]
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="gone"):
        Place.open(other).fill(breaks_off())  # type: ignore[arg-type]
    found = other.open()
    rows = list(found.rows()) if found.exists() else []
    assert rows in ([], broken)  # the file is removed first, the table rolled back: never half


WRITER = """
    import asyncio, sys
    from pathlib import Path
    from subnet.run.events import NotAccumulated
    from validator.journal_file import SqliteJournal
    from validator.journal_postgres import PostgresJournal
    from validator.journal_store import JournalStore
    async def main(path, url, run_id):
        database = PostgresJournal(url, run_id, Path(path)) if url else SqliteJournal(Path(path))
        journal = JournalStore(database)
        for i in range(100000):
            journal.stage(NotAccumulated(0, i, 0, 1), i)
            await journal.commit()
            print(i, flush=True)
    asyncio.run(main(*sys.argv[1:]))
"""


def test_kill_9_loses_nothing_that_was_acknowledged(place: Place) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(place.path), place.url, place.run_id]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout as lines:
        last = -1
        for line in lines:
            last = int(line)
            if last >= 50:
                os.kill(process.pid, signal.SIGKILL)
                break
        last = max([last, *(int(line) for line in lines if line.strip().isdigit())])
    process.wait(timeout=20)
    assert last >= 50
    database = place.open()
    if isinstance(database, PostgresJournal):
        database._open_s = 30.0  # its session is noticed as gone
    journal = JournalStore(database)
    assert len(journal) >= last + 1
    assert journal.num_dropped == 0
    journal.close()
