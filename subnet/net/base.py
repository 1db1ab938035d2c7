"""What a transport between miners promises: frames of a typed header and raw bytes, from a hotkey that proved itself.

* Whoever a frame comes from has signed for this connection with the hotkey that ``on_frame`` is told.
* ``send`` returns when the local kernel has the whole frame. That is no receipt: a reset may still lose it, and a frame
  that was being written when a connection broke is sent again, so receivers bear doubles.
* Frames of one peer and one priority keep their order on one connection; a lower priority number goes first.
* Memory is bounded per peer, both ways: a full queue makes ``send`` wait, a slow handler makes the peer wait.
* Garbage, an oversize length or an error of the handler about a frame ends that one connection, with the reason logged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

import msgspec

from subnet.errors import ConfigError
from subnet.protocol import wire
from subnet.protocol.wire import Buffer
from subnet.timing import Deadline

H = TypeVar("H")
H_contra = TypeVar("H_contra", contravariant=True)


class Priority(IntEnum):
    """What goes first: a gradient frees memory and the pipeline behind it."""

    BACKWARD = 0
    FORWARD = 1
    REST = 2


class PeerAddress(msgspec.Struct, frozen=True, order=True):
    """Where a hotkey listens; the connection proves that it is this hotkey."""

    hotkey: str
    host: str
    port: int


class TransportLimits(msgspec.Struct, frozen=True):
    """Per peer, checked before anything is allocated."""

    header_bytes: int = wire.MAX_HEADER_BYTES
    body_bytes: int = 1 << 30
    inbound_bytes: int = 256 << 20
    """Received and not yet handled; one frame is always let in."""
    inbound_frames: int = 1024
    outbound_bytes: int = 256 << 20
    """Queued for sending; one frame is always let in."""
    outbound_frames: int = 1024
    peers: int = 1024
    handshakes: int = 128
    """Connections that haven't proved themselves yet, all together."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"transport limit {name} = {getattr(self, name)}", hint="at least 1")


OnFrame = Callable[[str, H, bytearray], Awaitable[None]]
"""(peer's hotkey, header, body): the body is the handler's from then on. An ``IotaError`` ends the connection; any
other exception is our own fault and comes out of :meth:`Transport.watch`."""

OnReset = Callable[[str, str], None]
"""(peer's hotkey, reason): an established connection ended, and it wasn't us who closed the transport."""


class Transport(Protocol[H_contra]):
    @property
    def port(self) -> int:
        """Where we listen, once started."""
        ...

    async def start(self) -> None:
        """Listen; a port in use is a :class:`~subnet.errors.ConfigError`."""
        ...

    async def close(self) -> None:
        """End all connections; whoever still waits in ``send`` gets :class:`~subnet.errors.Unreachable`."""
        ...

    async def watch(self) -> None:
        """Runs for ever; raises what went wrong on our own side."""
        ...

    async def connect(self, peer: PeerAddress, *, deadline: Deadline) -> None:
        """Make sure of a connection: a probe. :class:`~subnet.errors.Unreachable` if there is none in time."""
        ...

    async def send(
        self,
        peer: PeerAddress,
        header: H_contra,
        body: Buffer | Sequence[Buffer],
        *,
        priority: Priority = Priority.REST,
        deadline: Deadline,
    ) -> None:
        """Hand a frame to the peer's kernel; ``body`` must stay as it is until this returns.

        :class:`~subnet.errors.DeadlinePassed` (it may still arrive), :class:`~subnet.errors.TooLarge`, or the permanent
        refusal of the peer.
        """
        ...
