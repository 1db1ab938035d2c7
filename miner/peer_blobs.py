"""Blobs from replica to replica, in pieces: what arrives has its hash, and a donor that fails is passed over.

Donors are spread by rendezvous over the blob's hash, with at most two requests under way at each. A donor that is slow or
gone is passed over for a while, one that served wrong bytes for as long as it lives, with the reason in the log. Served
are only blobs of the run's snapshots and log, a few requests of a peer at a time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from loguru import logger

from miner.blobs import BlobRef
from miner.sources import Holdings
from subnet.errors import Busy, HashMismatch, InputError, IotaError, NotFound, Unreachable
from subnet.model.snapshots import CHUNK_BYTES, LIMIT_MANIFEST_BYTES
from subnet.net.base import PeerAddress, Priority, Transport, send_deadline
from subnet.protocol.messages import (
    LIMIT_PIECE_BYTES,
    AnyPeerFrame,
    BlobPieceFrame,
    NoBlobFrame,
    WantBlobFrame,
)
from subnet.protocol.wire import Buffer, blob_hash
from subnet.run.state import RunState
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import Member

REQUESTS_PER_DONOR = 2
SERVED_PER_PEER = 4
SLOW_FOR_S = 60.0
"""How long a donor that was slow or unreachable isn't asked."""
LIMIT_BLOB_BYTES = max(CHUNK_BYTES, LIMIT_MANIFEST_BYTES, 1 << 30)
"""Of a blob whose size isn't known beforehand."""


@dataclass
class _Asked:
    donor: Member
    want: WantBlobFrame
    answer: asyncio.Future[tuple[BlobPieceFrame, bytearray]]


@dataclass(frozen=True)
class NodeView:
    """What :class:`PeerBlobs` needs of the node it belongs to."""

    run_id: str
    state: Callable[[], RunState]
    member: Callable[[], Member | None]
    address: Callable[[Member], PeerAddress | None]
    background: Callable[[Coroutine[Any, Any, None]], None]


class PeerBlobs:
    """Both sides: :meth:`fetch` asks, :meth:`on_frame` takes answers and serves; implements ``sources.Replicas``."""

    def __init__(self, node: NodeView, holdings: Holdings, *, piece_s: float = TIMEOUTS.blob_piece_s) -> None:
        self._node, self._holdings, self._piece_s = node, holdings, piece_s
        self._transport: Transport[AnyPeerFrame] | None = None
        self._requests = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._load: Counter[Member] = Counter()
        self._freed = asyncio.Event()
        self._passed_over: dict[Member, float] = {}
        """Until when, in the loop's time."""
        self._serving: Counter[str] = Counter()
        self.bytes_out = 0

    def use(self, transport: Transport[AnyPeerFrame]) -> None:
        self._transport = transport

    @property
    def num_asked(self) -> int:
        """Requests without an answer."""
        return len(self._asked)

    # --- asking ------------------------------------------------------------------------------------------------

    def donors(self, blob: str) -> list[Member]:
        """Live replicas of this member's stage that have a state and can be reached, in the blob's own order."""
        me, state, now = self._node.member(), self._node.state(), asyncio.get_running_loop().time()
        info = state.members.get(me) if me is not None else None
        if info is None or not info.reachable:
            return []
        self._passed_over = {k: until for k, until in self._passed_over.items() if k in state.members and until > now}
        found = [
            member
            for member, other in state.members.items()
            if member != me and other.stage == info.stage and other.version is not None and other.reachable
        ]
        return sorted(
            (member for member in found if member not in self._passed_over),
            key=lambda member: blake3(f"{blob}/{member.hotkey}".encode()).digest(),
        )

    async def fetch(self, ref: BlobRef, deadline: Deadline) -> bytearray:
        error: IotaError = NotFound(f"no replica has blob {ref[0][:10]}")
        tried: set[Member] = set()
        while (donor := await self._next_donor(ref[0], tried, deadline)) is not None:
            tried.add(donor)
            self._load[donor] += 1
            try:
                return await self._from(donor, ref, deadline)
            except NotFound:
                continue
            except Busy as busy:
                error = busy
            except IotaError as failure:
                error = failure
                self._pass_over(donor, failure)
            finally:
                self._load[donor] -= 1
                if not self._load[donor]:
                    del self._load[donor]
                self._freed.set()
        raise error

    async def _next_donor(self, blob: str, tried: set[Member], deadline: Deadline) -> Member | None:
        """The first that wasn't tried and has room; None once nobody is left."""
        while True:
            left = [donor for donor in self.donors(blob) if donor not in tried]
            if not left or self._transport is None:
                return None
            free = [donor for donor in left if self._load[donor] < REQUESTS_PER_DONOR]
            if free:
                return free[0]
            self._freed.clear()
            async with deadline.limit(f"a replica with room for blob {blob[:10]}"):
                await self._freed.wait()

    def _pass_over(self, donor: Member, why: IotaError) -> None:
        wrong = isinstance(why, InputError)
        now = asyncio.get_running_loop().time()
        self._passed_over[donor] = float("inf") if wrong else now + SLOW_FOR_S
        logger.log("WARNING" if wrong else "INFO", "replica {} is passed over: {}", donor, why)

    async def _from(self, donor: Member, ref: BlobRef, deadline: Deadline) -> bytearray:
        """All of a blob from one donor: bytes of two would leave nobody to name if they are wrong."""
        blob, size_bytes = ref
        data: bytearray | None = None
        filled = 0
        while data is None or filled < len(data):
            frame, piece = await self._piece(donor, blob, filled, deadline)
            if data is None:
                if (size_bytes and frame.size_bytes != size_bytes) or not 0 <= frame.size_bytes <= LIMIT_BLOB_BYTES:
                    raise InputError(f"{donor} says that blob {blob[:10]} has {frame.size_bytes} bytes")
                data = bytearray(frame.size_bytes)
            if frame.size_bytes != len(data) or len(piece) != min(LIMIT_PIECE_BYTES, len(data) - filled):
                raise InputError(f"{donor} sent {len(piece)} bytes of blob {blob[:10]} from {filled} on")
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        if await asyncio.to_thread(blob_hash, data) != blob:
            raise HashMismatch(f"{donor} served other bytes than those of blob {blob[:10]}")
        return data

    async def _piece(
        self, donor: Member, blob: str, offset: int, deadline: Deadline
    ) -> tuple[BlobPieceFrame, bytearray]:
        member, address = self._node.member(), self._node.address(donor)
        if member is None or address is None or self._transport is None:
            raise Unreachable(f"{donor} is gone")
        want = WantBlobFrame(self._node.run_id, next(self._requests), blob, offset, LIMIT_PIECE_BYTES, member)
        asked = _Asked(donor, want, asyncio.get_running_loop().create_future())
        self._asked[want.request] = asked
        limit = deadline.sooner(self._piece_s)
        try:
            await self._transport.send(address, want, b"", priority=Priority.CONTROL, deadline=limit)
            async with limit.limit(f"a piece of blob {blob[:10]} from {donor}"):
                return await asked.answer
        finally:
            del self._asked[want.request]

    def gone(self, member: Member) -> None:
        """The fold says that a member is gone: nobody waits for its answers."""
        for asked in list(self._asked.values()):
            if asked.donor == member and not asked.answer.done():
                asked.answer.set_exception(Unreachable(f"{member} is gone"))

    # --- frames ------------------------------------------------------------------------------------------------

    def on_frame(self, header: WantBlobFrame | BlobPieceFrame | NoBlobFrame, body: bytearray) -> None:
        """Of a proven sender; an error ends its connection."""
        if isinstance(header, WantBlobFrame):
            self._take_want(header)
            return
        asked = self._asked.get(header.request)
        if asked is None or asked.donor != header.sender or asked.want.hash != header.hash or asked.answer.done():
            return  # late: somebody else was asked meanwhile
        if isinstance(header, BlobPieceFrame):
            if header.offset != asked.want.offset or len(body) > LIMIT_PIECE_BYTES:
                raise InputError(f"a piece of {len(body)} bytes from {header.offset} on wasn't asked for")
            asked.answer.set_result((header, body))
            return
        busy = header.code == "busy"
        what = f"{header.sender} answers {header.code[:40]!r} for blob {header.hash[:10]}"
        asked.answer.set_exception(Busy(what) if busy else NotFound(what))

    def _take_want(self, want: WantBlobFrame) -> None:
        if want.offset < 0 or not 0 < want.num_bytes <= LIMIT_PIECE_BYTES:
            raise InputError(f"{want.num_bytes} bytes of a blob from {want.offset} on were asked for")
        address = self._node.address(want.sender)
        if address is not None:
            self._node.background(self._serve(address, want))

    async def _serve(self, address: PeerAddress, want: WantBlobFrame) -> None:
        if self._serving[want.sender.hotkey] >= SERVED_PER_PEER:
            await self._refuse(address, want, "busy")
            return
        self._serving[want.sender.hotkey] += 1
        try:
            if not self._holdings.may_serve(want.hash):
                await self._refuse(address, want, "not_served")
                return
            found = await asyncio.to_thread(self._holdings.get_piece, want.hash, want.offset, want.num_bytes)
            if found is None:
                await self._refuse(address, want, "not_held")
                return
            piece, size_bytes = found
            member = self._node.member()
            if member is not None:
                frame = BlobPieceFrame(want.run, want.request, want.hash, want.offset, size_bytes, member)
                await self._send(address, frame, piece)
                self.bytes_out += len(piece)
        finally:
            self._serving[want.sender.hotkey] -= 1
            if not self._serving[want.sender.hotkey]:
                del self._serving[want.sender.hotkey]

    async def _refuse(self, address: PeerAddress, want: WantBlobFrame, code: str) -> None:
        member = self._node.member()
        if member is not None:
            await self._send(address, NoBlobFrame(want.run, want.request, want.hash, code, member), b"")

    async def _send(self, address: PeerAddress, frame: AnyPeerFrame, body: Buffer) -> None:
        if self._transport is not None:
            priority = Priority.REST if isinstance(frame, BlobPieceFrame) else Priority.CONTROL
            await self._transport.send(
                address, frame, body, priority=priority, deadline=send_deadline(memoryview(body).nbytes)
            )
