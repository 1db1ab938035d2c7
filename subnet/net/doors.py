"""Sockets of peer connections, out and in: encrypted where :class:`~subnet.net.tls.Security` says so, on one port with plain ones.

An accepted socket is only looked at until it is known what it speaks; whoever calls bounds the time and closes what failed.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from loguru import logger

from subnet.errors import Unreachable
from subnet.net.border import os_reason, port_error
from subnet.net.frames import FrameConnection
from subnet.net.tls import CLIENT_HELLO, Security, TlsRequired, is_local, peer_certificate_hash

_BACKLOG = 512
_OUT_OF_FILES_S = 1.0
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def connect_to(
    connection: FrameConnection, host: str, port: int, security: Security, *, what: str, timeout_s: float
) -> None:
    """Connect, and encrypt where the address asks for it; :class:`Unreachable` says why not."""
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(lambda: connection, host, port)
    except OSError as error:
        raise Unreachable(f"{what}: {os_reason(error)}") from error
    if security.needed(connection.peer_host):
        try:
            secure = await loop.start_tls(transport, connection, security.client(), ssl_handshake_timeout=timeout_s)
        except OSError as error:  # of TLS too
            raise Unreachable(f"{what}: no encrypted connection: {error}") from error
        if secure is None:
            raise Unreachable(f"{what}: lost")
        connection.connection_made(secure)
        connection.channel = peer_certificate_hash(secure)
    if not is_local(connection.peer_host):
        connection.hurry()


async def let_in(connection: FrameConnection, sock: socket.socket, security: Security, *, timeout_s: float) -> None:
    """Speak with whoever connected as it began to speak; ``sock`` is the connection's from then on.

    :class:`TlsRequired` for a plain one where an encrypted one belongs: the connection is made, and can say so.
    """
    host = host_of(sock)
    encrypted = await _first_byte(sock) == CLIENT_HELLO and security.allowed
    loop = asyncio.get_running_loop()
    if encrypted:
        context, connection.channel = await security.server()
        try:
            await loop.connect_accepted_socket(
                lambda: connection, sock, ssl=context, ssl_handshake_timeout=timeout_s, ssl_shutdown_timeout=timeout_s
            )
        except OSError as error:
            raise Unreachable(f"{host}: no encrypted connection: {error}") from error
    else:
        await loop.connect_accepted_socket(lambda: connection, sock)
    if not is_local(host):
        connection.hurry()
    if not encrypted and security.needed(host):
        raise TlsRequired(f"{host} isn't local: encrypt", hint="--peer.tls auto")


def host_of(sock: socket.socket) -> str:
    """The other side's address, nothing where it is gone already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


async def _first_byte(sock: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            data = None
        except OSError as error:
            raise Unreachable(os_reason(error)) from error
        if data is not None:
            if not data:
                raise Unreachable("closed before it said anything")
            return data[0]
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, _done, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Door:
    """Accepts sockets until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self.port = host, port
        self._sock: socket.socket | None = None

    async def open(self) -> None:
        """Listen; a port in use is a :class:`~subnet.errors.ConfigError`."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                self._host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, _, _, _, address = found[0]
            self._sock = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            raise port_error(self._host, self.port, error) from error
        self._sock.setblocking(False)
        self.port = self._sock.getsockname()[1]

    async def serve(self, on_socket: Callable[[socket.socket], None]) -> None:
        """For ever; short of files it waits, as others may close some."""
        loop, sock = asyncio.get_running_loop(), self._sock
        if sock is None:
            raise RuntimeError("open the door first")
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    logger.error("no peer is let in for {:g} s: {}", _OUT_OF_FILES_S, os_reason(error))
                    await asyncio.sleep(_OUT_OF_FILES_S)
                elif error.errno == errno.EBADF:
                    raise
                continue
            accepted.setblocking(False)
            on_socket(accepted)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
