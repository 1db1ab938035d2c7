"""Boundary blobs, kept for as long as an audit may want them: recent ones in memory, older on disk, both within a byte budget.

A blob is either as it was put (its BLAKE3 is checked when it comes back from disk) or gone; when the disk budget is used up
the oldest steps go first, which is said once: an audit that wants them can only be told that they aren't held.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from loguru import logger

from miner.local_view import BoundaryKey
from subnet.logs import ReasonLog

Buffer = bytes | bytearray | memoryview


def _file_name(key: BoundaryKey) -> str:
    return f"{key.step}.{key.microbatch}.{key.stage}.{'g' if key.backward else 'x'}"


@dataclass
class _Entry:
    hash: str
    size_bytes: int
    data: memoryview | None
    own: bool


def as_bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class BoundaryCache:
    """``memory_bytes`` bounds what lies in memory after ``spill``, ``disk_bytes`` what lies on disk."""

    def __init__(self, directory: Path, *, memory_bytes: int, disk_bytes: int) -> None:
        self._directory = directory
        self._memory_budget, self._disk_budget = memory_bytes, disk_bytes
        self._entries: OrderedDict[BoundaryKey, _Entry] = OrderedDict()
        self.kept: dict[BoundaryKey, str] = {}
        """Hash of everything held: read it, don't change it."""
        self.memory_used = 0
        self.disk_used = 0
        self._reasons = ReasonLog()
        directory.mkdir(parents=True, exist_ok=True)
        for stale in directory.iterdir():
            stale.unlink()

    def put(self, key: BoundaryKey, data: Buffer, hash_: str, *, own: bool = False) -> None:
        """Keep ``data`` (not copied). A key that is there already keeps its first value. ``own``: made here."""
        if key in self._entries:
            return
        view = as_bytes(data)
        self._entries[key] = _Entry(hash_, view.nbytes, view, own)
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
        path = self._directory / _file_name(key)
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            logger.warning("boundary {} is gone from disk: {}", _file_name(key), error)
            self._forget(key)
            return None
        if blake3(data).hexdigest() != entry.hash:
            logger.warning("boundary {} on disk fails its hash", _file_name(key))
            self._forget(key)
            return None
        return memoryview(data)

    def drop_before(self, step: int) -> None:
        """Forget everything of steps before ``step``."""
        for key in [key for key in self._entries if key.step < step]:
            self._forget(key)

    def drop_from(self, step: int) -> None:
        """Forget everything of ``step`` and later: they are done again, on another branch."""
        for key in [key for key in self._entries if key.step >= step]:
            self._forget(key)

    def drop_received(self, step: int, num_training: int) -> None:
        """Forget what others made, up to ``step``: its makers keep it for whoever asks later. And what only evaluated."""
        for key in [key for key in self._entries if key.step <= step]:
            if not self._entries[key].own or key.microbatch >= num_training:
                self._forget(key)

    def drop(self, key: BoundaryKey) -> None:
        if key in self._entries:
            self._forget(key)

    def clear(self) -> None:
        for key in list(self._entries):
            self._forget(key)

    async def spill(self, keep_step: int) -> None:
        """Bring memory under its budget by writing the oldest blobs of steps before ``keep_step`` to disk."""
        for key in [key for key, entry in self._entries.items() if entry.data is not None and key.step < keep_step]:
            if self.memory_used <= self._memory_budget:
                return
            entry = self._entries.get(key)
            if entry is None or entry.data is None:
                continue
            if not self._make_room(entry.size_bytes, key.step):
                self._give_up(key)
                continue
            try:
                await asyncio.to_thread(_write, self._directory / _file_name(key), entry.data)
            except OSError as error:
                self._reasons.note("boundaries", f"os_error_{error.errno}", f"can't be kept on disk: {error}")
                if self._entries.get(key) is entry:
                    self._forget(key)
                continue
            if self._entries.get(key) is entry:
                self.memory_used -= entry.size_bytes
                self.disk_used += entry.size_bytes
                entry.data = None
            else:
                (self._directory / _file_name(key)).unlink(missing_ok=True)

    def _make_room(self, size_bytes: int, step: int) -> bool:
        """Drop older steps from disk until ``size_bytes`` fit; False if only this step's or newer are there."""
        while self.disk_used + size_bytes > self._disk_budget:
            oldest = min((key.step for key, entry in self._entries.items() if entry.data is None), default=step)
            if oldest >= step:
                return False
            for key in [key for key, entry in self._entries.items() if entry.data is None and key.step == oldest]:
                self._give_up(key)
        return True

    def _give_up(self, key: BoundaryKey) -> None:
        """Somebody may still ask for it, but there is no room."""
        reason = f"{self._disk_budget} bytes on disk are not enough for all that an audit may want: the oldest go"
        self._reasons.note("boundaries", "budget", reason)
        self._forget(key)

    def _forget(self, key: BoundaryKey) -> None:
        entry = self._entries.pop(key)
        self.kept.pop(key, None)
        if entry.data is not None:
            self.memory_used -= entry.size_bytes
        else:
            self.disk_used -= entry.size_bytes
            (self._directory / _file_name(key)).unlink(missing_ok=True)


def _write(path: Path, data: memoryview) -> None:
    # Evidence, not state: a half-written file fails its hash when read, so no fsync is spent on it.
    try:
        with path.open("wb") as file:
            file.write(data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
