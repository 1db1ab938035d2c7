"""Who is dead is found out at once, who is stopped by silence, who hangs by his ticks, and who is only slow stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import schedule_toy as toy
from aiohttp import web
from test_decide import Desk

from subnet.net.border import Listener, listen
from subnet.net.http import Call, FrameWriter, Route, create_app
from subnet.protocol import messages as msg
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.run import events as ev
from subnet.timing import SYSTEM_CLOCK, ManualClock
from subnet.words import Cursor, Member
from validator.coordinator import Coordinator
from validator.decide_members import decide_lost
from validator.journal_core import JournalCore, SegmentDue
from validator.journal_store import JournalStore
from validator.policy import Policy
from validator.presence import PresentClock
from validator.probing import probe
from validator.watch import Probe

POLICY = Policy()
ROOT = Path(__file__).resolve().parent.parent


# --- the rule --------------------------------------------------------------------------------------------------------


def lost(desk: Desk) -> dict[str, str]:
    found = decide_lost(desk.now, desk.state, desk.watch, POLICY)
    return {d.what.member.hotkey: d.reason.code for d in found if isinstance(d.what, ev.Gone)}


def beats(desk: Desk, member: Member, seconds: float, *, ticks: bool = True, every_s: float = 1.0) -> None:
    """Heartbeats arrive for so long; with ``ticks`` the main process moves too."""
    end = desk.now + seconds
    while desk.now < end:
        desk.now = min(end, desk.now + every_s)
        desk.watch.beat(member, int(desk.now * 5) if ticks else 7, desk.now)


def test_silence_is_gone() -> None:
    desk = Desk(1)
    member = desk.member("hot0")
    desk.watch.heard(member, desk.now)
    desk.now = POLICY.silence_s - 0.1
    assert lost(desk) == {}
    desk.now = POLICY.silence_s
    assert lost(desk) == {"hot0": "silent"}


def test_a_refused_probe_is_gone_at_once() -> None:
    desk = Desk(1)
    member = desk.member("hot0")
    desk.watch.heard(member, desk.now)
    desk.watch.reset(member, desk.now)
    assert lost(desk) == {}
    desk.watch.probe_answered(member, Probe.REFUSED, desk.now)
    assert lost(desk) == {"hot0": "reset_and_probe_failed"}


def test_a_probe_that_times_out_kills_nobody_whose_heartbeats_come() -> None:
    desk = Desk(1)
    member = desk.member("hot0")
    for _ in range(20):  # a machine under load: resets without reason, probes without answers
        desk.watch.reset(member, desk.now)
        desk.now += 1.0
        desk.watch.probe_answered(member, Probe.UNANSWERED, desk.now)
        desk.now += 1.0
        assert lost(desk) == {}
        desk.watch.beat(member, int(desk.now), desk.now)
    desk.watch.reset(member, desk.now)
    desk.watch.probe_answered(member, Probe.UNANSWERED, desk.now)
    desk.now += POLICY.probe_quiet_s
    assert lost(desk) == {"hot0": "reset_and_probe_failed"}, "a dead machine answers nothing at all"
    assert POLICY.probe_quiet_s < POLICY.silence_s


def test_a_kernel_that_accepts_is_no_sign_of_life() -> None:
    """The port of a stopped process still takes connections."""
    desk = Desk(1)
    member = desk.member("hot0")
    desk.watch.heard(member, desk.now)
    desk.now = POLICY.silence_s - 0.5
    desk.watch.reset(member, desk.now)
    desk.watch.probe_answered(member, Probe.ANSWERED, desk.now)
    desk.now = POLICY.silence_s
    assert lost(desk) == {"hot0": "silent"}


def test_heartbeats_of_a_main_process_that_hangs_are_no_life() -> None:
    desk = Desk(1)
    member = desk.member("hot0")
    beats(desk, member, 30.0)
    assert lost(desk) == {}
    beats(desk, member, POLICY.hung_s - 1.0, ticks=False)
    assert lost(desk) == {}, "an interpreter lock may be held for long"
    beats(desk, member, 2.5, ticks=False)
    assert lost(desk) == {"hot0": "main_process_hangs"}
    desk.watch.heard(member, desk.now)
    assert lost(desk) == {}, "it speaks"


def test_slow_heartbeats_under_load_are_enough() -> None:
    desk = Desk(1)
    member = desk.member("hot0")
    for _ in range(20):
        beats(desk, member, 4.5, every_s=4.5)
        assert lost(desk) == {}


def test_nobody_is_late_because_the_coordinator_was_away() -> None:
    """Stopped for a minute, it finds everyone's clock where it was; short turns of the loop count in full."""
    real = ManualClock()
    clock = PresentClock(real)
    begin = clock.now_s()
    for _ in range(30):
        real.advance(0.1)
        clock.now_s()
    assert clock.now_s() - begin == pytest.approx(3.0)
    real.advance(60.0)
    assert clock.now_s() - begin == pytest.approx(3.5)
    assert clock.away_s == pytest.approx(59.5)
    for _ in range(30):
        real.advance(0.1)
        clock.now_s()
    assert clock.now_s() - begin == pytest.approx(6.5)


async def test_probes_say_dead_only_where_nobody_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert await probe("127.0.0.1", port, 20) is Probe.REFUSED
        server.listen(0)  # nobody accepts, and the kernel keeps one
        assert await probe("127.0.0.1", port, 20) is Probe.ANSWERED
        with contextlib.ExitStack() as waiting:
            for _ in range(3):  # those fill its queue
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            assert await probe("127.0.0.1", port, 0.2) is Probe.UNANSWERED


# --- real processes and sockets --------------------------------------------------------------------------------------

MINER = """
import asyncio, sys
from miner.heartbeat import Target, start_heartbeat
from subnet.net.client import SignedClient
from subnet.protocol.signing import Signer
from subnet.timing import Deadline

url, receiver, streams = sys.argv[1:]
signer = Signer.from_uri("//Alice")
beat = start_heartbeat(signer)

async def tick():
    count = 0
    while True:
        beat.tick(count := count + 1)
        await asyncio.sleep(0.05)

async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    sys.stdin.readline()
    beat.aim(Target(url, receiver, "boot-0", 0))
    ticker = asyncio.create_task(tick())
    async with SignedClient(url, signer, receiver) as client:
        if streams == "yes":
            async for _ in client.stream("/v1/directives", connect=Deadline.after(60), idle_s=600):
                print("frame", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
ALICE, BOB = Signer.from_uri("//Alice"), Signer.from_uri("//Bob")


class LogStore:
    async def publish(self, segment: SegmentDue, core: JournalCore) -> None:
        core.answered(segment.index, stored=True, segment=range(segment.end - segment.start), own=())


class NoTasks:
    def bind(self, complete: object) -> None:
        pass

    async def probe_store(self) -> str:
        return ""


class Validator:
    """The coordinator behind its real routes; what the node does for it is these few lines."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self.gone: dict[str, str] = {}
        self.wake = asyncio.Event()
        self.listener: Listener | None = None
        self.coordinator = Coordinator(
            journal=JournalStore(path / "journal.db"),
            publisher=LogStore(),  # type: ignore[arg-type]
            tasks=NoTasks(),  # type: ignore[arg-type]
            signer=BOB,
            clock=PresentClock(SYSTEM_CLOCK),
            policy=policy,
            on_record=self._saw,
        )
        self.coordinator.begin(toy.plan_run(1, 4, 1), ("golden",))
        routes = [
            Route("POST", "/v1/heartbeat", self._heartbeat),
            Route("GET", "/v1/directives", self._directives),
        ]
        self.app = create_app(routes, RequestVerifier(BOB.hotkey, is_known=lambda _: True))

    def _saw(self, record: ev.Record) -> None:
        if isinstance(record.event, ev.Gone):
            self.gone[record.event.member.hotkey] = record.event.why
        self.wake.set()

    async def _heartbeat(self, call: Call) -> web.StreamResponse:
        beat = call.decode(msg.Heartbeat)
        member = self.coordinator.heard(call.hotkey, beat.boot, beat.ticks)
        if member is not None and beat.suspect:
            self.coordinator.suspect(member)
        self.wake.set()
        return web.Response(status=204)

    async def _directives(self, call: Call) -> web.StreamResponse:
        writer, position = FrameWriter(call, keepalive_s=600), 0
        try:
            async with writer as out:
                while (frame := await out.race(self.coordinator.feed.next_frame(position))) is not None:
                    await out.send(frame.data)
                    position = frame.next_number
        finally:
            for member in list(self.coordinator.state.members):
                self.coordinator.suspect(member)
        return writer.response

    async def join(self, port: int) -> Member:
        request = msg.JoinRequest(1, "toy", "boot-0", "127.0.0.1", port, ("golden",), Cursor(1, 0))
        assert (await self.coordinator.join(ALICE.hotkey, "cold", request)).accepted
        return next(iter(self.coordinator.state.members))

    async def until_gone(self) -> str:
        async with asyncio.timeout(60):
            while not self.gone:
                self.wake.clear()
                await self.wake.wait()
        return self.gone[ALICE.hotkey]

    async def until_beats(self, member: Member, more: int = 2) -> None:
        """So many more heartbeats, so that the miner is well under way."""
        seen: set[float] = set()
        async with asyncio.timeout(60):
            while len(seen) <= more:
                seen.add(self.coordinator.watch._links[member].heard_s)
                self.wake.clear()
                await self.wake.wait()


@contextlib.asynccontextmanager
async def served(path: Path, policy: Policy) -> AsyncIterator[Validator]:
    validator = Validator(path, policy)
    validator.listener = await listen(validator.app, "127.0.0.1", 0)
    try:
        async with asyncio.TaskGroup() as group:  # a coordinator that fails ends the test
            driver = group.create_task(validator.coordinator.run())
            yield validator
            driver.cancel()
    finally:
        await validator.coordinator.close()
        await validator.listener.close()


def start_process(url: str, streams: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", MINER, url, BOB.hotkey, "yes" if streams else "no"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd=ROOT,
    )


@contextlib.asynccontextmanager
async def miner(validator: Validator, *, streams: bool) -> AsyncIterator[tuple[subprocess.Popen[bytes], Member]]:
    """A process with a heartbeat process in a group of its own, joined; all of it is killed at the end."""
    assert validator.listener is not None
    process = start_process(validator.listener.url, streams)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        member = await validator.join(int(await asyncio.to_thread(process.stdout.readline)))
        process.stdin.write(b"go\n")
        process.stdin.flush()
        await validator.until_beats(member)
        if streams:
            assert await asyncio.to_thread(process.stdout.readline) == b"frame\n"
        yield process, member
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


PATIENT = Policy(silence_s=1000.0, hung_s=1000.0)


@pytest.mark.parametrize(("streams", "whole_group"), [(True, True), (False, False)], ids=["stream lost", "last words"])
async def test_a_killed_process_is_gone_without_silence(tmp_path: Path, streams: bool, whole_group: bool) -> None:
    """By its stream that ends, when heartbeat process and all die; and by that process alone, which says it."""
    async with served(tmp_path, PATIENT) as validator, miner(validator, streams=streams) as (process, _):
        assert not validator.gone
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        assert await validator.until_gone() == "lost"


async def test_a_stopped_process_is_silent_and_finds_itself_void(tmp_path: Path) -> None:
    policy = Policy(silence_s=2.0, hung_s=1000.0)
    async with served(tmp_path, policy) as validator, miner(validator, streams=True) as (process, member):
        os.killpg(process.pid, signal.SIGSTOP)
        assert await validator.until_gone() == "lost"
        validator.wake.clear()
        os.killpg(process.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            await validator.wake.wait()  # its heartbeat is here again
        assert validator.coordinator.heard(ALICE.hotkey, "boot-0", 1) is None, "it doesn't bring it back to life"
        assert member not in validator.coordinator.state.members
        request = msg.JoinRequest(1, "toy", "boot-1", "127.0.0.1", 1, ("golden",), Cursor(1, 0))
        assert (await validator.coordinator.join(ALICE.hotkey, "cold", request)).accepted, "no back-off"


async def test_a_main_process_that_hangs_is_gone_while_its_heartbeats_come(tmp_path: Path) -> None:
    policy = Policy(silence_s=1000.0, hung_s=3.0)
    async with served(tmp_path, policy) as validator, miner(validator, streams=False) as (process, member):
        process.send_signal(signal.SIGSTOP)  # the heartbeat process goes on
        await validator.until_beats(member)
        assert await validator.until_gone() == "lost"
