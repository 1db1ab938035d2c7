"""A stage's own last state on this machine's disk: whole and as it was written, or not there at all.

One file holds the chunks of a snapshot, one after the other, then its manifest and a trailer; it appears by rename after
fsync, and what a kill left half-written is swept at the next start. No torch, no event loop: everything here may block.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3
from loguru import logger

from subnet.errors import InputError, IotaError, OutOfSpace
from subnet.model.snapshots import BlobSink, ChunkRef, SnapshotManifest, decode_manifest, kinds_of
from subnet.store.disk import free_bytes, full_disk_is_ours, sync_directory, write_all
from subnet.words import BlobHash

_TRAILER = struct.Struct("<QQ32s")
"""Bytes of the chunks, bytes of the head, BLAKE3 of the head."""
_LIMIT_HEAD_BYTES = 64 << 20
_NAME = "stage.state"
_TEMP = "stage.state.tmp"


class SavedHead(msgspec.Struct, frozen=True):
    """What the file is: ``root`` was the stage's agreed root when it was written."""

    stage: int
    root: str
    manifest: bytes
    branch: int = 0
    """Of the run, when it was written: on another one its steps were done again."""


class Stopped(Exception):
    """The state is about to change: what was written so far is dropped."""


@dataclass(frozen=True)
class Saved:
    """A state on disk; :meth:`chunk` reads one of its chunks (whose hash the loader checks)."""

    path: Path
    stage: int
    root: str
    manifest: SnapshotManifest
    offsets: dict[BlobHash, int]
    branch: int = 0

    @property
    def step(self) -> int:
        return self.manifest.step

    def chunk(self, ref: ChunkRef) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), ref.size_bytes, self.offsets[ref.hash])


class SavedState:
    """At most one state, of one stage of one run; other runs' are removed."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        budget_bytes: int,
        reserve_bytes: int = 0,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._directory = directory / run_id
        self._budget_bytes, self._reserve_bytes, self._free = budget_bytes, reserve_bytes, free
        with full_disk_is_ours(str(directory)):
            self._directory.mkdir(parents=True, exist_ok=True)
        for other in directory.iterdir():
            if other.name != run_id:
                shutil.rmtree(other, ignore_errors=True)
        (self._directory / _TEMP).unlink(missing_ok=True)

    def write(
        self,
        stage: int,
        root: str,
        size_bytes: int,
        snapshot: Callable[[BlobSink], SnapshotManifest],
        stopped: Callable[[], bool],
        branch: int = 0,
    ) -> bool:
        """Write the state beside the last one; :meth:`commit` puts it in its place. False if it was stopped.

        Raises :class:`OutOfSpace` before a byte is written where the budget or the reserve says so. For a moment both
        states are on the disk.
        """
        if size_bytes > self._budget_bytes:
            raise OutOfSpace(f"the state has {size_bytes} bytes, the budget is {self._budget_bytes}")
        left_bytes = self._free(self._directory) - size_bytes
        if left_bytes < self._reserve_bytes:
            raise OutOfSpace(f"the state would leave {left_bytes} bytes free, not {self._reserve_bytes}")
        try:
            with full_disk_is_ours("the saved state"), (self._directory / _TEMP).open("wb", buffering=0) as file:
                _write(file.fileno(), stage, root, snapshot, stopped, branch)
        except Stopped:
            self._drop_temp()
            return False
        except BaseException:
            self._drop_temp()
            raise
        return True

    def commit(self) -> None:
        """Durable, then visible."""
        temp = self._directory / _TEMP
        try:
            with full_disk_is_ours("the saved state"):
                with temp.open("rb") as file:
                    os.fsync(file.fileno())
                temp.replace(self._directory / _NAME)
                sync_directory(self._directory)
        except BaseException:
            self._drop_temp()
            raise

    def find(self, stage: int) -> Saved | None:
        """The state of this stage, if there is one whose description is whole; a damaged file is removed."""
        path = self._directory / _NAME
        try:
            saved = _read(path)
        except FileNotFoundError:
            return None
        except (IotaError, OSError, msgspec.MsgspecError, struct.error) as error:
            logger.warning("the saved state is damaged and dropped: {}", error)
            self.discard()
            return None
        return saved if saved.stage == stage else None

    def discard(self) -> None:
        (self._directory / _NAME).unlink(missing_ok=True)

    def _drop_temp(self) -> None:
        (self._directory / _TEMP).unlink(missing_ok=True)


def _write(
    descriptor: int,
    stage: int,
    root: str,
    snapshot: Callable[[BlobSink], SnapshotManifest],
    stopped: Callable[[], bool],
    branch: int,
) -> None:
    body_bytes = 0

    def put(blob: BlobHash, data: memoryview) -> None:
        nonlocal body_bytes
        if stopped():
            raise Stopped
        write_all(descriptor, data)
        body_bytes += data.nbytes

    manifest = snapshot(put)
    head = msgspec.msgpack.encode(SavedHead(stage, root, manifest.encode(), branch))
    write_all(descriptor, [head, _TRAILER.pack(body_bytes, len(head), blake3(head).digest())])


def _read(path: Path) -> Saved:
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < _TRAILER.size:
            raise InputError("it is too short")
        trailer = os.pread(file.fileno(), _TRAILER.size, size_bytes - _TRAILER.size)
        body_bytes, head_bytes, digest = _TRAILER.unpack(trailer)
        if head_bytes > _LIMIT_HEAD_BYTES or body_bytes + head_bytes + _TRAILER.size != size_bytes:
            raise InputError("its lengths don't add up")
        head_data = os.pread(file.fileno(), head_bytes, body_bytes)
    if blake3(head_data).digest() != digest:
        raise InputError("its head fails its hash")
    head = msgspec.msgpack.decode(head_data, type=SavedHead)
    manifest = decode_manifest(head.manifest)
    offsets: dict[BlobHash, int] = {}
    at = 0
    for entry in manifest.entries:
        for kind in kinds_of(entry):
            for ref in entry.arrays[kind]:
                offsets.setdefault(ref.hash, at)
                at += ref.size_bytes
    if at != body_bytes:
        raise InputError("its chunks don't add up")
    return Saved(path, head.stage, head.root, manifest, offsets, head.branch)
