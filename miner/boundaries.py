"""Boundary blobs, kept for as long as an audit may want them: recent ones in memory, older on disk, both within a byte budget.

A blob is either as it was put (its BLAKE3 is checked when it comes back from disk) or gone; when the disk budget is used up
the oldest steps go first, which is said once: an audit that wants them can only be told that they aren't held.

With ``durable`` what was made here of steps that are over goes to disk at once and is found again by the next process in the
same directory. A file's name says all of it, its branch of the run included; a file appears by rename, without fsync: what a
power cut damages fails its hash and is absent.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from loguru import logger

from miner.local_view import BoundaryKey
from subnet.logs import ReasonLog
from subnet.store.disk import free_bytes

Buffer = bytes | bytearray | memoryview


_NAME = re.compile(r"(\d+)\.(-?\d+)\.(\d+)\.(\d+)\.(?:(\d+)\.)?([xg])\.([0-9a-f]{64})")
_TEMP = "being-written.tmp"
BATCH_BYTES, BATCH_FILES = 16 << 20, 64
"""Written in one go, at most (one blob at least)."""


@dataclass
class _Entry:
    hash: str
    size_bytes: int
    data: memoryview | None
    own: bool
    branch: int


def _file_name(key: BoundaryKey, entry: _Entry) -> str:
    kind = "g" if key.backward else "x"
    part = f"{key.part}." if key.part else ""
    return f"{entry.branch}.{key.step}.{key.microbatch}.{key.stage}.{part}{kind}.{entry.hash}"


def _read_name(name: str) -> tuple[int, BoundaryKey, str] | None:
    """Branch, key and hash of a file; None of what isn't one of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    branch, step, microbatch, stage, part, kind, hash_ = found.groups()
    return int(branch), BoundaryKey(int(step), int(microbatch), int(stage), kind == "g", int(part or 0)), hash_


def as_bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class BoundaryCache:
    """``memory_bytes`` bounds what lies in memory after ``spill``, ``disk_bytes`` what lies on disk."""

    def __init__(
        self, directory: Path, *, memory_bytes: int, disk_bytes: int, durable: bool = False, reserve_bytes: int = 0
    ) -> None:
        """Blocks on the disk. Without ``durable`` what another process has left is removed; ``reserve_bytes`` stay free."""
        self._directory, self._durable, self._reserve_bytes = directory, durable, reserve_bytes
        self._memory_budget, self._disk_budget = memory_bytes, disk_bytes
        self._entries: OrderedDict[BoundaryKey, _Entry] = OrderedDict()
        self.kept: dict[BoundaryKey, str] = {}
        """Hash of everything held: read it, don't change it."""
        self.branch = 0
        """Of the run: of what is put from now on."""
        self.memory_used = 0
        self.disk_used = 0
        self._reasons = ReasonLog()
        directory.mkdir(parents=True, exist_ok=True)
        self._take_up()

    def _take_up(self) -> None:
        """What the last process left; of a key that is there for several branches the last branch's."""
        found: list[tuple[int, BoundaryKey, str]] = []
        for path in self._directory.iterdir():
            named = _read_name(path.name) if self._durable else None
            if named is None:
                path.unlink()
            else:
                found.append(named)
        for branch, key, hash_ in sorted(found):
            if key in self._entries:
                self._forget(key)
            entry = _Entry(hash_, 0, None, True, branch)
            entry.size_bytes = (self._directory / _file_name(key, entry)).stat().st_size
            self._entries[key], self.kept[key] = entry, hash_
            self.disk_used += entry.size_bytes
        self._make_room(0, max((key.step for key in self._entries), default=0) + 1)

    def put(self, key: BoundaryKey, data: Buffer, hash_: str, *, own: bool = False) -> None:
        """Keep ``data`` (not copied); what has another hash under the key takes its place. ``own``: made here."""
        there = self._entries.get(key)
        if there is not None:
            if there.branch == self.branch and there.hash == hash_:
                return
            self._forget(key)
        view = as_bytes(data)
        self._entries[key] = _Entry(hash_, view.nbytes, view, own, self.branch)
        self.kept[key] = hash_
        self.memory_used += view.nbytes

    def __contains__(self, key: BoundaryKey) -> bool:
        return key in self._entries

    def hash_of(self, key: BoundaryKey) -> str | None:
        entry = self._entries.get(key)
        return entry.hash if entry else None

    def peek(self, key: BoundaryKey) -> memoryview | None:
        """The blob if it lies in memory."""
        entry = self._entries.get(key)
        return entry.data if entry else None

    async def get(self, key: BoundaryKey) -> memoryview | None:
        """The blob, from memory or disk; None if it isn't held (or fails its hash, which is logged)."""
        entry = self._entries.get(key)
        if entry is None or entry.data is not None:
            return entry.data if entry else None
        path = self._directory / _file_name(key, entry)
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            logger.warning("boundary {} is gone from disk: {}", path.name, error)
            data = b""
        if blake3(data).hexdigest() == entry.hash:
            return memoryview(data)
        if data:
            logger.warning("boundary {} on disk fails its hash", path.name)
        if self._entries.get(key) is entry:
            self._forget(key)
        return None

    # --- what goes ---------------------------------------------------------------------------------------------

    def drop_before(self, step: int) -> None:
        """Forget everything of steps before ``step``."""
        self._forget_all([key for key in self._entries if key.step < step])

    def rewind(self, step: int, branch: int) -> None:
        """The run is on this branch: what earlier ones made of ``step`` and later is done again."""
        gone = [key for key, entry in self._entries.items() if entry.branch < branch and key.step >= step]
        self._forget_all(gone)
        self.branch = branch

    def drop_received(self, step: int, num_training: int) -> None:
        """Forget what others made, up to ``step``: its makers keep it for whoever asks later. And what only evaluated."""
        past = [key for key in self._entries if key.step <= step]
        self._forget_all([key for key in past if not self._entries[key].own or key.microbatch >= num_training])

    def drop(self, key: BoundaryKey) -> None:
        if key in self._entries:
            self._forget(key)

    def clear(self) -> None:
        self._forget_all(list(self._entries))

    def _forget_all(self, keys: list[BoundaryKey]) -> None:
        for key in keys:
            self._forget(key)

    def _forget(self, key: BoundaryKey) -> None:
        entry = self._entries.pop(key)
        self.kept.pop(key, None)
        if entry.data is not None:
            self.memory_used -= entry.size_bytes
        else:
            self.disk_used -= entry.size_bytes
            _remove(self._directory / _file_name(key, entry))

    # --- to disk -----------------------------------------------------------------------------------------------

    async def spill(self, keep_step: int, needed_from: int | None = None) -> None:
        """Bring memory under its budget by writing the oldest blobs of steps before ``keep_step`` to disk; with ``durable``
        also what was made here of those steps, as far as the disk budget has room for it.

        Nothing of ``needed_from`` and later (else: of ``keep_step``) is given up where there is no room: it stays in memory.
        """
        needed_from = keep_step if needed_from is None else needed_from
        while batch := self._due(keep_step, needed_from):
            if not await self._write(batch, needed_from):
                return

    def _due(self, keep_step: int, needed_from: int) -> dict[BoundaryKey, _Entry]:
        """What goes to disk next: as much as is written in one go; it has room there."""
        batch: dict[BoundaryKey, _Entry] = {}
        batch_bytes, room_bytes = 0, self._room_bytes()
        for key in [key for key, entry in self._entries.items() if entry.data is not None and key.step < keep_step]:
            entry = self._entries.get(key)
            if entry is None:
                continue  # it had to make room
            over = self.memory_used - batch_bytes > self._memory_budget
            if not over and not (self._durable and entry.own):
                continue
            together_bytes = batch_bytes + entry.size_bytes
            fits = together_bytes <= room_bytes
            if batch and (together_bytes > BATCH_BYTES or len(batch) == BATCH_FILES or (over and not fits)):
                break
            if over and not self._make_room(entry.size_bytes, key.step):
                if key.step < needed_from:
                    self._give_up(key)
            elif over or fits:
                batch[key] = entry
                batch_bytes = together_bytes
        return batch

    async def _write(self, batch: dict[BoundaryKey, _Entry], needed_from: int) -> bool:
        """Whether the disk took it; what it didn't take stays in memory as long as that has room."""
        files = [(self._directory / _file_name(key, entry), entry.data) for key, entry in batch.items()]
        failed: OSError | None = None
        try:
            await asyncio.to_thread(_write_all, self._directory / _TEMP, files)
        except OSError as error:
            failed = error
            self._reasons.note("boundaries", f"os_error_{error.errno}", f"can't be kept on disk: {error}")
        for (key, entry), (path, _) in zip(batch.items(), files, strict=True):
            if failed is not None or self._entries.get(key) is not entry:
                _remove(path)
            if self._entries.get(key) is not entry:
                continue
            if failed is None:
                self.memory_used -= entry.size_bytes
                self.disk_used += entry.size_bytes
                entry.data = None
            elif self.memory_used > self._memory_budget and key.step < needed_from:
                self._forget(key)
        return failed is None

    def _make_room(self, size_bytes: int, step: int) -> bool:
        """Drop older steps from disk until ``size_bytes`` fit; False if only this step's or newer are there."""
        while size_bytes > self._room_bytes():
            oldest = min((key.step for key, entry in self._entries.items() if entry.data is None), default=step)
            if oldest >= step:
                return False
            for key in [key for key, entry in self._entries.items() if entry.data is None and key.step == oldest]:
                self._give_up(key)
        return True

    def _room_bytes(self) -> int:
        """Within the budget, and beside what stays free on the disk."""
        room_bytes = self._disk_budget - self.disk_used
        if not self._reserve_bytes:
            return room_bytes
        try:
            return min(room_bytes, free_bytes(self._directory) - self._reserve_bytes)
        except OSError as error:
            self._reasons.note("boundaries", f"os_error_{error.errno}", f"can't be kept on disk: {error}")
            return 0

    def _give_up(self, key: BoundaryKey) -> None:
        """Somebody may still ask for it, but there is no room."""
        used = f"{self.disk_used} of {self._disk_budget} bytes on disk"
        reason = f"{used} are not enough for all that an audit may want (or the disk is full): the oldest go"
        self._reasons.note("boundaries", "budget", reason)
        self._forget(key)


def boundaries_of_run(
    directory: Path, run_id: str, *, memory_bytes: int, disk_bytes: int, durable: bool, reserve_bytes: int = 0
) -> BoundaryCache:
    """The cache of a run, under a directory where only one run's are kept. Blocks on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    for other in directory.iterdir():
        if other.is_dir() and other.name != run_id:
            shutil.rmtree(other, ignore_errors=True)
        elif not other.is_dir():
            other.unlink()
    return BoundaryCache(
        directory / run_id,
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        durable=durable,
        reserve_bytes=reserve_bytes,
    )


def _write_all(temp: Path, files: list[tuple[Path, memoryview | None]]) -> None:
    """Evidence, not state: what a power cut spoils fails its hash when it is read, so no fsync is spent on it."""
    try:
        for path, data in files:
            assert data is not None
            with temp.open("wb") as file:
                file.write(data)
            temp.replace(path)
    finally:
        _remove(temp)


def _remove(path: Path) -> None:
    """A disk that fails doesn't let go of it either; then it is the next process's to look at."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
