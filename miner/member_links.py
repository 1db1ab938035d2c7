"""Boundaries and slices between miners: pushed by who makes them, asked for only when that didn't come, checked on arrival.

What comes too early (its lease isn't folded yet) waits in a bounded list; what nobody is entitled to send is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from blake3 import blake3

from miner.context import RunContext
from miner.link_packing import LinkPacking
from miner.local_view import BoundaryKey, Sent
from miner.member_slices import Slices
from miner.owed import accepts_boundary
from miner.owed_boundaries import is_of_lease
from miner.owes import Fetch, Push
from miner.tickets import NotFinite, Ticket, UnsignedBoundary, check_raw_finite, check_sender, check_ticket
from subnet.errors import HashMismatch, InputError, NotFound
from subnet.model.memory import boundary_bytes, boundary_parts
from subnet.net.base import Body, PeerAddress, Priority, Transport, send_deadline
from subnet.numerics.planes import Buffer, pack, unpack
from subnet.protocol.messages import (
    AnyPeerFrame,
    BlobPieceFrame,
    BoundaryFrame,
    NeedFrame,
    NeedSliceFrame,
    NoBlobFrame,
    SliceFrame,
    WantBlobFrame,
)
from subnet.protocol.sent import is_sent, sent_by, sign_sent
from subnet.run.state import item, members_of
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS

MAX_EARLY = 256
MAX_EARLY_BYTES = 256 << 20
ASKED_BEFORE_MISSING = 3
BYTES_AN_ASK = 512 << 10
"""A large boundary may be on its way for longer: it is asked for once more for each of these."""
SMALL_BYTES = 64 << 10

T = TypeVar("T")


class Links:
    """``transport`` is set once it listens."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.slices = Slices(context)
        self._transport: Transport[AnyPeerFrame] | None = None
        self._early: OrderedDict[tuple[BoundaryKey, str], tuple[BoundaryFrame, memoryview]] = OrderedDict()
        """By boundary and who sent it: nobody's takes another's place."""
        self._arrived: dict[BoundaryKey, asyncio.Event] = {}
        self._asked: dict[BoundaryKey, int] = {}
        self._sending: set[tuple[BoundaryKey, str]] = set()
        self._packing = LinkPacking()
        self._boundary_bytes = boundary_bytes(context.plan)
        self._boundary_parts = boundary_parts(context.plan)
        pipeline = context.plan.config.pipeline
        self._asks = ASKED_BEFORE_MISSING + self._boundary_bytes // BYTES_AN_ASK
        self._is_raw, self._num_training = pipeline.boundary_code == "raw", context.plan.config.num_items
        self._signs = context.plan.config.audit.on

    def use(self, transport: Transport[AnyPeerFrame]) -> None:
        self._transport = transport
        self.slices.use(transport)
        self._context.peer_blobs.use(transport)

    # --- arriving ----------------------------------------------------------------------------------------------

    async def on_frame(self, peer: str, header: AnyPeerFrame, body: Body) -> None:
        """One frame of a peer whose hotkey is proven; an error refuses it, and its sender is told."""
        check_sender(header, self._context.run_id, peer)
        match header:
            case BoundaryFrame():
                await self._take_boundary(header, body)
            case SliceFrame():
                await self.slices.take(header, body)
            case NeedFrame():
                await self._give_boundary(header)
            case NeedSliceFrame():
                await self.slices.give(header)
            case WantBlobFrame() | BlobPieceFrame() | NoBlobFrame():
                self._context.peer_blobs.on_frame(header, body)

    async def _take_boundary(self, frame: BoundaryFrame, body: Body) -> None:
        key = BoundaryKey(frame.step, frame.microbatch, frame.stage, frame.backward, frame.part)
        ticket = check_ticket(self._context.run_state, self._context.member, frame)
        if self._is_past(key) or ticket is Ticket.PAST:
            return
        if self._signs and not is_sent(sent_by(frame), frame.signature):
            raise UnsignedBoundary("a boundary that its sender hasn't signed, in a run with audits")
        if frame.packing == "none":
            if len(body) != self._boundary_bytes:
                raise InputError(f"a boundary of {len(body)} bytes, this run's have {self._boundary_bytes}")
            data, found = memoryview(body), body.hash()
        elif frame.packing == "planes":
            if len(body) >= self._boundary_bytes:
                raise InputError(f"a packed boundary of {len(body)} bytes, this run's have {self._boundary_bytes}")
            data, found = await _off_the_loop(self._boundary_bytes, lambda: _unpacked(body, self._boundary_parts))
        else:
            raise InputError(f"a boundary packed as {frame.packing!r}")
        if found != frame.hash:
            raise HashMismatch("a boundary's bytes are not those of its hash")
        if self._is_raw and frame.microbatch < self._num_training:
            try:
                check_raw_finite(data)
            except NotFinite:
                if self._signs:
                    self._context.keep_unusable(key, frame.hash, data)
                    self._context.wake()
                raise
        member = self._context.member
        if self._is_past(key):
            return  # while it was unpacked
        if member is not None and accepts_boundary(self._context.run_state, member, frame):
            self._keep(key, frame, data)
        else:
            self._keep_early(key, frame, data)

    def _keep_early(self, key: BoundaryKey, frame: BoundaryFrame, data: memoryview) -> None:
        """The oldest give way: first those of a sender that has more than a quarter of them."""
        sender = frame.sender.hotkey
        self._early[key, sender] = (frame, data)
        most = min(MAX_EARLY, max(1, MAX_EARLY_BYTES // self._boundary_bytes))
        while len(self._early) > most:
            own = [slot for slot in self._early if slot[1] == sender]
            del self._early[own[0] if len(own) > most // 4 else next(iter(self._early))]

    def _is_past(self, key: BoundaryKey) -> bool:
        """Whether a boundary is there already, or needed no more."""
        return key in self._context.local.boundaries or key.step < self._context.run_state.next_step

    def admit_early(self) -> None:
        """After the fold moved on: what came early may be due now, or never will be."""
        member, state = self._context.member, self._context.run_state
        for slot, (frame, data) in list(self._early.items()):
            key = slot[0]
            if self._is_past(key):
                del self._early[slot]
            elif member is not None and accepts_boundary(state, member, frame):
                del self._early[slot]
                self._keep(key, frame, data)

    def _keep(self, key: BoundaryKey, frame: BoundaryFrame, data: memoryview) -> None:
        self._context.cache.put(key, data, frame.hash)
        self._context.local.boundaries[key] = frame.hash
        self._context.local.unavailable.discard(key)
        if frame.signature and not frame.part:  # a part is receipted with others, in one list
            self._context.local.sent_to_me[key] = Sent(frame.hash, frame.generation, frame.signature)
        self._asked.pop(key, None)
        if (event := self._arrived.pop(key, None)) is not None:
            event.set()
        self._context.wake()

    # --- giving ------------------------------------------------------------------------------------------------

    async def _give_boundary(self, need: NeedFrame) -> None:
        key = BoundaryKey(need.step, need.microbatch, need.stage, need.backward, need.part)
        if (key, need.sender.hotkey) in self._sending:
            return  # on a slow link twice would only take longer
        address, data = self._context.address(need.sender), await self._context.cache.get(key)
        if address is not None and data is not None:
            self._context.background(self._answer(address, key, data))

    async def _answer(self, address: PeerAddress, key: BoundaryKey, data: memoryview) -> None:
        await self._send_boundary(address, key, data)

    async def push(self, owe: Push) -> None:
        data, address = await self._context.cache.get(owe.key), self._context.address(owe.to)
        if data is None or address is None:
            if data is None:
                self._context.local.lose(owe.key)
            raise NotFound(f"boundary {owe.key} or its receiver is gone")
        if not await self._send_boundary(address, owe.key, data):
            raise NotFound(f"boundary {owe.key} isn't what is to be given under its lease")
        self._context.local.note_pushed(owe.key, owe.to)

    async def _send_boundary(self, address: PeerAddress, key: BoundaryKey, data: memoryview) -> bool:
        """False where it may not be given."""
        frame = self._frame(key)
        if frame is None or self._transport is None:
            return False
        body, packing = await self._packed(address.hotkey, data)
        frame = msgspec.structs.replace(frame, packing=packing)
        priority = Priority.BACKWARD if key.backward else Priority.FORWARD
        link, sent, way = self._packing.link(address.hotkey), 0, (key, address.hotkey)
        self._sending.add(way)
        link.begin(SYSTEM_CLOCK.now_s())
        try:
            num_bytes = memoryview(body).nbytes
            await self._transport.send(address, frame, body, priority=priority, deadline=send_deadline(num_bytes))
            sent = num_bytes
        finally:
            self._sending.discard(way)
            link.end(SYSTEM_CLOCK.now_s(), sent)
        return True

    def _frame(self, key: BoundaryKey) -> BoundaryFrame | None:
        """What is said of a boundary that is sent; None where nothing may be said, so that nothing is sent."""
        context = self._context
        hash_, member = context.cache.hash_of(key), context.member
        if member is None or hash_ is None:
            return None
        found = item(context.run_state, key.step, key.microbatch, key.stage)
        generation = found.generation if found else 0
        mine = found if self._signs and found is not None and found.member == member else None
        if mine is not None and not is_of_lease(mine, key, hash_, context.local):
            return None
        frame = BoundaryFrame(
            context.run_id, key.step, key.microbatch, key.stage, key.backward, member, generation, hash_, part=key.part
        )
        return sign_sent(context.signer, frame) if self._signs else frame

    async def _packed(self, hotkey: str, data: memoryview) -> tuple[Buffer, str]:
        """A boundary as it goes to this peer, and how it is packed."""
        if not self._packing.packs(hotkey, data.nbytes):
            return data, "none"

        def work() -> tuple[bytes, float]:
            began = time.thread_time()
            body = pack(data, self._boundary_parts)
            return body, time.thread_time() - began

        body, spent_s = await _off_the_loop(data.nbytes, work)
        self._packing.gain.note(data.nbytes, len(body), spent_s)
        if len(body) >= data.nbytes or not self._packing.link(hotkey).decide(self._packing.gain):
            return data, "none"
        return body, "planes"

    # --- asking ------------------------------------------------------------------------------------------------

    async def fetch(self, owe: Fetch) -> None:
        """Wait for the boundary to be pushed; after a while ask its makers; after several times, call it missing."""
        event = self._arrived.setdefault(owe.key, asyncio.Event())
        try:
            async with asyncio.timeout(TIMEOUTS.peer_need_retry_s):
                await event.wait()
                return
        except TimeoutError:
            pass
        context = self._context
        member = context.member
        if member is None or self._transport is None:
            return
        key = owe.key
        for source in owe.sources:
            address = context.address(source)
            if address is not None and source != member:
                need = NeedFrame(context.run_id, key.step, key.microbatch, key.stage, key.backward, member, key.part)
                await self._transport.send(address, need, b"", priority=Priority.CONTROL, deadline=send_deadline(0))
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] >= self._asks:
            context.local.unavailable.add(key)

    def end_step(self, step: int) -> None:
        """Nothing of ``step``, nor of steps before, is waited for any more."""
        for waited in (self._asked, self._arrived):
            for key in [key for key in waited if key.step <= step]:
                del waited[key]
        self.slices.end_step(step)

    def rewind(self) -> None:
        """The run goes on from an earlier step, on another branch: nothing is waited for, and nothing early is due."""
        for waited in (self._asked, self._arrived, self._early):
            waited.clear()
        self.slices.rewind()

    def is_known(self, hotkey: str) -> bool:
        """Whether a hotkey may connect: it is a member, as far as we have folded."""
        state = self._context.run_state
        stages = range(len(state.run.cuts)) if state.run else range(0)
        return any(member.hotkey == hotkey for stage in stages for member in members_of(state, stage))


def _unpacked(body: Buffer, parts: Sequence[tuple[int, int]]) -> tuple[memoryview, str]:
    """The bytes, and their hash."""
    data = unpack(body, parts)
    return data, blake3(data).hexdigest()


async def _off_the_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Work on a body in another thread, unless it is so small that the change would take longer."""
    if size_bytes < SMALL_BYTES:
        return work()
    return await asyncio.to_thread(work)
