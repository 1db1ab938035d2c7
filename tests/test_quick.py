"""The short way for small messages answers as the long way does, whatever pieces a request comes in, and steps aside else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from subnet.errors import InputError, Refusal
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import Call, Route, answer, create_app
from subnet.net.limits import LimitPolicy, RequestLimits
from subnet.net.quick import QuickRoute, QuickRoutes, handler_factory
from subnet.protocol import wire
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.timing import Deadline

ALICE, BOB = Signer.from_uri("//Alice"), Signer.from_uri("//Bob")
QUICK_BYTES, LONG_BYTES = 2000, 8000


def said(hotkey: str, body: bytes) -> object:
    text = wire.decode(body, str, limit_bytes=LONG_BYTES, what="POST /ask")
    if text == "nothing":
        return None
    if text == "crash":
        raise ZeroDivisionError
    if text == "bad":
        raise InputError("bad text", hint="another")
    return f"{hotkey} {text[:10]}"


@dataclass
class Server:
    listener: Listener
    ways: list[str] = field(default_factory=list)


@pytest.fixture(params=["quick", "long"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async for found in serving(request.param == "quick", RequestLimits()):
        yield found


async def serving(quick: bool, limits: RequestLimits) -> AsyncIterator[Server]:
    ways: list[str] = []

    async def slowly(call: Call) -> web.StreamResponse:
        ways.append("long")
        value = said(call.hotkey, call.body)
        return web.Response(status=204) if value is None else answer(value)

    async def hello(call: Call) -> web.StreamResponse:
        return answer("hello")

    def quickly(hotkey: str, body: bytes) -> object:
        ways.append("quick")
        return said(hotkey, body)

    routes = [Route("POST", "/ask", slowly, body_limit_bytes=LONG_BYTES), Route("GET", "/hello", hello, signed=False)]
    verifier = RequestVerifier(BOB.hotkey, is_known=lambda _: True)
    short = QuickRoutes([QuickRoute("/ask", quickly, QUICK_BYTES)], verifier, limits)
    app = create_app(routes, verifier, limits)
    handlers = (lambda server: handler_factory(server, short)) if quick else None
    listener = await listen(app, "127.0.0.1", 0, handlers=handlers)
    yield Server(listener, ways)
    await listener.close()


def request(text: str, *, drop: str = "", add: str = "", signer: Signer = ALICE, late_s: float = 0) -> bytes:
    body = wire.encode(text)
    wall_ns = time.time_ns() - round(late_s * 1e9)
    headers = Signer(signer.keypair).sign_request(
        method="POST", target="/ask", body=body, receiver=BOB.hotkey, wall_ns=wall_ns
    )
    headers |= {"Host": "b", "Accept": wire.CONTENT_TYPE, "Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in headers.items() if name != drop]
    return ("POST /ask HTTP/1.1\r\n" + "\r\n".join(lines) + add + "\r\n\r\n").encode() + body


HELLO = b"GET /hello HTTP/1.1\r\nHost: b\r\nAccept: application/msgpack\r\n\r\n"


async def talk(server: Server, pieces: list[bytes], num_answers: int) -> list[tuple[int, bytes]]:
    """Send pieces with a pause between them; the status and body of each answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
    found: list[tuple[int, bytes]] = []
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(30):
            for _ in range(num_answers):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                at = head.find(b"content-length:")
                length = int(head[at + 15 :].split(b"\r\n")[0]) if at >= 0 else 0
                found.append((int(head[9:12]), await reader.readexactly(length)))
                assert b"x-iota-time-ns" in head
    finally:
        writer.close()
        await writer.wait_closed()
    return found


def text_of(answered: tuple[int, bytes]) -> str:
    assert answered[0] == 200, answered
    return wire.decode(answered[1], str, limit_bytes=1000, what="an answer")


def refusal_of(answered: tuple[int, bytes]) -> tuple[int, str]:
    return answered[0], wire.decode(answered[1], Refusal, limit_bytes=1000, what="a refusal").code


async def test_one_request_in_any_pieces(server: Server) -> None:
    data = request("hi")
    cuts = (1, 6, 20, len(data) - 10, len(data) - 1)
    for pieces in ([data], [data[:cut] for cut in (0,)] + [data], *([data[:cut], data[cut:]] for cut in cuts)):
        fresh = request("hi")
        whole = [fresh[: len(p)] if i == 0 else fresh[len(pieces[0]) :] for i, p in enumerate(pieces)]
        (answered,) = await talk(server, whole, 1)
        assert text_of(answered) == f"{ALICE.hotkey} hi"
    assert len(set(server.ways)) == 1


async def test_many_requests_on_one_connection_both_ways_mixed(server: Server) -> None:
    pieces = [request("one"), HELLO, request("two"), request("three") + request("four"), HELLO + request("five"), HELLO]
    found = await talk(server, pieces, 8)
    name = ALICE.hotkey
    assert [text_of(one) for one in found] == [
        f"{name} one", "hello", f"{name} two", f"{name} three", f"{name} four", "hello", f"{name} five", "hello",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda: request("bad"), (400, "bad_input")),
        (lambda: request("crash"), (500, "internal")),
        (lambda: request("x", drop="X-Bittensor-Signature"), (401, "malformed_auth")),
        (lambda: request("x", late_s=60), (401, "stale_request")),
        (lambda: request("x")[:-1] + b"y", (401, "bad_signature")),
        (lambda: request("x" * 5000), None),
        (lambda: request("x", add="\r\nConnection: keep-alive"), None),
        (lambda: request("x" * 9000), (413, "too_large")),
    ],
)
async def test_refusals_are_the_same(server: Server, data: object, expected: tuple[int, str] | None) -> None:
    (answered,) = await talk(server, [data()], 1)  # type: ignore[operator]
    if expected is None:
        assert text_of(answered).startswith(ALICE.hotkey)
    else:
        assert refusal_of(answered) == expected


async def test_an_answer_without_a_body(server: Server) -> None:
    assert await talk(server, [request("nothing"), request("after")], 2) == [
        (204, b""),
        (200, wire.encode(f"{ALICE.hotkey} after")),
    ]


async def test_a_request_twice_is_a_replay(server: Server) -> None:
    data = request("once")
    first, second = await talk(server, [data, data], 2)
    assert text_of(first) == f"{ALICE.hotkey} once"
    assert refusal_of(second) == (401, "replayed_request")


async def test_the_signed_client_gets_through(server: Server) -> None:
    async with SignedClient(server.listener.url, Signer(ALICE.keypair), BOB.hotkey) as client:
        assert await client.request("GET", "/hello", None, str, deadline=Deadline.after(30), signed=False) == "hello"
        for text in ("a", "b" * 3000, "c"):
            assert (await client.request("POST", "/ask", text, str, deadline=Deadline.after(30)))[-1] == text[0]


async def test_who_is_over_the_limit_goes_the_long_way_and_is_refused() -> None:
    limits = RequestLimits(LimitPolicy(requests_per_s=4, requests_burst=3))
    async for server in serving(True, limits):
        found = await talk(server, [request(str(i)) for i in range(4)], 4)
        assert [status for status, _ in found] == [200, 200, 200, 429]
        assert refusal_of(found[3])[1] == "rate_limited"
        assert server.ways == ["quick"] * 3
