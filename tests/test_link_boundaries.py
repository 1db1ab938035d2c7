"""Boundaries between miners in every code, packed or not: the same bytes arrive, and whatever isn't those is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from model_cases import tiny_plan

from miner import member_links
from miner.boundaries import BoundaryCache
from miner.local_view import BoundaryKey, LocalView, MadeFrom, Sent
from miner.member_links import Links
from miner.tickets import UnsignedBoundary
from subnet.errors import HashMismatch, InputError, TooLarge, Unreachable
from subnet.model.items import ItemShape
from subnet.net.base import Body, PeerAddress
from subnet.numerics.codes import encode
from subnet.numerics.planes import pack
from subnet.protocol.messages import BoundaryFrame
from subnet.protocol.sent import is_sent, sent_by, sign_sent
from subnet.protocol.signing import Signer
from subnet.run.config import AuditSection
from subnet.words import Member

ME, PEER = Member("me", 1, 1), Member("peer", 1, 2)
KEY = BoundaryKey(3, 1, 0, False)
AT = PeerAddress("peer", "127.0.0.1", 1)


class Wire:
    """A transport that keeps what it is given; ``seconds_per_byte`` passes on the links' clock."""

    def __init__(self) -> None:
        self.sent: list[tuple[BoundaryFrame, Body]] = []
        self.now_s = 0.0
        self.seconds_per_byte = 0.0
        self.fails = False

    async def send(self, peer: PeerAddress, header: Any, body: Any, **_options: Any) -> None:
        if self.fails:
            raise Unreachable("gone")
        data = Body(body)
        self.now_s += len(data) * self.seconds_per_byte
        self.sent.append((header, data))


def links(tmp_path: Path, code: str) -> Any:
    plan = tiny_plan((0, 2), code=code, hidden_size=192)
    cache = BoundaryCache(tmp_path / "boundaries", memory_bytes=1 << 24, disk_bytes=1 << 24)
    peer_blobs = SimpleNamespace(use=lambda transport: None)
    context: Any = SimpleNamespace(
        plan=plan, run_id="run", local=LocalView(), run_state=SimpleNamespace(next_step=3, work=None, ahead=None), member=ME,
        cache=cache, wake=lambda: None, peer_blobs=peer_blobs, stage=None,
    )  # fmt: skip
    made = Links(context)
    wire = Wire()
    made.use(wire)  # type: ignore[arg-type]
    return SimpleNamespace(links=made, context=context, wire=wire, shape=ItemShape.of(plan))


@pytest.fixture(autouse=True)
def every_boundary_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_links, "accepts_boundary", lambda state, me, frame: True)


@pytest.fixture(params=["raw", "int8", "int4"])
def end(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return links(tmp_path, request.param)


def boundary(end: Any, seed: int = 1) -> bytes:
    shape = end.shape
    values = np.random.default_rng(seed).standard_normal((shape.rows * shape.length, shape.hidden)) * 0.2
    return bytes(encode(shape.code, values.astype(np.float32), shape.chunks))


def frame(data: bytes, packing: str = "none") -> BoundaryFrame:
    return BoundaryFrame("run", KEY.step, KEY.microbatch, KEY.stage, False, PEER, 0, blake3(data).hexdigest(), packing)


def held(end: Any) -> bytes | None:
    data = end.context.cache.peek(KEY)
    return None if data is None else bytes(data)


async def test_a_boundary_arrives_packed_or_not_as_the_same_bytes(end: Any) -> None:
    data = boundary(end)
    assert len(data) == end.shape.boundary_size_bytes
    for packing, body in (("none", data), ("planes", pack(data, end.links._boundary_parts))):
        await end.links.on_frame("peer", frame(data, packing), Body(body))
        assert held(end) == data
        assert end.context.local.boundaries.pop(KEY) == blake3(data).hexdigest()
        end.context.cache._entries.clear()


async def test_bodies_that_are_not_the_boundary_are_refused_with_their_code(end: Any) -> None:
    data = boundary(end)
    body = pack(data, end.links._boundary_parts)
    other = pack(boundary(end, 2), end.links._boundary_parts)
    compress = zstandard.ZstdCompressor(level=1).compress
    for packing, wrong, error in [
        ("none", data[:-1], InputError),
        ("none", data + b"\0", InputError),
        ("none", body, InputError),
        ("none", b"\0" + data[1:], HashMismatch),
        ("planes", data, InputError),
        ("planes", body[:-1], InputError),
        ("planes", body + b"\0", InputError),
        ("planes", other, HashMismatch),
        ("planes", compress(bytes(len(data) - 4)), InputError),
        ("planes", compress(bytes(64 << 20)), TooLarge),
        ("gzip", data, InputError),
    ]:
        with pytest.raises(error) as caught:
            await end.links.on_frame("peer", frame(data, packing), Body(wrong))
        assert type(caught.value) is error
        assert held(end) is None
        assert not end.links._early
    await end.links.on_frame("peer", frame(data, "planes"), Body(body))
    assert held(end) == data


async def test_what_comes_early_is_kept_unpacked_and_what_is_past_is_not_looked_at(
    end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = boundary(end)
    monkeypatch.setattr(member_links, "accepts_boundary", lambda state, me, frame: False)
    await end.links.on_frame("peer", frame(data, "planes"), Body(pack(data, end.links._boundary_parts)))
    assert held(end) is None
    assert len(end.links._early) == 1
    monkeypatch.setattr(member_links, "accepts_boundary", lambda state, me, frame: True)
    end.links.admit_early()
    assert held(end) == data
    await end.links.on_frame("peer", frame(data, "planes"), Body(b"no frame"))
    end.context.run_state.next_step = 4
    await end.links.on_frame("peer", msgspec.structs.replace(frame(data, "planes"), microbatch=2), Body(b"no"))
    later = msgspec.structs.replace(frame(data, "planes"), step=4)
    with pytest.raises(InputError):
        await end.links.on_frame("peer", later, Body(b"no"))


async def test_a_slow_link_gets_packed_boundaries_and_a_fast_one_doesnt(
    end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = boundary(end)
    end.context.cache.put(KEY, data, blake3(data).hexdigest())
    end.context.member = PEER
    clock = SimpleNamespace(now_s=lambda: end.wire.now_s)
    monkeypatch.setattr(member_links, "SYSTEM_CLOCK", clock)

    async def send() -> tuple[BoundaryFrame, Body]:
        await end.links._send_boundary(AT, KEY, end.context.cache.peek(KEY))
        return end.wire.sent[-1]

    end.wire.seconds_per_byte = 1e-12
    seen = {(await send())[0].packing for _ in range(70)}
    assert seen == {"none"}
    end.wire.seconds_per_byte = 1e-3
    packed, body = [await send() for _ in range(70)][-1]
    assert packed.packing == "planes"
    assert len(body) < len(data)
    assert packed.hash == blake3(data).hexdigest()
    end.context.member = ME
    end.context.cache._entries.clear()
    await end.links.on_frame("peer", packed, body)
    assert held(end) == data
    end.wire.fails = True
    with pytest.raises(Unreachable):
        await send()
    assert end.links._packing.link("peer")._waiting == 0


# --- signed, where a run has audits ------------------------------------------------------------------------------


@pytest.fixture
def audited(tmp_path: Path) -> Any:
    end = links(tmp_path, "raw")
    config = end.context.plan.config
    on = msgspec.structs.replace(config, audit=AuditSection(rate=0.1, before_seal="probation"))
    end.context.plan = SimpleNamespace(config=on, **{name: getattr(end.context.plan, name) for name in PLAN})
    end.links = Links(end.context)
    end.links.use(end.wire)
    end.signer = end.context.signer = Signer.from_uri("//Alice")
    end.peer = Member(end.signer.hotkey, 1, 2)
    return end


PLAN = ("hidden_size", "num_stages", "model_config")


async def test_with_audits_a_boundary_is_taken_only_with_its_senders_signature(audited: Any) -> None:
    data = boundary(audited)
    mine = msgspec.structs.replace(frame(data), sender=audited.peer)
    signed = sign_sent(audited.signer, mine)
    other = sign_sent(Signer.from_uri("//Bob"), mine)
    for bad in (mine, other, msgspec.structs.replace(signed, generation=1)):
        with pytest.raises(UnsignedBoundary):
            await audited.links.on_frame(audited.peer.hotkey, bad, Body(data))
        assert held(audited) is None
    await audited.links.on_frame(audited.peer.hotkey, signed, Body(data))
    assert held(audited) == data
    assert audited.context.local.sent_to_me == {KEY: Sent(signed.hash, 0, signed.signature)}


async def test_what_is_sent_is_signed_and_under_a_lease_of_mine_its_one_value(audited: Any) -> None:
    data, member = boundary(audited), Member(audited.signer.hotkey, 1, 1)
    audited.context.member = member
    audited.context.cache.put(KEY, data, blake3(data).hexdigest(), own=True)
    holder, value = Member("other", 1, 9), blake3(data).hexdigest()
    for leased, made, receipted, given in (
        (holder, 3, "", True),
        (member, 4, "", True),
        (member, 3, value, True),
        (member, 3, "", False),
        (member, 3, "other", False),
    ):
        found = SimpleNamespace(member=leased, generation=4, forward_hash=receipted, backward_hash="")
        work = SimpleNamespace(step=KEY.step, items=[{KEY.microbatch: found}])
        audited.context.local.made_from[KEY] = MadeFrom("x", generation=made)
        audited.context.run_state = SimpleNamespace(next_step=3, work=work, ahead=None)
        assert await audited.links._send_boundary(AT, KEY, memoryview(data)) is given
        assert len(audited.wire.sent) == given
        if given:
            sent, _ = audited.wire.sent.pop()
            assert sent.generation == 4
            assert is_sent(sent_by(sent), sent.signature)


async def test_what_others_made_is_not_given_under_a_lease_of_mine(audited: Any) -> None:
    data, member = boundary(audited), Member(audited.signer.hotkey, 1, 1)
    audited.context.member = member
    audited.context.cache.put(KEY, data, blake3(data).hexdigest())
    work = SimpleNamespace(
        step=KEY.step, items=[{KEY.microbatch: SimpleNamespace(member=member, generation=4, forward_hash="")}]
    )
    audited.context.run_state = SimpleNamespace(next_step=3, work=work, ahead=None)
    await audited.links._send_boundary(AT, KEY, memoryview(data))
    assert not audited.wire.sent


async def test_without_audits_nothing_is_signed(tmp_path: Path) -> None:
    end = links(tmp_path, "raw")
    data = boundary(end)
    await end.links._send_boundary(AT, KEY, memoryview(data))
    assert not end.wire.sent, "it is held by nobody"
    end.context.cache.put(KEY, data, blake3(data).hexdigest(), own=True)
    await end.links._send_boundary(AT, KEY, memoryview(data))
    (sent, _) = end.wire.sent.pop()
    assert sent.signature == b""
