"""Moves a validator's journals from files to PostgreSQL and back: checked row by row, each run at once or not at all.

One run's move: its rows are written to the new place in one transaction, read back and compared (hash over all rows, hash
chain, head), then one file in the run's directory is replaced, which is the moment of the move; then the old rows go. Whatever
breaks off before leaves the run where it was, and what breaks off later leaves nothing to do but remove: done again, it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
from blake3 import blake3

from subnet.errors import ConfigError, Corrupt, IotaError
from validator.directory_lock import directory_lock
from validator.journal import Row
from validator.journals import Journals, place_of, say_place
from validator.run_registry import RunEntry, RunRegistry


class Moved(msgspec.Struct, frozen=True):
    """``what``: "moved", "already there" or "no journal yet"."""

    run: str
    what: str
    records: int
    """As the journal numbers them; those before its oldest copy are in the log store only."""
    head: str


def move(directory: Path, source: Journals, target: Journals) -> tuple[Moved, ...]:
    """Of every run in the validator's directory; the validator must not run."""
    directory = directory.expanduser()
    if not (directory / "runs").is_dir():
        raise ConfigError(f"{directory} is no validator's directory: it has no runs/", hint="give its --dir")
    if source.place == target.place:
        raise ConfigError("the two places are the same one", hint="iota journal move file postgresql://..., or back")
    with directory_lock(directory):
        return tuple(_move(entry, source, target) for entry in RunRegistry(directory).entries.values())


def _move(entry: RunEntry, source: Journals, target: Journals) -> Moved:
    place, run_id = place_of(entry.directory), entry.stored.run_id
    old, new = source.here(entry.directory, run_id), target.here(entry.directory, run_id)
    if place is None:
        return Moved(entry.name, "no journal yet", 0, "")
    if place == target.place:
        found = new.load(read_only=True)
        old.discard()  # what a move that broke off left behind
        return Moved(entry.name, "already there", found.length, found.head)
    if place != source.place:
        raise ConfigError(f"the journal of {entry.name} isn't where it is to be moved from", hint=f"it is in: {place}")
    with closing(old):
        found = old.load()  # the one writer now
        before = _Digest()
        new.fill(before.of(old.rows()))
        after = _Digest()
        for _ in after.of(new.rows()):
            pass
        there = new.load(read_only=True)
        if after.hex != before.hex or (there.length, there.head) != (found.length, found.head):
            raise Corrupt(
                f"what was written to {new.name} isn't what was read from {old.name}; the run stays where it was",
                hint="look at both disks, then move again",
            )
        say_place(entry.directory, target.place)
    try:
        old.discard()
    except IotaError as error:
        raise type(error)(
            f"moved, but the old one is still there: {error.reason}", hint="move again to remove it"
        ) from error
    return Moved(entry.name, "moved", found.length, found.head)


class _Digest:
    """Of rows as they pass."""

    def __init__(self) -> None:
        self._hasher = blake3(b"iota/journal-rows/1\0")

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            data = msgspec.msgpack.encode(row)
            self._hasher.update(len(data).to_bytes(8, "little"))
            self._hasher.update(data)
            yield row

    @property
    def hex(self) -> str:
        return self._hasher.hexdigest()


class Placed(msgspec.Struct, frozen=True):
    """Where a run's journal lies, and how far it is. ``place``: file, postgresql, or none yet."""

    run: str
    run_id: str
    place: str
    finished: bool
    records: int
    acknowledged: int
    head: str
    trouble: str = ""
    """Why it can't be read."""


def show(directory: Path, journals: Journals) -> tuple[Placed, ...]:
    """Of every run; also beside a validator that writes."""
    return tuple(_placed(entry, journals) for entry in RunRegistry(directory.expanduser()).entries.values())


def _placed(entry: RunEntry, journals: Journals) -> Placed:
    place = place_of(entry.directory)
    kind = "none" if place is None else place.split()[0]
    if place is None:
        return Placed(entry.name, entry.stored.run_id, kind, entry.finished, 0, 0, "")
    try:
        found = journals.of(entry.directory, entry.stored.run_id).load(read_only=True)
    except IotaError as error:
        return Placed(entry.name, entry.stored.run_id, kind, entry.finished, 0, 0, "", str(error))
    return Placed(entry.name, entry.stored.run_id, kind, entry.finished, found.length, found.acknowledged, found.head)
