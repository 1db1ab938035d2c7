"""Whatever happened to a journal's files: it goes on with what is good, says what it dropped, or stops with the way out."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from journal_cases import LEADER, NEVER, OFTEN, Rig, said
from long_run import LongRun

from neurons.entry import guarded
from subnet.errors import ConfigError, Corrupt, IotaError
from subnet.run import events as ev
from subnet.run.apply import fold
from subnet.run.chain_hash import next_head
from subnet.run.state_codec import state_bytes
from validator.copier import CopyPolicy
from validator.journal_store import JournalStore
from validator.log_publisher import LeadershipLost

RECORDS = LongRun().records(331)
"""Six steps; the last record is a StepSealed."""


async def build(
    path: Path, *, copies: CopyPolicy = OFTEN, publish: int = len(RECORDS), upto: int = len(RECORDS)
) -> Rig:
    """A journal of which the first ``publish`` records had their quorum events acknowledged; one commit a record at the end."""
    rig = Rig(path, copies=copies)
    await rig.emit(RECORDS[:publish])
    for record in RECORDS[publish:upto]:
        await rig.emit([record], publish=False)
    return rig


@pytest.fixture
async def closed(tmp_path: Path) -> Path:
    """A whole journal, closed: all of it in one file."""
    (await build(tmp_path / "j.db")).close()
    assert not (tmp_path / "j.db-wal").exists()
    return tmp_path / "j.db"


@contextmanager
def edited(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection:
        yield connection
        connection.commit()


def folded(path: Path) -> tuple[int, bytes]:
    """(number of records, canonical state) as a start finds them."""
    rig = Rig(path)
    try:
        return len(rig.journal), state_bytes(rig.coordinator.state)
    finally:
        rig.close()


WHOLE = (len(RECORDS), state_bytes(fold(RECORDS)))


# --- a torn tail ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn_bytes", [1, 4096, 3 * 4200])
async def test_a_truncated_wal_is_counted_and_dropped_and_a_new_term_begins(tmp_path: Path, torn_bytes: int) -> None:
    """SQLite drops commits that are cut off without a word; the tip knows how many there were."""
    rig = await build(tmp_path / "a" / "j.db", publish=210)
    path = rig.copy_files(tmp_path / "b")
    acknowledged = rig.journal.acknowledged
    rig.close()
    wal = path.with_name("j.db-wal")
    wal.write_bytes(wal.read_bytes()[:-torn_bytes])
    with said() as lines:
        found = Rig(path, rig.keys)
    dropped = found.journal.num_dropped
    assert 1 <= dropped <= len(RECORDS) - acknowledged
    assert len(found.journal) == len(RECORDS) - dropped
    assert any(
        f"the last {dropped} record(s), from {len(found.journal)} on, are lost or torn" in line for line in lines
    )
    assert state_bytes(found.coordinator.state) == state_bytes(fold(RECORDS[: len(RECORDS) - dropped]))
    term = found.coordinator.state.term
    found.coordinator.begin(RECORDS[0].event, None)  # type: ignore[arg-type]
    assert found.coordinator.state.term == term + 1, "members may have seen what was lost: their records must be void"
    assert not found.coordinator.core.may_speak
    await found.settle()
    assert found.coordinator.core.may_speak
    found.close()
    again = Rig(path, rig.keys)
    assert again.journal.num_dropped == 0
    again.close()


async def test_lost_acknowledged_records_stop_the_start(tmp_path: Path) -> None:
    rig = await build(tmp_path / "a" / "j.db", copies=NEVER)
    path = rig.copy_files(tmp_path / "b")
    rig.close()
    wal = path.with_name("j.db-wal")
    wal.write_bytes(wal.read_bytes()[: wal.stat().st_size // 2])
    with pytest.raises(
        Corrupt, match=r"ends before record \d+, but records up to \d+ are in the log store.*--lead-from"
    ):
        JournalStore(path)


async def test_the_log_store_knows_what_the_disk_and_the_tip_have_lost(tmp_path: Path) -> None:
    rig = await build(tmp_path / "a" / "j.db", publish=100, upto=100)
    path = rig.copy_files(tmp_path / "b")
    path.with_name("j.db-tip").unlink()
    await rig.emit(RECORDS[100:])
    rig.close()
    behind = Rig(path, rig.keys)
    assert len(behind.journal) == 100
    with pytest.raises(LeadershipLost, match=r"this disk has lost records.*--lead-from STORE"):
        await behind.emit([ev.Record(100, 0, ev.TermStarted(9, LEADER.hotkey, "n"))])
    behind.close()


async def test_a_missing_shm_and_a_missing_tip_cost_nothing(tmp_path: Path) -> None:
    rig = await build(tmp_path / "a" / "j.db")
    path = rig.copy_files(tmp_path / "b")
    rig.close()
    path.with_name("j.db-shm").unlink()
    path.with_name("j.db-tip").write_bytes(b"\xff not numbers")
    assert folded(path) == WHOLE


async def test_a_torn_last_record_is_dropped_with_the_first_commit(tmp_path: Path) -> None:
    rig = await build(tmp_path / "j.db", publish=0, upto=50)
    rig.close()
    with edited(tmp_path / "j.db") as connection:
        connection.execute("UPDATE records SET data = substr(data, 1, 5) WHERE number = 49")
    for _ in range(2):  # opening alone changes nothing
        journal = JournalStore(tmp_path / "j.db")
        assert (len(journal), journal.num_dropped) == (49, 1)
        journal.close()
    journal = JournalStore(tmp_path / "j.db")
    journal.stage(ev.TermStarted(7, "hk", "n"), 0)
    await journal.commit()
    head = journal.head
    journal.close()
    journal = JournalStore(tmp_path / "j.db")
    assert (len(journal), journal.num_dropped, journal.head) == (50, 0, head)
    journal.close()


# --- corrupt records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "copies", "number"), [(300, OFTEN, 290), (277, NEVER, 276), (277, NEVER, 0)])
async def test_a_corrupt_record_behind_the_copy_stops_the_start(
    tmp_path: Path, length: int, copies: CopyPolicy, number: int
) -> None:
    """In the middle; the last one, but acknowledged, so not torn; the first."""
    (await build(tmp_path / "j.db", copies=copies, publish=length, upto=length)).close()
    with edited(tmp_path / "j.db") as connection:
        (data,) = connection.execute("SELECT data FROM records WHERE number = ?", (number,)).fetchone()
        changed = data[:-1] + bytes([data[-1] ^ 1])
        connection.execute("UPDATE records SET data = ? WHERE number = ?", (changed, number))
    with pytest.raises(Corrupt, match=f"record {number} does not fit the hash chain.*--lead-from STORE"):
        JournalStore(tmp_path / "j.db")


async def test_a_missing_record_stops_the_start(tmp_path: Path) -> None:
    (await build(tmp_path / "j.db", copies=NEVER)).close()
    with edited(tmp_path / "j.db") as connection:
        connection.execute("DELETE FROM records WHERE number = 7")
    with pytest.raises(Corrupt, match=r"record 7 is missing.*--lead-from STORE"):
        JournalStore(tmp_path / "j.db")


async def test_a_corrupt_record_before_the_newest_copy_is_only_said(closed: Path) -> None:
    journal = JournalStore(closed)
    assert journal.copy is not None
    number = journal.base + 1
    assert number < journal.copy.number
    journal.close()
    with edited(closed) as connection:
        connection.execute("UPDATE records SET data = x'00' WHERE number = ?", (number,))
    with said() as lines:
        assert folded(closed) == WHOLE
    assert any(f"record {number} does not fit" in line and "which is good" in line for line in lines)


async def test_a_record_that_does_not_decode_stops_the_start(tmp_path: Path) -> None:
    """Its hash is right: somebody wrote it so."""
    (await build(tmp_path / "j.db", copies=NEVER, upto=30, publish=30)).close()
    with edited(tmp_path / "j.db") as connection:
        (head,) = connection.execute("SELECT head FROM records WHERE number = 29").fetchone()
        data = msgspec.msgpack.encode([30, 0, ["Invented", 1]])
        connection.execute("INSERT INTO records VALUES (30, ?, ?)", (next_head(head, data), data))
    with pytest.raises(Corrupt, match=r"record 30 does not decode.*newer version.*--lead-from STORE"):
        list(JournalStore(tmp_path / "j.db").replay())


# --- corrupt copies ------------------------------------------------------------------------------------------------

SPOIL = {
    "state": "UPDATE copies SET state = CAST(substr(state, 1, length(state) - 1) || x'ff' AS BLOB) WHERE number = ?",
    "history": "UPDATE copies SET history = x'93' WHERE number = ?",
    "hash": "UPDATE copies SET hash = 'x' WHERE number = ?",
    "head": "UPDATE copies SET head = iif(head LIKE '0%', '1', '0') || substr(head, 2) WHERE number = ?",
    "number": "UPDATE copies SET number = number - 1 WHERE number = ?",
}


def copy_numbers(path: Path) -> list[int]:
    with edited(path) as connection:
        return [row[0] for row in connection.execute("SELECT number FROM copies ORDER BY number DESC")]


@pytest.mark.parametrize("what", SPOIL)
async def test_a_corrupt_copy_falls_back_to_the_one_before(closed: Path, what: str) -> None:
    newest, older = copy_numbers(closed)
    with edited(closed) as connection:
        connection.execute(SPOIL[what], (newest,))
    with said() as lines:
        journal = JournalStore(closed)
    assert any("the copy of the state at record" in line and "is not used" in line for line in lines)
    assert journal.copy is not None
    assert journal.copy.number == journal.base == older
    journal.close()
    assert folded(closed) == WHOLE


async def test_both_copies_corrupt_names_the_way_out(closed: Path) -> None:
    with edited(closed) as connection:
        connection.execute("UPDATE copies SET state = x'00'")
    with pytest.raises(Corrupt, match=r"begins with record \d+, and its copies of the state \(2\).*--lead-from STORE"):
        JournalStore(closed)


async def test_a_corrupt_first_copy_costs_only_a_longer_replay(tmp_path: Path) -> None:
    rig = await build(tmp_path / "j.db", upto=55, publish=55)
    assert rig.journal.copy is not None
    assert rig.journal.base == 0
    rig.close()
    with edited(tmp_path / "j.db") as connection:
        connection.execute("UPDATE copies SET state = x'00'")
    assert folded(tmp_path / "j.db") == (55, state_bytes(fold(RECORDS[:55])))


async def test_the_next_copy_replaces_a_corrupt_one(tmp_path: Path) -> None:
    rig = await build(tmp_path / "j.db", upto=200, publish=200)
    rig.close()
    newest, older = copy_numbers(tmp_path / "j.db")
    with edited(tmp_path / "j.db") as connection:
        connection.execute("UPDATE copies SET state = x'00' WHERE number = ?", (newest,))
    again = Rig(tmp_path / "j.db", rig.keys)
    await again.emit(RECORDS[200:])
    again.close()
    assert newest not in copy_numbers(tmp_path / "j.db")
    assert min(copy_numbers(tmp_path / "j.db")) >= older
    assert folded(tmp_path / "j.db") == WHOLE


# --- anything ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal of which the first 200 records had their quorum events acknowledged."""
    directory = tmp_path_factory.mktemp("whole")

    async def make() -> None:
        (await build(directory / "j.db", publish=200)).close()

    asyncio.run(make())
    return directory


@settings(max_examples=50, deadline=None)
@given(data=some.data())
def test_no_damage_gives_another_state(whole: Path, data: some.DataObject) -> None:
    """Cut anywhere, any bit changed: the start finds the same records, fewer of the unacknowledged, or says no."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "j.db"
        shutil.copytree(whole, directory, dirs_exist_ok=True)
        content = bytearray(path.read_bytes())
        at = data.draw(some.integers(0, len(content) - 1))
        if data.draw(some.booleans()):
            content[at] ^= 1 << data.draw(some.integers(0, 7))
        else:
            del content[at:]
        path.write_bytes(content)
        try:
            length, state = folded(path)
        except (Corrupt, ConfigError) as found:
            error = found
        else:
            error = None
        if error is not None:
            assert "--lead-from STORE" in str(error)
            return
        assert length in (len(RECORDS), len(RECORDS) - 1)
        assert state == state_bytes(fold(RECORDS[:length]))


@pytest.mark.parametrize("size_bytes", [1, 100, 5000, 40_000])
def test_a_file_cut_in_the_middle_is_one_line_and_status_2(
    tmp_path: Path, size_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "j.db"
    JournalStore.create(path, [msgspec.msgpack.encode(record) for record in RECORDS] * 1, [(0, len(RECORDS))])
    with path.open("rb+") as file:
        file.truncate(size_bytes)

    def start() -> int:
        JournalStore(path)
        return 0

    assert guarded(start) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: journal ")
    assert "the way out: start with --lead-from STORE" in line


async def test_a_journal_that_is_locked_or_not_ours_says_so(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    (tmp_path / "dir.db").mkdir()
    with pytest.raises(ConfigError, match="check path and rights"):
        JournalStore(tmp_path / "dir.db")
    first, second = JournalStore(path), JournalStore(path)
    for journal in (first, second):
        journal.stage(ev.TermStarted(1, "hk", "n"), 0)
    await first.commit()
    with pytest.raises(IotaError, match="another process uses it: one validator a directory"):
        await second.commit()
    with pytest.raises(IotaError, match="another process"):
        await second.commit()
    first.close()
    second.close()


async def test_create_is_whole_and_never_overwrites(tmp_path: Path) -> None:
    data = [msgspec.msgpack.encode(record) for record in RECORDS]
    path = tmp_path / "run" / "j.db"
    JournalStore.create(path, data, [(0, 100), (100, 200)])
    assert sorted(file.name for file in path.parent.iterdir()) == ["j.db", "j.db-tip"]
    journal = JournalStore(path)
    assert (len(journal), journal.acknowledged, journal.num_segments) == (len(RECORDS), 200, 2)
    journal.close()
    assert folded(path) == WHOLE
    with pytest.raises(IotaError, match="there is a journal already"):
        JournalStore.create(path, data, [])
