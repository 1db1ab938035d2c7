"""Follows the validator's directive stream into the fold: every batch signed, every record in order, exactly once.

Anything that doesn't fit (wrong head, wrong signature, an older term, a gap) ends the connection and is logged; nothing of
it is folded. Who is new or too far behind is sent a signed copy of the fold first. A new term may rewind; the follower folds
again from its last final copy, and where the term takes back more than that, forgets all and begins anew.

In runs of many stages the validator sends the view of the member's own stage (:mod:`subnet.run.views`), and begins with a
copy when that changes; the old fold stays until the new one has come as far.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
from loguru import logger

from subnet.errors import HashMismatch, InputError, IotaError, TooLarge
from subnet.net.client import SignedClient
from subnet.protocol import wire
from subnet.protocol.copies import LIMIT_COPY_BYTES, PURPOSE_COPY, CopyPart, copy_statement, is_copy_part
from subnet.protocol.signing import verify_statement
from subnet.run.chain_hash import GENESIS_HEAD, next_head
from subnet.run.events import Batch, Record
from subnet.run.follower import Follower, Took
from subnet.run.invariants import InvariantBroken
from subnet.run.state import RunState
from subnet.run.state_codec import load_state
from subnet.run.views import NO_STAGE, PURPOSE_VIEW, View, ViewBatch, is_view_batch, view_statement
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import Cursor

PURPOSE_BATCH = "directives/1"
KEPT_HEADS = 65536
"""Who is told by a new term to rewind further than this begins anew; what it takes back is final long before."""
_record_decoder = msgspec.msgpack.Decoder(Record)


@dataclass
class _Copy:
    """A copy of the fold as far as it has come; ``whole`` is its first part."""

    whole: CopyPart
    data: bytearray


@dataclass
class _Fold:
    """A fold and what is needed to go on with it. ``kind``: "new" (undecided), "all", "none", or a stage's number."""

    follower: Follower = field(default_factory=Follower)
    heads: deque[bytes] = field(default_factory=lambda: _heads_from(GENESIS_HEAD))
    """Of the whole journal: the chain values of the last records, to check what a new term takes back."""
    kind: str = "new"

    def sees(self, stage: int | None) -> bool:
        """Whether it is of this view (None: the whole); one that is undecided becomes so."""
        kind = "all" if stage is None else "none" if stage == NO_STAGE else str(stage)
        if self.kind == "new":
            self.kind, self.follower.stage = kind, stage
        return self.kind == kind


class Directives:
    """``changed`` is set after each batch; ``on_took`` sees the records and whether a new term began with them.

    After a copy of the fold ``on_took`` sees no records: the fold has moved on all the same.
    """

    def __init__(
        self, client: SignedClient, run: str, on_took: Callable[[Sequence[Record], bool], None] | None = None
    ) -> None:
        self._client, self._run = client, run
        self.on_took = on_took
        self._fold = _Fold()
        self._next: _Fold | None = None
        """Another view's, until it has come as far as the fold that is shown."""
        self._copy: _Copy | None = None
        self._anew = False
        """What is folded can't go on: a copy, or the first record, is to replace it."""
        self.changed = asyncio.Event()
        self.connected = False

    @property
    def state(self) -> RunState:
        return self._fold.follower.state

    @property
    def cursor(self) -> Cursor:
        return self._fold.follower.cursor

    @property
    def view(self) -> View | None:
        """What of the journal the fold is of; None: the whole, or nothing yet."""
        return self._fold.follower.view

    async def follow(self) -> None:
        """Forever: connect, fold, and connect again with growing waits."""
        backoff = Backoff(0.1, 3.0)
        while True:
            try:
                self._copy, self._next, cursor = None, None, self.cursor
                after, view = (0, "new") if self._anew else (cursor.number, self._fold.kind)
                path = f"/v1/directives?run={self._run}&term={cursor.term}&after={after}&view={view}"
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
        """Check a batch, or a part of a copy, and fold it."""
        if is_copy_part(frame):
            self._take_part(frame)
        elif is_view_batch(frame):
            self._take_view(frame)
        else:
            self._take_batch(frame)

    # --- batches of the whole ------------------------------------------------------------------------------------

    def _take_batch(self, frame: bytes) -> None:
        batch = wire.decode(frame, Batch, limit_bytes=wire.MAX_STREAM_FRAME_BYTES, what="a batch of directives")
        term, end = batch.cursor.term, batch.cursor.number
        self._refuse_older(term)
        self._check_signed(PURPOSE_BATCH, f"{term}.{end}.{batch.head}".encode(), batch.signature)
        fold = self._fold_for(None, batch.first_number)
        number = 0 if self._anew else fold.follower.number
        rewind = number - batch.first_number
        if rewind < 0 or (rewind > 0 and term == fold.follower.term):
            raise InputError(f"directives from {batch.first_number} on don't follow {number}")
        if end != batch.first_number + len(batch.records):
            raise InputError("a batch of directives doesn't count its records")
        if rewind >= len(fold.heads):
            self._begin_anew(f"term {term} takes back {rewind} records, more than are kept")
        heads = [GENESIS_HEAD if self._anew else fold.heads[-1 - rewind].hex()]
        for data in batch.records:
            heads.append(next_head(heads[-1], bytes(data)))
        if heads[-1] != batch.head:
            raise InputError("a batch of directives doesn't fit the hash chain")
        records = _decoded(batch.records, batch.first_number)
        anew = self._forget_if_anew(GENESIS_HEAD)
        took = self._folded(fold, term, batch.first_number, records, None)
        for _ in range(rewind):
            fold.heads.pop()
        fold.heads.extend(bytes.fromhex(head) for head in heads[1:])
        self._came(fold, records, anew or took is Took.NEW_TERM)

    def _check_signed(self, purpose: str, statement: bytes, signature: bytes) -> None:
        if not verify_statement(self._client.receiver, purpose, statement, signature):
            raise InputError("a batch of directives isn't signed by the validator")

    def _folded(self, fold: _Fold, term: int, first: int, records: Sequence[Record], end: int | None) -> Took:
        try:
            return fold.follower.take(term, first, records, end)
        except InvariantBroken as error:
            self._begin_anew(str(error))

    def _refuse_older(self, term: int) -> None:
        if term < self.cursor.term:
            raise InputError(f"the validator leads term {term}, this process has seen term {self.cursor.term}")

    def _moved(self, records: Sequence[Record], new_term: bool) -> None:
        if self.on_took is not None:
            self.on_took(records, new_term)
        self.changed.set()

    def _begin_anew(self, why: str) -> NoReturn:
        self._anew = True
        raise InputError(f"{why}: what was folded is given up, asking for a copy of the run")

    def _forget_if_anew(self, head: str) -> bool:
        """What was given up goes when its replacement is there; nothing derived from it may live on: as a new term."""
        anew, self._anew = self._anew, False
        if anew:
            self._fold.follower.forget()
            self._fold.heads = _heads_from(head)
        return anew

    # --- views ---------------------------------------------------------------------------------------------------

    def _take_view(self, frame: bytes) -> None:
        """A view's batch has no chain of its own: the leader's signature is over all of it, and stretches must join."""
        batch = wire.decode(frame, ViewBatch, limit_bytes=wire.MAX_STREAM_FRAME_BYTES, what="a batch of directives")
        term, first, end = batch.cursor.term, batch.first_number, batch.cursor.number
        self._refuse_older(term)
        data = b"".join(bytes(raw) for raw in batch.records)
        statement = view_statement(term, first, end, batch.head, batch.stage, data)
        self._check_signed(PURPOSE_VIEW, statement, batch.signature)
        fold = self._fold_for(batch.stage, first)
        number = 0 if self._anew else fold.follower.number
        if first > number or (first < number and term == fold.follower.term):
            raise InputError(f"directives from {first} on don't follow {number}")
        records = _decoded(batch.records, first)
        if any(not first <= record.number < end for record in records):
            raise InputError("a batch of directives has records that it doesn't cover")
        anew = self._forget_if_anew(GENESIS_HEAD)
        took = self._folded(fold, term, first, records, end)
        self._came(fold, records, anew or took is Took.NEW_TERM)

    def _fold_for(self, stage: int | None, first: int) -> _Fold:
        """The fold that a batch of this view goes to; one that begins with the first record may begin another view."""
        fold = self._next or self._fold
        if self._anew:
            self._fold.kind = "new"
            fold, self._next = self._fold, None
        if fold.sees(stage):
            return fold
        if first > 0:
            raise InputError(f"directives of the view of stage {stage} from {first} on, without what is before")
        self._next = _Fold()
        self._next.sees(stage)
        return self._next

    def _came(self, fold: _Fold, records: Sequence[Record], new_term: bool) -> None:
        """Shows the other view's fold as soon as nothing is lost by it."""
        if fold is self._fold:
            self._moved(records, new_term)
            return
        later = fold.follower.term > self._fold.follower.term
        if later or fold.follower.number >= self._fold.follower.number:
            logger.debug("the fold is now of the view {!r}, from record {} on", fold.kind, fold.follower.number)
            self._fold, self._next = fold, None
            self._moved((), later)

    # --- copies ------------------------------------------------------------------------------------------------

    def _take_part(self, frame: bytes) -> None:
        part = wire.decode(frame, CopyPart, limit_bytes=wire.MAX_STREAM_FRAME_BYTES, what="a part of a copy of the run")
        copy = self._copy if part.offset else self._begin_copy(part)
        if copy is None or part.offset != len(copy.data) or _whole(part) != copy.whole:
            raise InputError("the parts of a copy of the run don't follow each other")
        copy.data += part.data
        if len(copy.data) > part.size_bytes or not part.data:
            raise InputError("the parts of a copy of the run don't add up to its size")
        if len(copy.data) == part.size_bytes:
            self._copy = None
            self._take_copy(part, bytes(copy.data))

    def _begin_copy(self, part: CopyPart) -> _Copy:
        """The first part: nothing is kept before the signature and the size are checked."""
        self._refuse_older(part.cursor.term)
        if not 0 < part.size_bytes <= LIMIT_COPY_BYTES:
            raise TooLarge(f"a copy of the run has {part.size_bytes} bytes, allowed are {LIMIT_COPY_BYTES}")
        if not verify_statement(self._client.receiver, PURPOSE_COPY, copy_statement(part), part.signature):
            raise InputError("a copy of the run isn't signed by the validator")
        self._copy = _Copy(_whole(part), bytearray())
        return self._copy

    def _take_copy(self, whole: CopyPart, data: bytes) -> None:
        if wire.blob_hash(data) != whole.hash:
            raise HashMismatch("a copy of the run doesn't fit its hash")
        term, number = whole.cursor.term, whole.cursor.number
        try:
            state = load_state(data)
        except msgspec.MsgspecError as error:
            raise InputError(f"a copy of the run doesn't decode: {error}", hint="update this miner") from error
        if state.number != number or state.run is None or not wire.is_blob_hash(whole.head):
            raise InputError("a copy of the run isn't what its cursor says")
        anew = self._forget_if_anew(whole.head)
        fold = self._fold
        if anew:
            fold.kind, self._next = "new", None
        behind = term == fold.follower.term and number < fold.follower.number
        if behind and fold.kind in ("new", "all"):
            raise InputError(f"a copy of the run at record {number} is behind record {self.cursor.number}")
        if behind or (fold.kind != "new" and fold.follower.number):
            fold = self._next = _Fold()
        took = fold.follower.start_from(term, data, state)
        fold.heads = _heads_from(whole.head)
        logger.info("begins with the copy of the run at record {} ({:,} bytes)", number, len(data))
        self._came(fold, (), anew or took is Took.NEW_TERM)


def _decoded(records: Sequence[msgspec.Raw], first: int) -> list[Record]:
    try:
        return [_record_decoder.decode(data) for data in records]
    except msgspec.MsgspecError as error:
        raise InputError(f"a record behind {first} doesn't decode: {error}", hint="update") from error


def _heads_from(head: str) -> deque[bytes]:
    return deque([bytes.fromhex(head)], maxlen=KEPT_HEADS)


def _whole(part: CopyPart) -> CopyPart:
    return msgspec.structs.replace(part, offset=0, data=b"")
