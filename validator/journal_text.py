"""Records of a journal as lines for people, and a search through them that reads only so many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from subnet.errors import InputError
from subnet.run.events import Record
from subnet.words import Member
from validator.history import describe

SCANNED_AT_ONCE = 2_000
"""Records that one question looks at: the answer says where to go on."""
MAX_LINES = 200
MAX_QUERY_CHARS = 80
MAX_TEXT_CHARS = 280
_SHOWN_ITEMS = 4

_decoder = msgspec.msgpack.Decoder(Record)


class JournalLine(msgspec.Struct, frozen=True):
    number: int
    time_s: float
    kind: str
    """The event's name."""
    text: str


class JournalPage(msgspec.Struct, frozen=True):
    """Lines, newest first. ``before``: where an older page begins; None: there is none that is still kept here."""

    lines: tuple[JournalLine, ...]
    before: int | None
    length: int
    oldest: int
    """Number of the oldest record that is kept here; the log store has those before it."""
    scanned: int


def line_of(data: bytes) -> JournalLine:
    record = _decoder.decode(data)
    event = record.event
    text = describe(record) or " ".join(
        f"{name}={_short(getattr(event, name))}" for name in event.__struct_fields__ if name != "model_config"
    )
    text = text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
    return JournalLine(record.number, record.time_ns / 1e9, type(event).__name__, text)


def _short(value: Any) -> str:
    """Long hashes and long lists by their head."""
    match value:
        case Member():
            return str(value)
        case str():
            return value if len(value) <= 16 else value[:12] + "…"
        case float():
            return f"{value:.6g}"
        case tuple() | list():
            shown = ",".join(_short(item) for item in value[:_SHOWN_ITEMS])
            return f"[{shown}{f',… {len(value)}' if len(value) > _SHOWN_ITEMS else ''}]"
        case msgspec.Struct():
            return type(value).__name__
        case _:
            return str(value)[:40]


def checked_query(text: str) -> str:
    """A search's words in lower case; :class:`InputError` where there are too many."""
    if len(text) > MAX_QUERY_CHARS:
        raise InputError(f"a search of {len(text)} characters", hint=f"allowed: {MAX_QUERY_CHARS}")
    return text.strip().lower()


def page_of(records: Sequence[bytes], first: int, *, length: int, oldest: int, limit: int, query: str) -> JournalPage:
    """The newest of ``records`` (numbered from ``first`` on) that contain every word of ``query``. Blocks; any thread."""
    words, found, scanned = query.split(), list[JournalLine](), 0
    for data in reversed(records):
        scanned += 1
        line = line_of(data)
        said = f"{line.number} {line.kind} {line.text}".lower()
        if all(word in said for word in words):
            found.append(line)
            if len(found) == limit:
                break
    before = first + len(records) - scanned
    return JournalPage(tuple(found), before if before > oldest else None, length, oldest, scanned)
