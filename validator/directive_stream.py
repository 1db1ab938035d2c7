"""The journal as members see it: signed batches of effective records from any position, pushed as soon as they are durable.

Who is new, or asks for records that are no longer kept, gets the newest copy of the fold in signed parts, and the records
behind it. In runs of many stages a member that can take it gets the view of its own stage (:mod:`subnet.run.views`).

What is sent is encoded and signed once for everybody who stands at the same place of the same view; with many readers it is
collected a little longer, so that speaking takes a bounded share of the loop's time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from subnet.errors import InputError
from subnet.net.http import FrameWriter, encoded_frame
from subnet.protocol import wire
from subnet.protocol.copies import PURPOSE_COPY, CopyPart, copy_statement
from subnet.protocol.signing import Signer, sign_statement
from subnet.run.events import AnyEvent, Batch, Joined, Record, RunPlanned, StageSealed
from subnet.run.state import RunState
from subnet.run.views import (
    NO_STAGE,
    PURPOSE_VIEW,
    VIEWS_FROM_STAGES,
    View,
    ViewBatch,
    is_seal,
    short_seal,
    view_of,
    view_statement,
)
from subnet.words import Cursor
from validator.copies import Copy
from validator.journal_store import JournalStore, first_bytes

MAX_BATCH_RECORDS = 4096
MAX_BATCH_BYTES = 8 << 20
PART_BYTES = 4 << 20
PURPOSE_BATCH = "directives/1"
READER_S = 100e-6
"""What is new is collected for so long for each reader: sending to one takes about a fifth of it."""
MAX_COLLECT_S = 0.25
MAX_LAG_RECORDS = 512
"""Who has nothing of so many records in its view is told all the same how far the journal is."""
KEPT_SEALS = 1024

_record_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Frame:
    """An encoded batch or part of a copy, and the number of the record to go on with after it."""

    data: bytes
    next_number: int


@dataclass(eq=False)
class _Live:
    """A reader that has everything: it is written to, until ``ended`` says why not."""

    out: FrameWriter
    ended: asyncio.Future[None]
    position: int | None = None
    """Where it fell out, if it did."""

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(eq=False)
class _Channel:
    """Readers of one view that have all records below ``position``."""

    view: View | None
    position: int
    readers: dict[_Live, None] = field(default_factory=dict[_Live, None])


class DirectiveFeed:
    """``visible`` records may leave the coordinator; ``advance`` wakes every reader."""

    def __init__(self, journal: JournalStore, signer: Signer) -> None:
        self._journal, self._signer = journal, signer
        self.term = 0
        self.visible = 0
        self._changed = asyncio.Event()
        self._last: tuple[int, int, bytes] | None = None
        self._signed_copy: tuple[int, int, CopyPart] | None = None
        self._plan: RunPlanned | None = None
        self._stages: dict[str, int] = {}
        """By hotkey: the stage it joined last."""
        self._views: dict[int, View] = {}
        self._channels: dict[int | None, _Channel] = {}
        self._live: dict[str, list[_Live]] = {}
        self._num_live = 0
        self._spoke_s = 0.0
        self._speaking: asyncio.TimerHandle | None = None
        self._seals: dict[int, bytes] = {}
        self.closed = False

    # --- told by the coordinator -------------------------------------------------------------------------------------

    def begin_from(self, state: RunState) -> None:
        """What a copy of the fold says of run and members."""
        self._plan = state.run
        self._stages = {member.hotkey: info.stage for member, info in state.members.items()}

    def note(self, event: AnyEvent) -> None:
        """A record that was folded: who serves which stage."""
        if isinstance(event, Joined):
            before = self._stages.get(event.member.hotkey)
            self._stages[event.member.hotkey] = event.stage
            if before != event.stage:
                for live in self._live.get(event.member.hotkey, ()):
                    live.end()
        elif isinstance(event, RunPlanned):
            self._plan = event

    def advance(self, visible: int) -> None:
        if visible > self.visible:
            self.visible = visible
            self._wake()
            if self._num_live and self._speaking is None:
                loop = asyncio.get_running_loop()
                collect_s = min(MAX_COLLECT_S, self._num_live * READER_S)
                self._speaking = loop.call_at(max(loop.time(), self._spoke_s + collect_s), self._speak)

    def close(self) -> None:
        self.closed = True
        if self._speaking is not None:
            self._speaking.cancel()
            self._speak()
        for live in [live for readers in self._live.values() for live in readers]:
            live.end()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- readers -----------------------------------------------------------------------------------------------------

    async def serve(self, out: FrameWriter, hotkey: str, position: int, has: str | None) -> None:
        """Send everything from ``position`` on, until the feed is closed or the reader has gone (``Unreachable``).

        ``has``: the view that the reader's fold is of ("new": none yet, "all", "none", a stage); None: it takes the
        whole alone.
        """
        view = self._view_for(hotkey, has)
        reader = self.reader(position if has in (None, "new") or has == _kind(view) else 0, view)
        while True:
            while not reader.is_level:
                frame = await out.race(reader.next_frame())
                if frame is None:
                    return
                await out.send(frame.data)
            if self.closed:
                return
            changed = self._view_for(hotkey, has)
            if changed is not view:  # it has moved, while it was told of everything or while it caught up
                view, reader = changed, self.reader(0, changed)
                continue
            reader.position = await self._live_until_ended(out, hotkey, reader)
            out.check()

    async def _live_until_ended(self, out: FrameWriter, hotkey: str, reader: FeedReader) -> int:
        """Stay among those who are written to; the position reached when that ended."""
        channel = self._channel(reader.view)
        self._flush(channel, even_nothing=True)
        live = _Live(out, asyncio.get_running_loop().create_future())
        channel.readers[live] = None
        self._live.setdefault(hotkey, []).append(live)
        self._num_live += 1
        out.when_gone(live.end)
        try:
            await live.ended
        finally:
            position = channel.position if live.position is None else live.position
            channel.readers.pop(live, None)
            self._live[hotkey].remove(live)
            if not self._live[hotkey]:
                del self._live[hotkey]
            self._num_live -= 1
        return position

    def _view_for(self, hotkey: str, has: str | None) -> View | None:
        """What this reader is to get; None: the whole."""
        if has is None or self._plan is None or len(self._plan.cuts) < VIEWS_FROM_STAGES:
            return None
        stage = self._stages.get(hotkey, NO_STAGE)
        if stage not in self._views:
            self._views[stage] = view_of(self._plan, stage)
        return self._views[stage]

    def reader(self, position: int, view: View | None = None) -> FeedReader:
        return FeedReader(self, position, view)

    async def next_frame(self, position: int) -> Frame | None:
        """The batch from ``position`` on, as soon as there is one; None when the feed is closed."""
        return await self.reader(position).next_frame()

    async def until_visible(self, position: int) -> bool:
        """Wait until the record at ``position`` may be seen; False when the feed is closed."""
        while not self.closed:
            changed = self._changed
            if position < self.visible:
                return True
            await changed.wait()
        return False

    # --- speaking to those who have everything -----------------------------------------------------------------------

    def _channel(self, view: View | None) -> _Channel:
        key = None if view is None else view.stage
        if key not in self._channels:
            self._channels[key] = _Channel(view, self.visible)
        channel = self._channels[key]
        if not channel.readers:
            channel.position = self.visible
        return channel

    def _speak(self) -> None:
        self._speaking = None
        self._spoke_s = asyncio.get_running_loop().time()
        for channel in self._channels.values():
            if channel.readers:
                self._flush(channel, even_nothing=self.visible - channel.position > MAX_LAG_RECORDS)

    def _flush(self, channel: _Channel, *, even_nothing: bool) -> None:
        """Write what is visible to the channel's readers; who can't take it at once goes on by itself."""
        while channel.readers and channel.position < self.visible:
            frame = self._frame(channel.view, channel.position, even_nothing=even_nothing)
            if frame is None:
                return
            chunk = encoded_frame(frame.data)
            for live in [live for live in channel.readers if not live.out.push(chunk)]:
                live.position = channel.position
                del channel.readers[live]
                live.end()
            channel.position = frame.next_number

    def _frame(self, view: View | None, first: int, *, even_nothing: bool) -> Frame | None:
        return self.batch(first) if view is None else self._view_batch(view, first, even_nothing=even_nothing)

    # --- frames ------------------------------------------------------------------------------------------------------

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
        data = _encoder.encode(Batch(Cursor(self.term, end), first, records, head, signature))
        self._last = (first, end, data)
        return Frame(data, end)

    def view_batch(self, view: View, first: int) -> Frame:
        """The view's part of the visible records from ``first`` on."""
        frame = self._view_batch(view, first, even_nothing=True)
        assert frame is not None
        return frame

    def _view_batch(self, view: View, first: int, *, even_nothing: bool) -> Frame | None:
        end, found, size = first, list[bytes](), 0
        while end < self.visible and len(found) < MAX_BATCH_RECORDS and size < MAX_BATCH_BYTES:
            start, end = end, min(self.visible, end + MAX_BATCH_RECORDS)
            more = self._seen(view, start, end)
            size += sum(map(len, more))
            found += more
        if not found and not even_nothing:
            return None
        return Frame(self._signed_view(view, first, end, found), end)

    def _signed_view(self, view: View, first: int, end: int, found: list[bytes]) -> bytes:
        head = self._journal.head_after(end)
        statement = view_statement(self.term, first, end, head, view.stage, b"".join(found))
        signature = sign_statement(self._signer, PURPOSE_VIEW, statement)
        records = tuple(msgspec.Raw(data) for data in found)
        return _encoder.encode(ViewBatch(Cursor(self.term, end), first, view.stage, records, head, signature))

    def _seen(self, view: View, first: int, end: int) -> list[bytes]:
        records, scopes = self._journal.records_between(first, end), self._journal.scopes_between(first, end)
        wanted = view.scopes
        if not any(is_seal(scope) for scope in scopes):
            return [data for data, scope in zip(records, scopes, strict=True) if scope in wanted]
        found: list[bytes] = []
        for number, (data, scope) in enumerate(zip(records, scopes, strict=True), start=first):
            if scope in wanted:
                found.append(data)
            elif is_seal(scope):
                found.append(self._short_seal(number, data))
        return found

    def _short_seal(self, number: int, data: bytes) -> bytes:
        short = self._seals.get(number)
        if short is None:
            record = _record_decoder.decode(data)
            assert isinstance(record.event, StageSealed)
            short = _encoder.encode(msgspec.structs.replace(record, event=short_seal(record.event)))
            if len(self._seals) >= KEPT_SEALS:
                self._seals.clear()
            self._seals[number] = short
        return short

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

    def __init__(self, feed: DirectiveFeed, position: int, view: View | None = None) -> None:
        self._feed, self.position, self.view = feed, position, view
        self._copy: Copy | None = None
        self._offset = 0

    @property
    def is_level(self) -> bool:
        """Whether it has exactly what may be seen."""
        return self._copy is None and 0 < self.position == self._feed.visible

    async def next_frame(self) -> Frame | None:
        """What comes next, as soon as it may be seen; None when the feed is closed."""
        feed = self._feed
        if self._copy is None:
            if not await feed.until_visible(self.position):
                return None
            self._copy, self._offset = feed.copy_for(self.position), 0
        copy = self._copy
        if copy is None:
            frame = feed.batch(self.position) if self.view is None else feed.view_batch(self.view, self.position)
            self.position = frame.next_number
            return frame
        if not await feed.until_visible(copy.number - 1):
            return None
        data = feed.part(copy, self._offset)
        self._offset += PART_BYTES
        if self._offset >= len(copy.state):
            self._copy, self.position = None, copy.number
        return Frame(data, self.position)


def _kind(view: View | None) -> str:
    """What a reader says that it has, once its fold is of this view."""
    if view is None:
        return "all"
    return "none" if view.stage == NO_STAGE else str(view.stage)


def checked_kind(text: str | None) -> str | None:
    """The query parameter ``view``, if it can be one."""
    if text is None or text in ("new", "all", "none") or (text.isascii() and text.isdigit() and len(text) <= 3):
        return text
    raise InputError(f"query parameter view={text!r} is no view", hint="new, all, none or a stage's number")
