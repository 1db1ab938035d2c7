"""Ports of a local swarm: given ones are checked to be free before anything starts, zeros become free ones."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from subnet.errors import ConfigError

HOST = "127.0.0.1"


@dataclass(frozen=True)
class SwarmPorts:
    """0: any free port."""

    chain: int = 0
    store: int = 0
    validator: int = 0

    def taken(self) -> SwarmPorts:
        """These ports, checked to be free, and free ones for the zeros."""
        with _Held() as held:
            return SwarmPorts(*(held.take(port) for port in (self.chain, self.store, self.validator)))


class _Held:
    """Ports bound for a moment, so that no two of them are the same."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *exc: object) -> None:
        for held in self._sockets:
            held.close()

    def take(self, port: int) -> int:
        held = socket.socket()
        self._sockets.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"can't listen on {HOST}:{port}: {error.strerror or error}",
                hint="stop what holds the port, or choose another (0: any free one)",
            ) from error
        return held.getsockname()[1]


def answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1.0):
            return True
    except OSError:
        return False
