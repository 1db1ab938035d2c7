"""The journal as members see it: signed batches of effective records from any position, pushed as soon as they are durable."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from subnet.protocol.signing import Signer, sign_statement
from subnet.run.events import Batch
from subnet.words import Cursor
from validator.journal_store import JournalStore

MAX_BATCH_RECORDS = 4096
PURPOSE_BATCH = "directives/1"


@dataclass(frozen=True)
class Frame:
    """An encoded batch, and the number of the record after it."""

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
        while not self.closed:
            changed = self._changed
            if position < self.visible:
                end = min(self.visible, position + MAX_BATCH_RECORDS)
                return Frame(self._batch(position, end), end)
            await changed.wait()
        return None

    def _batch(self, first: int, end: int) -> bytes:
        if self._last is not None and self._last[:2] == (first, end):
            return self._last[2]
        head = self._journal.heads[end - 1]
        records = tuple(msgspec.Raw(data) for data in self._journal.records[first:end])
        signature = sign_statement(self._signer, PURPOSE_BATCH, f"{self.term}.{end}.{head}".encode())
        data = msgspec.msgpack.encode(Batch(Cursor(self.term, end), first, records, head, signature))
        self._last = (first, end, data)
        return data
