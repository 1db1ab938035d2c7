"""Peer transport straight over TCP: one connection per pair of hotkeys, opened by whoever first has something to say.

When two miners open at the same moment, the connection of the smaller hotkey stands and the other is denied as a
crossing; an opener that had lost its connection, or was restarted, replaces the old one. A lost connection is opened
anew, with growing waits, for as long as a frame is wanted. Which connection a frame travels on is nobody's concern.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from loguru import logger

from subnet.errors import Busy, DeadlinePassed, InputError, IotaError, Refused, TooLarge, Unreachable
from subnet.net.base import OnFrame, OnReset, PeerAddress, Priority, TransportLimits
from subnet.net.border import os_reason, port_error
from subnet.net.frames import FrameConnection
from subnet.net.handshake import (
    HANDSHAKE_BYTES,
    Established,
    Open,
    accept_handshake,
    deny,
    open_handshake,
    say_ready,
)
from subnet.net.outgoing import OutgoingFrame
from subnet.net.peer import Peer
from subnet.protocol import wire
from subnet.protocol.signing import Signer, UnknownHotkey
from subnet.protocol.wire import Buffer, byte_views
from subnet.timing import TIMEOUTS, Backoff, Deadline

H = TypeVar("H")


class Crossing(Busy):
    """Both opened at once; the other one's connection stands."""

    code = "crossing"


class StreamTransport(Generic[H]):
    """Implements :class:`subnet.net.base.Transport`; ``header_type`` is a struct or a tagged union of structs."""

    def __init__(
        self,
        signer: Signer,
        header_type: Any,
        on_frame: OnFrame[H],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        incarnation: str = "",
        on_reset: OnReset | None = None,
        is_known: Callable[[str], bool] = lambda hotkey: True,
        limits: TransportLimits | None = None,
        connect_s: float = TIMEOUTS.peer_connect_s,
        stall_s: float = TIMEOUTS.peer_send_s,
    ) -> None:
        self._signer = signer
        self._header_type = header_type
        self._on_frame = on_frame
        self._host = host
        self._port = port
        self._incarnation = incarnation or secrets.token_hex(8)
        self._on_reset = on_reset
        self._is_known = is_known
        self._limits = limits or TransportLimits()
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._handshakes = 0
        self._closing = False
        self._failed: asyncio.Future[None] | None = None

    # --- the protocol

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        try:
            factory = functools.partial(self._new_connection, self._accepted)
            self._server = await loop.create_server(factory, self._host, self._port)
        except OSError as error:
            raise port_error(self._host, self._port, error) from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        gone = Unreachable("the transport is closing")
        for peer in self._peers.values():
            peer.queue.fail_all(gone)
            peer.arrived.set()
        connections = [peer.connection for peer in self._peers.values() if peer.connection is not None]
        await asyncio.gather(*(connection.close() for connection in connections))
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()

    async def watch(self) -> None:
        if self._failed is None:
            raise RuntimeError("start the transport first")
        await asyncio.shield(self._failed)

    async def connect(self, peer: PeerAddress, *, deadline: Deadline) -> None:
        state = self._peer_at(peer)
        state.wanted += 1
        try:
            async with deadline.limit(f"connecting to {_shown(peer)}"):
                state.refused = None
                while state.live is None:
                    state.arrived.clear()
                    self._ensure_pump(state)
                    await state.arrived.wait()
                    if state.refused is not None:
                        raise state.refused
        except DeadlinePassed as error:
            raise _explained(error, state) from error
        finally:
            state.wanted -= 1

    async def send(
        self,
        peer: PeerAddress,
        header: H,
        body: Buffer | Sequence[Buffer],
        *,
        priority: Priority = Priority.REST,
        deadline: Deadline,
    ) -> None:
        encoded, views = wire.encode(header), byte_views(body)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        frame = OutgoingFrame(priority, encoded, views, done)
        if len(encoded) > self._limits.header_bytes or frame.size_bytes - len(encoded) > self._limits.body_bytes:
            raise TooLarge(f"a frame of {len(encoded)} + {frame.size_bytes - len(encoded)} bytes is over the limits")
        state = self._peer_at(peer)
        try:
            async with deadline.limit(f"sending to {_shown(peer)}"):
                await state.queue.push(frame)
                self._ensure_pump(state)
                await frame.done
        except DeadlinePassed as error:
            raise _explained(error, state) from error
        finally:
            state.queue.abandon(frame)
            if done.done() and not done.cancelled():
                done.exception()  # ours was raised above; this one is for a sender that had already given up

    def connected(self) -> dict[str, str]:
        """Hotkeys with an established connection, and the incarnations that they proved."""
        return {
            hotkey: peer.established.incarnation
            for hotkey, peer in self._peers.items()
            if peer.live is not None and peer.established is not None
        }

    # --- sending

    def _peer_at(self, address: PeerAddress) -> Peer:
        if address.hotkey == self._signer.hotkey:
            raise InputError("a miner doesn't send to itself")
        peer = self._peer(address.hotkey)
        peer.address = address
        return peer

    def _peer(self, hotkey: str) -> Peer:
        if hotkey not in self._peers:
            self._peers[hotkey] = Peer(hotkey, self._limits)
        return self._peers[hotkey]

    def _ensure_pump(self, peer: Peer) -> None:
        if self._closing:
            raise Unreachable("the transport is closing")
        if peer.pump is None or peer.pump.done():
            peer.pump = self._spawn(self._pump(peer), f"pump {peer.hotkey[:8]}")

    async def _pump(self, peer: Peer) -> None:
        """Write what is queued, opening the connection as often as that takes; ends when nothing is wanted."""
        backoff = Backoff(0.05, 1.0)
        while True:
            frame = peer.queue.pop()
            if frame is None and (not peer.wanted or peer.live is not None):
                return
            try:
                connection = peer.live or await self._dial(peer)
                if frame is not None:
                    await connection.write_frame(frame.header, frame.views, stall_s=self._stall_s)
                    peer.queue.finish(frame)
                backoff.reset()
            except asyncio.CancelledError:
                if frame is not None:
                    peer.queue.finish(frame, Unreachable("the transport is closing"))
                raise
            except IotaError as error:
                peer.trouble = error.reason
                if error.retryable:
                    if frame is not None:
                        peer.queue.unpop(frame)
                    await self._pause(peer, backoff.next_s())
                    continue
                if frame is not None:
                    peer.queue.finish(frame, error)
                peer.queue.fail_all(error)
                peer.refused = error
                peer.arrived.set()
                return

    async def _pause(self, peer: Peer, seconds: float) -> None:
        """Wait before the next try, or until the peer has opened a connection itself."""
        if peer.live is not None:
            return
        peer.arrived.clear()
        waiter = asyncio.ensure_future(peer.arrived.wait())
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            waiter.cancel()

    async def _dial(self, peer: Peer) -> FrameConnection:
        address = peer.address
        if address is None:
            raise Unreachable(f"{peer.hotkey[:8]} isn't connected, and its address isn't known")
        what = f"connection to {_shown(address)}"
        loop = asyncio.get_running_loop()
        connection = self._new_connection(None)
        peer.dialing = True
        try:
            async with Deadline.after(self._connect_s).limit(what):
                try:
                    await loop.create_connection(lambda: connection, address.host, address.port)
                except OSError as error:
                    raise Unreachable(f"{what}: {os_reason(error)}") from error
                established = await open_handshake(
                    connection, self._signer, peer.hotkey, self._incarnation, peer.last_id
                )
        except BaseException as error:
            connection.abort()
            if isinstance(error, Refused) and error.code == Crossing.code and peer.live is not None:
                return peer.live
            raise
        finally:
            peer.dialing = False
        self._adopt(peer, connection, established)
        return connection

    # --- receiving

    def _new_connection(self, on_open: Callable[[FrameConnection], None] | None) -> FrameConnection:
        limits = self._limits
        connection = FrameConnection(
            header_bytes=max(limits.header_bytes, HANDSHAKE_BYTES),
            body_bytes=0,
            quota_bytes=limits.inbound_bytes,
            quota_frames=limits.inbound_frames,
            on_open=on_open,
            handshake=True,
        )
        connection.set_limits(header_bytes=HANDSHAKE_BYTES, body_bytes=0)
        return connection

    def _accepted(self, connection: FrameConnection) -> None:
        if self._closing or self._handshakes >= self._limits.handshakes:
            connection.abort()
            return
        self._handshakes += 1
        self._spawn(self._accept(connection), f"accept {connection.peer_name}")

    async def _accept(self, connection: FrameConnection) -> None:
        try:
            try:
                async with Deadline.after(self._connect_s).limit(f"handshake of {connection.peer_name}"):
                    established = await accept_handshake(connection, self._signer, self._incarnation, self._admit)
            finally:
                self._handshakes -= 1
            say_ready(connection)
        except IotaError as error:
            if not isinstance(error, Crossing):
                logger.info("refused a peer at {}: {}", connection.peer_name, error.reason)
            if connection.failure is None:
                deny(connection, error)
            await connection.close()
            return
        except asyncio.CancelledError:
            connection.abort()
            raise
        self._adopt(self._peer(established.hotkey), connection, established)

    def _admit(self, opened: Open) -> None:
        """Raise unless this hotkey may connect, now and with this connection."""
        if self._closing:
            raise Busy("shutting down")
        if opened.hotkey == self._signer.hotkey:
            raise InputError("that is our own hotkey")
        if not self._is_known(opened.hotkey):
            # a joiner may be ahead of what we have folded: worth another try
            raise UnknownHotkey(f"{opened.hotkey[:64]} is no member that we know of", retry_after_s=0.2)
        peer = self._peers.get(opened.hotkey)
        num_connected = sum(1 for other in self._peers.values() if other.live is not None)
        if (peer is None or peer.live is None) and num_connected >= self._limits.peers:
            raise Busy(f"already {num_connected} peers")
        if peer is None:
            return
        crossing = Crossing("we opened a connection at the same moment", retry_after_s=0.05)
        if peer.dialing and self._signer.hotkey < opened.hotkey:
            raise crossing
        current = peer.established if peer.live is not None else None
        same = current is not None and current.opened_by_us and current.incarnation == opened.incarnation
        if same and peer.last_id != opened.last:
            raise crossing

    def _adopt(self, peer: Peer, connection: FrameConnection, established: Established) -> None:
        old = peer.connection
        peer.connection, peer.established = connection, established
        peer.last_id = established.connection_id
        peer.trouble = ""
        peer.arrived.set()
        connection.end_handshake(header_bytes=self._limits.header_bytes, body_bytes=self._limits.body_bytes)
        self._spawn(self._serve(peer, connection), f"serve {peer.hotkey[:8]}")
        if old is not None:
            old.abort()
            self._report(peer, "the peer opened a new connection")

    async def _serve(self, peer: Peer, connection: FrameConnection) -> None:
        """Hand each frame to the handler, in order, until the connection ends."""
        what = f"frame of {peer.hotkey[:8]}"
        reason = "closed"
        try:
            while True:
                raw, body = await connection.next_frame()
                size_bytes = len(raw) + len(body)
                header = wire.decode(raw, self._header_type, limit_bytes=self._limits.header_bytes, what=what)
                await self._on_frame(peer.hotkey, header, body)
                connection.release(size_bytes)
        except IotaError as error:
            reason = error.reason
            if error is not connection.failure or isinstance(error, InputError):
                logger.warning("closing the connection with {}: {}", peer.hotkey, reason)
        finally:
            connection.abort()
            if peer.connection is connection:
                peer.connection = None
                self._report(peer, reason)

    def _report(self, peer: Peer, reason: str) -> None:
        if self._on_reset is not None and not self._closing:
            self._on_reset(peer.hotkey, reason)

    # --- tasks

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)


def _explained(error: DeadlinePassed, peer: Peer) -> DeadlinePassed:
    return DeadlinePassed(f"{error.reason}: {peer.trouble}") if peer.trouble else error


def _shown(address: PeerAddress) -> str:
    return f"{address.hotkey[:8]} at {address.host}:{address.port}"
