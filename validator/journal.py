"""The journal interface: what a database must do so that a run can be led from it (:class:`JournalDatabase`).

There are two: a SQLite file in the run's directory (:mod:`validator.journal_file`) and PostgreSQL
(:mod:`validator.journal_postgres`). One suite tests both (``tests/test_journal_contract.py``). What they promise:

- a batch is written whole and durably before :meth:`JournalWriter.write` returns, or not at all;
- at most one process adds records: whoever else tries is refused with :class:`~subnet.errors.ConfigError`;
- what is read back is what was written, or an error names the record that isn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from validator.copies import Copy
from validator.journal_rows import Found

Table = Literal["records", "segments", "copies", "receipts"]
TABLES: tuple[Table, ...] = ("records", "segments", "copies", "receipts")
Row = tuple[Table, tuple[Any, ...]]
"""records: (number, head, data); segments: (number, first, next); copies: (number, head, hash, state, history);
receipts: (step, hotkey, data), in the order they came."""


@dataclass
class Work:
    """What one commit adds and removes."""

    records: list[tuple[int, str, bytes]] = field(default_factory=lambda: [])
    segments: list[tuple[int, int, int]] = field(default_factory=lambda: [])
    receipts: list[tuple[int, str, bytes]] = field(default_factory=lambda: [])
    forget_before_step: int | None = None
    torn: int | None = None
    copy: Copy | None = None
    keep_from: int = 0
    """With a copy: copies and records before this number may go."""
    done: Future[None] | None = None

    @property
    def empty(self) -> bool:
        return not (self.records or self.segments or self.receipts or self.copy) and self.forget_before_step is None


class JournalWriter(Protocol):
    """Used by one thread."""

    def write(self, batch: Sequence[Work]) -> None:
        """All of it, on disk, or nothing of it and an error of ours."""
        ...

    def delete_below(self, number: int, most: int) -> bool:
        """At most ``most`` records before ``number``; whether there may be more."""
        ...

    def close(self) -> None: ...


class JournalDatabase(Protocol):
    """One run's journal. Everything but ``interrupt`` and ``receipts_between`` is called by one thread at a time."""

    @property
    def name(self) -> str:
        """For messages; without any password."""
        ...

    @property
    def path(self) -> Path:
        """What belongs to the journal on this disk lies beside this path, whether there is a file or not."""
        ...

    @property
    def trouble(self) -> str:
        """What is wrong with the database now, in words; empty while it answers."""
        ...

    def exists(self) -> bool: ...

    def load(self, *, read_only: bool = False) -> Found:
        """All that is good. ``read_only``: at one moment, beside the one who writes; else the caller is the writer now."""
        ...

    def writer(self) -> JournalWriter:
        """After :meth:`load`."""
        ...

    def interrupt(self) -> None:
        """A write takes longer than an answer should: give its connection up, if there is one. Any thread."""
        ...

    def receipts_between(self, hotkey: str, first_step: int, end_step: int) -> list[bytes]:
        """Committed reports of the hotkey, in order. Blocks; any thread."""
        ...

    def create(self, records: Iterable[bytes], segments: Iterable[tuple[int, int]]) -> None:
        """Write a journal whole, from its first record. :class:`~subnet.errors.Exists` where there is one."""
        ...

    def rows(self) -> Iterator[Row]:
        """Everything, table by table, as it is at one moment."""
        ...

    def fill(self, rows: Iterable[Row]) -> None:
        """From another's :meth:`rows`: whole or not at all; what was there before goes."""
        ...

    def set_aside(self, name: str) -> None:
        """Another journal of the run is to take the place: this one is kept, under another name. Of a file this does nothing:
        who replaces it renames the run's directory."""
        ...

    def discard(self) -> None:
        """Remove the journal, if it is there."""
        ...

    def close(self) -> None: ...
