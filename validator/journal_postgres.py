"""A journal in PostgreSQL: durable before it is acknowledged, one writer at a time, and a server that goes away is waited for.

All runs of a validator share the tables ``iota_*``. Whoever leads a run holds an advisory lock in a session of its own and has
its name in the run's row: each transaction begins by counting that row's ``batch`` up under the name, so that one who has lost
the lock writes nothing, and one whose connection broke in the middle of a commit finds out whether it was done.

Passwords come from where libpq looks for them (``PGPASSFILE``, ``~/.pgpass``, a service file) as well as from the URL; no
message has one. Sources: PostgreSQL's manual, sections 13.3.5 (advisory locks) and 30.1 (reliability).
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import psycopg
from blake3 import blake3
from loguru import logger

from subnet.errors import ConfigError, Corrupt, Exists
from subnet.timing import TIMEOUTS, Backoff, Deadline
from validator.journal import JournalWriter, Row, Table, Work
from validator.journal_rows import WAY_OUT, Found, Tip, chained, read_rows
from validator.postgres import (
    ALL,
    COPY,
    ITERATED_AT_ONCE,
    Connection,
    PostgresRows,
    connect,
    forget,
    is_away,
    make_tables,
    postgres_errors,
    said,
    where,
    write_work,
)


class PostgresJournal:
    """:class:`validator.journal.JournalDatabase`. ``path``: what belongs to it on this disk lies beside (the tip, terms)."""

    def __init__(
        self,
        url: str,
        run_id: str,
        path: Path,
        *,
        away_s: float = TIMEOUTS.journal_away_s,
        open_s: float = TIMEOUTS.journal_open_s,
    ) -> None:
        self.path, self._url, self._run_id = path, url, run_id
        self.name = f"journal {run_id} in {where(url)}"
        self.trouble = ""
        self._away_s, self._open_s = away_s, open_s
        self._lock = int.from_bytes(blake3(b"iota/journal/1\0" + run_id.encode()).digest()[:8], "little", signed=True)
        self._writer_name = ""
        self._journal, self._batch = 0, 0
        self._connection: Connection | None = None
        self._dropping = threading.Lock()

    # --- to read -----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        with self._said("be read"), closing(self._connect_at_start()) as connection:
            return self._number_of(connection) is not None

    def load(self, *, read_only: bool = False) -> Found:
        tip = Tip.read(self.path)
        with self._said("be opened"):
            if read_only:
                with closing(self._connect_at_start()) as connection:
                    return self._found(connection, self._number_or_corrupt(connection), tip)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = self._lead()
            try:
                return self._found(connection, self._journal, tip)
            except BaseException:
                self.close()
                raise

    def _found(self, connection: Connection, journal: int, tip: tuple[int, int]) -> Found:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return read_rows(self.name, PostgresRows(connection, journal), tip)

    def receipts_between(self, hotkey: str, first_step: int, end_step: int) -> list[bytes]:
        with self._said("be read"), closing(connect(self._url)) as connection:
            rows = connection.execute(
                "SELECT r.data FROM iota_receipts r JOIN iota_journals j ON r.journal = j.id "
                "WHERE j.run_id = %s AND r.step >= %s AND r.step < %s AND r.hotkey = %s ORDER BY r.id",
                (self._run_id, first_step, end_step, hotkey),
                binary=True,
            )
            return [data for (data,) in rows]

    def rows(self) -> Iterator[Row]:
        with self._said("be read"), closing(self._connect_at_start()) as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            journal = self._number_or_corrupt(connection)
            for table, query in ALL.items():
                with connection.cursor(name=f"iota_{table}") as cursor:
                    cursor.itersize = ITERATED_AT_ONCE
                    for row in cursor.execute(query, (journal,), binary=True):
                        yield table, row

    # --- to write ----------------------------------------------------------------------------------------------

    def writer(self) -> JournalWriter:
        return _Writer(self)

    def create(self, records: Iterable[bytes], segments: Iterable[tuple[int, int]]) -> None:
        number, acknowledged = 0, 0

        def rows() -> Iterator[Row]:
            nonlocal number, acknowledged
            for row in chained(iter(records)):
                number = row[0] + 1
                yield "records", row
            for index, (first, acknowledged) in enumerate(segments):
                yield "segments", (index, first, acknowledged)

        if self.exists():
            raise Exists(f"there is one already: {self.name}", hint="start without --lead-from")
        self.fill(rows())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        Tip.say(self.path, number, acknowledged)

    def fill(self, rows: Iterable[Row]) -> None:
        with self._said("be written"):
            connection = self._lead()
            try:
                with connection.transaction():
                    forget(connection, self._journal)
                    for table, of_table in itertools.groupby(rows, key=_table):
                        with connection.cursor().copy(COPY[table]) as copy:
                            for _, row in of_table:
                                copy.write_row((self._journal, *row))
            finally:
                self.close()

    def set_aside(self, name: str) -> None:
        with self._said("be written"):
            if not self.exists():
                return
            connection = self._lead()
            try:
                connection.execute(
                    "UPDATE iota_journals SET run_id = run_id || %s WHERE id = %s", (f" until {name}", self._journal)
                )
            finally:
                self.close()

    def discard(self) -> None:
        with self._said("be written"):
            if not self.exists():
                return
            connection = self._lead()
            try:
                with connection.transaction():
                    forget(connection, self._journal)
                    connection.execute("DELETE FROM iota_journals WHERE id = %s", (self._journal,))
            finally:
                self.close()

    def write(self, batch: Sequence[Work]) -> None:
        """What :meth:`JournalWriter.write` does: tried again until the server has been away for ``away_s``."""
        deadline, backoff, wanted = Deadline.after(self._away_s), Backoff(0.1, 2.0), self._batch + 1
        while True:
            try:
                connection = self._again()
                if self._batch < wanted:
                    with connection.transaction():
                        self._count(connection, wanted)
                        for work in batch:
                            write_work(connection, self._journal, work)
                    self._batch = wanted
                if self.trouble:
                    logger.info("{}: it answers again", self.name)
                    self.trouble = ""
                return
            except psycopg.Error as error:
                self._drop()
                if not is_away(error) or deadline.expired:
                    raise said(self.name, "be written", error) from error
                if not self.trouble:
                    self.trouble = str(said(self.name, "be written", error).reason)
                    logger.warning(
                        "{}; nothing is acknowledged until it can, at most {:g} s", self.trouble, self._away_s
                    )
            time.sleep(min(backoff.next_s(), deadline.remaining_s()))

    def delete_below(self, number: int, most: int) -> bool:
        try:
            done = self._again().execute(
                "DELETE FROM iota_records WHERE journal = %s AND number IN "
                "(SELECT number FROM iota_records WHERE journal = %s AND number < %s LIMIT %s)",
                (self._journal, self._journal, number, most),
            )
            return done.rowcount >= most
        except psycopg.Error as error:
            self._drop()
            raise said(self.name, "be written", error) from error

    def _count(self, connection: Connection, batch: int) -> None:
        done = connection.execute(
            "UPDATE iota_journals SET batch = %s WHERE id = %s AND writer = %s AND batch = %s",
            (batch, self._journal, self._writer_name, batch - 1),
        )
        if done.rowcount != 1:
            raise self._taken()

    # --- the writer's session ------------------------------------------------------------------------------------

    def _connect_at_start(self) -> Connection:
        """Until ``open_s`` are over: the server may be starting too."""
        deadline, backoff = Deadline.after(self._open_s), Backoff(0.2, 2.0)
        while True:
            try:
                return connect(self._url)
            except psycopg.OperationalError as error:
                if not is_away(error) or deadline.expired:
                    raise
                logger.debug("{}: {}", self.name, error)
            time.sleep(min(backoff.next_s(), deadline.remaining_s()))

    def _lead(self) -> Connection:
        """Be the one writer: the lock, and the name that each transaction is checked against."""
        connection = self._connect_at_start()
        try:
            make_tables(connection)
            self._take_lock(connection, self._open_s)
            self._writer_name = secrets.token_hex(16)
            row = connection.execute(
                "INSERT INTO iota_journals (run_id, writer) VALUES (%s, %s) "
                "ON CONFLICT (run_id) DO UPDATE SET writer = excluded.writer RETURNING id, batch",
                (self._run_id, self._writer_name),
            ).fetchone()
        except BaseException:
            connection.close()
            raise
        assert row is not None
        self._journal, self._batch = row
        self._connection = connection
        return connection

    def _again(self) -> Connection:
        """The session, opened anew where it broke; nobody may have led meanwhile. ``_batch`` is then as the server has it."""
        if self._connection is not None:
            return self._connection
        connection = connect(self._url)
        try:
            self._take_lock(connection, 0.0)
            row = connection.execute(
                "SELECT writer, batch FROM iota_journals WHERE id = %s", (self._journal,)
            ).fetchone()
            if row is None or row[0] != self._writer_name or not self._batch <= row[1] <= self._batch + 1:
                raise self._taken()
        except BaseException:
            connection.close()
            raise
        self._batch, self._connection = row[1], connection
        return connection

    def _take_lock(self, connection: Connection, within_s: float) -> None:
        """A session that broke may hold it until the server has noticed. :class:`psycopg.OperationalError` while a session
        of our own may be the one, :class:`ConfigError` at a start."""
        deadline = Deadline.after(within_s)
        while True:
            row = connection.execute("SELECT pg_try_advisory_lock(%s)", (self._lock,)).fetchone()
            if row is not None and row[0]:
                return
            if not within_s:
                raise psycopg.OperationalError("the lock of the broken session isn't free yet")
            if deadline.expired:
                raise ConfigError(
                    f"{self.name} is written by another process", hint="one validator a run: end the other first"
                )
            time.sleep(min(0.2, deadline.remaining_s()))

    def _taken(self) -> ConfigError:
        return ConfigError(
            f"{self.name} can't be written: another process has taken it over", hint="one validator a run"
        )

    def interrupt(self) -> None:
        with self._dropping, suppress(OSError, psycopg.Error):
            if self._connection is not None:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as other:
                    other.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        with self._dropping:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def close(self) -> None:
        self._drop()

    def _number_of(self, connection: Connection) -> int | None:
        (table,) = connection.execute("SELECT to_regclass('iota_journals')").fetchone() or (None,)
        if table is None:
            return None
        row = connection.execute("SELECT id FROM iota_journals WHERE run_id = %s", (self._run_id,)).fetchone()
        return None if row is None else row[0]

    def _number_or_corrupt(self, connection: Connection) -> int:
        number = self._number_of(connection)
        if number is None:
            raise Corrupt(f"{self.name} isn't there", hint=f"is it the right database? Else {WAY_OUT}")
        return number

    def _said(self, what: str) -> AbstractContextManager[None]:
        return postgres_errors(self.name, what)


def _table(row: Row) -> Table:
    return row[0]


class _Writer:
    """:class:`validator.journal.JournalWriter`"""

    def __init__(self, journal: PostgresJournal) -> None:
        self._journal = journal

    def write(self, batch: Sequence[Work]) -> None:
        self._journal.write(batch)

    def delete_below(self, number: int, most: int) -> bool:
        return self._journal.delete_below(number, most)

    def close(self) -> None:
        self._journal.close()
