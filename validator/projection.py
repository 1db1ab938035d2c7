"""What the owner of a run has derived from its records (who earned what), as bytes that go with a copy of the fold.

A validator that starts from the copy knows what everyone earned before it, though the records are no longer here. Numbers that
fade depend on the policy: a dump that was counted with another one isn't taken.
"""

from __future__ import annotations

import msgspec
from loguru import logger

from subnet.errors import Corrupt
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy

VERSION = 3


class _Dump(msgspec.Struct, frozen=True):
    version: int
    policy: ScorePolicy
    book: bytes


class _Version(msgspec.Struct, frozen=True):
    version: int


_decoder, _version_decoder = msgspec.msgpack.Decoder(_Dump), msgspec.msgpack.Decoder(_Version)


def dump_book(book: RunBook) -> bytes:
    return msgspec.msgpack.encode(_Dump(VERSION, book.policy, book.dump()))


def load_book(book: RunBook, data: bytes) -> None:
    """Into the book; :class:`Corrupt`, and nothing is changed, where it can't be read or was counted with another policy."""
    hint = "the log store has all records: iota score recompute STORE_URL RUN counts them anew"
    try:
        version = _version_decoder.decode(data).version
        if version != VERSION:
            raise Corrupt(f"the scores in it are of version {version}, not {VERSION}", hint=hint)
        found = _decoder.decode(data)
        if found.policy != book.policy:
            raise Corrupt("the scores in it were counted with another policy", hint=hint)
        book.load(found.book)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the scores in it can't be read: {error}", hint=hint) from error


class SessionProjection:
    """Dumps and fills the book that it is given; implements ``coordinator.Projection``."""

    def __init__(self, book: RunBook) -> None:
        self._book = book

    def dump(self) -> bytes:
        return dump_book(self._book)

    def load(self, data: bytes) -> None:
        """Into the empty book of a new session; what can't be used is said to be lost."""
        try:
            load_book(self._book, data)
        except Corrupt as error:
            logger.warning("what was earned before the copy of the run is forgotten here: {}", error)
