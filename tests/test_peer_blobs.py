"""Blobs from replica to replica over real connections: right bytes, spread and bounded requests, donors that die or lie."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from join_cases import joined

from miner.peer_blobs import REQUESTS_PER_DONOR, SERVED_PER_PEER, NodeView, PeerBlobs
from miner.sources import Holdings
from subnet.errors import Busy, HashMismatch, InputError, NotFound
from subnet.model.snapshots import SnapshotManifest
from subnet.net.base import PeerAddress
from subnet.net.streams import StreamTransport
from subnet.protocol.messages import LIMIT_PIECE_BYTES, AnyPeerFrame, BlobPieceFrame, NoBlobFrame, WantBlobFrame
from subnet.protocol.signing import Signer
from subnet.protocol.wire import blob_hash
from subnet.run import state as st
from subnet.store.disk import BlobCache
from subnet.timing import Deadline
from subnet.words import BlobHash, Member


def soon() -> Deadline:
    return Deadline.after(20)


class Donor:
    """A member with a transport, a cache and both sides of the exchange."""

    def __init__(self, name: str, directory: Path, state: st.RunState) -> None:
        self.signer = Signer.from_uri(f"//{name}")
        self.state, self.tasks = state, set[asyncio.Task[None]]()
        self.member: Member | None = None
        self.cache = BlobCache(directory / name, 64 << 20)
        self.holdings = Holdings(self.cache, lambda: state)
        node = NodeView("run", lambda: state, lambda: self.member, self.address_of, self.background)
        self.peers = PeerBlobs(node, self.holdings, piece_s=2.0)
        self.lies = False

    async def start(self, number: int) -> Donor:
        self.transport: StreamTransport[AnyPeerFrame] = StreamTransport(self.signer, AnyPeerFrame, self.on_frame)
        await self.transport.start()
        self.peers.use(self.transport)
        self.member = joined(self.state, self.signer.hotkey, number, port=self.transport.port, version=3)
        return self

    async def on_frame(self, peer: str, header: AnyPeerFrame, body: bytearray) -> None:
        assert isinstance(header, WantBlobFrame | BlobPieceFrame | NoBlobFrame)
        if self.lies and isinstance(header, WantBlobFrame):
            size = self.cache.size_of(BlobHash(header.hash)) or 0
            assert self.member is not None
            frame = BlobPieceFrame("run", header.request, header.hash, header.offset, size, self.member)
            address = self.address_of(header.sender)
            assert address is not None
            lie = bytes(min(LIMIT_PIECE_BYTES, size - header.offset))
            self.background(self.transport.send(address, frame, lie, deadline=soon()))
            return
        self.peers.on_frame(header, body)

    def address_of(self, member: Member) -> PeerAddress | None:
        info = self.state.members.get(member)
        return PeerAddress(member.hotkey, info.host, info.port) if info else None

    def background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def hold(self, data: bytes) -> str:
        blob = blob_hash(data)
        self.cache.put(blob, data)
        self.holdings._chunks.setdefault("manifest", set()).add(blob)
        return str(blob)

    async def close(self) -> None:
        await self.transport.close()
        for task in list(self.tasks):
            task.cancel()


@pytest.fixture
async def donors(tmp_path: Path) -> AsyncIterator[list[Donor]]:
    """The first asks the others."""
    state = st.new_state()
    made = [await Donor(f"Donor{i}", tmp_path, state).start(i + 1) for i in range(3)]
    yield made
    for donor in made:
        await donor.close()


async def test_a_blob_comes_in_pieces_from_whoever_has_it(donors: list[Donor]) -> None:
    joiner, _, other = donors
    data = os.urandom(2 * LIMIT_PIECE_BYTES + 17)
    blob, empty = other.hold(data), other.hold(b"")
    assert await joiner.peers.fetch((blob, len(data)), soon()) == data
    assert await joiner.peers.fetch((blob, 0), soon()) == data, "also where the size isn't known"
    assert await joiner.peers.fetch((empty, 0), soon()) == b""
    assert other.peers.bytes_out == 2 * len(data)
    with pytest.raises(NotFound):
        await joiner.peers.fetch((str(blob_hash(b"nobody's")), 8), soon())
    assert len(joiner.peers.donors(blob)) == 2, "not to have a blob is no fault"
    assert joiner.peers.num_asked == 0
    assert not joiner.peers._load
    assert not other.peers._serving


async def test_only_the_runs_snapshots_and_log_are_served(donors: list[Donor]) -> None:
    joiner, one, other = donors
    secret = b"somebody else's"
    for donor in (one, other):
        donor.cache.put(blob_hash(secret), secret)
    with pytest.raises(NotFound):
        await joiner.peers.fetch((str(blob_hash(secret)), len(secret)), soon())
    one.holdings.learn("manifest", SnapshotManifest(0, ()))
    assert not one.holdings.may_serve(blob_hash(secret))


async def test_wrong_bytes_are_noticed_and_their_donor_is_passed_over(donors: list[Donor]) -> None:
    joiner, one, other = donors
    data = os.urandom(5000)
    blob = str(blob_hash(data))
    for donor in (one, other):
        donor.hold(data)
    liar = next(donor for donor in (one, other) if donor.member == joiner.peers.donors(blob)[0])
    liar.lies = True
    assert await joiner.peers.fetch((blob, 5000), soon()) == data
    assert liar.member not in joiner.peers.donors(blob)
    assert all(liar.member not in joiner.peers.donors(str(i)) for i in range(20)), "for the rest, whatever the blob"
    honest = other if liar is one else one
    honest.lies = True
    with pytest.raises(HashMismatch):
        await joiner.peers.fetch((blob, 5000), soon())
    assert joiner.peers.donors(blob) == []


async def test_a_donor_that_dies_is_replaced(donors: list[Donor]) -> None:
    joiner, one, other = donors
    data = os.urandom(3 * LIMIT_PIECE_BYTES)
    blob = str(blob_hash(data))
    for donor in (one, other):
        donor.hold(data)
    first = next(donor for donor in (one, other) if donor.member == joiner.peers.donors(blob)[0])
    given = 0
    answer = first.holdings.get_piece

    def die_after_one(*args: Any) -> Any:
        nonlocal given
        given += 1
        if given == 2:
            asyncio.run_coroutine_threadsafe(first.transport.close(), loop).result(5)
        return answer(*args)

    loop = asyncio.get_running_loop()
    first.holdings.get_piece = die_after_one  # type: ignore[method-assign]
    fetching = asyncio.create_task(joiner.peers.fetch((blob, len(data)), soon()))
    while given < 2:
        await asyncio.sleep(0.01)
    assert first.member is not None
    joiner.peers.gone(first.member)
    assert await fetching == data
    assert first.member not in joiner.peers.donors(blob)
    assert joiner.peers.num_asked == 0


async def test_requests_are_spread_and_bounded(donors: list[Donor]) -> None:
    joiner, one, other = donors
    datas = [os.urandom(1000) for _ in range(40)]
    most = dict.fromkeys((one.signer.hotkey, other.signer.hotkey), 0)
    for donor in (one, other):
        for data in datas:
            donor.hold(data)
        answer = donor.holdings.get_piece

        def count(*args: Any, donor: Donor = donor, answer: Any = answer) -> Any:
            key = donor.signer.hotkey
            most[key] = max(most[key], donor.peers._serving[joiner.signer.hotkey])
            return answer(*args)

        donor.holdings.get_piece = count  # type: ignore[method-assign]
    refs = [(str(blob_hash(data)), 1000) for data in datas]
    assert await asyncio.gather(*(joiner.peers.fetch(ref, soon()) for ref in refs)) == datas
    assert max(most.values()) <= REQUESTS_PER_DONOR
    assert min(one.peers.bytes_out, other.peers.bytes_out) > 5000, "both give"


async def test_a_greedy_peer_is_told_to_wait_and_a_mad_one_loses_its_connection(donors: list[Donor]) -> None:
    joiner, one, _ = donors
    blob = one.hold(b"data")
    assert joiner.member is not None
    assert one.member is not None
    gate = asyncio.Event()
    loop, answer = asyncio.get_running_loop(), one.holdings.get_piece

    def wait(*args: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
        return answer(*args)

    one.holdings.get_piece = wait  # type: ignore[method-assign]
    asked = [asyncio.create_task(joiner.peers._piece(one.member, blob, 0, soon())) for _ in range(SERVED_PER_PEER + 3)]
    while sum(task.done() for task in asked) < 3:
        await asyncio.sleep(0.01)
    assert [type(task.exception()) for task in asked if task.done()] == [Busy] * 3
    gate.set()
    await asyncio.wait(asked)
    assert sum(task.exception() is None for task in asked) == SERVED_PER_PEER
    with pytest.raises(InputError):
        one.peers.on_frame(WantBlobFrame("run", 1, blob, 0, LIMIT_PIECE_BYTES + 1, joiner.member), bytearray())
    with pytest.raises(InputError):
        one.peers.on_frame(WantBlobFrame("run", 1, blob, -1, 1, joiner.member), bytearray())
