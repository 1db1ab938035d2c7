"""The contract of a transport, plain and encrypted (a factory lets others join); lies and garbage cost one connection only."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest

from subnet.errors import ConfigError, DeadlinePassed, InputError, IotaError, Refused, TooLarge, Unreachable
from subnet.net import records
from subnet.net.base import PeerAddress, Priority, TransportLimits
from subnet.net.frames import FrameConnection
from subnet.net.handshake import PEER_VERSION, Accept, Open, Prove, open_handshake
from subnet.net.outgoing import Credit, OutgoingFrame, OutgoingQueue
from subnet.net.records import Amount, Kind
from subnet.net.streams import StreamTransport
from subnet.net.tls import Security
from subnet.protocol import wire
from subnet.protocol.signing import Signer
from subnet.protocol.wire import BODY_LENGTH, FRAME_LENGTH
from subnet.timing import Deadline


class Tensor(msgspec.Struct, frozen=True, tag="t"):
    number: int


class Need(msgspec.Struct, frozen=True, tag="n"):
    name: str


Header = Tensor | Need
KEYS = sorted((Signer.from_uri(f"//Peer{i}") for i in range(3)), key=lambda signer: signer.hotkey)


def soon() -> Deadline:
    return Deadline.after(20)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Node:
    """A transport and what happened to it."""

    signer: Signer
    limits: TransportLimits = field(default_factory=TransportLimits)
    known: set[str] | None = None
    incarnation: str = ""
    port: int = 0
    frames: list[tuple[str, Header, bytes]] = field(default_factory=list)
    resets: list[tuple[str, str]] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    tls: str = "auto"

    def __post_init__(self) -> None:
        self.open.set()
        self.transport: StreamTransport[Header] = StreamTransport(
            self.signer,
            Header,
            self.on_frame,
            on_reset=lambda hotkey, reason: self.resets.append((hotkey, reason)),
            is_known=lambda hotkey: self.known is None or hotkey in self.known,
            limits=self.limits,
            incarnation=self.incarnation,
            port=self.port,
            security=Security(self.tls),
            connect_s=5,
        )

    async def on_frame(self, hotkey: str, header: Header, body: bytearray) -> None:
        await self.open.wait()
        if header == Need("boom"):
            raise InputError("a frame we don't like")
        if header == Need("bug"):
            raise KeyError("our own fault")
        self.frames.append((hotkey, header, bytes(body)))

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.signer.hotkey, "127.0.0.1", self.transport.port)


Start = Callable[..., "asyncio.Future[Node]"]


@pytest.fixture(params=["auto", "always"], ids=["plain", "tls"])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    """Another transport joins the contract with a parameter of its own."""
    nodes: list[Node] = []

    async def make(signer: Signer, **options: object) -> Node:
        node = Node(signer, **({"tls": request.param} | options))
        await node.transport.start()
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        await node.transport.close()


# --- the contract -----------------------------------------------------------------------------------------------------


async def test_frames_arrive_as_they_were_sent(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    bodies = [b"", b"x", os.urandom(70_000), os.urandom(3 << 20)]
    for i, body in enumerate(bodies):
        await a.transport.send(b.address, Tensor(i), body, deadline=soon())
    await b.transport.send(a.address, Need("more"), [b"ab", bytearray(b"cd"), memoryview(b"xef")[1:]], deadline=soon())
    await until(lambda: len(b.frames) == 4 and len(a.frames) == 1)
    assert b.frames == [(KEYS[0].hotkey, Tensor(i), body) for i, body in enumerate(bodies)]
    assert a.frames == [(KEYS[1].hotkey, Need("more"), b"abcdef")]
    assert set(a.transport.connected()) == {KEYS[1].hotkey}


async def test_a_tensor_of_wide_numbers_travels_as_bytes(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    numbers = memoryview(struct.pack("<1000f", *range(1000))).cast("f")
    await a.transport.send(b.address, Tensor(0), numbers, deadline=soon())
    await until(lambda: len(b.frames) == 1)
    assert b.frames[0][2] == numbers.tobytes()


@pytest.mark.parametrize("round_", range(5))
async def test_one_connection_when_all_open_at_once(start: Start, round_: int) -> None:
    """Whose connection crosses the other's is refused with ``crossing``, and nobody notices."""
    nodes = [await start(key) for key in KEYS]
    async with asyncio.TaskGroup() as group:
        for a in nodes:
            for b in nodes:
                if a is not b:
                    for i in range(10):
                        group.create_task(a.transport.send(b.address, Tensor(i), b"x" * 1000, deadline=soon()))
    await until(lambda: all(len(node.frames) == 20 for node in nodes))
    assert all(len(node.transport.connected()) == 2 for node in nodes)
    assert all(node.resets == [] for node in nodes)


async def test_nobody_there(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    address = b.address
    await b.transport.close()
    with pytest.raises(Unreachable, match=r"not done within.*refused"):
        await a.transport.send(address, Tensor(0), b"x", deadline=Deadline.after(1))
    with pytest.raises(Unreachable, match=r"not done within.*refused"):
        await a.transport.connect(address, deadline=Deadline.after(1))


async def test_a_restarted_peer_is_found_again(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    await a.transport.send(b.address, Tensor(0), b"x", deadline=soon())
    await b.transport.close()
    await until(lambda: len(a.resets) == 1)
    assert a.resets[0][0] == KEYS[1].hotkey
    again = asyncio.create_task(a.transport.send(b.address, Tensor(1), b"y", deadline=soon()))
    await asyncio.sleep(0.05)
    b2 = await start(KEYS[1], port=b.transport.port)
    await again
    await until(lambda: len(b2.frames) == 1)
    assert b2.frames[0][1] == Tensor(1)


@pytest.mark.parametrize("smaller", [0, 1])
async def test_a_side_that_lost_the_connection_replaces_it(start: Start, smaller: int) -> None:
    a, b = await start(KEYS[smaller]), await start(KEYS[1 - smaller])
    await a.transport.send(b.address, Tensor(0), b"", deadline=soon())
    await until(lambda: len(b.frames) == 1)
    # b forgets its end without a word, as after a cut cable
    peer = b.transport._peers[a.signer.hotkey]
    lost, peer.connection = peer.connection, None
    await b.transport.send(a.address, Tensor(1), b"", deadline=soon())
    await until(lambda: len(a.frames) == 1 and len(a.resets) == 1)
    lost.abort()
    await a.transport.send(b.address, Tensor(2), b"", deadline=soon())
    await until(lambda: len(b.frames) == 2)


async def test_a_peer_that_is_not_known_yet_is_let_in_later(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1], known=set())
    with pytest.raises(DeadlinePassed, match="no member"):
        await a.transport.send(b.address, Tensor(0), b"", deadline=Deadline.after(2))
    b.known.add(KEYS[0].hotkey)
    await a.transport.send(b.address, Tensor(1), b"", deadline=soon())
    await until(lambda: [frame[1] for frame in b.frames] == [Tensor(1)])


async def test_the_wrong_hotkey_at_an_address_is_permanent(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    wrong = PeerAddress(KEYS[2].hotkey, "127.0.0.1", b.transport.port)
    for attempt in (
        a.transport.send(wrong, Tensor(0), b"", deadline=soon()),
        a.transport.connect(wrong, deadline=soon()),
    ):
        with pytest.raises(Refused) as refused:
            await attempt
        assert refused.value.code == "wrong_receiver"


async def test_too_large_is_refused_before_it_is_sent(start: Start) -> None:
    small = TransportLimits(header_bytes=200, body_bytes=1000)
    a, b = await start(KEYS[0], limits=small), await start(KEYS[1])
    for header, body in ((Tensor(0), bytes(1001)), (Need("x" * 300), b"")):
        with pytest.raises(TooLarge):
            await a.transport.send(b.address, header, body, deadline=soon())
    await a.transport.send(b.address, Tensor(0), bytes(1000), deadline=soon())


@pytest.mark.parametrize(("header", "body"), [(Tensor(0), bytes(1001)), (Need("x" * 300), b"")], ids=["body", "header"])
async def test_what_a_peer_may_not_send_ends_its_connection_only(start: Start, header: Header, body: bytes) -> None:
    small = TransportLimits(header_bytes=200, body_bytes=1000)
    liar, b, honest = await start(KEYS[0]), await start(KEYS[1], limits=small), await start(KEYS[2])
    await honest.transport.connect(b.address, deadline=soon())
    await liar.transport.send(b.address, header, body, deadline=soon())
    await until(lambda: len(liar.resets) == 1 and len(b.resets) == 1)
    assert b.resets[0][0] == KEYS[0].hotkey
    await honest.transport.send(b.address, Tensor(7), b"fine", deadline=soon())
    await until(lambda: len(b.frames) == 1)
    assert b.frames == [(KEYS[2].hotkey, Tensor(7), b"fine")]
    assert honest.resets == []


async def test_a_refused_frame_costs_itself_only(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    await a.transport.send(b.address, Need("boom"), b"x", deadline=soon())
    await a.transport.send(b.address, Tensor(1), b"y", deadline=soon())
    await until(lambda: len(b.frames) == 1)
    assert b.frames == [(KEYS[0].hotkey, Tensor(1), b"y")]
    assert b.transport.offences() == {KEYS[0].hotkey: {"bad_input": 1}}
    await until(lambda: a.transport._peers[KEYS[1].hotkey]._said == {"bad_input"})  # its sender was told
    assert a.resets == b.resets == []


async def test_a_header_of_another_kind_is_garbage(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    await a.transport.send(b.address, {"type": "t", "number": "seven"}, b"", deadline=soon())
    await until(lambda: len(b.resets) == 1)
    assert "number" in b.resets[0][1]
    assert b.frames == []


async def test_our_own_fault_comes_out_of_watch(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    watching = asyncio.create_task(b.transport.watch())
    await a.transport.send(b.address, Need("bug"), b"", deadline=soon())
    with pytest.raises(KeyError):
        await watching


async def test_back_pressure_bounds_both_sides(start: Start) -> None:
    limits = TransportLimits(
        inbound_bytes=1 << 20, inbound_frames=4, outbound_bytes=1 << 20, outbound_frames=4, body_bytes=1 << 20
    )
    a, b = await start(KEYS[0], limits=limits), await start(KEYS[1], limits=limits)
    b.open.clear()
    body = os.urandom(400_000)
    sends = [asyncio.create_task(a.transport.send(b.address, Tensor(i), body, deadline=soon())) for i in range(60)]
    await asyncio.sleep(0.3)
    assert not all(task.done() for task in sends)
    connection = b.transport._peers[KEYS[0].hotkey].connection
    assert 0 < connection.inbound.lanes[Priority.REST].held.num_bytes <= 1 << 20
    with pytest.raises(DeadlinePassed):
        await a.transport.send(b.address, Tensor(99), b"", deadline=Deadline.after(0.05))
    b.open.set()
    await asyncio.gather(*sends)
    await until(lambda: len(b.frames) == 60)
    assert [frame[1].number for frame in b.frames] == list(range(60))
    assert all(frame[2] == body for frame in b.frames)


async def test_a_frame_over_the_quota_passes_alone(start: Start) -> None:
    limits = TransportLimits(inbound_bytes=1000, outbound_bytes=1000)
    a, b = await start(KEYS[0], limits=limits), await start(KEYS[1], limits=limits)
    for i in range(3):
        await a.transport.send(b.address, Tensor(i), bytes(100_000), deadline=soon())
    await until(lambda: len(b.frames) == 3)


async def test_a_peer_that_reads_nothing_loses_the_connection(start: Start) -> None:
    a = await start(KEYS[0], tls="auto")
    a.transport._stall_s = 0.2
    deaf_key = KEYS[1]

    connection = await raw_connection(a.transport.port)
    await open_handshake(connection, deaf_key, a.signer.hotkey, "boot", "")
    connection.end_handshake()
    await until(lambda: a.transport._peers[deaf_key.hotkey].connection.credit.windows[Priority.REST].num_frames > 0)
    connection._transport.pause_reading()
    address = PeerAddress(deaf_key.hotkey, "127.0.0.1", 1)
    with pytest.raises(DeadlinePassed, match=r"took nothing|refused|Connect"):
        await a.transport.send(address, Tensor(0), bytes(64 << 20), deadline=Deadline.after(2))
    assert "took nothing" in a.resets[0][1]
    await connection.close()


async def test_closing_wakes_whoever_waits(start: Start) -> None:
    a, b = await start(KEYS[0]), await start(KEYS[1])
    address = b.address
    await b.transport.close()
    waits = [
        asyncio.create_task(a.transport.send(address, Tensor(0), b"", deadline=soon())),
        asyncio.create_task(a.transport.connect(address, deadline=soon())),
    ]
    await asyncio.sleep(0.1)
    await a.transport.close()
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(result, Unreachable) and "closing" in result.reason for result in results)
    with pytest.raises(Unreachable):
        await a.transport.send(address, Tensor(0), b"", deadline=soon())


async def test_port_in_use(start: Start) -> None:
    a = await start(KEYS[0])
    with pytest.raises(ConfigError, match="can't listen"):
        await start(KEYS[1], port=a.transport.port)


async def test_nobody_sends_to_itself(start: Start) -> None:
    a = await start(KEYS[0])
    with pytest.raises(InputError):
        await a.transport.send(a.address, Tensor(0), b"", deadline=soon())


# --- handshakes that lie ----------------------------------------------------------------------------------------------


async def raw_connection(port: int) -> FrameConnection:
    loop = asyncio.get_running_loop()
    connection = FrameConnection(TransportLimits())
    await loop.create_connection(lambda: connection, "127.0.0.1", port)
    return connection


def opening(**changes: object) -> Open:
    fields = {"version": PEER_VERSION, "hotkey": KEYS[0].hotkey, "receiver": KEYS[1].hotkey}
    return Open(**(fields | {"incarnation": "boot", "nonce": bytes(32), "last": ""} | changes))


async def denial(connection: FrameConnection) -> str:
    header = await connection.next_greeting()
    await connection.close()
    return msgspec.msgpack.decode(header)["refusal"]["code"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (opening(version=99), "version_unsupported"),
        (opening(receiver=KEYS[2].hotkey), "wrong_receiver"),
        (opening(nonce=b"short"), "bad_input"),
        (opening(hotkey=KEYS[2].hotkey), "unknown_hotkey"),
        (opening(hotkey=KEYS[1].hotkey), "bad_input"),
        (Prove(bytes(64)), "bad_input"),
        ({"type": "nothing"}, "bad_input"),
    ],
)
async def test_a_bad_opening_is_denied_with_its_code(start: Start, message: object, code: str) -> None:
    b = await start(KEYS[1], tls="auto", known={KEYS[0].hotkey, KEYS[1].hotkey})
    connection = await raw_connection(b.transport.port)
    connection.write_greeting(wire.encode(message))
    assert await denial(connection) == code
    assert b.transport.connected() == {}
    assert b.resets == []


async def test_a_false_proof_is_denied(start: Start) -> None:
    b = await start(KEYS[1], tls="auto")
    connection = await raw_connection(b.transport.port)
    connection.write_greeting(wire.encode(opening()))
    header = await connection.next_greeting()
    accept = wire.decode(header, Accept, limit_bytes=4096, what="accept")
    # neither another key's signature nor the accepter's own, sent back, proves anything
    connection.write_greeting(wire.encode(Prove(accept.signature)))
    assert await denial(connection) == "bad_signature"
    assert b.transport.connected() == {}


async def test_an_impostor_does_not_pass_for_the_accepter(start: Start) -> None:
    a = await start(KEYS[0], tls="auto")

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = wire.FRAME_LENGTH.unpack(await reader.readexactly(4))
        await reader.readexactly(length + 8)
        header = wire.encode(Accept("boot", bytes(32), KEYS[2].sign(b"something else")))
        writer.write(wire.FRAME_LENGTH.pack(len(header)) + header + wire.BODY_LENGTH.pack(0))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = PeerAddress(KEYS[1].hotkey, "127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(IotaError) as raised:
        await a.transport.send(address, Tensor(0), b"", deadline=soon())
    assert raised.value.code == "bad_signature"
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(4) + b"\xff" * 8, b""])
async def test_garbage_before_the_handshake(start: Start, data: bytes) -> None:
    b = await start(KEYS[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", b.transport.port)
    writer.write(data)
    if not data:
        writer.write_eof()
    with suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    await until(lambda: not b.transport._handshakes)
    assert b.transport.connected() == {}


async def test_handshakes_are_bounded(start: Start) -> None:
    b = await start(KEYS[1], limits=TransportLimits(handshakes=2))
    idle = [await raw_connection(b.transport.port) for _ in range(2)]
    await until(lambda: b.transport._handshakes.total() == 2)
    third = await raw_connection(b.transport.port)
    with pytest.raises(Unreachable):
        await third.next_greeting()
    for connection in [*idle, third]:
        await connection.close()


# --- the queue --------------------------------------------------------------------------------------------------------


async def test_backward_goes_first() -> None:
    queue, credit = OutgoingQueue(30_000, 300), Credit()
    credit.windows = [Amount(10_000, 100) for _ in Priority]
    loop = asyncio.get_running_loop()
    order = [Priority.REST, Priority.FORWARD, Priority.BACKWARD, Priority.FORWARD, Priority.BACKWARD]
    frames = [OutgoingFrame(p, b"%d" % i, (), loop.create_future()) for i, p in enumerate(order)]
    for frame in frames:
        await queue.push(frame)
    queue.abandon(frames[3])
    first = queue.next(credit)
    assert first is frames[2]
    queue.begin(first, credit)
    queue.rewind()
    popped = []
    while (frame := queue.next(credit)) is not None:
        popped.append(frame)
        queue.begin(frame, credit)
        queue.finish(frame)
    assert [int(frame.header) for frame in popped] == [2, 4, 1, 0]
    assert not queue.wanted


async def test_a_record_glued_to_the_handshake_waits_for_its_end() -> None:
    connection = FrameConnection(TransportLimits())
    ready = FRAME_LENGTH.pack(5) + b"ready" + BODY_LENGTH.pack(0)
    frame = records.start(Priority.REST, b"tensor", 1000) + records.head(Kind.DATA, Priority.REST, 1000) + b"x" * 1000
    buffer = connection.get_buffer(-1)
    buffer[: len(ready + frame)] = ready + frame
    connection.buffer_updated(len(ready + frame))
    assert await connection.next_greeting() == b"ready"
    assert connection.failure is None
    connection.end_handshake()
    assert await connection.next_frame(Priority.REST) == (b"tensor", bytearray(b"x" * 1000))
