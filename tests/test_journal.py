"""What the journal acknowledged is there after any crash; what doesn't fit the chain stops the start."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from subnet.errors import Corrupt
from subnet.run.events import NotAccumulated, TermStarted
from validator.journal_store import JournalStore

ROOT = Path(__file__).resolve().parent.parent


async def test_round_trip_and_chain(tmp_path: Path) -> None:
    journal = JournalStore(tmp_path / "j.db")
    events = [TermStarted(1, "hk", "n"), NotAccumulated(0, 1, 2, 3)]
    for event in events:
        journal.stage(event, 7)
    await journal.commit()
    head = journal.head
    journal.close()
    again = JournalStore(tmp_path / "j.db")
    assert [record.event for record in again.replay()] == events
    assert again.head == head
    assert len(again) == 2
    again.close()


async def test_segments_survive(tmp_path: Path) -> None:
    journal = JournalStore(tmp_path / "j.db")
    journal.stage(TermStarted(1, "hk", "n"), 7)
    journal.stage_segment(0, 1)
    await journal.commit()
    journal.close()
    again = JournalStore(tmp_path / "j.db")
    assert (again.acknowledged, again.num_segments) == (1, 1)
    again.close()


@pytest.mark.parametrize("number", [0, 2, 3])
async def test_a_changed_record_stops_the_start_and_names_its_number(tmp_path: Path, number: int) -> None:
    path = tmp_path / "j.db"
    journal = JournalStore(path)
    for i in range(5):
        journal.stage(NotAccumulated(0, i, 0, 1), i)
    await journal.commit()
    journal.close()
    connection = sqlite3.connect(path)
    (data,) = connection.execute("SELECT data FROM records WHERE number = ?", (number,)).fetchone()
    connection.execute("UPDATE records SET data = ? WHERE number = ?", (b"\x00" + data[1:], number))
    connection.commit()
    connection.close()
    with pytest.raises(Corrupt, match=f"record {number} does not fit.*--lead-from STORE"):
        JournalStore(path)


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from subnet.run.events import NotAccumulated
        from validator.journal_store import JournalStore
        async def main():
            journal = JournalStore(Path(sys.argv[1]))
            for i in range(100000):
                journal.stage(NotAccumulated(0, i, 0, 1), i)
                await journal.commit()
                print(i, flush=True)
        asyncio.run(main())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "j.db")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
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
    journal = JournalStore(tmp_path / "j.db")
    assert len(journal) >= last + 1
    journal.close()


def lead(path: Path, limit_bytes: int, num_records: int) -> subprocess.CompletedProcess[str]:
    arguments = [str(ROOT / "tests" / "disk_full_case.py"), str(path), str(limit_bytes), str(num_records)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_full_disk_ends_the_process_in_one_line_and_costs_nothing(tmp_path: Path) -> None:
    """What was committed is there when the disk has room again, and the run goes on in its term."""
    path = tmp_path / "j.db"
    full = lead(path, 400_000, 10_000)
    committed = [line.split() for line in full.stdout.splitlines() if line.startswith("committed")]
    (said,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert f"journal {path} can't be written" in said
    assert "make room and start again: nothing acknowledged is lost" in said
    assert len(committed) > 20, "the disk was full too early to say anything"
    journal = JournalStore(path)
    _, number, head = committed[-1]
    assert len(journal) >= int(number)
    assert journal.head_after(int(number)) == head
    assert journal.num_dropped == 0
    journal.close()
    again = lead(path, 0, 5)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("term 1\n")
    numbers = [int(line.split()[1]) for line in again.stdout.splitlines() if line.startswith("committed")]
    assert numbers[0] > int(number)
    assert len(numbers) == 5
