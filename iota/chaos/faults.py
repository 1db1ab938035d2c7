"""What each kind of disruption does, as a script: act, say for how many seconds to wait, act again; undone however it ends.

A script is closed early when the chaos ends: what it holds (a paused process, a blocked link) is let go then; what it
ended is not started again. Nothing here waits by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from typing import Protocol

from iota.chaos.plan import PROCESS, Disruption, Kind
from iota.chaos.proxy import PASS, Policy
from subnet.errors import IotaError

Script = Generator[float, None, str]
"""Yields seconds to wait; returns what came of it."""

VALIDATOR, STORE = "validator", "store"
POLL_S = 0.05
END_S = 60.0
START_S = 120.0
LEAVE_S = 30.0
_PERIOD_S = 0.25
"""A slow process runs for its share of each period."""


class NoEffect(IotaError):
    """A disruption didn't come about: its target was gone, or nothing passed that could have been corrupted."""

    code = "no_effect"


class Ground(Protocol):
    """A swarm as faults see it; processes by name: ``validator``, ``store``, ``miner-0`` and so on."""

    @property
    def restarts_itself(self) -> bool:
        """Somebody else starts again what has ended, and when."""
        ...

    def miners(self) -> tuple[str, ...]:
        """Miners that run now, in the order of their numbers."""
        ...

    def running(self, name: str) -> bool: ...

    def pid(self, name: str) -> int | None: ...

    def hotkey(self, name: str) -> str:
        """Empty for a process without one."""
        ...

    def signal(self, name: str, number: int, *, group: bool = False) -> int:
        """Its process id; :class:`NoEffect` where it doesn't run. ``group``: its heartbeat process too."""
        ...

    def expect_end(self, name: str) -> None:
        """The next end of this process is no failure."""
        ...

    def restart(self, name: str) -> None:
        """Start it again (or leave it to who does so); it has ended."""
        ...

    def add_miner(self) -> str: ...

    def set_link(self, name: str, policy: Policy) -> None:
        """``store``, or ``miner-3/validator``, ``miner-3/peers``."""
        ...

    def num_flipped(self, name: str) -> int: ...


def script(ground: Ground, disruption: Disruption, target: str) -> Script:
    """The script of a disruption; the first ``next`` of it acts."""
    return _SCRIPTS[disruption.kind](ground, disruption, target)


def _kill(ground: Ground, d: Disruption, target: str) -> Script:
    ground.signal(target, signal.SIGKILL)
    ground.expect_end(target)
    yield from _until_ended(ground, target, END_S)
    return (yield from _back(ground, target, d.back_s))


def _preempt(ground: Ground, d: Disruption, target: str) -> Script:
    ground.signal(target, signal.SIGTERM)
    ground.expect_end(target)
    left = yield from _ended_within(ground, target, d.notice_s)
    if not left:
        ground.signal(target, signal.SIGKILL)
        yield from _until_ended(ground, target, END_S)
    back = yield from _back(ground, target, d.back_s)
    return f"{'left in time' if left else 'killed'}, {back}"


def _rejoin(ground: Ground, d: Disruption, target: str) -> Script:
    how = yield from _leave(ground, d, target)
    back = yield from _back(ground, target, d.back_s)
    return f"{how}, {back}"


def _leave(ground: Ground, d: Disruption, target: str) -> Script:
    ground.signal(target, signal.SIGTERM)
    ground.expect_end(target)
    if (yield from _ended_within(ground, target, LEAVE_S)):
        return "left"
    ground.signal(target, signal.SIGKILL)
    yield from _until_ended(ground, target, END_S)
    return f"did not leave within {LEAVE_S:g} s, killed"


def _pause(ground: Ground, d: Disruption, target: str) -> Script:
    try:
        ground.signal(target, signal.SIGSTOP, group=True)
        yield d.for_s
    finally:
        resumed = _resume(ground, target)
    return "resumed" if resumed else "ended while it was paused"


def _slow(ground: Ground, d: Disruption, target: str) -> Script:
    if d.link == PROCESS:
        return (yield from _held_back(ground, d, target))
    policy = Policy(delay_ms=d.delay_ms, kbit_per_s=d.kbit_per_s)
    return (yield from _linked(ground, _links(target, d.link), policy, d.for_s))


def _held_back(ground: Ground, d: Disruption, target: str) -> Script:
    """Stops and continues the process; its heartbeat goes on, as a slow machine's does."""
    left_s = d.for_s
    try:
        while left_s > 0:
            ground.signal(target, signal.SIGSTOP)
            yield _PERIOD_S * (1 - d.share)
            ground.signal(target, signal.SIGCONT)
            yield _PERIOD_S * d.share
            left_s -= _PERIOD_S
    finally:
        resumed = _resume(ground, target)
    return "at full speed again" if resumed else "ended while it was slow"


def _partition(ground: Ground, d: Disruption, target: str) -> Script:
    policy = Policy(mode="reset" if d.mode == "reset" else "blackhole")
    return (yield from _linked(ground, _links(target, d.link), policy, d.for_s))


def _corrupt(ground: Ground, d: Disruption, target: str) -> Script:
    """Until the bytes have passed; none within ``for_s`` is no disruption."""
    (link,) = _links(target, d.link)
    before, left_s = ground.num_flipped(link), d.for_s
    ground.set_link(link, Policy(flip_bytes=d.num_bytes, flip_every=d.every_bytes))
    try:
        while left_s > 0 and ground.num_flipped(link) - before < d.num_bytes:
            yield POLL_S
            left_s -= POLL_S
    finally:
        ground.set_link(link, PASS)
    flipped = ground.num_flipped(link) - before
    if not flipped:
        raise NoEffect(f"too few bytes passed within {d.for_s:g} s")
    return f"{flipped} bytes inverted"


def _store_outage(ground: Ground, d: Disruption, target: str) -> Script:
    if d.link == PROCESS:
        return (yield from _pause(ground, d, target))
    match d.mode:
        case "truncate":
            policy = Policy(truncate_after=d.truncate_after)
        case "slow":
            policy = Policy(delay_ms=d.delay_ms, kbit_per_s=d.kbit_per_s)
        case "busy":
            policy = Policy(mode="busy")
        case "reset":
            policy = Policy(mode="reset")
        case _:
            policy = Policy(mode="blackhole")
    return (yield from _linked(ground, (STORE,), policy, d.for_s))


def _join(ground: Ground, d: Disruption, target: str) -> Script:
    name = ground.add_miner()
    yield from _until_running(ground, name)
    return f"{name} started"


# ---- parts


def _links(target: str, link: str) -> tuple[str, ...]:
    names = ("validator", "peers") if link == "both" else (link,)
    return tuple(f"{target}/{name}" for name in names)


def _linked(ground: Ground, links: tuple[str, ...], policy: Policy, for_s: float) -> Script:
    try:
        for link in links:
            ground.set_link(link, policy)
        yield for_s
    finally:
        for link in links:
            ground.set_link(link, PASS)
    return "as before"


def _resume(ground: Ground, target: str) -> bool:
    try:
        ground.signal(target, signal.SIGCONT, group=True)
    except NoEffect:
        return False
    return True


def _ended_within(ground: Ground, target: str, seconds: float) -> Generator[float, None, bool]:
    while ground.running(target) and seconds > 0:
        yield POLL_S
        seconds -= POLL_S
    return not ground.running(target)


def _until_ended(ground: Ground, target: str, seconds: float) -> Generator[float, None, None]:
    if not (yield from _ended_within(ground, target, seconds)):
        raise NoEffect(f"{target} did not end within {seconds:g} s of SIGKILL")


def _until_running(ground: Ground, target: str) -> Generator[float, None, None]:
    left_s = START_S
    while not ground.running(target):
        if left_s <= 0:
            raise NoEffect(f"{target} wasn't started within {START_S:g} s")
        yield POLL_S
        left_s -= POLL_S


def _back(ground: Ground, target: str, after_s: float) -> Script:
    if not ground.restarts_itself:
        yield after_s
    ground.restart(target)
    yield from _until_running(ground, target)
    return "started again"


_SCRIPTS: dict[Kind, Callable[[Ground, Disruption, str], Script]] = {
    Kind.KILL: _kill,
    Kind.VALIDATOR_KILL: _kill,
    Kind.PREEMPT: _preempt,
    Kind.PAUSE: _pause,
    Kind.SLOW: _slow,
    Kind.PARTITION: _partition,
    Kind.CORRUPT: _corrupt,
    Kind.STORE_OUTAGE: _store_outage,
    Kind.REJOIN: _rejoin,
    Kind.JOIN: _join,
    Kind.LEAVE: _leave,
}
