"""The state of a transport towards one hotkey: where it listens, the one connection, what waits to be sent."""

from __future__ import annotations

import asyncio

from subnet.errors import IotaError
from subnet.net.base import PeerAddress, TransportLimits
from subnet.net.frames import FrameConnection
from subnet.net.handshake import Established
from subnet.net.outgoing import OutgoingQueue


class Peer:
    """What we know of one hotkey: its address, its connection if there is one, what waits for it."""

    def __init__(self, hotkey: str, limits: TransportLimits) -> None:
        self.hotkey = hotkey
        self.address: PeerAddress | None = None
        self.queue = OutgoingQueue(limits.outbound_bytes, limits.outbound_frames)
        self.connection: FrameConnection | None = None
        self.established: Established | None = None
        self.last_id = ""
        self.dialing = False
        self.pump: asyncio.Task[None] | None = None
        self.arrived = asyncio.Event()
        self.wanted = 0
        self.trouble = ""
        self.refused: IotaError | None = None

    @property
    def live(self) -> FrameConnection | None:
        """The connection, unless it has failed and its reader hasn't noticed yet."""
        return self.connection if self.connection is not None and self.connection.failure is None else None
