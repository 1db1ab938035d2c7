"""Follows the validator's directive stream into the fold: every record chained, every batch signed, in order, exactly once.

Anything that doesn't fit (wrong head, wrong signature, an older term, a gap) ends the connection and is logged; nothing of
it is folded. A new term may rewind; the follower folds again from its last final copy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from loguru import logger

from subnet.errors import InputError, IotaError
from subnet.net.client import SignedClient
from subnet.protocol import wire
from subnet.protocol.signing import verify_statement
from subnet.run.chain_hash import GENESIS_HEAD, next_head
from subnet.run.events import Batch, Record
from subnet.run.follower import Follower, Took
from subnet.run.state import RunState
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import Cursor

PURPOSE_BATCH = "directives/1"
KEPT_HEADS = 65536
"""A new term that rewinds further than this is refused; what it takes back is final long before."""
_record_decoder = msgspec.msgpack.Decoder(Record)


class Directives:
    """``changed`` is set after each batch; ``on_took`` sees the records and whether a new term began with them."""

    def __init__(
        self, client: SignedClient, run: str, on_took: Callable[[Sequence[Record], bool], None] | None = None
    ) -> None:
        self._client, self._run = client, run
        self.on_took = on_took
        self._follower = Follower()
        self._heads: deque[bytes] = deque([bytes.fromhex(GENESIS_HEAD)], maxlen=KEPT_HEADS)
        self.changed = asyncio.Event()
        self.connected = False

    @property
    def state(self) -> RunState:
        return self._follower.state

    @property
    def cursor(self) -> Cursor:
        return self._follower.cursor

    async def follow(self) -> None:
        """Forever: connect, fold, and connect again with growing waits."""
        backoff = Backoff(0.1, 3.0)
        while True:
            try:
                cursor = self.cursor
                path = f"/v1/directives?run={self._run}&term={cursor.term}&after={cursor.number}"
                async for frame in self._client.stream(path, connect=Deadline.after(TIMEOUTS.http_request_s)):
                    self.connected = True
                    self.take(frame)
                    backoff.reset()
            except IotaError as error:
                log = logger.debug if error.retryable and not self.connected else logger.warning
                log("directive stream: {}", error)
            self.connected = False
            await asyncio.sleep(backoff.next_s())

    def take(self, frame: bytes) -> None:
        """Check a batch and fold it."""
        batch = wire.decode(frame, Batch, limit_bytes=wire.MAX_STREAM_FRAME_BYTES, what="a batch of directives")
        number, term = self.cursor.number, batch.cursor.term
        if term < self.cursor.term:
            raise InputError(f"the validator leads term {term}, this process has seen term {self.cursor.term}")
        rewind = number - batch.first_number
        if rewind < 0 or (rewind > 0 and term == self.cursor.term):
            raise InputError(f"directives from {batch.first_number} on don't follow {number}")
        if batch.cursor.number != batch.first_number + len(batch.records):
            raise InputError("a batch of directives doesn't count its records")
        if rewind >= len(self._heads):
            raise InputError(f"term {term} takes back {rewind} records")
        statement = f"{term}.{batch.cursor.number}.{batch.head}".encode()
        if not verify_statement(self._client.receiver, PURPOSE_BATCH, statement, batch.signature):
            raise InputError("a batch of directives isn't signed by the validator")
        heads = [self._heads[-1 - rewind].hex()]
        for data in batch.records:
            heads.append(next_head(heads[-1], bytes(data)))
        if heads[-1] != batch.head:
            raise InputError("a batch of directives doesn't fit the hash chain")
        records = [_record_decoder.decode(data) for data in batch.records]
        took = self._follower.take(term, batch.first_number, records)
        for _ in range(rewind):
            self._heads.pop()
        self._heads.extend(bytes.fromhex(head) for head in heads[1:])
        if self.on_took is not None:
            self.on_took(records, took is Took.NEW_TERM)
        self.changed.set()
