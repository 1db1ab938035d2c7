"""A leader's journal with the scores in its copies, killed at one write after the other: run as a process.

score_kill_case.py DIRECTORY SEED WRITE...   a child for each WRITE dies (SIGKILL) before that write; prints how many there are
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import journal_cases
from journal_cases import OFTEN, Rig, records_of
from score_cases import Owner

from subnet.run import events as ev
from validator.journal_file import Tip

GAP_S = 33.3


async def play(rig: Rig, records: Sequence[ev.Record]) -> None:
    """The same records with the same stamps, whoever plays them."""
    for first in range(0, len(records), 20):
        rig.clock.advance(GAP_S)
        await rig.emit(records[first : first + 20])


def count_writes(look: Callable[[], None]) -> None:
    """``look`` is called before each statement that the journal's writer executes, and before each note of its tip."""
    connect, committed = sqlite3.connect, Tip.committed

    class Looking(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            look()
            return super().execute(*arguments)

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:
            look()
            return super().executemany(*arguments)

    def looking(self: Tip, number: int | None, acknowledged: int | None) -> None:
        look()
        committed(self, number, acknowledged)

    sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Looking, **options)  # type: ignore[assignment]
    Tip.committed = looking  # type: ignore[method-assign]


def lead(directory: Path, seed: int, deadly: int) -> None:
    """Dies before write number ``deadly``, if there is one."""
    count = 0

    def look() -> None:
        nonlocal count
        count += 1
        if count == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    journal_cases.Counter = Owner  # type: ignore[misc, assignment]
    count_writes(look)
    directory.mkdir()
    rig = Rig(directory / "journal.db", copies=OFTEN)
    asyncio.run(play(rig, records_of(seed)))
    rig.close()


def main() -> int:
    directory, (seed, first, each) = Path(sys.argv[1]), [int(text) for text in sys.argv[2:]]
    records_of(seed)  # once for all children
    directory.mkdir()
    deadly = first
    while True:
        if not os.fork():
            lead(directory / f"at{deadly}", seed, deadly)
            os._exit(0)  # there are fewer writes
        _, status = os.wait()
        if not os.WIFSIGNALED(status):
            return status
        print("killed", deadly, flush=True)
        deadly += each


if __name__ == "__main__":
    sys.exit(main())
