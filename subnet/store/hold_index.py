"""Which blobs are held and why, beside a store that has no hard links: a hold is on the disk before its grant leaves.

    objects    what may lie in the bucket: (blob, SHA-256, shelf) make the key
    holds      why: class, label, horizon; a blob goes when its last hold ends
    dying      objects without a hold whose deletion the store hasn't acknowledged yet; nothing is granted to them meanwhile
    uploads    uploads in parts that have begun, to be resumed
    facts      small values of the owner's, such as the counts of requests

The methods block and are thread-safe. A copy of the file is all that another owner needs to go on (:meth:`merge`).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from subnet.errors import ConfigError, Corrupt, OutOfSpace
from subnet.store.base import Hold
from subnet.timing import SYSTEM_CLOCK
from subnet.words import BlobHash

SHELVES = ("blobs", "evidence")
"""Objects of class ``evidence`` lie apart, so that a lifecycle rule may take the old ones."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (blob BLOB, sha BLOB, shelf INTEGER, size INTEGER, who TEXT,
    PRIMARY KEY (blob, sha, shelf)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS holds (blob BLOB, retention TEXT, label TEXT, horizon INTEGER,
    PRIMARY KEY (blob, retention, label, horizon)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS holds_by_label ON holds (retention, label, horizon);
CREATE TABLE IF NOT EXISTS dying (blob BLOB, sha BLOB, shelf INTEGER, size INTEGER,
    PRIMARY KEY (blob, sha, shelf)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uploads (blob BLOB, sha BLOB, shelf INTEGER, upload TEXT,
    PRIMARY KEY (blob, sha, shelf)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
"""


class StoredObject(msgspec.Struct, frozen=True, order=True):
    """``sha256`` is of the bytes, or of its parts' digests one after the other; part of the key, so that a key has one content."""

    blob: BlobHash
    sha256: str
    shelf: str
    size_bytes: int = 0
    who: str = msgspec.field(default="", name="who")

    @property
    def name(self) -> str:
        return f"{self.shelf}/{self.blob}.{self.sha256}"

    def row(self) -> tuple[bytes, bytes, int]:
        return bytes.fromhex(self.blob), bytes.fromhex(self.sha256), SHELVES.index(self.shelf)


def shelf_of(hold: Hold) -> str:
    return "evidence" if hold.retention == "evidence" else "blobs"


class IndexTotals(msgspec.Struct, frozen=True):
    num_blobs: int
    used_bytes: int


class HoldIndex:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_new = not path.exists()
        self._lock = threading.RLock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            hint = "move it away: the copy in the bucket takes its place"
            raise Corrupt(f"the store's index {path} can't be used: {error}", hint=hint) from error
        except OSError as error:
            raise ConfigError(f"the store's index {path} can't be made: {error}") from error
        self.changes = 0
        """Grows with each change: whether a copy is still good."""
        self._totals, self._counted, self._count_again_s = IndexTotals(0, 0), -1, 0.0

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- holding

    def add(self, entries: Sequence[tuple[StoredObject, Hold]]) -> set[StoredObject]:
        """Hold all of these, durably; those whose key is being deleted aren't, and are returned: ask again later."""
        with self._changing() as db:
            dying = {entry for entry, _ in entries if self._is_dying(db, entry)}
            for entry, hold in entries:
                if entry in dying:
                    continue
                row = entry.row()
                db.execute("INSERT OR IGNORE INTO objects VALUES (?, ?, ?, ?, ?)", (*row, entry.size_bytes, entry.who))
                held = (row[0], hold.retention, hold.label, hold.horizon)
                db.execute("INSERT OR IGNORE INTO holds VALUES (?, ?, ?, ?)", held)
        return dying

    def _is_dying(self, db: sqlite3.Connection, entry: StoredObject) -> bool:
        return bool(db.execute("SELECT 1 FROM dying WHERE blob = ? AND sha = ? AND shelf = ?", entry.row()).fetchone())

    def find(self, blobs: Iterable[BlobHash]) -> dict[BlobHash, list[StoredObject]]:
        """What may be there of each blob; granted isn't stored: the bucket says."""
        found: dict[BlobHash, list[StoredObject]] = {}
        with self._lock:
            for blob in blobs:
                rows = self._db.execute(
                    "SELECT sha, shelf, size, who FROM objects WHERE blob = ? ORDER BY shelf, sha",
                    (bytes.fromhex(blob),),
                )
                entries = [StoredObject(blob, sha.hex(), SHELVES[shelf], size, who) for sha, shelf, size, who in rows]
                if entries:
                    found[blob] = entries
        return found

    def names(self, entries: Iterable[StoredObject]) -> set[StoredObject]:
        """Those of the objects that are in the index (held or dying)."""
        known: set[StoredObject] = set()
        with self._lock:
            for entry in entries:
                query = "SELECT 1 FROM objects WHERE blob = ? AND sha = ? AND shelf = ?"
                if self._db.execute(query, entry.row()).fetchone() or self._is_dying(self._db, entry):
                    known.add(entry)
        return known

    # --- letting go

    def expire(self, retention: str, label: str, below: int) -> tuple[int, int]:
        """End holds; blobs and bytes that have none left, which are dying from now on."""
        with self._changing() as db:
            args = (retention, label, below)
            where = "retention = ? AND label = ? AND horizon < ?"
            blobs = [row[0] for row in db.execute(f"SELECT DISTINCT blob FROM holds WHERE {where}", args)]
            db.execute(f"DELETE FROM holds WHERE {where}", args)
            return self._let_go(db, blobs)

    def delete(self, blob: BlobHash) -> None:
        """End all holds on a blob."""
        with self._changing() as db:
            key = bytes.fromhex(blob)
            db.execute("DELETE FROM holds WHERE blob = ?", (key,))
            self._let_go(db, [key])

    def drop(self, entry: StoredObject) -> None:
        """An object that isn't what its address says; holds stay, for the right one."""
        with self._changing() as db:
            db.execute("INSERT OR REPLACE INTO dying VALUES (?, ?, ?, ?)", (*entry.row(), entry.size_bytes))
            db.execute("DELETE FROM objects WHERE blob = ? AND sha = ? AND shelf = ?", entry.row())

    def condemn(self, entries: Iterable[StoredObject]) -> None:
        """Objects in the bucket that nothing names: to be deleted like those that were let go."""
        with self._changing() as db:
            for entry in entries:
                db.execute("INSERT OR REPLACE INTO dying VALUES (?, ?, ?, ?)", (*entry.row(), entry.size_bytes))

    @staticmethod
    def _let_go(db: sqlite3.Connection, blobs: Sequence[bytes]) -> tuple[int, int]:
        num_blobs, freed_bytes = 0, 0
        for blob in blobs:
            if db.execute("SELECT 1 FROM holds WHERE blob = ? LIMIT 1", (blob,)).fetchone():
                continue
            sizes = [row[0] for row in db.execute("SELECT size FROM objects WHERE blob = ?", (blob,))]
            db.execute(
                "INSERT OR REPLACE INTO dying SELECT blob, sha, shelf, size FROM objects WHERE blob = ?", (blob,)
            )
            db.execute("DELETE FROM objects WHERE blob = ?", (blob,))
            db.execute("DELETE FROM uploads WHERE blob = ?", (blob,))
            num_blobs, freed_bytes = num_blobs + bool(sizes), freed_bytes + max(sizes, default=0)
        return num_blobs, freed_bytes

    def dying(self, limit: int) -> list[StoredObject]:
        with self._lock:
            rows = self._db.execute("SELECT blob, sha, shelf, size FROM dying LIMIT ?", (limit,)).fetchall()
        return [StoredObject(BlobHash(blob.hex()), sha.hex(), SHELVES[shelf], size) for blob, sha, shelf, size in rows]

    def died(self, entries: Iterable[StoredObject]) -> None:
        with self._changing() as db:
            query = "DELETE FROM dying WHERE blob = ? AND sha = ? AND shelf = ?"
            db.executemany(query, [entry.row() for entry in entries])

    # --- uploads in parts

    def upload_of(self, entry: StoredObject) -> str:
        with self._lock:
            query = "SELECT upload FROM uploads WHERE blob = ? AND sha = ? AND shelf = ?"
            row = self._db.execute(query, entry.row()).fetchone()
        return row[0] if row else ""

    def set_upload(self, entry: StoredObject, upload: str) -> None:
        """Empty: it has ended."""
        with self._changing() as db:
            if upload:
                db.execute("INSERT OR REPLACE INTO uploads VALUES (?, ?, ?, ?)", (*entry.row(), upload))
            else:
                db.execute("DELETE FROM uploads WHERE blob = ? AND sha = ? AND shelf = ?", entry.row())

    def uploads(self) -> set[str]:
        with self._lock:
            return {row[0] for row in self._db.execute("SELECT upload FROM uploads")}

    # --- the whole

    def totals(self) -> IndexTotals:
        """Counted anew when something changed, but not more than a fiftieth of the time."""
        with self._lock:
            begun_s = SYSTEM_CLOCK.now_s()
            if self._counted == self.changes or begun_s < self._count_again_s:
                return self._totals
            query = "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM (SELECT MAX(size) AS size FROM objects GROUP BY blob)"
            num_blobs, used_bytes = self._db.execute(query).fetchone()
            self._totals, self._counted = IndexTotals(num_blobs, used_bytes), self.changes
            now_s = SYSTEM_CLOCK.now_s()
            self._count_again_s = now_s + 50 * (now_s - begun_s)
        return self._totals

    def fact(self, name: str) -> bytes:
        with self._lock:
            row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row[0] if row else b""

    def set_fact(self, name: str, value: bytes) -> None:
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def copy_to(self, path: Path) -> int:
        """A consistent copy of the file; returns :attr:`changes` as of then."""
        with self._lock:
            changes = self.changes
            with closing(sqlite3.connect(path)) as target:
                self._db.backup(target)
        return changes

    def merge(self, path: Path) -> None:
        """Take over another owner's objects, holds and uploads: more is held, nothing less."""
        with self._lock:
            try:
                self._db.execute("ATTACH DATABASE ? AS other", (str(path),))
                with self._changing() as db:
                    for table in ("objects", "holds", "dying", "uploads"):
                        db.execute(f"INSERT OR IGNORE INTO main.{table} SELECT * FROM other.{table}")
                    db.execute("DELETE FROM dying WHERE (blob, sha, shelf) IN (SELECT blob, sha, shelf FROM objects)")
            except sqlite3.DatabaseError as error:
                raise Corrupt(f"a copy of the store's index can't be read: {error}") from error
            finally:
                with suppress(sqlite3.DatabaseError):  # it was never attached
                    self._db.execute("DETACH DATABASE other")

    @contextmanager
    def _changing(self) -> Generator[sqlite3.Connection]:
        """One transaction, on the disk when it ends."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
                self._db.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if "full" in str(error):
                    raise OutOfSpace(f"the store's index: {error}", hint="free some space") from error
                raise
            self.changes += 1
