"""Connections with peers elsewhere are encrypted and bound to both hotkeys: whoever sits in between fails at both ends."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from peer_cases import A, B, Node, Note, running, soon, until

from subnet.errors import ConfigError, DeadlinePassed, IotaError
from subnet.net.base import PeerAddress, TransportLimits
from subnet.net.frames import FrameConnection
from subnet.net.handshake import open_handshake
from subnet.net.tls import Security
from subnet.protocol.signing import Signer
from subnet.timing import Deadline

EVE = Signer.from_uri("//Eve")


@pytest.mark.parametrize(
    ("mode", "host", "needed"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "::ffff:127.0.0.1", False),
        ("auto", "10.1.2.3", False),
        ("auto", "10.2.0.1", True),
        ("auto", "192.168.1.7", True),
        ("auto", "8.8.8.8", True),
        ("auto", "fe80::1%eth0", True),
        ("auto", "not an address", True),
        ("always", "127.0.0.1", True),
        ("never", "8.8.8.8", False),
    ],
)
def test_who_is_spoken_to_in_the_clear(mode: str, host: str, needed: bool) -> None:
    assert Security(mode, ["10.1.0.0/16"]).needed(host) is needed  # type: ignore[arg-type]


def test_what_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"peer\.tls"):
        Security("sometimes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1/8"):
        Security("auto", ["10.0.0.1/8"])


async def test_frames_travel_encrypted() -> None:
    a, b = Node(A, tls="always"), Node(B, tls="always")
    seen = bytearray()
    async with running(a, b):
        async with _wiretap(b.transport.port, seen) as port:
            address = PeerAddress(B.hotkey, "127.0.0.1", port)
            await a.transport.send(address, Note(1), b"a secret gradient" * 100, deadline=soon())
            await until(lambda: b.numbers == [1])
        assert b"secret" not in seen
        assert B.hotkey.encode() not in seen
        assert len(seen) > 1700


async def test_where_encryption_belongs_a_plain_connection_is_refused() -> None:
    a, b = Node(A, tls="never"), Node(B, tls="always")
    async with running(a, b):
        with pytest.raises(IotaError) as raised:
            await a.transport.send(b.address, Note(1), b"", deadline=soon())
        assert raised.value.code == "tls_required"
        assert b.frames == []


async def test_nobody_gives_in_to_a_peer_that_does_not_encrypt() -> None:
    a, b = Node(A, tls="always"), Node(B, tls="never")
    async with running(a, b):
        with pytest.raises(DeadlinePassed, match="no encrypted connection"):
            await a.transport.send(b.address, Note(1), b"", deadline=Deadline.after(2))
        assert b.frames == []


async def test_a_man_in_the_middle_fails_at_the_opener() -> None:
    """He has a certificate of his own and passes on every byte: the accepter signed for another certificate."""
    a, b = Node(A, tls="always"), Node(B, tls="always")
    async with running(a, b), _middle(b.transport.port) as port:
        with pytest.raises(IotaError) as raised:
            await a.transport.send(PeerAddress(B.hotkey, "127.0.0.1", port), Note(1), b"x", deadline=soon())
        assert raised.value.code == "bad_signature"
        assert b.frames == []
        assert b.transport.connected() == {}


@pytest.mark.parametrize("believes", [True, False])
async def test_a_man_in_the_middle_fails_at_the_accepter(believes: bool) -> None:
    """Even an opener that checks nothing signs for the certificate it has seen."""
    b = Node(B, tls="always")
    async with running(b), _middle(b.transport.port) as port:
        connection = FrameConnection(TransportLimits())
        context = Security("always").client()
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port, ssl=context)
        certificate = connection.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert certificate
        connection.channel = b"" if believes else b"another certificate"
        with pytest.raises(IotaError):
            await open_handshake(connection, A, B.hotkey, "boot", "")
        assert b.transport.connected() == {}
        connection.abort()
        await connection.close()


async def test_the_certificate_lies_nowhere_and_is_new_in_each_process() -> None:
    (first, first_hash), (_, second_hash) = await Security().server(), await Security().server()
    assert first_hash != second_hash
    assert first.minimum_version is ssl.TLSVersion.TLSv1_3


class _Pipe:
    """Passes bytes on, both ways, until one side ends."""

    def __init__(self, port: int, *, inner: ssl.SSLContext | None = None, seen: bytearray | None = None) -> None:
        self._port, self._inner, self._seen = port, inner, seen
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        up_reader, up = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._inner)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, up))
                group.create_task(self._copy(up_reader, writer))
        except* OSError:
            pass
        finally:
            for end in (writer, up):
                end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._seen is not None:
                self._seen += data
            writer.write(data)
            await writer.drain()
        writer.close()


class _Serving:
    def __init__(self, pipe: _Pipe, outer: Security | None = None) -> None:
        self._pipe, self._outer = pipe, outer

    async def __aenter__(self) -> int:
        context = (await self._outer.server())[0] if self._outer is not None else None
        self._server = await asyncio.start_server(self._pipe.serve, "127.0.0.1", 0, ssl=context)
        return self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._pipe.tasks:
            task.cancel()
        if self._pipe.tasks:
            await asyncio.wait(self._pipe.tasks)


def _wiretap(port: int, seen: bytearray) -> _Serving:
    return _Serving(_Pipe(port, seen=seen))


def _middle(port: int) -> _Serving:
    return _Serving(_Pipe(port, inner=Security("always").client()), Security("always"))
