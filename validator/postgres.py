"""PostgreSQL for journals: connections that notice when the server is gone, tables, statements, and its errors as ours."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict

from subnet.errors import ConfigError, Corrupt, IotaError, OutOfSpace, Unreachable
from validator.journal import Table, Work
from validator.journal_rows import WAY_OUT, RowDamaged

Connection = psycopg.Connection[tuple[Any, ...]]
ITERATED_AT_ONCE = 2_000
"""Rows of a cursor that are fetched together."""
OLDEST = 120_000
"""PostgreSQL 12."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS iota_database (id text PRIMARY KEY);
CREATE TABLE IF NOT EXISTS iota_journals (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_id text NOT NULL UNIQUE, writer text NOT NULL,
    batch bigint NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS iota_records (
    journal integer NOT NULL, number bigint NOT NULL, head text NOT NULL, data bytea NOT NULL, PRIMARY KEY (journal, number)
);
CREATE TABLE IF NOT EXISTS iota_segments (
    journal integer NOT NULL, number bigint NOT NULL, first bigint NOT NULL, next bigint NOT NULL,
    PRIMARY KEY (journal, number)
);
CREATE TABLE IF NOT EXISTS iota_copies (
    journal integer NOT NULL, number bigint NOT NULL, head text NOT NULL, hash text NOT NULL, state bytea NOT NULL,
    history bytea NOT NULL, PRIMARY KEY (journal, number)
);
CREATE TABLE IF NOT EXISTS iota_receipts (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, journal integer NOT NULL, step bigint NOT NULL, hotkey text NOT NULL,
    data bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS iota_receipts_by_step ON iota_receipts (journal, step);
INSERT INTO iota_database SELECT md5(random()::text || clock_timestamp()::text)
    WHERE NOT EXISTS (SELECT FROM iota_database);
"""
_SCHEMA_LOCK = 7_031_847_261
ALL: dict[Table, LiteralString] = {
    "records": "SELECT number, head, data FROM iota_records WHERE journal = %s ORDER BY number",
    "segments": "SELECT number, first, next FROM iota_segments WHERE journal = %s ORDER BY number",
    "copies": "SELECT number, head, hash, state, history FROM iota_copies WHERE journal = %s ORDER BY number",
    "receipts": "SELECT step, hotkey, data FROM iota_receipts WHERE journal = %s ORDER BY id",
}
ADD: dict[Table, LiteralString] = {
    "records": "INSERT INTO iota_records VALUES (%s, %s, %s, %b)",
    "segments": "INSERT INTO iota_segments VALUES (%s, %s, %s, %s)",
    "copies": "INSERT INTO iota_copies VALUES (%s, %s, %s, %s, %b, %b)",
    "receipts": "INSERT INTO iota_receipts (journal, step, hotkey, data) VALUES (%s, %s, %s, %b)",
}
COPY: dict[Table, LiteralString] = {
    "records": "COPY iota_records FROM STDIN",
    "segments": "COPY iota_segments FROM STDIN",
    "copies": "COPY iota_copies FROM STDIN",
    "receipts": "COPY iota_receipts (journal, step, hotkey, data) FROM STDIN",
}
FORGET: tuple[LiteralString, ...] = (
    "DELETE FROM iota_records WHERE journal = %s",
    "DELETE FROM iota_segments WHERE journal = %s",
    "DELETE FROM iota_copies WHERE journal = %s",
    "DELETE FROM iota_receipts WHERE journal = %s",
)
_CONFIG = (
    pg.InsufficientPrivilege,
    pg.ReadOnlySqlTransaction,
    pg.InvalidPassword,
    pg.InvalidAuthorizationSpecification,
)
_CONFIG_WORDS = ("authentication failed", "does not exist", "no password supplied", "pg_hba.conf")


def where(url: str) -> str:
    """The database for messages: no password, no user. :class:`ConfigError` for what is no URL of PostgreSQL."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            f"--journal {url.split('@')[-1]!r} is no URL of a database", hint="postgresql://USER@HOST/DATABASE"
        )
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"--journal can't be read: {error}", hint="postgresql://USER@HOST/DATABASE") from error
    host, port, name = parts.get("host") or "localhost", parts.get("port"), parts.get("dbname") or ""
    return f"postgresql://{host}{f':{port}' if port else ''}/{name}"


def connect(url: str) -> Connection:
    """A session that commits to disk before it answers and notices within half a minute when the other side is gone."""
    connection = psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=5,
        application_name="iota",
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        tcp_user_timeout=10_000,
    )
    try:
        if connection.info.server_version < OLDEST:
            raise ConfigError(
                f"{where(url)} is PostgreSQL {connection.info.server_version // 10_000}", hint="12 or newer"
            )
        for setting, value in (
            ("tcp_keepalives_idle", "10"),
            ("tcp_keepalives_interval", "5"),
            ("tcp_keepalives_count", "3"),
        ):
            connection.execute("SELECT set_config(%s, %s, false)", (setting, value))
        (sync, waits) = connection.execute(
            "SELECT current_setting('fsync'), current_setting('synchronous_commit')"
        ).fetchone() or ("", "")
        if sync != "on":
            raise ConfigError(
                f"{where(url)} doesn't write to its disk: fsync = {sync}", hint="fsync = on in postgresql.conf"
            )
        if waits in ("off", "local"):
            connection.execute("SET synchronous_commit = on")
    except BaseException:
        connection.close()
        raise
    return connection


def make_tables(connection: Connection) -> None:
    if (connection.execute("SELECT to_regclass('iota_receipts_by_step')").fetchone() or (None,))[0] is None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
            connection.execute(SCHEMA)


def database_id(connection: Connection) -> str:
    """Which database it is: made with its tables."""
    make_tables(connection)
    row = connection.execute("SELECT id FROM iota_database").fetchone()
    return row[0] if row is not None else ""


def forget(connection: Connection, journal: int) -> None:
    for statement in FORGET:
        connection.execute(statement, (journal,))


def write_work(connection: Connection, journal: int, work: Work) -> None:
    if work.torn is not None:
        connection.execute("DELETE FROM iota_records WHERE journal = %s AND number >= %s", (journal, work.torn))
    if work.records:
        numbers, heads, data = zip(*work.records, strict=True)
        connection.execute(
            "INSERT INTO iota_records SELECT %s, * FROM unnest(%s::bigint[], %s::text[], %b::bytea[])",
            (journal, list(numbers), list(heads), list(data)),
        )
    for segment in work.segments:
        connection.execute(ADD["segments"], (journal, *segment))
    for receipt in work.receipts:
        connection.execute(ADD["receipts"], (journal, *receipt))
    if work.forget_before_step is not None:
        before = (journal, work.forget_before_step)
        connection.execute("DELETE FROM iota_receipts WHERE journal = %s AND step < %s", before)
    if work.copy is not None:
        copy, keep = work.copy, work.keep_from
        connection.execute("DELETE FROM iota_copies WHERE journal = %s AND number != %s", (journal, keep))
        connection.execute(ADD["copies"], (journal, copy.number, copy.head, copy.digest, copy.state, copy.beside))
        connection.execute(
            "DELETE FROM iota_segments WHERE journal = %s AND next <= %s "
            "AND number < (SELECT max(number) FROM iota_segments WHERE journal = %s)",
            (journal, keep, journal),
        )


class PostgresRows:
    """:class:`validator.journal_rows.Rows`, within the caller's transaction."""

    def __init__(self, connection: Connection, journal: int) -> None:
        self._connection, self._journal = connection, journal

    def _one(self, query: LiteralString, *more: Any) -> tuple[Any, ...] | None:
        return self._connection.execute(query, (self._journal, *more), binary=True).fetchone()

    def last_segment(self) -> tuple[Any, ...] | None:
        return self._one("SELECT number, next FROM iota_segments WHERE journal = %s ORDER BY number DESC LIMIT 1")

    def lowest(self) -> int | None:
        return (self._one("SELECT min(number) FROM iota_records WHERE journal = %s") or (None,))[0]

    def highest(self) -> int | None:
        return (self._one("SELECT max(number) FROM iota_records WHERE journal = %s") or (None,))[0]

    def copy_numbers(self) -> list[int]:
        query: LiteralString = "SELECT number FROM iota_copies WHERE journal = %s ORDER BY number DESC"
        return [row[0] for row in self._connection.execute(query, (self._journal,))]

    def copy(self, number: int) -> tuple[Any, ...] | None:
        try:
            query = "SELECT head, hash, state, history FROM iota_copies WHERE journal = %s AND number = %s"
            return self._one(query, number)
        except (pg.DataCorrupted, pg.IndexCorrupted) as error:
            raise RowDamaged(_words(error)) from error

    def records_from(self, number: int) -> Iterator[tuple[Any, ...]]:
        query = "SELECT number, head, data FROM iota_records WHERE journal = %s AND number >= %s ORDER BY number"
        try:
            with self._connection.cursor(name="iota_records_from") as cursor:
                cursor.itersize = ITERATED_AT_ONCE
                yield from cursor.execute(query, (self._journal, number), binary=True)
        except (pg.DataCorrupted, pg.IndexCorrupted) as error:
            raise RowDamaged(_words(error)) from error


# --- errors --------------------------------------------------------------------------------------------------------


def is_away(error: psycopg.Error) -> bool:
    """Whether the server may be back later: it is down, starting, out of connections, or the network is."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    if isinstance(error, pg.DiskFull) or any(words in str(error) for words in _CONFIG_WORDS):
        return False
    state = error.sqlstate or ""
    return state in ("", "53300") or state[:2] in ("08", "57")


@contextmanager
def postgres_errors(name: str, what: str) -> Generator[None]:
    """What PostgreSQL says, as errors of ours."""
    try:
        yield
    except psycopg.Error as error:
        raise said(name, what, error) from error


def said(name: str, what: str, error: psycopg.Error) -> IotaError:
    """``what``: be opened, be written, be read."""
    reason = f"{name} can't {what}: {_words(error)}"
    if isinstance(error, pg.DiskFull):
        return OutOfSpace(
            reason, hint="the server's disk is full: make room and start again, nothing acknowledged is lost"
        )
    if is_away(error):
        return Unreachable(reason, hint="is the server up? start again when it is: nothing acknowledged is lost")
    if isinstance(error, pg.UniqueViolation):
        return ConfigError(reason, hint="another process uses it: one validator a run")
    if isinstance(error, _CONFIG) or any(words in str(error) for words in _CONFIG_WORDS):
        return ConfigError(
            reason, hint="check the URL of --journal, its password (~/.pgpass), and that the user may create tables"
        )
    return Corrupt(reason, hint=WAY_OUT)


def _words(error: psycopg.Error) -> str:
    return " ".join(str(error).split()) or type(error).__name__
