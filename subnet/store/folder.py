"""A folder as a store: every file in it is whole, durable before it is acknowledged, and within a byte budget.

    tmp/                                     uploads on their way; emptied at start
    blobs/ab/<hash>                          the bytes
    holds/<class>/<label>/<horizon>/<hash>   a hard link to the blob per reason to keep it: the last one gone, it goes
    named/<name with % for />                write-once keys; link(2) picks the one winner

A kill at any moment leaves nothing half-written visible: bytes are synced in ``tmp``, then linked. The hold is linked
before the blob, so that no blob is without one, and only the hold's directory is synced, one for all uploads of a step: a
blob that is missing beside its hold is linked from it at the next start.
The methods block and are thread-safe; the server calls them in threads. Needs a file system with hard links.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from blake3 import blake3

from subnet.errors import ConfigError, Exists, HashMismatch, InputError, NotFound, OutOfSpace, TooLarge
from subnet.protocol.wire import Buffer, is_blob_hash
from subnet.store.base import LIST_PAGE, Expiry, Hold, NamedKey, NamedPage, Usage, check_name
from subnet.store.disk import GroupSync, free_bytes, full_disk_is_ours, write_all
from subnet.store.names import NameIndex
from subnet.timing import SYSTEM_CLOCK
from subnet.words import BlobHash

REFUSED_FOR_S = 30.0
"""How long a refusal for lack of space is remembered; whoever still wants to upload has tried again by then."""
MARGIN_BYTES = 1 << 20


class Upload:
    """Bytes on their way into the store; ends by one of the store's ``commit_*`` or by :meth:`abort`."""

    def __init__(self, store: FolderStore, size_bytes: int, expected: BlobHash) -> None:
        self._store = store
        self._hasher = blake3()
        self._open = True
        self.size_bytes = size_bytes
        self.expected = expected
        self.received_bytes = 0
        self.descriptor, path = mkstemp(dir=store.temp_dir)
        self.path = Path(path)

    def write(self, data: Buffer) -> None:
        self.received_bytes += len(data)
        if self.received_bytes > self.size_bytes:
            raise TooLarge(f"more than the {self.size_bytes} bytes of the grant")
        self._hasher.update(data)
        with full_disk_is_ours("the store"):
            write_all(self.descriptor, data)

    def seal(self) -> None:
        """Check size and hash, and put the bytes on the disk."""
        if self.received_bytes != self.size_bytes:
            raise InputError(f"{self.received_bytes} bytes came, the grant says {self.size_bytes}")
        if self._hasher.hexdigest() != self.expected:
            raise HashMismatch(f"the bytes don't have the hash {self.expected[:10]}… of the grant")
        with full_disk_is_ours("the store"):
            os.fchmod(self.descriptor, 0o444)
            os.fsync(self.descriptor)

    def abort(self) -> None:
        """Remove what came; harmless after a commit."""
        if self._open:
            self._open = False
            os.close(self.descriptor)
            self.path.unlink(missing_ok=True)
            self._store.unreserve(self.size_bytes)


class FolderStore:
    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.temp_dir = directory / "tmp"
        self._blobs = directory / "blobs"
        self._holds = directory / "holds"
        self._named = directory / "named"
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._group = GroupSync()
        self._names = NameIndex()
        self._used_bytes = 0
        self._reserved_bytes = 0
        self._num_blobs = 0
        self._refused = (0, 0.0)
        """Size of the last upload that was refused for lack of space, and when."""
        try:
            with full_disk_is_ours(str(directory)):
                for path in (self.temp_dir, self._blobs, self._holds, self._named):
                    path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the store's folder {directory} can't be used: {error}") from error
        self._recover()

    # --- writing

    def begin(self, size_bytes: int, expected: BlobHash) -> Upload:
        """Reserve the bytes; :class:`OutOfSpace` before any are read."""
        with self._lock:
            if self._used_bytes + self._reserved_bytes + size_bytes > self._budget_bytes:
                left_bytes = max(0, self._budget_bytes - self._used_bytes - self._reserved_bytes)
                raise OutOfSpace(
                    f"the store has {left_bytes} bytes left of {self._budget_bytes}, not {size_bytes}",
                    hint="raise its budget, or let old evidence expire",
                )
            self._reserved_bytes += size_bytes
        try:
            with full_disk_is_ours("the store"):
                return Upload(self, size_bytes, expected)
        except BaseException:
            self.unreserve(size_bytes)
            raise

    def unreserve(self, size_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= size_bytes

    def commit_blob(self, upload: Upload, hold: Hold) -> bool:
        """True if the blob is new, False if it was there (and now has this hold too). Durable on return."""
        upload.seal()
        blob = upload.expected
        path, hold_path = self._blob_path(blob), self._hold_path(blob, hold)
        with self._lock, full_disk_is_ours("the store"):
            path.parent.mkdir(parents=True, exist_ok=True)
            touched = _make_directory(hold_path.parent)
            created = not path.exists()
            with suppress(FileExistsError):
                os.link(upload.path if created else path, hold_path)
            if created:
                upload.path.rename(path)
                self._used_bytes += upload.size_bytes
                self._num_blobs += 1
        upload.abort()
        with full_disk_is_ours("the store"):
            self._group.sync(touched)
        return created

    def commit_named(self, upload: Upload, name: str) -> None:
        """:class:`Exists` unless this is the first write of the name. Durable on return, visible only then."""
        check_name(name)
        upload.seal()
        path = self._named_path(name)
        with full_disk_is_ours("the store"):
            try:
                os.link(upload.path, path)
            except FileExistsError as error:
                raise Exists(f"key {name} is taken") from error
            with self._lock:
                self._used_bytes += upload.size_bytes
            upload.abort()
            self._group.sync([self._named])
        with self._lock:
            self._names.add(name)

    # --- reading

    def find_blob(self, blob: BlobHash) -> tuple[Path, int]:
        path = self._blob_path(blob)
        try:
            return path, path.stat().st_size
        except FileNotFoundError as error:
            raise NotFound(f"no blob {blob[:10]}… here") from error

    def sizes(self, blobs: Iterable[BlobHash]) -> dict[BlobHash, int]:
        """Bytes of those that are here."""
        found: dict[BlobHash, int] = {}
        for blob in blobs:
            with suppress(NotFound):
                found[blob] = self.find_blob(blob)[1]
        return found

    def find_named(self, name: str) -> tuple[Path, int]:
        check_name(name)
        with self._lock:
            visible = name in self._names
        if not visible:
            raise NotFound(f"no key {name} here")
        path = self._named_path(name)
        return path, path.stat().st_size

    def list_named(self, prefix: str, after: str = "", limit: int = LIST_PAGE) -> NamedPage:
        with self._lock:
            names = self._names.page(prefix, after, limit + 1)
        page = tuple(NamedKey(name, self._named_path(name).stat().st_size) for name in names[:limit])
        return NamedPage(keys=page, more=len(names) > limit)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(
                self._used_bytes, self._budget_bytes, self._num_blobs, len(self._names), lacks_bytes=self._lacks_bytes()
            )

    def note_refused(self, size_bytes: int) -> None:
        """An upload of so many bytes found no room; :meth:`usage` says so until there is."""
        with self._lock:
            self._refused = (size_bytes, SYSTEM_CLOCK.now_s())

    def _lacks_bytes(self) -> int:
        """What was refused lately and still would be: an uploader that gave up says nothing for ever."""
        size_bytes, at_s = self._refused
        if not size_bytes or SYSTEM_CLOCK.now_s() - at_s > REFUSED_FOR_S:
            return 0
        over_budget = self._used_bytes + self._reserved_bytes + size_bytes > self._budget_bytes
        return size_bytes if over_budget or free_bytes(self.temp_dir) < size_bytes + MARGIN_BYTES else 0

    # --- letting go

    def delete(self, blob: BlobHash) -> None:
        with self._lock:
            for hold_path in self._holds.glob(f"*/*/*/{blob}"):
                hold_path.unlink(missing_ok=True)
            self._remove_if_free(blob)

    def expire(self, retention: str, label: str, below: int) -> Expiry:
        Hold(retention, label).check()
        num_blobs, freed_bytes = 0, 0
        parent = self._holds / retention / label
        horizons = [path for path in parent.iterdir() if int(path.name) < below] if parent.is_dir() else []
        for directory in horizons:
            with self._lock:
                for hold_path in list(directory.iterdir()):
                    hold_path.unlink()
                    freed = self._remove_if_free(BlobHash(hold_path.name))
                    num_blobs += freed is not None
                    freed_bytes += freed or 0
                directory.rmdir()
        return Expiry(num_blobs, freed_bytes)

    def _remove_if_free(self, blob: BlobHash) -> int | None:
        """Remove a blob that no hold keeps; returns its size. Called with the lock held."""
        path = self._blob_path(blob)
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if stat.st_nlink > 1:
            return None
        path.unlink()
        self._used_bytes -= stat.st_size
        self._num_blobs -= 1
        return stat.st_size

    # --- places

    def _blob_path(self, blob: BlobHash) -> Path:
        return self._blobs / blob[:2] / blob

    def _hold_path(self, blob: BlobHash, hold: Hold) -> Path:
        hold.check()
        return self._holds / hold.retention / hold.label / f"{hold.horizon:016d}" / blob

    def _named_path(self, name: str) -> Path:
        return self._named / name.replace("/", "%")

    def _recover(self) -> None:
        """After a kill: sweep what was on its way, bring back what only its holds still name, count what is whole."""
        for path in self.temp_dir.iterdir():
            path.unlink()
        for hold_path in self._holds.glob("*/*/*/*"):
            blob_path = self._blob_path(BlobHash(hold_path.name))
            if not blob_path.exists():
                blob_path.parent.mkdir(parents=True, exist_ok=True)
                os.link(hold_path, blob_path)
        for path in self._blobs.glob("*/*"):
            if is_blob_hash(path.name):
                self._used_bytes += path.stat().st_size
                self._num_blobs += 1
        for path in sorted(self._named.iterdir()):  # in order they are added at the end
            name, size_bytes = path.name.replace("%", "/"), path.stat().st_size
            self._names.add(name)
            self._used_bytes += size_bytes


def _make_directory(directory: Path) -> list[Path]:
    """Make it, and name the directories whose entries must be synced before what is put into it is durable."""
    touched = [directory]
    while not directory.is_dir():
        directory = directory.parent
        touched.append(directory)
    touched[0].mkdir(parents=True, exist_ok=True)
    return touched
