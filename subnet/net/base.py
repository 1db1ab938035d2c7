"""What a transport between miners promises: frames of a typed header and raw bytes, from a hotkey that proved itself.

* Whoever a frame comes from has signed for this connection with the hotkey that ``on_frame`` is told; with a peer that
  isn't local the connection is encrypted, and bound to both hotkeys.
* ``send`` returns when the local kernel has the whole frame. That is no receipt: a reset may still lose it, and a frame
  that was being written when a connection broke is sent again, so receivers bear doubles.
* Frames of one peer and one priority keep their order on one connection. Each priority has credits of its own, which its
  receiver gives: one that is full waits at its sender and holds up no other, and a large frame gives way to a lower number.
* Memory is bounded per peer and priority, both ways: a full queue makes ``send`` wait, a slow handler makes the peer wait.
* Garbage, an oversize length, more than was credited, and a frame that doesn't get on end that one connection. A frame
  that the handler refuses is dropped and its sender told the code. Who does such things repeatedly is cut off for a
  growing while. Each kind of offence of a peer is logged once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

import msgspec
from blake3 import blake3

from subnet.errors import ConfigError
from subnet.protocol import wire
from subnet.protocol.wire import Buffer
from subnet.timing import TIMEOUTS, Deadline, transfer_deadline

H = TypeVar("H")
H_contra = TypeVar("H_contra", contravariant=True)

CONTROL_BYTES = 4096


class Priority(IntEnum):
    """What goes first: questions are small and somebody waits; a gradient frees memory and the pipeline behind it."""

    CONTROL = 0
    """Frames without a body, or nearly."""
    BACKWARD = 1
    FORWARD = 2
    REST = 3


class PeerAddress(msgspec.Struct, frozen=True, order=True):
    """Where a hotkey listens; the connection proves that it is this hotkey."""

    hotkey: str
    host: str
    port: int


class TransportLimits(msgspec.Struct, frozen=True):
    """Per peer, checked before anything is allocated."""

    header_bytes: int = wire.MAX_HEADER_BYTES
    body_bytes: int = 1 << 30
    boundary_bytes: int = 1 << 30
    """The same for frames of the priorities ``BACKWARD`` and ``FORWARD``."""
    inbound_bytes: int = 256 << 20
    """Received and not yet handled, a quarter for each priority; one frame of each is always let in."""
    inbound_frames: int = 1024
    outbound_bytes: int = 256 << 20
    """Queued for sending, a quarter for each priority; one frame of each is always let in."""
    outbound_frames: int = 1024
    peers: int = 1024
    handshakes: int = 128
    """Connections that haven't proved themselves yet, all together."""
    handshakes_per_address: int = 16
    """And of one address, if that isn't this machine."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"transport limit {name} = {getattr(self, name)}", hint="at least 1")

    def body_limit(self, priority: Priority) -> int:
        match priority:
            case Priority.CONTROL:
                return min(CONTROL_BYTES, self.body_bytes)
            case Priority.BACKWARD | Priority.FORWARD:
                return self.boundary_bytes
            case Priority.REST:
                return self.body_bytes


def share(total: int) -> int:
    """What each priority gets of a limit for all."""
    return max(1, total // len(Priority))


def send_deadline(num_bytes: int) -> Deadline:
    """When a frame of so many bytes should be with the other miner's kernel, whatever else its link carries."""
    return transfer_deadline(TIMEOUTS.peer_send_s, num_bytes)


class Body(bytearray):
    """A frame's body; its hash was taken while it arrived, where that was asked for, else it is taken when asked."""

    __slots__ = ("_taken",)
    _taken: str

    def hash(self) -> str:
        """BLAKE3 of the bytes as they came, in hex."""
        try:
            return self._taken
        except AttributeError:
            self._taken = blake3(self).hexdigest()
            return self._taken

    def took(self, digest: str) -> None:
        self._taken = digest


OnFrame = Callable[[str, H, Body], Awaitable[None]]
"""(peer's hotkey, header, body): the body is the handler's from then on. An ``IotaError`` refuses the frame: its sender is
told, and an ``InputError`` counts against it. Any other exception is our own fault and comes out of :meth:`Transport.watch`.
Frames of different priorities may be handled at the same time."""

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
        """Hand a frame to the peer's kernel; ``body`` must stay as it is until this returns or raises.

        :class:`~subnet.errors.DeadlinePassed` (it may still arrive), :class:`~subnet.errors.TooLarge`, or the permanent
        refusal of the peer.
        """
        ...
