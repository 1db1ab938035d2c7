"""Where a validator's journals lie: in a file of each run's directory, or in one PostgreSQL database; never in both.

The run's directory says which (``journal-place``, absent: the file), so that a validator that is started with another
``--journal`` refuses instead of beginning the run anew. :mod:`validator.journal_move` moves them.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from subnet.errors import ConfigError, Corrupt
from subnet.store.disk import atomic_write
from validator.journal import JournalDatabase
from validator.journal_file import SqliteJournal

FILE_NAME, PLACE_NAME = "journal.db", "journal-place"
FILE = "file"
MOVE = "iota journal move"


@dataclass
class Journals:
    """``url``: ``postgresql://...``, or empty for files."""

    url: str = ""

    def __post_init__(self) -> None:
        if self.url:
            from validator.postgres import where

            where(self.url)

    @cached_property
    def place(self) -> str:
        """What stands in ``journal-place`` of runs whose journal is here: ``file``, or ``postgresql`` and the database's id."""
        if not self.url:
            return FILE
        from validator.postgres import connect, database_id, postgres_errors

        with postgres_errors("the database of --journal", "be opened"), closing(connect(self.url)) as connection:
            return f"postgresql {database_id(connection)}"

    def of(self, directory: Path, run_id: str) -> JournalDatabase:
        """The run's journal, wherever it lies. :class:`ConfigError` where this validator wasn't told how to get there."""
        found = place_of(directory)
        if found == FILE or (found is None and not self.url):
            return SqliteJournal(directory / FILE_NAME)
        if found is not None and found != self.place:
            start = "with the --journal it had" if self.url else "with --journal postgresql://..."
            raise ConfigError(
                f"the journal of {directory.name} is in {'another' if self.url else 'a'} PostgreSQL database",
                hint=f"start {start}, or move it first: {MOVE}",
            )
        return self.here(directory, run_id)

    def to_lead(self, directory: Path, run_id: str) -> JournalDatabase:
        """The journal that the run is led from: it must lie where this validator keeps its journals, or begin there."""
        if place_of(directory) == FILE and self.url:
            raise ConfigError(
                f"the journal of {directory.name} is a file in {directory}",
                hint=f"start without --journal, or move it first: {MOVE} file postgresql://...",
            )
        journal = self.of(directory, run_id)
        if self.url and place_of(directory) is None:
            say_place(directory, self.place)  # before the first record is: nobody begins it anew elsewhere
        return journal

    def here(self, directory: Path, run_id: str) -> JournalDatabase:
        """Where this validator keeps its journals, whatever the directory says."""
        path = directory / FILE_NAME
        if not self.url:
            return SqliteJournal(path)
        from validator.journal_postgres import PostgresJournal

        return PostgresJournal(self.url, run_id, path)


def place_of(directory: Path) -> str | None:
    """Where the run's journal is: None where there is none yet."""
    try:
        return (directory / PLACE_NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return FILE if (directory / FILE_NAME).exists() else None
    except (OSError, ValueError) as error:
        raise Corrupt(
            f"{directory / PLACE_NAME} can't be read: {error}", hint="take the run's directory from a backup"
        ) from error


def say_place(directory: Path, place: str) -> None:
    """From now on the run's journal is there."""
    atomic_write(directory / PLACE_NAME, f"{place}\n".encode("ascii"))
