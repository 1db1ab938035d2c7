"""Whether a miner can be reached from here: one connection and half a handshake, in which it proves its hotkey.

So that nobody else is probed by it: only the request's own source address, or an announced address that is public and a port
that needs no privileges; few requests of a hotkey, fewer targets; one address is tried, as resolved once; nothing is sent but
the handshake's opening. It never says more than the codes of :class:`~subnet.protocol.reach.ReachAnswer`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from subnet.errors import Busy, InputError, IotaError, Refused
from subnet.net.base import TransportLimits
from subnet.net.doors import connect_to
from subnet.net.frames import FrameConnection
from subnet.net.handshake import ask_accepter
from subnet.net.tls import Security, TlsRequired
from subnet.protocol.reach import ReachAnswer, ReachRequest
from subnet.protocol.signing import Signer
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline

AT_ONCE = 16
BURST, REFILL_S = 6, 5.0
"""Requests of a hotkey, and after what time it has another one."""
TARGETS, TARGETS_S = 4, 3600.0
"""Different targets of a hotkey that aren't where it asks from, and for how long they count."""
_MAX_HOTKEYS = 4096
_FIRST_UNPRIVILEGED_PORT = 1024
_MAX_HOST_CHARACTERS = 253

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass
class _Asker:
    tokens: float = BURST
    seen_s: float = 0.0
    targets: deque[tuple[float, str]] = field(default_factory=deque[tuple[float, str]])


class ReachDesk:
    def __init__(
        self,
        signer: Signer,
        *,
        clock: Clock = SYSTEM_CLOCK,
        security: Security | None = None,
        connect_s: float = TIMEOUTS.peer_connect_s,
    ) -> None:
        self._signer, self._clock, self._connect_s = signer, clock, connect_s
        self._securities = (security or Security(), Security("always"))
        """As between miners; and for one that insists on encryption even here."""
        self._askers: OrderedDict[str, _Asker] = OrderedDict()
        self._under_way = 0

    async def look(self, hotkey: str, source: str, request: ReachRequest) -> ReachAnswer:
        """Connect to the miner ``hotkey``; :class:`Busy` where it asks too often."""
        if not 0 < request.port <= 65535 or not 0 < len(request.host) <= _MAX_HOST_CHARACTERS:
            raise InputError(f"port {request.port} of a host of {len(request.host)} characters")
        asker = self._asker(hotkey)
        self._take_turn(asker)
        try:
            target = await _resolve(request.host)
        except OSError as error:
            return ReachAnswer(False, "unknown_host", f"{request.host}: {error.strerror or error}", "", source)
        why_not = forbidden(target, source, request.port)
        if why_not:
            return ReachAnswer(False, "not_public", why_not, str(target), source)
        if not same_place(target, source):
            self._count_target(asker, f"{target} {request.port}")
        self._under_way += 1
        try:
            code, reason = await self._connect(hotkey, str(target), request.port)
        finally:
            self._under_way -= 1
        return ReachAnswer(code == "reachable", code, reason, str(target), source)

    async def _connect(self, hotkey: str, host: str, port: int) -> tuple[str, str]:
        usual, always = self._securities
        try:
            return await self._try(hotkey, host, port, usual)
        except TlsRequired:
            return await self._try(hotkey, host, port, always)

    async def _try(self, hotkey: str, host: str, port: int, security: Security) -> tuple[str, str]:
        connection = FrameConnection(TransportLimits(), stall_s=self._connect_s)
        what = f"{host}:{port}"
        try:
            async with Deadline.after(self._connect_s).limit(what):
                await connect_to(connection, host, port, security, what=what, timeout_s=self._connect_s)
                await ask_accepter(connection, self._signer, hotkey, "reach")
        except Refused as error:
            if error.code == TlsRequired.code and not security.needed(host):
                raise TlsRequired(error.reason) from error
            return "other_hotkey", f"{what} says {error.code}: {error.reason[:200]}"
        except InputError:
            return "other_hotkey", f"something else listens at {what}"
        except IotaError as error:
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            return ("refused", "connection refused") if refused else (_code(error), _reason(error, self._connect_s))
        finally:
            connection.abort()
        return "reachable", f"reachable at {what}"

    # --- limits

    def _asker(self, hotkey: str) -> _Asker:
        asker = self._askers.setdefault(hotkey, _Asker())
        self._askers.move_to_end(hotkey)
        if len(self._askers) > _MAX_HOTKEYS:
            self._askers.popitem(last=False)
        return asker

    def _take_turn(self, asker: _Asker) -> None:
        now_s = self._clock.now_s()
        asker.tokens = min(BURST, asker.tokens + (now_s - asker.seen_s) / REFILL_S)
        asker.seen_s = now_s
        if asker.tokens < 1:
            raise Busy("asked too often whether it can be reached", retry_after_s=REFILL_S)
        if self._under_way >= AT_ONCE:
            raise Busy("others are being looked at", retry_after_s=self._connect_s)
        asker.tokens -= 1

    def _count_target(self, asker: _Asker, target: str) -> None:
        now_s = self._clock.now_s()
        while asker.targets and asker.targets[0][0] < now_s - TARGETS_S:
            asker.targets.popleft()
        if target not in {known for _, known in asker.targets}:
            if len(asker.targets) >= TARGETS:
                raise Busy(f"{TARGETS} addresses in an hour are enough", retry_after_s=TARGETS_S)
            asker.targets.append((now_s, target))


def forbidden(target: Address, source: str, port: int) -> str:
    """Why nobody is connected there on behalf of ``source``, or nothing."""
    if same_place(target, source):
        return ""
    if not target.is_global or target.is_multicast:
        return f"{target} is neither a public address nor the one you come from, {source}"
    if port < _FIRST_UNPRIVILEGED_PORT:
        return f"port {port} of an address that you don't come from"
    return ""


def same_place(target: Address, source: str) -> bool:
    try:
        found = ipaddress.ip_address(source.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    found = mapped or found
    return target == found or (target.is_loopback and found.is_loopback)


async def _resolve(host: str) -> Address:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUTS.peer_connect_s):
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def _code(error: IotaError) -> str:
    return "other_hotkey" if error.code in ("bad_signature", "unauthorized") else "no_answer"


def _reason(error: IotaError, connect_s: float) -> str:
    if error.code == "deadline":
        return f"no answer within {connect_s:g} s"
    return error.reason
