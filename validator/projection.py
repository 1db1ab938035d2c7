"""What the owner of a run has derived from its records (who earned what), as bytes that go with a copy of the fold.

A validator that starts from the copy knows what everyone earned before it, though the records are no longer here.
"""

from __future__ import annotations

import msgspec
from loguru import logger

from subnet.score.book import RunBook

VERSION = 2


class _Dump(msgspec.Struct, frozen=True):
    version: int
    book: bytes


_decoder = msgspec.msgpack.Decoder(_Dump)


class SessionProjection:
    """Dumps and fills the book that it is given; implements ``coordinator.Projection``."""

    def __init__(self, book: RunBook) -> None:
        self._book = book

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(_Dump(VERSION, self._book.dump()))

    def load(self, data: bytes) -> None:
        """Into the empty book of a new session; what an older version counted can't be read, and is said to be lost."""
        try:
            found = _decoder.decode(data)
            if found.version != VERSION:
                raise msgspec.ValidationError(f"version {found.version}, not {VERSION}")
            self._book.load(found.book)
        except msgspec.MsgspecError as error:
            logger.warning("the scores in the copy of the run can't be read ({}): they begin again from here", error)
