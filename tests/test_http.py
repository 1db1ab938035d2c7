"""Client and server keep one contract: each fault its code and status, retries signed anew, nothing unlimited."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
import pytest
from aiohttp import web
from loguru import logger

from subnet.errors import (
    Busy,
    ConfigError,
    DeadlinePassed,
    InputError,
    IotaError,
    NotFound,
    Refused,
    TooLarge,
    Unreachable,
)
from subnet.net.border import Listener, client_error, listen
from subnet.net.client import SignedClient, checked_base_url
from subnet.net.http import Call, FrameWriter, Route, answer, create_app
from subnet.protocol import wire
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.timing import Deadline, ManualClock

ALICE, BOB, EVE = (Signer.from_uri(f"//{name}") for name in ("Alice", "Bob", "Eve"))


class Ask(msgspec.Struct, frozen=True):
    text: str
    number: int = 0


class Told(msgspec.Struct, frozen=True):
    hotkey: str
    text: str


def soon() -> Deadline:
    return Deadline.after(20)


class Server:
    """A validator in small; ``fail`` makes the next calls of ``/busy`` fail."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.calls = 0
        self.failures: list[Exception] = []
        self.stream_gate = asyncio.Event()
        verifier = RequestVerifier(BOB.hotkey, is_known=lambda hotkey: hotkey == ALICE.hotkey, clock=self.clock)
        routes = [
            Route("GET", "/hello", self.hello, signed=False),
            Route("POST", "/echo", self.echo, body_limit_bytes=1000),
            Route("POST", "/busy", self.busy),
            Route("GET", "/stream", self.stream),
            Route("GET", "/large", self.large),
            Route("GET", "/empty", self.empty),
        ]
        self.app = create_app(routes, verifier)

    async def hello(self, call: Call) -> web.StreamResponse:
        return answer(Told("", "hello"))

    async def echo(self, call: Call) -> web.StreamResponse:
        return answer(Told(call.hotkey, call.decode(Ask).text))

    async def busy(self, call: Call) -> web.StreamResponse:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return answer(Told(call.hotkey, "done"))

    async def large(self, call: Call) -> web.StreamResponse:
        return web.Response(body=bytes(2 << 20), content_type=wire.CONTENT_TYPE)

    async def empty(self, call: Call) -> web.StreamResponse:
        return web.Response(status=204)

    async def stream(self, call: Call) -> web.StreamResponse:
        async with FrameWriter(call, keepalive_s=0.05) as out:
            for i in range(3):
                await out.send(b"frame %d" % i)
            if call.request.query.get("hold"):
                await out.race(self.stream_gate.wait())
            await out.send(bytes(100_000))
        return out.response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    server.listener = await listen(server.app, "127.0.0.1", 0)
    yield server
    await server.listener.close()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[SignedClient]:
    async with SignedClient(server.listener.url, Signer(ALICE.keypair), BOB.hotkey, clock=server.clock) as client:
        yield client


async def raw(server: Server, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None):
    async with aiohttp.ClientSession() as session:
        async with session.request(method, server.listener.url + path, data=body, headers=headers) as response:
            return response.status, await response.json()


def signed(server: Server, signer: Signer = ALICE, *, late_s: float = 0, **changes: object) -> dict[str, str]:
    fields = {"method": "POST", "target": "/echo?a=1", "body": wire.encode(Ask("hi")), "receiver": BOB.hotkey}
    wall_ns = server.clock.wall_ns() - round(late_s * 1e9)
    return Signer(signer.keypair).sign_request(wall_ns=wall_ns, **(fields | changes))


FAULTS: dict[str, tuple[int, Callable[[Server], dict[str, str]]]] = {
    "unsigned": (401, lambda s: {}),
    "stale_request": (401, lambda s: signed(s, late_s=11)),
    "future_request": (401, lambda s: signed(s, late_s=-3)),
    "bad_signature: path": (401, lambda s: signed(s, target="/other?a=1")),
    "bad_signature: query": (401, lambda s: signed(s, target="/echo?a=2")),
    "bad_signature: body": (401, lambda s: signed(s, body=wire.encode(Ask("ho")))),
    "bad_signature: method": (401, lambda s: signed(s, method="PUT")),
    "wrong_receiver": (401, lambda s: signed(s, receiver=EVE.hotkey)),
    "unknown_hotkey": (403, lambda s: signed(s, EVE)),
    "malformed_auth": (401, lambda s: signed(s) | {"X-Bittensor-Signature": "0x12"}),
}


@pytest.mark.parametrize("case", FAULTS)
async def test_each_fault_is_refused_with_its_code(server: Server, case: str) -> None:
    status, headers = FAULTS[case]
    found, refusal = await raw(server, "POST", "/echo?a=1", wire.encode(Ask("hi")), headers(server))
    assert (found, refusal["code"]) == (status, case.partition(":")[0])
    assert refusal["reason"]
    assert "retry_after" not in refusal


async def test_a_replay_is_refused(server: Server) -> None:
    headers = signed(server)
    async with aiohttp.ClientSession() as session:
        async with session.post(server.listener.url + "/echo?a=1", data=wire.encode(Ask("hi")), headers=headers) as ok:
            assert ok.status == 200
    found, refusal = await raw(server, "POST", "/echo?a=1", wire.encode(Ask("hi")), headers)
    assert (found, refusal["code"]) == (401, "replayed_request")


async def test_what_the_server_itself_refuses_has_a_code_too(server: Server) -> None:
    status, refusal = await raw(server, "POST", "/echo", b"x", {"Expect": "the impossible"})
    assert (status, refusal["code"], refusal["hint"]) == (417, "bad_request", "100-continue, or none")
    async with aiohttp.ClientSession() as session:
        data = wire.encode(Ask("hi"))
        async with session.post(
            server.listener.url + "/echo?a=1", data=data, headers=signed(server), expect100=True
        ) as ok:
            assert ok.status == 200


async def test_unknown_routes_and_methods(server: Server) -> None:
    assert (await raw(server, "GET", "/nowhere"))[1]["code"] == "no_such_route"
    status, refusal = await raw(server, "DELETE", "/echo")
    assert (status, refusal["code"], refusal["hint"]) == (405, "no_such_method", "allowed: POST")


async def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Server, client: SignedClient) -> None:
    status, refusal = await raw(server, "POST", "/echo", bytes(1001))
    assert (status, refusal["code"]) == (413, "too_large")

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield bytes(1000)

    async with (
        aiohttp.ClientSession() as session,
        session.post(server.listener.url + "/echo", data=endless()) as response,
    ):
        assert (response.status, (await response.json())["code"]) == (413, "too_large")
    with pytest.raises(Refused) as refused:
        await client.request("POST", "/echo", Ask("x" * 1001), Told, deadline=soon())
    assert (refused.value.code, refused.value.status) == ("too_large", 413)


async def test_the_handler_gets_the_proved_hotkey(client: SignedClient) -> None:
    assert await client.request("POST", "/echo?a=%2F&b=c+d", Ask("hi"), Told, deadline=soon()) == Told(
        ALICE.hotkey, "hi"
    )
    assert await client.request("GET", "/empty", None, None, deadline=soon()) is None


async def test_a_public_route_needs_no_key(server: Server) -> None:
    async with SignedClient(server.listener.url) as client:
        assert (await client.request("GET", "/hello", None, Told, deadline=soon(), signed=False)).text == "hello"
        with pytest.raises(ConfigError, match="hello"):
            await client.request("POST", "/echo", Ask(""), Told, deadline=soon())


async def test_a_malformed_body_names_the_place(client: SignedClient) -> None:
    with pytest.raises(Refused, match=r"\$\.text") as refused:
        await client.request("POST", "/echo", {"text": 5}, Told, deadline=soon())
    assert refused.value.status == 400
    with pytest.raises(InputError, match=r"POST .*/echo: .*missing required field"):
        await client.request("POST", "/echo", Ask("hi"), Needs, deadline=soon())


class Needs(msgspec.Struct, frozen=True):
    something: int


async def test_busy_is_retried_and_signed_anew(server: Server, client: SignedClient) -> None:
    server.failures = [Busy("later", retry_after_s=0.01), Busy("later", retry_after_s=0.01)]
    assert (await client.request("POST", "/busy", Ask(""), Told, deadline=soon())).text == "done"
    assert server.calls == 3


async def test_retry_after_is_honoured_up_to_the_deadline(server: Server, client: SignedClient) -> None:
    server.failures = [Busy("much later", retry_after_s=60)]
    with pytest.raises(Refused, match="much later") as refused:
        await client.request("POST", "/busy", Ask(""), Told, deadline=Deadline.after(5))
    assert (refused.value.code, refused.value.retry_after_s, server.calls) == ("busy", 60, 1)


@pytest.mark.parametrize(
    ("failure", "code", "status"), [(NotFound("gone"), "not_found", 404), (KeyError("bug"), "internal", 500)]
)
async def test_permanent_errors_are_not_retried(
    server: Server, client: SignedClient, failure: Exception, code: str, status: int
) -> None:
    server.failures = [failure] * 5
    with pytest.raises(Refused) as refused:
        await client.request("POST", "/busy", Ask(""), Told, deadline=soon())
    assert (refused.value.code, refused.value.status, server.calls) == (code, status, 1)
    assert "bug" not in refused.value.reason


@pytest.mark.parametrize("off_s", [-1000, -20, 5, 1000])
async def test_a_wrong_clock_is_corrected(server: Server, off_s: float) -> None:
    clock = ManualClock(wall_ns=server.clock.wall_ns() + round(off_s * 1e9))
    async with SignedClient(server.listener.url, Signer(ALICE.keypair), BOB.hotkey, clock=clock) as client:
        for _ in range(2):
            assert (await client.request("POST", "/echo", Ask("hi"), Told, deadline=soon())).text == "hi"
        assert client.offset_ns == round(-off_s * 1e9)


async def test_a_clock_that_is_hours_off_is_for_a_person(server: Server) -> None:
    clock = ManualClock(wall_ns=server.clock.wall_ns() + 7200 * 10**9)
    async with SignedClient(server.listener.url, Signer(ALICE.keypair), BOB.hotkey, clock=clock) as client:
        with pytest.raises(ConfigError, match="clocks"):
            await client.request("POST", "/echo", Ask("hi"), Told, deadline=soon())


async def test_an_answer_over_the_limit(server: Server) -> None:
    signer = Signer(ALICE.keypair)
    async with SignedClient(
        server.listener.url, signer, BOB.hotkey, clock=server.clock, answer_limit_bytes=1 << 20
    ) as client:
        with pytest.raises(TooLarge):
            await client.request("GET", "/large", None, None, deadline=soon())


# --- servers that aren't ours -----------------------------------------------------------------------------------------


@pytest.fixture
async def stranger() -> AsyncIterator[Callable[[bytes], Awaitable[SignedClient]]]:
    """A server that answers anything with the given bytes, and a client for it."""
    left: list[tuple[asyncio.Server, SignedClient]] = []

    async def make(reply: bytes) -> SignedClient:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if await reader.read(1):
                writer.write(reply)
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = SignedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ALICE, BOB.hotkey)
        left.append((server, client))
        return client

    yield make
    for server, client in left:
        await client.close()
        server.close()
        await server.wait_closed()


def http_answer(status: int, kind: str, body: bytes, extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}"
    return f"{head}Connection: close\r\n\r\n".encode() + body


HTML = b"<html><title>Router login</title></html>"


@pytest.mark.parametrize(
    "reply",
    [
        http_answer(200, "text/html", HTML),
        http_answer(404, "text/html", HTML),
        http_answer(302, "text/html", HTML, "Location: http://127.0.0.1:1/\r\n"),
        http_answer(400, "application/json", b'{"error": "no"}'),
        http_answer(400, wire.CONTENT_TYPE, b"\xc1"),
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
)
async def test_an_answer_that_is_not_ours_is_one_line(
    stranger: Callable[[bytes], Awaitable[SignedClient]], reply: bytes
) -> None:
    client = await stranger(reply)
    with pytest.raises(ConfigError) as raised:
        await client.request("GET", "/v1/hello", None, Told, deadline=soon(), signed=False)
    text = str(raised.value)
    assert client.base_url in text
    assert "check the URL" in text
    assert "\n" not in text
    if b"<html>" in reply:
        assert "<html>" in text


@pytest.mark.parametrize("reply", [http_answer(502, "text/html", HTML), b""])
async def test_a_gateway_in_trouble_is_retried(
    stranger: Callable[[bytes], Awaitable[SignedClient]], reply: bytes
) -> None:
    client = await stranger(reply)
    with pytest.raises(Unreachable):
        await client.request("GET", "/v1/hello", None, Told, deadline=Deadline.after(0.3), signed=False)


async def test_connection_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with SignedClient(f"http://127.0.0.1:{port}", ALICE, BOB.hotkey) as client:
        with pytest.raises(Unreachable, match=str(port)):
            await client.request("GET", "/v1/hello", None, Told, deadline=Deadline.after(0.3), signed=False)


async def test_a_server_that_says_nothing() -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with SignedClient(url, ALICE, BOB.hotkey) as client:
        with pytest.raises(DeadlinePassed):
            await client.request("GET", "/v1/hello", None, Told, deadline=Deadline.after(0.2), signed=False)
    await ended.wait()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:80", "ftp://x:1", "http://", "http://x:1/path", "http://x:99999", "x y"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="isn't a base URL"):
        checked_base_url(url)
    assert checked_base_url(" http://x:1/ ") == "http://x:1"


async def test_port_in_use(server: Server) -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        await listen(Server().app, "127.0.0.1", server.listener.port)


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(subclasses(aiohttp.ClientError), key=lambda kind: kind.__name__))
def test_every_error_of_aiohttp_is_mapped(kind: type[Exception]) -> None:
    mapped = client_error("GET http://x:1", plain(kind))
    assert isinstance(mapped, ConfigError | Unreachable)


def plain(kind: type[Exception]) -> Exception:
    """An instance whose text needs none of the fields of its class."""
    error = type(kind.__name__, (kind,), {"__str__": lambda self: "x", "__init__": lambda self: None})()
    if not hasattr(error, "message"):
        error.message = "x"
    return error


def test_other_errors_are_not_ours_to_map() -> None:
    assert client_error("x", ValueError("x")) is None


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_of_frames(client: SignedClient) -> None:
    frames = [frame async for frame in client.stream("/stream", connect=soon())]
    assert frames == [b"frame 0", b"frame 1", b"frame 2", bytes(100_000)]


async def test_keep_alives_are_not_seen_but_keep_a_stream_alive(server: Server, client: SignedClient) -> None:
    frames: list[bytes] = []

    async def read() -> None:
        async for frame in client.stream("/stream?hold=1", connect=soon(), idle_s=5):
            frames.append(frame)

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.3)
    assert len(frames) == 3
    server.stream_gate.set()
    await reading
    assert frames[3:] == [bytes(100_000)]


async def test_a_silent_stream_ends(stranger: Callable[[bytes], Awaitable[SignedClient]]) -> None:
    head = f"HTTP/1.1 200 x\r\nContent-Type: {wire.CONTENT_TYPE}\r\nContent-Length: 1000\r\n\r\n".encode()
    frame = wire.stream_head(3) + b"abc"

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + frame)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with SignedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ALICE, BOB.hotkey) as client:
        stream = client.stream("/stream", connect=soon(), idle_s=0.1)
        assert await anext(stream) == b"abc"
        with pytest.raises(DeadlinePassed, match="silent"):
            await anext(stream)
    server.close()
    await server.wait_closed()
    for body, error in (
        (wire.stream_head(1 << 30), TooLarge),
        (frame[:-1], Unreachable),
    ):
        client = await stranger(http_answer(200, wire.CONTENT_TYPE, body))
        with pytest.raises(error):
            _ = [frame async for frame in client.stream("/stream", connect=soon())]


@pytest.mark.parametrize("place", range(8))
async def test_a_garbled_length_is_found_before_keep_alives_fill_the_frame(
    stranger: Callable[[bytes], Awaitable[SignedClient]], place: int
) -> None:
    """A stream that is quiet but for keep-alives would have fed them to a frame that never was."""
    head = bytearray(wire.stream_head(80))
    head[place] ^= 0xFF
    body = bytes(head) + bytes(80) + wire.stream_head(0) * 4
    client = await stranger(http_answer(200, wire.CONTENT_TYPE, body))
    with pytest.raises(InputError, match="garbled"):
        _ = [frame async for frame in client.stream("/stream", connect=soon())]


async def test_a_stream_whose_head_is_garbled_is_said_at_once() -> None:
    """Nobody waits for the end of a stream to say what came: a miner was deaf for minutes."""

    gone = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nContent-Type: application/msgpa\xe8k\r\nTransfer-Encoding: chunked\r\n\r\n")
        frame = wire.stream_head(3) + b"abc"
        writer.write(b"%x\r\n%b\r\n" % (len(frame), frame))
        await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with SignedClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ALICE, BOB.hotkey) as client:
        async with asyncio.timeout(30):
            with pytest.raises(ConfigError, match=r"answered 200.*abc"):
                await anext(client.stream("/stream", connect=soon()))
            await gone.wait()
    server.close()
    await server.wait_closed()


async def test_a_stream_that_is_refused(server: Server, client: SignedClient) -> None:
    client.receiver = EVE.hotkey
    with pytest.raises(IotaError) as raised:
        await anext(client.stream("/stream", connect=soon()))
    assert raised.value.code == "wrong_receiver"


async def test_a_stream_that_is_left(server: Server, client: SignedClient) -> None:
    stream = client.stream("/stream?hold=1", connect=soon())
    assert await anext(stream) == b"frame 0"
    await stream.aclose()
    assert (await client.request("POST", "/echo", Ask("still"), Told, deadline=soon())).text == "still"


async def test_bytes_that_are_no_http_are_one_line_of_the_log(server: Server) -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, level="INFO", format="{message}")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
        writer.write(b"GET /hello HTTP/1.1\r\nX-Bit\x8bensor: 1\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
    finally:
        logger.remove(sink)
    assert len(lines) == 1
    assert "Invalid header token" in lines[0]
    assert lines[0].count("\n") == 1
    assert "Traceback" not in lines[0]


def test_the_listener_says_where(server: Listener) -> None:
    assert server.listener.url.startswith("http://127.0.0.1:")
