"""What is in a journal, wherever it lies: read from its copy on, a torn tail dropped, whatever else is wrong named by number.

Which of a journal's rows are good is decided here, once for all databases; they only hand rows over (:class:`Rows`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from loguru import logger

from subnet.errors import Corrupt
from subnet.run.chain_hash import GENESIS_HEAD, next_head
from validator.copies import Copy

WAY_OUT = "the way out: start with --lead-from STORE, which reads the run from its log store"


class RowDamaged(Exception):
    """The database can't give a row, or gives what the schema doesn't allow."""


class Rows(Protocol):
    """One snapshot of a journal's tables. Rows are as the database gives them; each method may raise :class:`RowDamaged`."""

    def last_segment(self) -> tuple[Any, ...] | None:
        """(number, next) of the newest."""
        ...

    def lowest(self) -> int | None: ...

    def highest(self) -> int | None: ...

    def copy_numbers(self) -> list[int]:
        """Newest first."""
        ...

    def copy(self, number: int) -> tuple[Any, ...] | None:
        """(head, hash, state, history)."""
        ...

    def records_from(self, number: int) -> Iterator[tuple[Any, ...]]:
        """(number, head, data), rising."""
        ...


@dataclass
class Found:
    """A journal as it was found; ``base``: the number of ``records[0]``, whose predecessor's head is ``base_head``."""

    base: int = 0
    base_head: str = GENESIS_HEAD
    records: list[bytes] = field(default_factory=lambda: [])
    heads: list[str] = field(default_factory=lambda: [])
    copy: Copy | None = None
    """The newest good copy of the state: replay begins with it."""
    acknowledged: int = 0
    num_segments: int = 0
    num_dropped: int = 0
    """Records at the end that were committed once and are lost."""
    torn: int | None = None
    """Number of a record at the end that is still there and must be deleted before another takes its place."""

    @property
    def length(self) -> int:
        return self.base + len(self.records)

    @property
    def head(self) -> str:
        return self.heads[-1] if self.heads else self.base_head


def read_rows(name: str, rows: Rows, tip: tuple[int, int]) -> Found:
    """Everything that is good, or the error that says which record isn't and what to do. ``tip``: as :meth:`Tip.read` says."""
    tip_number, tip_acknowledged = tip
    found = _anchored(name, rows)
    if max(found.acknowledged, tip_acknowledged) > found.length:
        raise Corrupt(
            f"{name} ends before record {found.length}, but records up to "
            f"{max(found.acknowledged, tip_acknowledged) - 1} are in the log store",
            hint=WAY_OUT,
        )
    found.num_dropped = max(found.num_dropped, tip_number - found.length)
    if found.num_dropped:
        logger.warning(
            "{}: the last {} record(s), from {} on, are lost or torn and were dropped; a new term begins",
            name,
            found.num_dropped,
            found.length,
        )
    return found


def _anchored(name: str, rows: Rows) -> Found:
    """From the newest-but-one copy on, as far back as members may still ask; from a later one where that can't be read."""
    try:
        segment = rows.last_segment()
        last, acknowledged = _typed(segment, int, int) if segment is not None else (-1, 0)
        copies, bad = _copies(name, rows)
        lowest = rows.lowest()
    except RowDamaged as error:
        raise Corrupt(f"{name} can't be opened: {error}", hint=WAY_OUT) from error
    num_segments = last + 1
    anchors = [(copy.number, copy.head) for copy in copies[:2]]
    if not lowest and len(anchors) < 2:  # nothing was deleted yet
        anchors.append((0, GENESIS_HEAD))
    if not anchors:
        why = f"its copies of the state ({bad}) don't fit their hashes" if bad else "it has no copy of the state"
        raise Corrupt(f"{name} begins with record {lowest}, and {why}", hint=WAY_OUT)
    for anchor in reversed(anchors[1:]):
        try:
            return _read(name, rows, Found(*anchor, [], [], None, acknowledged, num_segments), copies)
        except _BadRecord as error:
            if error.number >= copies[0].number:
                raise
            logger.warning("{}; it lies before the copy of the state at {}, which is good", error, copies[0].number)
    return _read(name, rows, Found(*anchors[0], [], [], None, acknowledged, num_segments), copies)


def _copies(name: str, rows: Rows) -> tuple[list[Copy], int]:
    """The good ones, newest first, and how many aren't."""
    numbers = rows.copy_numbers()
    copies: list[Copy] = []
    for number in numbers:
        try:
            head, digest, state, history = _typed(rows.copy(number), str, str, bytes, bytes)
            copy = Copy(number, head, state, history)
            why = "" if copy.digest == digest and copy.decodes else "it doesn't fit its hash"
        except RowDamaged as error:
            copy, why = None, str(error)
        if copy is not None and not why:
            copies.append(copy)
        else:
            logger.warning("{}: the copy of the state at record {} is not used: {}", name, number, why)
    return copies, len(numbers) - len(copies)


def _typed(row: Any, *kinds: type) -> tuple[Any, ...]:
    """The row, if it is what the schema says: a damaged page may give anything."""
    if not isinstance(row, tuple) or not all(map(isinstance, cast("tuple[Any, ...]", row), kinds)):
        raise RowDamaged("a row is damaged")
    return cast("tuple[Any, ...]", row)


class _BadRecord(Corrupt):
    """Names the record that can't be used."""

    def __init__(self, name: str, number: int, why: str) -> None:
        super().__init__(f"{name}: record {number} {why}; those before it are good", hint=WAY_OUT)
        self.number = number


def _read(name: str, rows: Rows, found: Found, copies: Sequence[Copy]) -> Found:
    """The records behind ``found.base``, each checked against the chain, and the chain against the copies."""
    heads = {copy.number: copy.head for copy in copies}
    head = found.base_head
    try:
        last = rows.highest()
        for row in rows.records_from(found.base):
            number, stored, data = _typed(row, int, str, bytes)
            head, fits = next_head(head, data), number == found.length
            if not fits or stored != head or heads.get(number + 1, head) != head:
                if fits and number == last and number >= found.acknowledged:
                    found.torn, found.num_dropped = number, 1
                    break
                raise _BadRecord(name, found.length, "does not fit the hash chain" if fits else "is missing")
            found.records.append(data)
            found.heads.append(head)
    except RowDamaged as error:
        raise _BadRecord(name, found.length, f"can't be read ({error})") from error
    found.copy = copies[0] if copies else None
    if found.copy is not None and found.length < found.copy.number:
        raise _BadRecord(name, found.length, "is missing")
    return found


def chained(records: Iterator[bytes]) -> Iterator[tuple[int, str, bytes]]:
    """(number, head, data) of each, from the first record on."""
    head = GENESIS_HEAD
    for number, data in enumerate(records):
        head = next_head(head, data)
        yield number, head, data


class Tip:
    """How many records were committed, and how many of them acknowledged, in a file beside the journal.

    It is written without a sync: it may lag behind the journal, but is never ahead of what was acknowledged. So it tells
    what a disk lost, or a database that was put back to an older state.
    """

    def __init__(self, path: Path) -> None:
        self._number, self._acknowledged = self.read(path)
        self._descriptor = os.open(_tip_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def committed(self, number: int | None, acknowledged: int | None) -> None:
        """So many records are committed, and known as acknowledged; None: as many as before."""
        self._number = self._number if number is None else number
        self._acknowledged = self._acknowledged if acknowledged is None else acknowledged
        try:
            os.pwrite(self._descriptor, _tip_line(self._number, self._acknowledged), 0)
        except OSError as error:
            logger.warning("the journal's tip can't be written: {}", error)

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def say(path: Path, number: int, acknowledged: int) -> None:
        """Of a journal that is written whole."""
        _tip_path(path).write_bytes(_tip_line(number, acknowledged))

    @staticmethod
    def read(path: Path) -> tuple[int, int]:
        """(records, acknowledged records); zeros where there is none or it can't be read: it only ever adds a warning."""
        with suppress(OSError, ValueError):
            number, acknowledged = _tip_path(path).read_text(encoding="ascii").split()
            return int(number), int(acknowledged)
        return 0, 0


def _tip_line(number: int, acknowledged: int) -> bytes:
    return f"{number:20d} {acknowledged:20d}\n".encode()


def _tip_path(path: Path) -> Path:
    return path.with_name(path.name + "-tip")
