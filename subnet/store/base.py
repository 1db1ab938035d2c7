"""What a store promises, whoever runs it: blobs by their hash through grants, and named keys that are written once.

* A blob is visible whole or not at all; its bytes are checked against size and BLAKE3 on arrival, both ways.
* A grant is a URL that is good for one method, one blob, one size, until it expires. Miners hold no other credential.
  A store that can't check BLAKE3 itself binds the URL to the SHA-256 of the bytes, which the asker names (``needs_sha256``).
* A named key is written once: of any number of racing writers exactly one wins, the others get ``Exists``.
* A blob is kept for as long as a *hold* on it lasts; holds end by ``expire`` alone, never by age or by a full disk.

Errors are part of the contract: ``NotFound``, ``Exists``, ``Expired`` (ask for a new grant), ``HashMismatch``,
``TooLarge``, ``OutOfSpace``, ``AuthFailed`` (an altered grant), ``Unreachable``, ``DeadlinePassed``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from subnet.errors import InputError
from subnet.protocol.wire import Buffer, byte_views, is_blob_hash
from subnet.store.meter import StoreMeter
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash

RETENTION_CLASSES = ("evidence", "log", "snapshot", "data", "case")
"""``evidence``: boundary blobs and partials, until the audit window closes; ``log``: merged partitions; ``snapshot``;
``data``: token shards and submissions; ``case``: the bundle of an accusation, until its time behind the run's end is over."""

_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*(?:/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)*")
_LABEL = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,63}")
MAX_NAME_BYTES = 200
MAX_HORIZON = 10**15
LIST_PAGE = 1000
MAX_SIZES = 4096
"""Blobs that one request asks the sizes of."""
MAX_NAMED_BYTES = 64 << 20
SINGLE_BYTES = 64 << 20
"""Blobs over this go up in parts, where the store binds grants to SHA-256."""
PART_BYTES = 16 << 20
"""Size of each part but the last. Requesters hash by it: a change of it or of ``SINGLE_BYTES`` breaks older members' uploads."""
MAX_PARTS = 10_000


class NeedsSha256(InputError):
    """The store binds grants to SHA-256, so whoever wants to put names it (:func:`part_digests`)."""

    code = "needs_sha256"


class Hold(msgspec.Struct, frozen=True, order=True):
    """Why a blob is kept: ``expire(retention, label, below)`` ends it once its ``horizon`` is less than ``below``.

    ``label`` is the run, ``horizon`` a number that its owner counts in (steps).
    """

    retention: str
    label: str
    horizon: int = 0

    def check(self) -> None:
        if self.retention not in RETENTION_CLASSES:
            raise InputError(f"retention {self.retention!r} is unknown", hint=f"one of {', '.join(RETENTION_CLASSES)}")
        if not _LABEL.fullmatch(self.label):
            raise InputError(f"label {self.label!r} is not allowed", hint="1 to 64 letters, digits, - _ .")
        if not 0 <= self.horizon <= MAX_HORIZON:
            raise InputError(f"horizon {self.horizon} is not allowed", hint=f"0 to {MAX_HORIZON}")


class Grant(msgspec.Struct, frozen=True):
    """Permission to ``method`` (PUT or GET) one blob at ``url``; ``expires_s`` is in seconds since 1970."""

    url: str
    method: str
    headers: dict[str, str]
    hash: str
    size_bytes: int
    expires_s: int
    same_bytes: bool = False
    """To put: what is already there under this key are these very bytes, so that ``Exists`` is success."""
    held: bool = False
    """To put: the blob is there already, and held from now on; nothing needs to move."""
    parts: tuple[int, ...] = ()
    """To put: the blob goes up in parts (numbered from 1), these are lacking; each has a grant of its own, ``url`` is empty."""
    part_bytes: int = 0
    """To get: ranges of this size may be read side by side (0: read it as one). To put: size of the parts."""


class PutWant(msgspec.Struct, frozen=True):
    """What a grant to put is asked for; ``sha256`` is of each part (:func:`part_digests`), empty where it isn't known."""

    blob: BlobHash
    size_bytes: int
    sha256: tuple[str, ...] = ()


class NamedKey(msgspec.Struct, frozen=True, order=True):
    name: str
    size_bytes: int


class NamedPage(msgspec.Struct, frozen=True):
    """Keys in order of name; ``more``: ask again with ``after`` = the last of them."""

    keys: tuple[NamedKey, ...]
    more: bool


class Usage(msgspec.Struct, frozen=True):
    used_bytes: int
    budget_bytes: int
    """0: none."""
    num_blobs: int
    num_named: int
    """0 where the store doesn't count them."""
    lacks_bytes: int = 0
    """Size of an upload that was refused lately for lack of space, and still would be; 0 where there is none."""


class Expiry(msgspec.Struct, frozen=True):
    """What :meth:`OwnerStore.expire` freed."""

    num_blobs: int
    freed_bytes: int


class OwnerStore(Protocol):
    """The owner's side (a validator). Every call raises the errors of the module's docstring."""

    @property
    def meter(self) -> StoreMeter:
        """What was asked of the store for each run."""
        ...

    async def open(self, *, deadline: Deadline) -> None:
        """Before the first call: an owner without an index of its own takes over what the last one left."""
        ...

    async def maintain(self) -> None:
        """Forever: what the owner does for the store beside its runs."""
        ...

    async def grant_puts(
        self, wants: Sequence[PutWant], hold: Hold, *, who: str = "", deadline: Deadline
    ) -> tuple[Grant, ...]:
        """Grants in order; the holds are durable before they are returned. :class:`NeedsSha256` where they must be named."""
        ...

    async def grant_parts(
        self, want: PutWant, numbers: Sequence[int], hold: Hold, *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        """A grant for each of these parts of a blob that goes up in parts."""
        ...

    async def complete_parts(self, want: PutWant, hold: Hold, *, deadline: Deadline) -> Grant:
        """Put the parts together; ``parts`` of the answer are those that are still lacking, none once the blob is there."""
        ...

    async def grant_gets(
        self, refs: Sequence[tuple[BlobHash, int]], label: str = "", *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        """Grants in order for the run ``label``; a size of 0 means that the store says it. :class:`NotFound`."""
        ...

    async def check_blobs(self, blobs: Sequence[BlobHash], *, deadline: Deadline) -> None:
        """Somebody got wrong bytes under these hashes: look, and remove what isn't what its address says."""
        ...

    async def put_blob(self, data: Buffer, hold: Hold, *, deadline: Deadline) -> BlobHash: ...

    async def get_blob(self, blob: BlobHash, size_bytes: int, *, deadline: Deadline) -> bytearray: ...

    async def get_range(
        self, blob: BlobHash, size_bytes: int, start: int, num_bytes: int, *, deadline: Deadline
    ) -> bytearray:
        """Bytes ``[start, start + num_bytes)`` of a blob of ``size_bytes``, unchecked."""
        ...

    def presign_put_named(
        self, name: str, content: BlobHash, size_bytes: int, *, sha256: str = "", ttl_s: float = TIMEOUTS.url_ttl_s
    ) -> Grant:
        """A grant for one write-once PUT, for the holder of a term that isn't the store's owner."""
        ...

    async def put_named(self, name: str, data: Buffer, *, deadline: Deadline) -> None:
        """Write once; :class:`~subnet.errors.Exists` where another's bytes are already there."""
        ...

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes: ...

    async def list_named(self, prefix: str, *, deadline: Deadline) -> Sequence[NamedKey]: ...

    async def delete(self, blob: BlobHash, *, deadline: Deadline) -> None:
        """Remove a blob and all holds on it; absent is fine."""
        ...

    async def expire(self, retention: str, label: str, below: int, *, deadline: Deadline) -> Expiry:
        """End the holds with a horizon under ``below``; blobs without a hold go."""
        ...

    async def sizes(self, blobs: Iterable[BlobHash], *, deadline: Deadline) -> dict[BlobHash, int]:
        """Bytes of those of the blobs that are here; the others are left out."""
        ...

    async def usage(self, *, deadline: Deadline) -> Usage:
        """Also whether the store answers at all."""
        ...

    async def close(self) -> None: ...


def check_name(name: str) -> None:
    if len(name) > MAX_NAME_BYTES or not _NAME.fullmatch(name):
        raise InputError(
            f"{name[:80]!r} can't name a key", hint=f"letters, digits, - _ . and /, at most {MAX_NAME_BYTES}"
        )


def check_prefix(prefix: str) -> None:
    if len(prefix) > MAX_NAME_BYTES or not re.fullmatch(r"[A-Za-z0-9_.\-/]*", prefix):
        raise InputError(f"{prefix[:80]!r} can't begin the name of a key")


def check_blob(text: str) -> BlobHash:
    if not is_blob_hash(text):
        raise InputError(f"{text[:80]!r} isn't the hash of a blob", hint="64 lower-case hex digits (BLAKE3)")
    return BlobHash(text)


def num_parts(size_bytes: int) -> int:
    """Parts that a blob of this size goes up in; 1: as a whole."""
    return 1 if size_bytes <= SINGLE_BYTES else -(-size_bytes // PART_BYTES)


def part_digests(data: Buffer | Sequence[Buffer]) -> tuple[str, ...]:
    """SHA-256 of each part that these bytes go up in, in hex."""
    views = byte_views(data)
    left_bytes = sum(view.nbytes for view in views)
    room_bytes = left_bytes if num_parts(left_bytes) == 1 else PART_BYTES
    found: list[str] = []
    hasher, filled = hashlib.sha256(), 0
    for view in views:
        while view.nbytes:
            piece, view = view[: room_bytes - filled], view[room_bytes - filled :]
            hasher.update(piece)
            filled += piece.nbytes
            if filled == room_bytes:
                found.append(hasher.hexdigest())
                hasher, filled = hashlib.sha256(), 0
    if filled or not found:
        found.append(hasher.hexdigest())
    return tuple(found)
