"""Peer transport straight over TCP: one connection per pair of hotkeys, opened by whoever first has something to say.

When two miners open at the same moment, the connection of the smaller hotkey stands and the other is denied as a
crossing; an opener that had lost its connection, or was restarted, replaces the old one. A lost connection is opened
anew, with growing waits, for as long as a frame is wanted. Which connection a frame travels on is nobody's concern.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from subnet.errors import Busy, DeadlinePassed, InputError, IotaError, Refused, TooLarge, Unreachable
from subnet.logs import ReasonLog
from subnet.net.base import OnFrame, OnReset, PeerAddress, Priority, TransportLimits
from subnet.net.doors import Door, connect_to, host_of, let_in
from subnet.net.frames import FrameConnection
from subnet.net.handshake import Established, Open, accept_handshake, deny, open_handshake, say_ready
from subnet.net.offences import CutOff
from subnet.net.outgoing import OutgoingFrame
from subnet.net.peer import Peer, shown
from subnet.net.pump import write_next
from subnet.net.rate import RateLimit
from subnet.net.tls import Security, is_local
from subnet.protocol import wire
from subnet.protocol.signing import Signer, UnknownHotkey
from subnet.protocol.wire import Buffer, byte_views
from subnet.timing import TIMEOUTS, Backoff, Deadline

H = TypeVar("H")


class Crossing(Busy):
    """Both opened at once; the other one's connection stands."""

    code = "crossing"


class StreamTransport(Generic[H]):
    """Implements :class:`subnet.net.base.Transport`; ``header_type`` is a struct or a tagged union of structs.

    ``hashed``: priorities whose bodies are hashed while they arrive. ``upload`` and ``download`` may be shared with others.
    """

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
        security: Security | None = None,
        upload: RateLimit | None = None,
        download: RateLimit | None = None,
        hashed: Collection[Priority] = (Priority.BACKWARD, Priority.FORWARD),
        connect_s: float = TIMEOUTS.peer_connect_s,
        stall_s: float = TIMEOUTS.peer_send_s,
    ) -> None:
        self._signer = signer
        self._header_type = header_type
        self._on_frame = on_frame
        self._door = Door(host, port)
        self._incarnation = incarnation or secrets.token_hex(8)
        self._on_reset = on_reset
        self._is_known = is_known
        self._limits = limits or TransportLimits()
        self._security = security or Security()
        self._upload, self._download = upload or RateLimit(), download or RateLimit()
        self._hashed = hashed
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._peers: dict[str, Peer] = {}
        self._reasons = ReasonLog()
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: Counter[str] = Counter()
        """Under way, by address."""
        self._closing = False
        self._failed: asyncio.Future[None] | None = None

    # --- the protocol

    @property
    def port(self) -> int:
        return self._door.port

    async def start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        await self._door.open()
        self._spawn(self._door.serve(self._accepted), "door")

    async def close(self) -> None:
        self._closing = True
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
        self._door.close()
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
            async with deadline.limit(f"connecting to {shown(peer)}"):
                state.refused = None
                while state.live is None:
                    state.arrived.clear()
                    self._ensure_pump(state)
                    await state.arrived.wait()
                    if state.refused is not None:
                        raise state.refused
        except DeadlinePassed as error:
            raise state.explained(error) from error
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
        if len(encoded) > self._limits.header_bytes or frame.body_bytes > self._limits.body_limit(priority):
            raise TooLarge(f"a frame of {len(encoded)} + {frame.body_bytes} bytes is over the limits")
        state = self._peer_at(peer)
        try:
            async with deadline.limit(f"sending to {shown(peer)}"):
                await state.queue.push(frame)
                self._ensure_pump(state)
                await frame.done
        except DeadlinePassed as error:
            raise state.explained(error) from error
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

    def offences(self) -> dict[str, dict[str, int]]:
        """Refused frames and connections, by hotkey and code."""
        return {hotkey: peer.offences.counts for hotkey, peer in self._peers.items() if peer.offences.counts}

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
        while peer.queue.wanted or (peer.wanted and peer.live is None):
            try:
                connection = peer.live or await self._dial(peer)
                if peer.queue.wanted:
                    await write_next(peer, connection, self._upload, stall_s=self._stall_s)
                backoff.reset()
            except asyncio.CancelledError:
                peer.queue.fail_all(Unreachable("the transport is closing"))
                raise
            except IotaError as error:
                peer.trouble = error.reason
                if error.retryable:
                    await self._pause(peer, backoff.next_s())
                    continue
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
        peer.offences.check(_now_s())
        what = f"connection to {shown(address)}"
        connection = self._new_connection()
        peer.dialing = True
        try:
            async with Deadline.after(self._connect_s).limit(what):
                await connect_to(
                    connection, address.host, address.port, self._security, what=what, timeout_s=self._connect_s
                )
                if peer.live is not None:
                    raise Crossing("the peer was faster")
                established = await open_handshake(
                    connection, self._signer, peer.hotkey, self._incarnation, peer.last_id
                )
        except BaseException as error:
            connection.abort()
            if isinstance(error, Crossing | Refused) and error.code == Crossing.code and peer.live is not None:
                return peer.live
            raise
        finally:
            peer.dialing = False
        self._adopt(peer, connection, established)
        return connection

    # --- receiving

    def _new_connection(self) -> FrameConnection:
        return FrameConnection(self._limits, hashed=self._hashed, download=self._download, stall_s=self._stall_s)

    def _accepted(self, sock: socket.socket) -> None:
        host = host_of(sock)
        crowded = self._handshakes[host] >= self._limits.handshakes_per_address and not is_local(host)
        if self._closing or not host or crowded or self._handshakes.total() >= self._limits.handshakes:
            sock.close()
            return
        self._handshakes[host] += 1
        self._spawn(self._accept(sock, host), f"accept {host}")

    async def _accept(self, sock: socket.socket, host: str) -> None:
        connection = self._new_connection()
        try:
            try:
                async with Deadline.after(self._connect_s).limit(f"handshake of {host}"):
                    await let_in(connection, sock, self._security, timeout_s=self._connect_s)
                    established = await accept_handshake(connection, self._signer, self._incarnation, self._admit)
            finally:
                self._handshakes[host] -= 1
                self._handshakes += Counter[str]()  # forgets the zeros
            say_ready(connection)
        except IotaError as error:
            if not isinstance(error, Crossing | CutOff | Unreachable):
                self._reasons.note(f"refused a peer at {host}", error.code, error.reason)
            if connection.failure is None and connection.transport is not None:
                deny(connection, error)
            await connection.close()
            if connection.transport is None:
                sock.close()
            return
        except asyncio.CancelledError:
            connection.abort()
            if connection.transport is None:
                sock.close()
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
        peer.offences.check(_now_s())
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
        connection.changed = peer.queue.changed
        connection.on_refused = peer.say_refused
        connection.end_handshake()
        for priority in Priority:
            self._spawn(self._serve(peer, connection, priority), f"serve {peer.hotkey[:8]} {priority.name}")
        if old is not None:
            old.abort()
            self._report(peer, "the peer opened a new connection")
        peer.queue.changed.set()

    async def _serve(self, peer: Peer, connection: FrameConnection, priority: Priority) -> None:
        """Hand each frame of a priority to the handler, in order, until the connection ends."""
        what = f"frame of {peer.hotkey[:8]}"
        try:
            while True:
                raw, body = await connection.next_frame(priority)
                size_bytes = len(raw) + len(body)
                header = wire.decode(raw, self._header_type, limit_bytes=self._limits.header_bytes, what=what)
                try:
                    await self._on_frame(peer.hotkey, header, body)
                except IotaError as error:
                    connection.refuse(priority, error.refusal())
                    if peer.offences.note(error, _now_s()):
                        connection.inbound.drop()
                        connection.reject(CutOff("cut off after repeated offences"))
                connection.handled(priority, size_bytes)
        except IotaError as error:
            if connection.failure is None:
                connection.reject(error)
        finally:
            connection.abort()
            self._over(peer, connection)

    def _over(self, peer: Peer, connection: FrameConnection) -> None:
        """Once for each connection that was adopted and is still the peer's."""
        if peer.connection is not connection:
            return
        peer.connection = None
        failure = connection.failure
        if isinstance(failure, InputError):
            peer.offences.note(failure, _now_s())
        peer.queue.changed.set()
        self._report(peer, failure.reason if failure is not None else "closed")

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


def _now_s() -> float:
    return asyncio.get_running_loop().time()
