"""The state of a transport towards one hotkey: where it listens, the one connection, what waits to be sent, how it behaved."""

from __future__ import annotations

import asyncio

from loguru import logger

from subnet.errors import DeadlinePassed, IotaError, Refusal
from subnet.net.base import PeerAddress, Priority, TransportLimits
from subnet.net.frames import FrameConnection
from subnet.net.handshake import Established
from subnet.net.offences import Offences
from subnet.net.outgoing import OutgoingQueue

_MAX_SAID = 64


class Peer:
    """What we know of one hotkey: its address, its connection if there is one, what waits for it."""

    def __init__(self, hotkey: str, limits: TransportLimits) -> None:
        self.hotkey = hotkey
        self.address: PeerAddress | None = None
        self.queue = OutgoingQueue(limits.outbound_bytes, limits.outbound_frames)
        self.connection: FrameConnection | None = None
        self.written_on: FrameConnection | None = None
        """The connection on which the queue's frames have begun."""
        self.established: Established | None = None
        self.last_id = ""
        self.dialing = False
        self.pump: asyncio.Task[None] | None = None
        self.arrived = asyncio.Event()
        self.wanted = 0
        self.trouble = ""
        self.refused: IotaError | None = None
        self.offences = Offences(hotkey)
        self._said: set[str] = set()

    @property
    def live(self) -> FrameConnection | None:
        """The connection, unless it has failed and its reader hasn't noticed yet."""
        return self.connection if self.connection is not None and self.connection.failure is None else None

    def explained(self, error: DeadlinePassed) -> DeadlinePassed:
        """With what went wrong last, where something did."""
        return DeadlinePassed(f"{error.reason}: {self.trouble}") if self.trouble else error

    def say_refused(self, priority: Priority, refusal: Refusal) -> None:
        """What the peer refuses of ours, each code once."""
        if refusal.code not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(refusal.code)
            what = f"{priority.name} frame of ours"
            logger.warning("peer {} refuses a {}: {}: {}", self.hotkey, what, refusal.code, refusal.reason)


def shown(address: PeerAddress) -> str:
    return f"{address.hotkey[:8]} at {address.host}:{address.port}"
