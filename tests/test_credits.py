"""Each priority has credits of its own: one that is full holds up no other, and nobody gets more in than was credited."""

from __future__ import annotations

import asyncio
import os
import struct

import pytest
from blake3 import blake3
from peer_cases import A, B, Node, Note, raw_peer, running, soon, until, write

from subnet.errors import DeadlinePassed
from subnet.net import records
from subnet.net.base import Body, Priority, TransportLimits
from subnet.net.rate import RateLimit
from subnet.net.records import Amount, Kind
from subnet.protocol import wire
from subnet.timing import Deadline

BACKWARD, FORWARD, REST = Priority.BACKWARD, Priority.FORWARD, Priority.REST
SMALL = TransportLimits(inbound_bytes=4 << 20, inbound_frames=16, outbound_bytes=40 << 20, outbound_frames=160)


async def test_a_flood_that_nobody_takes_holds_up_its_own_priority_only() -> None:
    a, b = Node(A), Node(B, limits=SMALL)
    b.closed[1000] = asyncio.Event()
    async with running(a, b):
        body = os.urandom(300_000)
        flood = [
            asyncio.create_task(a.transport.send(b.address, Note(1000 + i), body, priority=FORWARD, deadline=soon()))
            for i in range(30)
        ]
        await until(lambda: sum(task.done() for task in flood) >= 3)
        await a.transport.send(b.address, Note(1), body, priority=BACKWARD, deadline=soon())
        await a.transport.send(b.address, Note(2), b"", priority=REST, deadline=soon())
        await a.transport.send(b.address, Note(3), b"", priority=Priority.CONTROL, deadline=soon())
        await until(lambda: sorted(b.numbers) == [1, 2, 3])
        connection = b.transport._peers[A.hotkey].connection
        assert connection is not None
        assert connection.inbound.lanes[FORWARD].held.num_bytes <= 1 << 20
        assert not all(task.done() for task in flood)
        b.closed[1000].set()
        await asyncio.gather(*flood)
        await until(lambda: len(b.frames) == 33)
        assert b.numbers[3:] == list(range(1000, 1030))


async def test_a_large_frame_gives_way_between_its_pieces() -> None:
    """The receiver sees the urgent frame whole before the large one that began first."""
    a, b = Node(A), Node(B)
    async with running(a, b):
        big = bytes(64 << 20)
        slow = asyncio.create_task(a.transport.send(b.address, Note(0), big, priority=REST, deadline=soon()))
        connection = None

        def begun() -> bool:
            nonlocal connection
            peer = b.transport._peers.get(A.hotkey)
            connection = peer.connection if peer is not None else None
            return connection is not None and connection.inbound.lanes[REST].partial is not None

        await until(begun)
        await a.transport.send(b.address, Note(1), b"gradient", priority=BACKWARD, deadline=soon())
        await slow
        await until(lambda: len(b.frames) == 2)
        assert b.numbers == [1, 0]
        assert len(b.frames[1][1]) == len(big)


async def test_bodies_hash_while_they_arrive() -> None:
    a, b = Node(A), Node(B, hashed=(FORWARD,))
    async with running(a, b):
        body = os.urandom((3 << 20) + 17)
        for priority in (FORWARD, REST):
            await a.transport.send(b.address, Note(priority), [body[:5], body[5:]], priority=priority, deadline=soon())
        await a.transport.send(b.address, Note(9), b"", priority=FORWARD, deadline=soon())
        await until(lambda: len(b.frames) == 3)
        for number, found in b.frames:
            wanted = b"" if number == 9 else body
            assert isinstance(found, Body)
            assert hasattr(found, "_taken") == (number != REST)
            assert found == wanted
            assert found.hash() == blake3(wanted).hexdigest()


async def test_a_frame_that_its_sender_gives_up_is_cancelled_and_its_bytes_are_read_no_more() -> None:
    a, b = Node(A, upload=RateLimit(2 << 20)), Node(B, limits=SMALL)
    async with running(a, b):
        await a.transport.connect(b.address, deadline=soon())
        body = bytearray(b"x" * (4 << 20))
        with pytest.raises(DeadlinePassed):
            await a.transport.send(b.address, Note(0), body, priority=REST, deadline=Deadline.after(0.4))
        body[:] = bytes(len(body))
        await a.transport.send(b.address, Note(1), b"after", priority=REST, deadline=soon())
        await until(lambda: b.numbers == [1])
        connection = b.transport._peers[A.hotkey].connection
        assert connection is not None
        assert connection.inbound.lanes[REST].held == Amount(0, 0)
        assert b.resets == []


async def test_credit_comes_back_over_many_frames() -> None:
    a, b = Node(A), Node(B, limits=SMALL)
    async with running(a, b):
        for i in range(300):
            await a.transport.send(b.address, Note(i), bytes(50_000), priority=FORWARD, deadline=soon())
        await until(lambda: len(b.frames) == 300)
        assert b.numbers == list(range(300))
        peer = a.transport._peers[B.hotkey]
        await until(lambda: peer.connection.credit.under_way[FORWARD] == Amount(0, 0))


# --- peers that lie ---------------------------------------------------------------------------------------------------

HEADER = wire.encode(Note(0))
GARBAGE = {
    "more than was credited": (
        [records.start(FORWARD, HEADER, 1 << 20), records.head(Kind.DATA, FORWARD, 1 << 20), bytes(1 << 20)] * 3,
        "over_credit",
    ),
    "more frames than were credited": ([records.start(FORWARD, HEADER, 0)] * 6, "over_credit"),
    "a long question": ([records.start(Priority.CONTROL, HEADER, 5000)], "too_large"),
    "10 GB": ([records.start(FORWARD, HEADER, 10 << 30)], "too_large"),
    "a length beyond any": ([records.start(REST, HEADER, (1 << 64) - 1)], "too_large"),
    "a piece of another length": (
        [records.start(REST, HEADER, 10), records.head(Kind.DATA, REST, 11), bytes(11)],
        "bad_input",
    ),
    "a piece of nothing": ([records.start(REST, HEADER, 10), records.head(Kind.DATA, REST, 0)], "bad_input"),
    "a piece without a beginning": ([records.head(Kind.DATA, REST, 1), b"x"], "bad_input"),
    "a frame within another": ([records.start(REST, HEADER, 10), records.start(REST, HEADER, 10)], "bad_input"),
    "an end of nothing": ([records.head(Kind.CANCEL, REST, 0)], "bad_input"),
    "an unknown kind": ([struct.pack(">BBI", 77, 0, 0)], "bad_input"),
    "an unknown priority": ([struct.pack(">BBI", 1, 9, 0)], "bad_input"),
    "a long header": ([records.head(Kind.START, REST, 1 << 20)], "too_large"),
    "a record without end": ([records.head(Kind.REFUSED, REST, 1 << 31)], "too_large"),
    "credit for what wasn't sent": ([records.amount(Kind.HANDLED, REST, Amount(1, 1))], "bad_input"),
    "an amount that isn't": ([records.head(Kind.WINDOW, REST, 3), b"abc"], "bad_input"),
    "a refusal that isn't": ([records.head(Kind.REFUSED, REST, 3), b"abc"], "bad_input"),
    "TLS": ([b"\x16\x03\x01\x02\x00\x01"], "bad_input"),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_what_breaks_the_rules_ends_that_connection_with_its_code(what: str) -> None:
    parts, code = GARBAGE[what]
    b = Node(B, limits=TransportLimits(inbound_bytes=8 << 20, inbound_frames=16, boundary_bytes=1 << 20))
    b.closed[0] = asyncio.Event()
    async with running(b):
        async with raw_peer(b) as liar:
            write(liar, *parts)
            await until(lambda: len(b.resets) == 1)
        assert b.transport.offences() == {A.hotkey: {code: 1}}
        b.closed.clear()
        async with raw_peer(b) as again:  # one offence is borne
            write(again, records.start(REST, HEADER, 0))
            await until(lambda: b.numbers[-1:] == [0])


async def test_a_window_counts_what_is_credited_not_what_is_sent() -> None:
    """A hand-made peer that keeps to its credit may go on for ever."""
    b = Node(B, limits=TransportLimits(inbound_bytes=4000, inbound_frames=4))
    async with running(b), raw_peer(b) as peer:
        for _ in range(50):
            await until(
                lambda: peer.credit.under_way[REST].num_frames == 0 and peer.credit.windows[REST].num_frames > 0
            )
            peer.credit.under_way[REST].add(len(HEADER) + 5000)
            write(peer, records.start(REST, HEADER, 5000), records.head(Kind.DATA, REST, 5000), bytes(5000))
        await until(lambda: len(b.frames) == 50)
        assert b.resets == []


# --- peers that dawdle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [records.start(REST, HEADER, 1000)],
        [records.start(REST, HEADER, 1000), records.head(Kind.DATA, REST, 1000), b"x"],
        [records.start(REST, HEADER, 1000)[:9]],
        [b"\x01"],
    ],
    ids=["no body", "half a body", "half a header", "half a head"],
)
async def test_a_frame_that_never_ends_ends_its_connection(parts: list[bytes]) -> None:
    b = Node(B, stall_s=0.3)
    async with running(b), raw_peer(b) as loris:
        write(loris, *parts)
        await until(lambda: len(b.resets) == 1)
        assert b.transport.offences() == {A.hotkey: {"slow_peer": 1}}


async def test_a_trickle_is_no_progress_and_silence_between_frames_is_no_fault() -> None:
    b = Node(B, stall_s=0.5)
    async with running(b), raw_peer(b) as loris:
        await asyncio.sleep(1.2)  # nothing has begun: nothing is late
        loris.credit.under_way[REST].add(len(HEADER))
        write(loris, records.start(REST, HEADER, 0))
        await until(lambda: len(b.frames) == 1)
        assert b.resets == []
        write(loris, records.start(REST, HEADER, 10_000), records.head(Kind.DATA, REST, 10_000))
        while not b.resets:
            if loris.failure is None:
                write(loris, b"x")
            await asyncio.sleep(0.05)
        assert b.transport.offences() == {A.hotkey: {"slow_peer": 1}}


async def test_a_handshake_that_never_ends_is_given_up() -> None:
    b = Node(B)
    b.transport._connect_s = 0.3
    async with running(b):
        reader, writer = await asyncio.open_connection("127.0.0.1", b.transport.port)
        silent_reader, silent = await asyncio.open_connection("127.0.0.1", b.transport.port)
        writer.write(b"\x00\x00")
        await until(lambda: b.transport._handshakes.total() == 2)
        await until(lambda: b.transport._handshakes.total() == 0)
        await reader.read()
        await silent_reader.read()
        for each in (writer, silent):
            each.close()
            await each.wait_closed()
