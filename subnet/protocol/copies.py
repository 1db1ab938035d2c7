"""A copy of the fold on its way: signed parts of one whole, sent in place of records that are no longer kept."""

from __future__ import annotations

import msgspec

from subnet.words import Cursor

LIMIT_COPY_BYTES = 256 << 20
PURPOSE_COPY = "state-copy/1"
_COPY_TAG = b"\xa4copy"


class CopyPart(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="copy"):
    """A frame of ``GET /v1/directives``: a piece of the fold of records ``0 .. cursor.number - 1``, instead of those records.

    All parts of a copy are alike but for ``offset`` and ``data``; they come in order, one behind the other.
    """

    cursor: Cursor
    """The term under which it is sent, and the number of the record after it."""
    head: str
    """Chain value after those records."""
    hash: str
    """BLAKE3 of the whole, which has ``size_bytes``."""
    size_bytes: int
    offset: int
    data: bytes
    signature: bytes
    """The leader's over :func:`copy_statement`."""


def copy_statement(part: CopyPart) -> bytes:
    return f"{part.cursor.term}.{part.cursor.number}.{part.head}.{part.hash}.{part.size_bytes}".encode()


def is_copy_part(frame: bytes) -> bool:
    """Whether a frame of the directive stream is a :class:`CopyPart`; else it is a batch of records."""
    return frame[1 : 1 + len(_COPY_TAG)] == _COPY_TAG
