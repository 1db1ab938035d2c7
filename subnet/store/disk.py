"""Files appear whole, durable, or not at all; and a local cache of blobs that keeps to its bytes.

A full disk is :class:`~subnet.errors.OutOfSpace` and leaves nothing behind.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp

from loguru import logger

from subnet.errors import OutOfSpace
from subnet.protocol.wire import Buffer, blob_hash, byte_views, is_blob_hash
from subnet.words import BlobHash

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMP_PREFIX = ".tmp-"


@contextmanager
def full_disk_is_ours(what: str) -> Generator[None]:
    """An ``OSError`` that says the disk is full becomes :class:`OutOfSpace`; others stay."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutOfSpace(f"{what}: the disk is full", hint="free some space, or raise the budget") from error
        raise


def free_bytes(directory: Path) -> int:
    """Bytes that an ordinary user may still write to the directory's file system."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def write_all(descriptor: int, data: Buffer | Sequence[Buffer]) -> None:
    """``os.write`` until everything is written."""
    for view in byte_views(data):
        left = view
        while left.nbytes:
            left = left[os.write(descriptor, left) :]


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(directory: Path) -> None:
    """Bring the files of a directory, and their names, to the disk."""
    for file in sorted(directory.iterdir()):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(directory)


def atomic_write(path: Path, data: Buffer | Sequence[Buffer], *, durable: bool = True, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: temp file, fsync, rename, fsync of the directory (``durable`` False: no fsync)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_is_ours(str(path)):
        descriptor, temp = mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)
        try:
            try:
                write_all(descriptor, data)
                os.fchmod(descriptor, mode)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            Path(temp).replace(path)
        except BaseException:
            with suppress(FileNotFoundError):
                Path(temp).unlink()
            raise
        if durable:
            sync_directory(path.parent)


def remove_temporaries(directory: Path) -> int:
    """Delete what a killed :func:`atomic_write` left; returns how many."""
    left = list(directory.glob(f"{_TEMP_PREFIX}*"))
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


class GroupSync:
    """Directory fsyncs of concurrent commits are shared: one thread syncs for all that wait.

    After a failed fsync the kernel may have dropped the writes, so every later call fails too.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._pending: set[Path] = set()
        self._running = False
        self._started = 0
        self._done = 0
        self._failure: OSError | None = None

    def sync(self, directories: Iterable[Path]) -> None:
        with self._turn:
            self._pending.update(directories)
            ticket = self._started + 1
            while self._done < ticket and self._failure is None:
                if self._running:
                    self._turn.wait()
                else:
                    self._run()
            if self._failure is not None:
                raise self._failure

    def _run(self) -> None:
        """One round, as its leader; called and left with the lock held."""
        self._running = True
        self._started += 1
        batch, self._pending = self._pending, set()
        self._turn.release()
        failure: OSError | None = None
        try:
            for directory in sorted(batch):
                with suppress(FileNotFoundError):  # expired meanwhile, with all that was in it
                    sync_directory(directory)
        except OSError as error:
            failure = error
        finally:
            self._turn.acquire()
            self._running = False
            self._done = self._started
            self._failure = self._failure or failure
            self._turn.notify_all()


class BlobCache:
    """Local blobs within a byte budget: least recently used go first, pinned ones never.

    ``reserve_bytes`` stay free on the disk: with less than that left, nothing new is kept.

    ``pin(blob, horizon)`` keeps a blob until ``release(below)`` passes its horizon. Pins aren't remembered over a
    restart: whoever needs a blob pins it again. Bytes are checked when they are read; a damaged file is dropped,
    logged, and absent. Thread-safe.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        *,
        reserve_bytes: int = 0,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._reserve_bytes, self._free = reserve_bytes, free
        self._lock = threading.Lock()
        self._sizes: OrderedDict[BlobHash, int] = OrderedDict()
        self._pins: dict[BlobHash, int] = {}
        self._used_bytes = 0
        with full_disk_is_ours(str(directory)):
            directory.mkdir(parents=True, exist_ok=True)
            remove_temporaries(directory)
        found = [(entry.stat(), entry.name) for entry in directory.iterdir() if is_blob_hash(entry.name)]
        for stat, name in sorted(found, key=lambda item: item[0].st_mtime_ns):
            self._sizes[BlobHash(name)] = stat.st_size
            self._used_bytes += stat.st_size
        with self._lock, suppress(OutOfSpace):
            self._make_room(0, "a smaller budget")

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __contains__(self, blob: str) -> bool:
        return blob in self._sizes

    def put(self, blob: BlobHash, data: Buffer, *, pin: int | None = None) -> None:
        """Keep ``data`` under its hash (checked by the caller); :class:`OutOfSpace` if only pinned blobs could go."""
        size_bytes = memoryview(data).nbytes
        with self._lock:
            if pin is not None:
                self._pins[blob] = max(pin, self._pins.get(blob, pin))
            if blob in self._sizes:
                self._sizes.move_to_end(blob)
                return
            try:
                self._make_room(size_bytes, f"blob {blob[:10]}")
                self._check_reserve(size_bytes)
                atomic_write(self._directory / blob, data, durable=False)
            except BaseException:
                self._pins.pop(blob, None)
                raise
            self._sizes[blob] = size_bytes
            self._used_bytes += size_bytes

    def get(self, blob: BlobHash) -> bytearray | None:
        """The bytes, checked; None if they aren't here."""
        with self._lock:
            size_bytes = self._sizes.get(blob)
            if size_bytes is None:
                return None
            self._sizes.move_to_end(blob)
            data = bytearray(size_bytes)
            try:
                with (self._directory / blob).open("rb", buffering=0) as file:
                    filled = 0
                    while filled < size_bytes and (count := file.readinto(memoryview(data)[filled:])):
                        filled += count
            except OSError as error:
                logger.warning("cached blob {} can't be read: {}", blob, error)
                filled = -1
            if filled == size_bytes and blob_hash(data) == blob:
                return data
            logger.warning("cached blob {} is damaged and dropped", blob)
            self._drop(blob)
            return None

    def get_range(self, blob: BlobHash, start: int, num_bytes: int) -> bytes | None:
        """Bytes of a blob as they lie there, *unchecked* (whoever has all of them checks); None if they can't be had."""
        with self._lock:
            if blob not in self._sizes:
                return None
            self._sizes.move_to_end(blob)
        try:
            with (self._directory / blob).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), num_bytes, start)
        except OSError as error:
            logger.warning("cached blob {} can't be read: {}", blob, error)
            return None
        return data if len(data) == num_bytes else None

    def size_of(self, blob: BlobHash) -> int | None:
        return self._sizes.get(blob)

    def pin(self, blob: BlobHash, horizon: int) -> bool:
        """Whether the blob is here (and now pinned)."""
        with self._lock:
            if blob not in self._sizes:
                return False
            self._pins[blob] = max(horizon, self._pins.get(blob, horizon))
            return True

    def release(self, below: int) -> None:
        """Pins whose horizon is under ``below`` end; their blobs may be evicted from now on."""
        with self._lock:
            self._pins = {blob: horizon for blob, horizon in self._pins.items() if horizon >= below}

    def discard(self, blob: BlobHash) -> None:
        with self._lock:
            if blob in self._sizes:
                self._drop(blob)

    def _check_reserve(self, size_bytes: int) -> None:
        left_bytes = self._free(self._directory) - size_bytes
        if left_bytes < self._reserve_bytes:
            raise OutOfSpace(
                f"the cache would leave {left_bytes} bytes free on its disk, not {self._reserve_bytes}",
                hint="free some space, or lower the reserve",
            )

    def _make_room(self, size_bytes: int, what: str) -> None:
        excess_bytes = self._used_bytes + size_bytes - self._budget_bytes
        if excess_bytes <= 0:
            return
        victims: list[BlobHash] = []
        for blob, held_bytes in self._sizes.items():
            if excess_bytes <= 0:
                break
            if blob not in self._pins:
                victims.append(blob)
                excess_bytes -= held_bytes
        if excess_bytes > 0:
            raise OutOfSpace(
                f"{what}: {excess_bytes} bytes over the cache's budget of {self._budget_bytes}, and the rest is pinned",
                hint="raise the budget",
            )
        for blob in victims:
            self._drop(blob)

    def _drop(self, blob: BlobHash) -> None:
        self._used_bytes -= self._sizes.pop(blob)
        self._pins.pop(blob, None)
        (self._directory / blob).unlink(missing_ok=True)
