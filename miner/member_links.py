"""Boundaries and slices between miners: pushed by who makes them, asked for only when that didn't come, checked on arrival.

What comes too early (its lease isn't folded yet) waits in a bounded list; what nobody is entitled to send is dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from blake3 import blake3
from loguru import logger

from miner.context import RunContext
from miner.local_view import BoundaryKey
from miner.owed import accepts_boundary
from miner.owes import Fetch, FetchSlice, Push, SendSlice, StoreSlice
from subnet.errors import InputError, NotFound
from subnet.net.base import PeerAddress, Priority, Transport
from subnet.numerics.packing import pack_slice, unpack_slice
from subnet.numerics.slices import slice_size
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
from subnet.run.state import item, members_of
from subnet.timing import TIMEOUTS, Deadline

MAX_EARLY = 256
MAX_EARLY_BYTES = 256 << 20
MAX_SLICE_BYTES = 2 << 30
ASKED_BEFORE_MISSING = 3


class Links:
    """``transport`` is set once it listens."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._transport: Transport[AnyPeerFrame] | None = None
        self._early: OrderedDict[BoundaryKey, tuple[BoundaryFrame, bytearray]] = OrderedDict()
        self._arrived: dict[BoundaryKey, asyncio.Event] = {}
        self._asked: dict[BoundaryKey, int] = {}
        pipeline, length = context.plan.config.pipeline, context.plan.config.data.sequence_length
        self._boundary_bytes = 4 * pipeline.microbatch_rows * length * context.plan.hidden_size

    def use(self, transport: Transport[AnyPeerFrame]) -> None:
        self._transport = transport
        self._context.peer_blobs.use(transport)

    # --- arriving ----------------------------------------------------------------------------------------------

    async def on_frame(self, peer: str, header: AnyPeerFrame, body: bytearray) -> None:
        """One frame of a peer whose hotkey is proven. An error here closes its connection."""
        if header.run != self._context.run_id:
            return
        if header.sender.hotkey != peer:
            raise InputError(f"a frame of {header.sender} came from {peer}")
        match header:
            case BoundaryFrame():
                self._take_boundary(header, body)
            case SliceFrame():
                self._take_slice(header, body)
            case NeedFrame():
                await self._give_boundary(header)
            case NeedSliceFrame():
                await self._give_slice(header)
            case WantBlobFrame() | BlobPieceFrame() | NoBlobFrame():
                self._context.peer_blobs.on_frame(header, body)

    def _take_boundary(self, frame: BoundaryFrame, body: bytearray) -> None:
        key = BoundaryKey(frame.step, frame.microbatch, frame.stage, frame.backward)
        if key in self._context.local.boundaries or frame.step < self._context.run_state.next_step:
            return
        if len(body) != self._boundary_bytes:
            raise InputError(f"a boundary of {len(body)} bytes, this run's have {self._boundary_bytes}")
        if blake3(body).hexdigest() != frame.hash:
            raise InputError("a boundary's bytes are not those of its hash")
        member = self._context.member
        if member is not None and accepts_boundary(self._context.run_state, member, frame):
            self._keep(key, frame, body)
        else:
            self._early[key] = (frame, body)
            most = min(MAX_EARLY, max(1, MAX_EARLY_BYTES // self._boundary_bytes))
            while len(self._early) > most:
                self._early.popitem(last=False)

    def admit_early(self) -> None:
        """After the fold moved on: what came early may be due now, or never will be."""
        member, state = self._context.member, self._context.run_state
        for key, (frame, body) in list(self._early.items()):
            if key.step < state.next_step:
                del self._early[key]
            elif member is not None and accepts_boundary(state, member, frame):
                del self._early[key]
                self._keep(key, frame, body)

    def _keep(self, key: BoundaryKey, frame: BoundaryFrame, body: bytearray) -> None:
        self._context.cache.put(key, body, frame.hash)
        self._context.local.boundaries[key] = frame.hash
        self._context.local.unavailable.discard(key)
        self._asked.pop(key, None)
        if (event := self._arrived.pop(key, None)) is not None:
            event.set()
        self._context.wake()

    def _take_slice(self, frame: SliceFrame, body: bytearray) -> None:
        context = self._context
        if frame.step != context.run_state.next_step or context.stage is None or frame.hash in context.slices:
            return
        info = context.run_state.members.get(frame.sender)
        merge = context.stage.merge()
        if info is None or info.stage != frame.stage or frame.group != merge.group:
            return
        partition = merge.partitions.get(frame.partition)
        if partition is None:
            raise InputError(f"a slice of partition {frame.partition}, which this stage doesn't hold")
        section = context.plan.layout.sections[partition.section]
        num_items = frame.num_items
        if not 0 < num_items <= context.plan.config.pipeline.microbatches:
            raise InputError(f"a slice of {num_items} microbatches")
        data = memoryview(body)
        if frame.packing == "bits" and not merge.calibration:
            data = unpack_slice(section, partition, body, num_items)
        if data.nbytes != slice_size(section, partition, num_items, calibration=merge.calibration):
            raise InputError(f"a slice of {data.nbytes} bytes of partition {frame.partition}")
        if blake3(data).hexdigest() != frame.hash:
            raise InputError("a slice's bytes are not those of its hash")
        if sum(held.nbytes for held in context.slices.values()) + data.nbytes > MAX_SLICE_BYTES:
            logger.warning("dropping a slice of {}: over the budget", frame.sender)
            return
        context.slices[frame.hash] = data
        context.local.slices.add(frame.hash)
        context.wake()

    # --- giving ------------------------------------------------------------------------------------------------

    async def _give_boundary(self, need: NeedFrame) -> None:
        key = BoundaryKey(need.step, need.microbatch, need.stage, need.backward)
        address, data = self._context.address(need.sender), await self._context.cache.get(key)
        if address is not None and data is not None:
            self._context.background(self._send_boundary(address, key, data))

    async def _give_slice(self, need: NeedSliceFrame) -> None:
        address, data = self._context.address(need.sender), self._context.slices.get(need.hash)
        if address is not None and data is not None:
            self._context.background(self._send_slice(address, need.partition, need.hash, data))

    async def push(self, owe: Push) -> None:
        data, address = await self._context.cache.get(owe.key), self._context.address(owe.to)
        if data is None or address is None:
            raise NotFound(f"boundary {owe.key} or its receiver is gone")
        await self._send_boundary(address, owe.key, data)
        self._context.local.pushed.add((owe.key, owe.to))

    async def _send_boundary(self, address: PeerAddress, key: BoundaryKey, data: memoryview) -> None:
        context = self._context
        hash_ = context.cache.hash_of(key)
        if context.member is None or hash_ is None or self._transport is None:
            return
        found = item(context.run_state, key.step, key.microbatch, key.stage)
        generation = found.generation if found else 0
        frame = BoundaryFrame(
            context.run_id, key.step, key.microbatch, key.stage, key.backward, context.member, generation, hash_
        )
        priority = Priority.BACKWARD if key.backward else Priority.FORWARD
        await self._transport.send(
            address, frame, data, priority=priority, deadline=Deadline.after(TIMEOUTS.peer_send_s)
        )

    async def send_slice(self, owe: SendSlice) -> None:
        data, address = self._context.slices.get(owe.hash), self._context.address(owe.to)
        if data is None or address is None:
            raise NotFound(f"slice {owe.partition} or its owner is gone")
        await self._send_slice(address, owe.partition, owe.hash, data)
        self._context.local.sent.add((owe.hash, owe.to))

    async def _send_slice(self, address: PeerAddress, partition: int, hash_: str, data: memoryview) -> None:
        context = self._context
        stage = context.stage
        if stage is None or context.member is None or self._transport is None:
            return
        merge = stage.merge()
        num_items = self._items_of(hash_)
        packing, body = context.plan.config.merge.packing, data
        if packing == "bits" and not merge.calibration:
            found = merge.partitions[partition]
            section = context.plan.layout.sections[found.section]
            body = memoryview(pack_slice(section, found, data, num_items))
        frame = SliceFrame(
            context.run_id, merge.step, merge.group, partition, stage.stage, context.member, hash_, num_items, packing
        )
        await self._transport.send(address, frame, body, deadline=Deadline.after(TIMEOUTS.peer_send_s))

    def _items_of(self, hash_: str) -> int:
        for commitment in self._context.local.commitments.values():
            if any(value == hash_ for _, value in commitment.hashes):
                return len(commitment.microbatches)
        raise NotFound("that slice isn't mine")

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
                need = NeedFrame(context.run_id, key.step, key.microbatch, key.stage, key.backward, member)
                await self._transport.send(address, need, b"", deadline=Deadline.after(TIMEOUTS.peer_send_s))
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] >= ASKED_BEFORE_MISSING:
            context.local.unavailable.add(key)

    async def fetch_slice(self, owe: FetchSlice) -> None:
        """From its contributor; once slices are routed through the store, from there."""
        context = self._context
        await asyncio.sleep(TIMEOUTS.peer_need_retry_s)
        if owe.hash in context.slices or context.member is None or self._transport is None:
            return
        if owe.routed:
            (data,) = await context.blobs.get_many([(owe.hash, 0)], Deadline.after(TIMEOUTS.store_request_s))
            context.slices[owe.hash] = memoryview(data)
            context.local.slices.add(owe.hash)
            return
        address = context.address(owe.source)
        if address is not None:
            need = NeedSliceFrame(
                context.run_id, owe.step, owe.group, owe.partition, owe.stage, owe.hash, context.member
            )
            await self._transport.send(address, need, b"", deadline=Deadline.after(TIMEOUTS.peer_send_s))

    async def store_slice(self, owe: StoreSlice) -> None:
        data = self._context.slices.get(owe.hash)
        if data is None:
            raise NotFound(f"slice {owe.partition} is gone")
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        await self._context.blobs.put_many([(owe.hash, data)], "evidence", deadline)
        self._context.local.stored.add(owe.hash)

    def end_step(self, step: int) -> None:
        """Nothing of ``step``, nor of steps before, is waited for any more."""
        for waited in (self._asked, self._arrived):
            for key in [key for key in waited if key.step <= step]:
                del waited[key]

    def is_known(self, hotkey: str) -> bool:
        """Whether a hotkey may connect: it is a member, as far as we have folded."""
        state = self._context.run_state
        stages = range(len(state.run.cuts)) if state.run else range(0)
        return any(member.hotkey == hotkey for stage in stages for member in members_of(state, stage))
