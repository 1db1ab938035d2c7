"""Whether a miner can be reached: half a handshake with it, and nobody else can be probed by asking."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest
from peer_cases import A, B, Node, running

from miner.reach import find_reach, found
from subnet.errors import Busy, InputError
from subnet.net.border import listen
from subnet.net.client import SignedClient
from subnet.net.http import Call, Route, answer, create_app
from subnet.protocol.reach import ReachAnswer, ReachRequest
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.timing import ManualClock
from validator.reach import BURST, REFILL_S, TARGETS, ReachDesk, forbidden

VALIDATOR = Signer.from_uri("//Validator")
HOME = "127.0.0.1"


def desk(clock: ManualClock | None = None, connect_s: float = 5.0) -> ReachDesk:
    return ReachDesk(VALIDATOR, clock=clock or ManualClock(), connect_s=connect_s)


@pytest.mark.parametrize("tls", ["auto", "always"])
async def test_a_miner_that_listens_is_reachable_and_no_connection_stays(tls: str) -> None:
    node = Node(B, tls=tls)
    async with running(node):
        found = await desk().look(B.hotkey, HOME, ReachRequest(1, "localhost", node.transport.port))
        assert (found.reachable, found.code, found.host) == (True, "reachable", HOME)
        assert node.transport.connected() == {}
        assert node.resets == []


async def test_another_hotkey_there_is_not_the_miner() -> None:
    node = Node(B)
    async with running(node):
        found = await desk().look(A.hotkey, HOME, ReachRequest(1, HOME, node.transport.port))
    assert (found.reachable, found.code) == (False, "other_hotkey")


async def test_something_else_there_is_not_the_miner() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, HOME, 0)
    async with server:
        found = await desk().look(B.hotkey, HOME, ReachRequest(1, HOME, server.sockets[0].getsockname()[1]))
    assert (found.reachable, found.code) == (False, "other_hotkey")


async def test_nobody_there_and_nobody_who_answers() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOME, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        silent = await desk(connect_s=0.2).look(B.hotkey, HOME, ReachRequest(1, HOME, port))
    gone = await desk().look(B.hotkey, HOME, ReachRequest(1, HOME, port))
    assert (silent.reachable, silent.code) == (False, "no_answer")
    assert (gone.reachable, gone.code) == (False, "refused")


@pytest.mark.parametrize(
    ("target", "source", "port", "allowed"),
    [
        ("10.0.0.5", "10.0.0.5", 22, True),  # where the request comes from
        ("127.0.0.1", "::1", 8100, True),
        ("8.8.8.8", "1.1.1.1", 8100, True),  # public
        ("8.8.8.8", "1.1.1.1", 22, False),
        ("10.0.0.6", "10.0.0.5", 8100, False),  # a neighbour of the validator's
        ("127.0.0.1", "1.1.1.1", 8100, False),
        ("169.254.169.254", "1.1.1.1", 8100, False),
        ("224.0.0.1", "1.1.1.1", 8100, False),
        ("fd00::1", "2606:4700::1", 8100, False),
        ("0.0.0.0", "1.1.1.1", 8100, False),
        ("10.0.0.6", "", 8100, False),
    ],
)
def test_whom_it_connects_to(target: str, source: str, port: int, allowed: bool) -> None:
    assert (forbidden(ipaddress.ip_address(target), source, port) == "") is allowed


async def test_nobody_is_connected_to_where_that_is_forbidden() -> None:
    looking = desk()

    async def never(*args: object) -> tuple[str, str]:
        raise AssertionError(f"connected: {args}")

    looking._connect = never  # type: ignore[method-assign]
    found = await looking.look(B.hotkey, "1.1.1.1", ReachRequest(1, HOME, 8100))
    assert (found.code, found.source) == ("not_public", "1.1.1.1")
    with pytest.raises(InputError):
        await looking.look(B.hotkey, HOME, ReachRequest(1, HOME, 70000))


async def test_few_requests_and_fewer_targets() -> None:
    clock = ManualClock()
    looking = desk(clock)
    tried: list[tuple[object, ...]] = []

    async def connect(*args: object) -> tuple[str, str]:
        tried.append(args)
        return "no_answer", "no answer"

    looking._connect = connect  # type: ignore[method-assign]
    for _ in range(int(BURST)):
        await looking.look(B.hotkey, HOME, ReachRequest(1, HOME, 8100))
    with pytest.raises(Busy):
        await looking.look(B.hotkey, HOME, ReachRequest(1, HOME, 8100))
    await looking.look(A.hotkey, HOME, ReachRequest(1, HOME, 8100))
    for i in range(TARGETS):
        clock.advance(REFILL_S)
        await looking.look(B.hotkey, "1.1.1.1", ReachRequest(1, f"8.8.8.{i}", 8100))
    clock.advance(REFILL_S)
    await looking.look(B.hotkey, "1.1.1.1", ReachRequest(1, "8.8.8.0", 8100))  # known already
    clock.advance(REFILL_S)
    with pytest.raises(Busy, match="addresses"):
        await looking.look(B.hotkey, "1.1.1.1", ReachRequest(1, "8.8.4.4", 8100))
    assert len(tried) == BURST + 1 + TARGETS + 1


async def test_a_miner_asks_and_says_what_was_found() -> None:
    looking = ReachDesk(VALIDATOR)

    async def reach(call: Call) -> object:
        return answer(await looking.look(call.hotkey, call.request.remote or "", call.decode(ReachRequest)))

    verifier = RequestVerifier(VALIDATOR.hotkey, is_known=lambda hotkey: True)
    listener = await listen(create_app([Route("POST", "/v1/reach", reach)], verifier), HOME, 0)  # type: ignore[list-item]
    node = Node(B)
    try:
        async with running(node), SignedClient(listener.url, B, VALIDATOR.hotkey) as client:
            reachable = await find_reach(client, HOME, node.transport.port)
            port = node.transport.port
        async with SignedClient(listener.url, B, VALIDATOR.hotkey) as client:
            closed = await find_reach(client, HOME, port)
    finally:
        await listener.close()
    assert (reachable.reachable, reachable.known, reachable.text) == (True, True, f"reachable at {HOME}:{port}")
    assert not closed.reachable
    assert f"not reachable at {HOME}:{port}: connection refused; open port {port}" in closed.text


async def test_a_validator_that_cannot_say_leaves_it_assumed() -> None:
    verifier = RequestVerifier(VALIDATOR.hotkey, is_known=lambda hotkey: True)
    listener = await listen(create_app([], verifier), HOME, 0)
    try:
        async with SignedClient(listener.url, B, VALIDATOR.hotkey) as client:
            finding = await find_reach(client, HOME, 8100)
    finally:
        await listener.close()
    assert (finding.reachable, finding.known) == (True, False)


def test_the_remedy_names_what_is_wrong() -> None:
    said = found(ReachAnswer(False, "not_public", "10.0.0.5 is private", "10.0.0.5", "1.2.3.4"), "10.0.0.5", 8100)
    assert "--peer.host 1.2.3.4" in said.text
    odd = found(ReachAnswer(False, "news", "{odd}" * 200, "", ""), "h", 1)
    assert not odd.reachable
    assert len(odd.text) < 500
