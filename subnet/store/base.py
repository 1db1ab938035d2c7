"""What a store promises, whoever runs it: blobs by their hash through grants, and named keys that are written once.

* A blob is visible whole or not at all; its bytes are checked against size and BLAKE3 on arrival, both ways.
* A grant is a URL that is good for one method, one blob, one size, until it expires. Miners hold no other credential.
* A named key is written once: of any number of racing writers exactly one wins, the others get ``Exists``.
* A blob is kept for as long as a *hold* on it lasts; holds end by ``expire`` alone, never by age or by a full disk.

Errors are part of the contract: ``NotFound``, ``Exists``, ``Expired`` (ask for a new grant), ``HashMismatch``,
``TooLarge``, ``OutOfSpace``, ``AuthFailed`` (an altered grant), ``Unreachable``, ``DeadlinePassed``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from subnet.errors import InputError
from subnet.protocol.wire import Buffer, is_blob_hash
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash

RETENTION_CLASSES = ("evidence", "log", "snapshot", "data")
"""``evidence``: boundary blobs and partials, until the audit window closes; ``log``: merged partitions; ``snapshot``;
``data``: token shards and submissions."""

_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*(?:/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)*")
_LABEL = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,63}")
MAX_NAME_BYTES = 200
MAX_HORIZON = 10**15
LIST_PAGE = 1000
MAX_SIZES = 4096
"""Blobs that one request asks the sizes of."""
MAX_NAMED_BYTES = 64 << 20


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
    num_blobs: int
    num_named: int
    lacks_bytes: int = 0
    """Size of an upload that was refused lately for lack of space, and still would be; 0 where there is none."""


class Expiry(msgspec.Struct, frozen=True):
    """What :meth:`Store.expire` freed."""

    num_blobs: int
    freed_bytes: int


class Store(Protocol):
    """The owner's side (a validator). Every call raises the errors of the module's docstring."""

    def presign_put(
        self, blob: BlobHash, size_bytes: int, hold: Hold, *, ttl_s: float = TIMEOUTS.url_ttl_s
    ) -> Grant: ...

    def presign_get(self, blob: BlobHash, size_bytes: int, *, ttl_s: float = TIMEOUTS.url_ttl_s) -> Grant: ...

    def presign_put_named(
        self, name: str, content: BlobHash, size_bytes: int, *, ttl_s: float = TIMEOUTS.url_ttl_s
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

    async def usage(self, *, deadline: Deadline) -> Usage: ...


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
