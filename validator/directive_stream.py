"""The journal as members see it: signed batches of effective records from any position, pushed as soon as they are durable.

Who is new, or asks for records that are no longer kept, gets the newest copy of the fold in signed parts, and the records
behind it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from subnet.protocol import wire
from subnet.protocol.messages import PURPOSE_COPY, CopyPart, copy_statement
from subnet.protocol.signing import Signer, sign_statement
from subnet.run.events import Batch
from subnet.words import Cursor
from validator.copies import Copy
from validator.journal_store import JournalStore, first_bytes

MAX_BATCH_RECORDS = 4096
MAX_BATCH_BYTES = 8 << 20
PART_BYTES = 4 << 20
PURPOSE_BATCH = "directives/1"


@dataclass(frozen=True)
class Frame:
    """An encoded batch or part of a copy, and the number of the record to go on with after it."""

    data: bytes
    next_number: int


class DirectiveFeed:
    """``visible`` records may leave the coordinator; ``advance`` wakes every reader."""

    def __init__(self, journal: JournalStore, signer: Signer) -> None:
        self._journal, self._signer = journal, signer
        self.term = 0
        self.visible = 0
        self._changed = asyncio.Event()
        self._last: tuple[int, int, bytes] | None = None
        self._signed_copy: tuple[int, int, CopyPart] | None = None
        self.closed = False

    def advance(self, visible: int) -> None:
        if visible > self.visible:
            self.visible = visible
            self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def next_frame(self, position: int) -> Frame | None:
        """The batch from ``position`` on, as soon as there is one; None when the feed is closed."""
        return await self.reader(position).next_frame()

    def reader(self, position: int) -> FeedReader:
        return FeedReader(self, position)

    async def until_visible(self, position: int) -> bool:
        """Wait until the record at ``position`` may be seen; False when the feed is closed."""
        while not self.closed:
            changed = self._changed
            if position < self.visible:
                return True
            await changed.wait()
        return False

    def copy_for(self, position: int) -> Copy | None:
        """The copy that a reader at ``position`` is to begin with, if it can't or shouldn't begin with records."""
        copy = self._journal.copy
        if copy is None or (position > 0 and position >= self._journal.base):
            return None
        return copy

    def batch(self, first: int) -> Frame:
        """The visible records from ``first`` on, as many as make one frame."""
        end = min(self.visible, first + MAX_BATCH_RECORDS)
        if self._last is not None and self._last[:2] == (first, end):
            return Frame(self._last[2], end)
        found = first_bytes(self._journal.records_between(first, end), MAX_BATCH_BYTES)
        end = first + len(found)
        head = self._journal.head_after(end)
        signature = sign_statement(self._signer, PURPOSE_BATCH, f"{self.term}.{end}.{head}".encode())
        records = tuple(msgspec.Raw(data) for data in found)
        data = msgspec.msgpack.encode(Batch(Cursor(self.term, end), first, records, head, signature))
        self._last = (first, end, data)
        return Frame(data, end)

    def part(self, copy: Copy, offset: int) -> bytes:
        """Bytes of the copy from ``offset`` on, under the leader's signature over the whole."""
        if self._signed_copy is None or self._signed_copy[:2] != (self.term, copy.number):
            cursor, digest = Cursor(self.term, copy.number), wire.blob_hash(copy.state)
            whole = CopyPart(cursor, copy.head, digest, len(copy.state), 0, b"", b"")
            signature = sign_statement(self._signer, PURPOSE_COPY, copy_statement(whole))
            self._signed_copy = (self.term, copy.number, msgspec.structs.replace(whole, signature=signature))
        piece = copy.state[offset : offset + PART_BYTES]
        return wire.encode(msgspec.structs.replace(self._signed_copy[2], offset=offset, data=piece))


class FeedReader:
    """One reader's way through the feed: at most one copy first, then records in order."""

    def __init__(self, feed: DirectiveFeed, position: int) -> None:
        self._feed, self.position = feed, position
        self._copy: Copy | None = None
        self._offset = 0

    async def next_frame(self) -> Frame | None:
        """What comes next, as soon as it may be seen; None when the feed is closed."""
        feed = self._feed
        if self._copy is None:
            if not await feed.until_visible(self.position):
                return None
            self._copy, self._offset = feed.copy_for(self.position), 0
        copy = self._copy
        if copy is None:
            frame = feed.batch(self.position)
            self.position = frame.next_number
            return frame
        if not await feed.until_visible(copy.number - 1):
            return None
        data = feed.part(copy, self._offset)
        self._offset += PART_BYTES
        if self._offset >= len(copy.state):
            self._copy, self.position = None, copy.number
        return Frame(data, self.position)
