"""Slices of sums straight from contributor to owner: checked before they are held, packed and checked off the event loop.

A slice may come before a manifest names it (:mod:`miner.early_slices`); one that is named is kept for as long as its step.
Wrong bytes end their sender's connection. What has to go through the store is :mod:`miner.store_links`' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from loguru import logger

from miner.context import RunContext, StageWork
from miner.early_slices import EarlySlice, EarlySlices, names
from miner.owes import FetchSlice, SendSlice
from subnet.errors import InputError, NotFound
from subnet.logs import ReasonLog
from subnet.net.base import PeerAddress, Priority, Transport, send_deadline
from subnet.numerics.owners import foreseen_owners, foreseen_seconds, owners_of, pair
from subnet.protocol.messages import AnyPeerFrame, NeedSliceFrame, SliceFrame
from subnet.run import state as st
from subnet.run.state import RunState, StepWork
from subnet.timing import TIMEOUTS
from subnet.words import Member

MAX_SLICE_BYTES = 2 << 30
"""Of all slices held, mine and others', named or not."""
AT_ONCE = 2
"""Slices packed or checked at the same time: more would only take turns."""

T = TypeVar("T")


class Slices:
    """``transport`` is set once it listens."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._transport: Transport[AnyPeerFrame] | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._lanes: dict[str, asyncio.Semaphore] = {}
        """By peer: a send's deadline begins when its turn comes."""
        self._reasons = ReasonLog()
        self.early = EarlySlices()

    def use(self, transport: Transport[AnyPeerFrame]) -> None:
        self._transport = transport

    # --- arriving ----------------------------------------------------------------------------------------------

    async def take(self, frame: SliceFrame, body: bytearray) -> None:
        """One that somebody sent, early or not; what nobody is entitled to send is dropped, wrong bytes are an error."""
        context = self._context
        stage, member = context.stage, context.member
        if stage is None or member is None or not self._is_open(stage, frame) or self._is_held(frame):
            return
        self._check_form(stage, frame, len(body))
        if not self._is_due(member, frame):
            return
        if not self._has_room(frame, len(body)):
            self._reasons.note("slices", "no_room", f"dropping a slice of {frame.sender}: over the budget")
            self.early.refuse(frame.hash)
            return
        merge, packed = stage.merge(), frame.packing == "bits"
        data = await self._beside(
            lambda: merge.accept_slice(frame.partition, body, frame.num_items, frame.hash, packed=packed)
        )
        # while that was checked the step may have ended, the manifest come, the sender gone
        if context.stage is not stage or context.member != member or not self._is_open(stage, frame):
            return
        if self._is_held(frame) or not self._is_due(member, frame):
            return
        if self._is_named(frame):
            self._keep(frame.hash, data)
        else:
            epoch = st.epoch(context.run_state, frame.sender)
            self.early.put(frame.sender, frame.partition, EarlySlice(frame.step, epoch, frame.hash, data))

    def _is_open(self, stage: StageWork, frame: SliceFrame) -> bool:
        """Whether it belongs to the open step's merge of my group, and its sender serves the stage it says."""
        state = self._context.run_state
        info = state.members.get(frame.sender)
        if state.work is None or frame.step != state.work.step or stage.state.next_step != frame.step:
            return False
        return info is not None and info.stage == frame.stage and frame.group == stage.merge().group

    def _is_held(self, frame: SliceFrame) -> bool:
        return frame.hash in self._context.slices or self.early.has(frame.sender, frame.partition, frame.hash)

    def _check_form(self, stage: StageWork, frame: SliceFrame, size_bytes: int) -> None:
        merge = stage.merge()
        if frame.partition not in merge.partitions:
            raise InputError(f"a slice of partition {frame.partition}, which this stage doesn't hold")
        if frame.packing not in ("bytes", "bits"):
            raise InputError(f"a slice packed as {frame.packing!r}")
        if not 0 < frame.num_items <= self._context.plan.config.num_items:
            raise InputError(f"a slice of {frame.num_items} microbatches")
        expected = merge.slice_bytes(frame.partition, frame.num_items, packed=frame.packing == "bits")
        if size_bytes != expected:
            raise InputError(f"a slice of {size_bytes} bytes of partition {frame.partition} instead of {expected}")

    def _is_due(self, member: Member, frame: SliceFrame) -> bool:
        """Named by the manifest, or of a contributor to be, for a partition that is about to be mine."""
        state = self._context.run_state
        work = state.work
        if work is None:
            return False
        if self._is_named(frame):
            return True
        return frame.sender in work.held and is_mine(state, work, frame.group, frame.partition, member)

    def _is_named(self, frame: SliceFrame) -> bool:
        merge = st.merge_of(self._context.run_state, frame.step, frame.group)
        if merge is None or merge.phase not in (st.REDUCING, st.REVEALED):
            return False
        return names(merge, frame.sender, frame.partition, frame.hash)

    def _has_room(self, frame: SliceFrame, size_bytes: int) -> bool:
        held = sum(data.nbytes for data in self._context.slices.values())
        if self._is_named(frame):
            return held + size_bytes <= MAX_SLICE_BYTES
        whole = held + self.early.size_bytes + size_bytes <= MAX_SLICE_BYTES
        return whole and self.early.has_room(frame.sender, frame.partition, size_bytes)

    def _keep(self, hash_: str, data: memoryview) -> None:
        context = self._context
        context.slices[hash_] = data
        context.local.slices.add(hash_)
        context.wake()

    def admit_early(self) -> None:
        """After the fold moved on: what came early may be named now, or never will be."""
        context = self._context
        if not len(self.early) or context.stage is None or context.member is None:
            return
        group = st.group_of(context.run_state, context.stage.stage)
        for hash_, data in self.early.settle(context.run_state, group, context.member).items():
            self._keep(hash_, data)

    # --- giving ------------------------------------------------------------------------------------------------

    async def give(self, need: NeedSliceFrame) -> None:
        address, data = self._context.address(need.sender), self._context.slices.get(need.hash)
        if address is not None and data is not None:
            self._context.background(self._send(address, need.partition, need.hash, data))

    async def send(self, owe: SendSlice) -> None:
        data, address = self._context.slices.get(owe.hash), self._context.address(owe.to)
        if data is None or address is None:
            raise NotFound(f"slice {owe.partition} or its owner is gone")
        await self._send(address, owe.partition, owe.hash, data)
        self._context.local.sent.add((owe.hash, owe.to))
        self._context.wake()

    async def _send(self, address: PeerAddress, partition: int, hash_: str, data: memoryview) -> None:
        context = self._context
        stage, member = context.stage, context.member
        if stage is None or member is None or self._transport is None:
            return
        merge, num_items, packing = stage.merge(), self._items_of(hash_), context.plan.config.merge.packing
        frame = SliceFrame(
            context.run_id, merge.step, merge.group, partition, stage.stage, member, hash_, num_items, packing
        )
        async with self._lanes.setdefault(address.hotkey, asyncio.Semaphore(AT_ONCE)):
            body = data
            if packing == "bits":
                body = await self._beside(lambda: merge.pack(partition, data, num_items))
            await self._transport.send(address, frame, body, deadline=send_deadline(memoryview(body).nbytes))

    def _items_of(self, hash_: str) -> int:
        for (_, _, microbatches), made in self._context.local.made.items():
            if hash_ in made.values():
                return len(microbatches)
        raise NotFound("that slice isn't mine")

    # --- asking ------------------------------------------------------------------------------------------------

    async def fetch(self, owe: FetchSlice) -> None:
        """Ask its contributor, once it has had the time to send it by itself."""
        context = self._context
        if not self.early.was_refused(owe.hash):
            await asyncio.sleep(TIMEOUTS.peer_need_retry_s)
        if owe.hash in context.slices or context.member is None or self._transport is None:
            return
        address = context.address(owe.source)
        if address is None:
            return
        need = NeedSliceFrame(context.run_id, owe.step, owe.group, owe.partition, owe.stage, owe.hash, context.member)
        await self._transport.send(address, need, b"", priority=Priority.CONTROL, deadline=send_deadline(0))
        logger.debug("asked {} for its slice of partition {}", owe.source, owe.partition)
        if self.early.was_refused(owe.hash):
            await asyncio.sleep(TIMEOUTS.peer_need_retry_s)

    def end_step(self, step: int) -> None:
        self.early.end_step(step)
        self._lanes.clear()

    def rewind(self) -> None:
        self.early = EarlySlices()

    async def _beside(self, work: Callable[[], T]) -> T:
        async with self._slots:
            return await asyncio.to_thread(work)


def is_mine(state: RunState, work: StepWork, group: int, partition: int, me: Member) -> bool:
    """Whether I own the partition now, or will if nobody comes or goes."""
    merge = work.merges[group]
    if merge.owners and me in owners_of(merge, partition):
        return True
    foreseen = foreseen_owners(state, group)
    if foreseen is None:
        return False
    return me in pair(foreseen, foreseen_seconds(state, group, foreseen), partition)
