"""A PostgreSQL server that stops, freezes, loses an answer, or is given to another: waited for, never written twice, never lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest
from journal_cases import NEVER, PLANNED, Rig
from postgres_server import PASSWORD, Server

from subnet.errors import ConfigError, Corrupt, Unreachable
from subnet.run.events import HardwareClassSet, NotAccumulated
from subnet.timing import ManualClock
from validator import journal_postgres
from validator.journal_postgres import PostgresJournal
from validator.journal_store import JournalStore
from validator.postgres import Connection
from validator.presence import PresentClock

WITHIN_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


def journal_at(url: str, tmp_path: Path, **more: float) -> PostgresJournal:
    return PostgresJournal(url, tmp_path.name, tmp_path / "journal.db", **{"open_s": 0.5, "away_s": WITHIN_S, **more})


def stage(journal: JournalStore, i: int) -> None:
    journal.stage(NotAccumulated(0, i, 0, 1), i)


def assert_whole(url: str, tmp_path: Path, records: int) -> None:
    """Chain and numbers are checked by loading."""
    found = journal_at(url, tmp_path).load(read_only=True)
    assert (found.length, found.num_dropped) == (records, 0)


async def test_while_the_server_is_away_nothing_is_acknowledged_and_then_all_is(
    postgres: Server, tmp_path: Path
) -> None:
    journal = JournalStore(journal_at(postgres.url(), tmp_path))
    stage(journal, 0)
    await journal.commit()
    await asyncio.to_thread(postgres.stop)
    try:
        stage(journal, 1)
        first = asyncio.create_task(journal.commit())
        await until(lambda: bool(journal.trouble))
        assert "can't be written" in journal.trouble
        assert PASSWORD not in journal.trouble
        stage(journal, 2)
        second = asyncio.create_task(journal.commit())
        await asyncio.sleep(0.3)
        assert not first.done()
        assert not second.done()
        assert journal.committed == 1
    finally:
        await asyncio.to_thread(postgres.start)
    await asyncio.wait_for(asyncio.gather(first, second), WITHIN_S)
    assert (journal.committed, journal.trouble) == (3, "")
    journal.close()
    assert_whole(postgres.url(), tmp_path, 3)


async def test_a_server_that_stays_away_ends_the_leader_with_one_line_and_loses_nothing(
    postgres: Server, tmp_path: Path
) -> None:
    rig = Rig(journal_at(postgres.url(), tmp_path, away_s=0.5), copies=NEVER)  # type: ignore[arg-type]
    coordinator = rig.coordinator
    coordinator.begin(PLANNED, None)
    running = asyncio.create_task(coordinator.run())
    await until(lambda: rig.journal.committed >= 2)
    await asyncio.to_thread(postgres.stop)
    try:
        coordinator.tell(HardwareClassSet(("x",), "operator"))
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(running, WITHIN_S)
        assert ended.group_contains(Unreachable, match="nothing acknowledged is lost")
        committed = rig.journal.committed
        assert committed < len(rig.journal)
    finally:
        await asyncio.to_thread(postgres.start)
        await coordinator.close()
    assert_whole(postgres.url(), tmp_path, committed)


@asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_server_that_freezes_is_given_up_and_written_to_once(postgres: Server, tmp_path: Path) -> None:
    """Its session holds the lock until it runs again; whether it did what it was asked is then seen from the count."""
    database = journal_at(postgres.url(), tmp_path)
    journal = JournalStore(database, answer_s=0.3)
    stage(journal, 0)
    await journal.commit()
    assert database._connection is not None
    async with frozen(database._connection.info.backend_pid):
        stage(journal, 1)
        commit = asyncio.create_task(journal.commit())
        await until(lambda: bool(journal.trouble))
        assert not commit.done()
    await asyncio.wait_for(commit, WITHIN_S)
    journal.close()
    assert_whole(postgres.url(), tmp_path, 2)


async def test_an_answer_that_is_lost_after_the_commit_writes_nothing_twice(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [True]

    class LosesAnswer:
        """A connection that breaks between the server's commit and its answer, once."""

        def __init__(self, inner: Connection) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

        def transaction(self) -> object:
            return _Losing(self._inner, lost)

    real = journal_postgres.connect
    database = journal_at(postgres.url(), tmp_path)
    journal = JournalStore(database)
    stage(journal, 0)
    await journal.commit()
    database._drop()
    monkeypatch.setattr(journal_postgres, "connect", lambda url: LosesAnswer(real(url)))
    stage(journal, 1)
    await journal.commit()
    assert lost == [False]
    stage(journal, 2)
    await journal.commit()
    journal.close()
    monkeypatch.undo()
    assert_whole(postgres.url(), tmp_path, 3)


class _Losing:
    def __init__(self, inner: Connection, lost: list[bool]) -> None:
        self._inner, self._lost, self._transaction = inner, lost, inner.transaction()

    def __enter__(self) -> object:
        return self._transaction.__enter__()

    def __exit__(self, *exception: object) -> object:
        done = self._transaction.__exit__(*exception)  # type: ignore[arg-type]
        if exception[0] is None and self._lost[0]:
            self._lost[0] = False
            self._inner.close()
            raise psycopg.OperationalError("the connection was closed")
        return done


async def test_a_session_that_is_ended_is_opened_anew(postgres: Server, tmp_path: Path) -> None:
    database = journal_at(postgres.url(), tmp_path)
    journal = JournalStore(database)
    stage(journal, 0)
    await journal.commit()
    assert database._connection is not None
    with psycopg.connect(postgres.url(), autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s)", (database._connection.info.backend_pid,))
    stage(journal, 1)
    await asyncio.wait_for(journal.commit(), WITHIN_S)
    journal.close()
    assert_whole(postgres.url(), tmp_path, 2)


async def test_who_was_replaced_writes_nothing_more(postgres: Server, tmp_path: Path) -> None:
    """Its session broke, and another process took the journal over before it was back."""
    database = journal_at(postgres.url(), tmp_path)
    old = JournalStore(database)
    stage(old, 0)
    await old.commit()
    database._drop()  # as a broken connection leaves it
    new = JournalStore(journal_at(postgres.url(), tmp_path, open_s=WITHIN_S))
    stage(new, 1)
    await new.commit()
    new.close()
    stage(old, 77)
    with pytest.raises(ConfigError, match="taken it over"):
        await old.commit()
    stage(old, 78)
    with pytest.raises(ConfigError, match="taken it over"):
        await old.commit()
    old.close()
    assert_whole(postgres.url(), tmp_path, 2)


def test_a_server_that_does_not_sync_is_refused(postgres: Server, tmp_path: Path) -> None:
    postgres.stop("fast")
    postgres.start("-c fsync=off")
    try:
        with pytest.raises(ConfigError, match="fsync = on"):
            journal_at(postgres.url(), tmp_path).load()
    finally:
        postgres.stop("fast")
        postgres.start()


def test_what_is_wrong_with_the_address_is_said_without_the_password(postgres: Server, tmp_path: Path) -> None:
    for url, words in (
        (postgres.url(password="false-secret"), "password"),
        (postgres.url("nowhere"), "nowhere"),
        (postgres.url().replace(str(postgres.port), "1"), "is the server up"),
        ("mysql://iota:false-secret@host/db", "no URL"),
    ):
        with pytest.raises((ConfigError, Unreachable)) as refused:
            journal_at(url, tmp_path).load()
        assert words in str(refused.value)
        assert PASSWORD not in str(refused.value)
        assert "secret" not in str(refused.value)


def test_a_user_without_the_right_to_make_tables_is_told(postgres: Server, tmp_path: Path) -> None:
    url = postgres.new_database("guarded")
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'".encode())
    with pytest.raises(ConfigError, match="may create tables"):
        journal_at(url.replace("iota:", "guest:"), tmp_path).load()


def test_a_run_that_the_database_does_not_have_is_not_read_as_empty(postgres: Server, tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match=r"right database.*--lead-from"):
        journal_at(postgres.url(), tmp_path).load(read_only=True)


def test_nobodys_clock_runs_while_the_journal_is_away() -> None:
    away, real = [False], ManualClock()
    clock = PresentClock(real, absent=lambda: away[0])
    before_s = clock.now_s()
    away[0] = True
    for _ in range(100):
        real.advance(0.1)
        assert clock.now_s() == pytest.approx(before_s)
    away[0] = False
    real.advance(0.2)
    assert clock.now_s() == pytest.approx(before_s + 0.2)
