"""Whatever a peer sends that it may not is refused with its code, said once, and the next honest frame is taken."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from loguru import logger
from model_cases import tiny_plan
from peer_cases import raw_peer, running, soon, until, write
from test_tickets import BEFORE, ME, OTHER, state_of

from miner.boundaries import BoundaryCache
from miner.local_view import BoundaryKey, LocalView
from miner.member_links import Links
from subnet.model.memory import boundary_bytes
from subnet.net import records
from subnet.net.base import Body, PeerAddress, Priority, TransportLimits
from subnet.net.records import Kind
from subnet.net.streams import StreamTransport
from subnet.protocol import wire
from subnet.protocol.messages import AnyPeerFrame, BoundaryFrame
from subnet.protocol.signing import Signer
from subnet.words import Member

HERE, THERE = Signer.from_uri("//Here"), Signer.from_uri("//There")
FORWARD = Priority.FORWARD


def named(state: Any) -> Any:
    """The same state with the maker's real hotkey."""
    maker = msgspec.structs.replace(BEFORE, hotkey=THERE.hotkey)
    state.members[maker] = state.members.pop(BEFORE)
    for item in state.work.items[0].values():
        if item.member == BEFORE:
            item.member = maker
    state.work.replays.clear()
    return maker


class Ends:
    """A member's links behind a transport, and the transport of a peer that makes boundaries for it."""

    def __init__(self, tmp_path: Path) -> None:
        plan = tiny_plan((0, 2), hidden_size=64)
        self.state = state_of()
        self.maker = named(self.state)
        cache = BoundaryCache(tmp_path / "boundaries", memory_bytes=1 << 24, disk_bytes=1 << 24)
        context: Any = SimpleNamespace(
            plan=plan, run_id="run", local=LocalView(), run_state=self.state, member=ME, cache=cache, stage=None,
            wake=lambda: None, peer_blobs=SimpleNamespace(use=lambda transport: None),
        )  # fmt: skip
        self.local, self.size = context.local, boundary_bytes(plan)
        self.links = links = Links(context)
        limits = TransportLimits(boundary_bytes=self.size)
        self.transport = StreamTransport[AnyPeerFrame](HERE, AnyPeerFrame, links.on_frame, limits=limits)
        self.peer = StreamTransport[AnyPeerFrame](THERE, AnyPeerFrame, links.on_frame)
        links.use(self.transport)
        self.signer = HERE

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(HERE.hotkey, "127.0.0.1", self.transport.port)

    @property
    def codes(self) -> dict[str, int]:
        return self.transport.offences().get(THERE.hotkey, {})

    def body(self, seed: int = 0) -> bytes:
        values = np.random.default_rng(seed).standard_normal(self.size // 4)
        return values.astype("<f4").tobytes()

    def frame(self, body: bytes, **changes: Any) -> BoundaryFrame:
        good = BoundaryFrame("run", 5, 0, 0, False, self.maker, 2, blake3(body).hexdigest())
        return msgspec.structs.replace(good, **changes)

    async def send(self, frame: BoundaryFrame, body: bytes) -> None:
        await self.peer.send(self.address, frame, body, priority=FORWARD, deadline=soon())


def bad_frames(ends: Ends) -> dict[str, tuple[BoundaryFrame, bytes, str]]:
    body = ends.body()
    odd = bytearray(body)
    odd[8:12] = struct.pack("<f", float("nan"))
    half = np.frombuffer(body, "<f4").astype("<f2").tobytes()
    return {
        "somebody else's name": (ends.frame(body, sender=OTHER), body, "foreign_sender"),
        "somebody else's lease": (ends.frame(body, microbatch=1, generation=1), body, "not_leased"),
        "an old generation": (ends.frame(body, generation=1), body, "stale_lease"),
        "another run": (ends.frame(body, run="other"), body, "wrong_run"),
        "another stage": (ends.frame(body, stage=2), body, "wrong_stage"),
        "an unknown microbatch": (ends.frame(body, microbatch=99), body, "bad_input"),
        "another dtype": (ends.frame(half), half, "bad_input"),
        "another length": (ends.frame(body[4:]), body[4:], "bad_input"),
        "another hash": (ends.frame(body), ends.body(1), "hash_mismatch"),
        "no number": (ends.frame(bytes(odd)), bytes(odd), "not_finite"),
        "an unknown packing": (ends.frame(body, packing="gzip"), body, "bad_input"),
    }


async def test_each_bad_frame_is_refused_and_the_good_one_taken(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    said: list[str] = []
    sink = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    try:
        async with running(ends, SimpleNamespace(transport=ends.peer)):  # type: ignore[arg-type]
            for what, (frame, body, code) in bad_frames(ends).items():
                before = ends.codes.get(code, 0)
                peer = ends.transport._peers.get(THERE.hotkey)
                if peer is not None:
                    peer.offences._level = 0.0  # so that none of these is one too many
                await ends.send(frame, body)
                await until(lambda code=code, before=before: ends.codes.get(code, 0) == before + 1)
                assert not ends.local.boundaries, what
            good = ends.body()
            await ends.send(ends.frame(good), good)
            key = BoundaryKey(5, 0, 0, False)
            await until(lambda: ends.local.boundaries.get(key) == blake3(good).hexdigest())
            assert THERE.hotkey in ends.transport.connected()
    finally:
        logger.remove(sink)
    for code in ends.codes:
        assert sum(f"is refused: {code}:" in line for line in said) == 1, code


async def test_10_gb_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    body = ends.body()
    async with running(ends, SimpleNamespace(transport=ends.peer)):  # type: ignore[arg-type]
        async with raw_peer(ends, THERE) as liar:  # type: ignore[arg-type]
            header = wire.encode(ends.frame(body))
            write(liar, records.start(FORWARD, header, 10 << 30), records.head(Kind.DATA, FORWARD, 1 << 20))
            await until(lambda: ends.codes == {"too_large": 1})
        await ends.send(ends.frame(body), body)
        await until(lambda: len(ends.local.boundaries) == 1)


async def test_who_goes_on_is_cut_off_and_let_in_again(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    body = ends.body()
    async with running(ends, SimpleNamespace(transport=ends.peer)):  # type: ignore[arg-type]
        for number in range(1, 6):
            await ends.send(ends.frame(body), ends.body(number))
        await until(lambda: ends.codes.get("hash_mismatch") == 5 and not ends.transport.connected())
        await ends.send(ends.frame(body), body)  # waits until the cut-off of 2 s is over
        await until(lambda: len(ends.local.boundaries) == 1)


async def test_what_comes_early_takes_nobody_elses_place(tmp_path: Path) -> None:
    """A frame that names a lease yet to come waits; however many such somebody sends, another's stays."""
    ends = Ends(tmp_path)
    links = ends.links
    good = ends.body()
    await links.on_frame(THERE.hotkey, ends.frame(good, step=6), Body(good))
    for number in range(600):
        lie = ends.body(number)
        key = {"step": 6, "microbatch": number % 3, "sender": Member("eve", 1, 8), "generation": 1 + number}
        await links.on_frame("eve", ends.frame(lie, **key), Body(lie))
    for number in range(300):
        lie = ends.body(number)
        await links.on_frame("eve", ends.frame(lie, step=7 + number, sender=Member("eve", 1, 8)), Body(lie))
    assert len(links._early) <= 256
    ends.state.work.step = ends.state.next_step = 6
    links.admit_early()
    assert ends.local.boundaries == {BoundaryKey(6, 0, 0, False): blake3(good).hexdigest()}
