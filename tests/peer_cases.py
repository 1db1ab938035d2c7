"""Two transports and a peer of whom every byte is chosen, for tests of what travels between miners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from subnet.errors import InputError
from subnet.net.base import Body, PeerAddress, Priority, TransportLimits
from subnet.net.frames import FrameConnection
from subnet.net.handshake import open_handshake
from subnet.net.rate import RateLimit
from subnet.net.streams import StreamTransport
from subnet.net.tls import Security
from subnet.protocol.signing import Signer
from subnet.timing import Deadline


class Note(msgspec.Struct, frozen=True, tag="note"):
    number: int


A, B = sorted((Signer.from_uri(f"//Peer{i}") for i in range(2)), key=lambda signer: signer.hotkey)


def soon() -> Deadline:
    return Deadline.after(30)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Node:
    """A transport that takes frames; those of a priority in ``closed`` wait until it is taken out."""

    signer: Signer
    limits: TransportLimits = field(default_factory=TransportLimits)
    tls: str = "auto"
    stall_s: float = 10.0
    upload: RateLimit | None = None
    download: RateLimit | None = None
    hashed: tuple[Priority, ...] = (Priority.BACKWARD, Priority.FORWARD)
    frames: list[tuple[int, Body]] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    closed: dict[int, asyncio.Event] = field(default_factory=dict)
    """Frames with a number from here on wait for the event."""

    def __post_init__(self) -> None:
        self.transport: StreamTransport[Note] = StreamTransport(
            self.signer,
            Note,
            self.on_frame,
            on_reset=lambda hotkey, reason: self.resets.append(reason),
            limits=self.limits,
            security=Security(self.tls),  # type: ignore[arg-type]
            upload=self.upload,
            download=self.download,
            hashed=self.hashed,
            stall_s=self.stall_s,
            connect_s=5,
        )

    async def on_frame(self, hotkey: str, header: Note, body: Body) -> None:
        for first, event in self.closed.items():
            if header.number >= first:
                await event.wait()
        if header.number < 0:
            raise InputError(f"number {header.number}")
        self.frames.append((header.number, body))

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.frames]

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.signer.hotkey, "127.0.0.1", self.transport.port)


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    try:
        for node in nodes:
            await node.transport.start()
        yield
    finally:
        for node in nodes:
            await node.transport.close()


@asynccontextmanager
async def raw_peer(node: Node, signer: Signer = A) -> AsyncIterator[FrameConnection]:
    """A proven connection to ``node`` whose records are the test's own."""
    connection = FrameConnection(TransportLimits())
    await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", node.transport.port)
    try:
        await open_handshake(connection, signer, node.signer.hotkey, "boot", "")
        connection.end_handshake()
        yield connection
    finally:
        connection.abort()
        await connection.close()


def write(connection: FrameConnection, *parts: bytes) -> None:
    assert connection.transport is not None
    connection.transport.write(b"".join(parts))
