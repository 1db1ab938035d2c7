"""The directive stream over HTTP: what is new is pushed to whoever has everything, who is slow catches up, views follow joins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from random_run import RandomRun

from miner.directives import Directives
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import Call, FrameWriter, Route, create_app
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.run import events as ev
from subnet.run.state import RunState
from subnet.run.views import ViewBatch, is_view_batch, seen_bytes
from subnet.timing import Deadline
from subnet.words import CALIBRATION_STEP, Member
from validator.directive_stream import DirectiveFeed, checked_kind
from validator.journal_store import JournalStore
from validator.watch import Watch

LEADER = Signer.from_uri("//Leader")
MINER = Signer.from_uri("//Miner")
ME = "hot5"
"""The hotkey of the random run that the reader is taken for."""


class Served:
    """A random run whose journal is served; ``grow`` lets it go on and shows what it did."""

    def __init__(self, path: Path, stages: int = 7) -> None:
        self.journal = JournalStore(path)
        self.feed = DirectiveFeed(self.journal, LEADER)
        self.feed.term = 1
        self.run = RandomRun(11, stages, 4, [Watch()], self._on_event)
        self.listener: Listener
        self.app = create_app(
            [Route("GET", "/v1/directives", self._directives)], RequestVerifier(LEADER.hotkey, is_known=lambda _: True)
        )

    def _on_event(self, state: RunState, event: ev.AnyEvent) -> None:
        self.journal.stage(event, 0)
        self.feed.note(event)

    async def _directives(self, call: Call) -> web.StreamResponse:
        writer = FrameWriter(call)
        after, has = int(call.request.query["after"]), checked_kind(call.request.query.get("view"))
        async with writer as out:
            await self.feed.serve(out, ME, after, has)
        return writer.response

    async def grow(self, rounds: int) -> None:
        self.run.play(rounds, 16)
        await self.show()

    async def show(self) -> None:
        await self.journal.commit()
        self.feed.advance(len(self.journal))

    def stage_of_me(self) -> int | None:
        return next((info.stage for member, info in self.run.state.members.items() if member.hotkey == ME), None)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path / "j.db")
    served.listener = await listen(served.app, "127.0.0.1", 0)
    yield served
    served.feed.close()
    await served.listener.close()
    served.journal.close()


async def until(directives: Directives, number: int) -> None:
    async with asyncio.timeout(60):
        while directives.cursor.number < number:
            directives.changed.clear()
            await directives.changed.wait()


async def until_agrees(directives: Directives, whole: RunState, stage: int) -> None:
    """Who has nothing new in its view isn't told of what happened elsewhere, so its number may lag."""
    async with asyncio.timeout(60):
        while True:
            view = directives.view
            if (
                view is not None
                and view.stage == stage
                and seen_bytes(directives.state, view) == seen_bytes(whole, view)
            ):
                return
            directives.changed.clear()
            await directives.changed.wait()


async def test_a_view_follows_its_hotkey_from_stage_to_stage(served: Served) -> None:
    async with SignedClient(served.listener.url, MINER, LEADER.hotkey) as client:
        directives = Directives(client, "toy")
        following = asyncio.create_task(directives.follow())
        seen: set[int] = set()
        try:
            for _ in range(60):
                await served.grow(3)
                await asyncio.sleep(0)
                stage = served.stage_of_me()
                if stage is None:
                    continue
                await until_agrees(directives, served.run.state, stage)
                seen.add(stage)
        finally:
            following.cancel()
            await asyncio.wait([following])
    assert len(seen) > 1, "it moved"
    assert served.run.state.next_step > CALIBRATION_STEP


async def test_who_moves_while_it_catches_up_gets_the_new_view(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there to be told of the move yet: it is seen when the reader has caught up."""
    served.run.emit(ev.Joined(Member(ME, 1, 900), "cold", 1, "boot", "127.0.0.1", 1))
    await served.grow(3)
    real, moved = FrameWriter.send, False

    async def send(self: FrameWriter, frame: bytes) -> None:
        nonlocal moved
        await real(self, frame)
        if frame and not moved:
            moved = True
            served.feed.note(ev.Joined(Member(ME, 1, 901), "cold", 4, "boot 2", "127.0.0.1", 1))

    monkeypatch.setattr(FrameWriter, "send", send)
    async with SignedClient(served.listener.url, MINER, LEADER.hotkey) as client:
        stream = client.stream("/v1/directives?run=toy&term=0&after=0&view=new", connect=Deadline.after(30))
        async with asyncio.timeout(30):
            stages = [view_of_frame(await anext(stream)), view_of_frame(await anext(stream))]
        await stream.aclose()
    assert moved
    assert stages[-1] == 4


def view_of_frame(frame: bytes) -> int | None:
    return msgspec.msgpack.decode(frame, type=ViewBatch).stage if is_view_batch(frame) else None


async def test_many_readers_get_the_same_frames_encoded_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.grow(30)
    signed: list[int] = []
    real = DirectiveFeed._signed_view
    monkeypatch.setattr(
        DirectiveFeed, "_signed_view", lambda feed, *args: (signed.append(args[1]), real(feed, *args))[1]
    )
    async with SignedClient(served.listener.url, MINER, LEADER.hotkey, max_connections=64) as client:
        readers = [Directives(client, "toy") for _ in range(12)]
        tasks = [asyncio.create_task(reader.follow()) for reader in readers]
        try:
            for reader in readers:
                await until(reader, len(served.journal) - 100)
            async with asyncio.timeout(60):
                while served.feed._num_live < len(readers):
                    await asyncio.sleep(0.01)
            signed.clear()
            await served.grow(20)
            served.run.emit(ev.HardwareClassSet(("golden",), "operator"))  # something that is in every view
            await served.show()
            for reader in readers:
                await until(reader, len(served.journal))
            pushed_by_view = len(served.feed._channels)
            assert 0 < len(signed) <= 2 * pushed_by_view + len(readers)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    states = {reader.state.number for reader in readers}
    assert states == {len(served.journal)}


async def test_who_reads_slowly_misses_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls out of those who are pushed to, and goes on from there by itself."""
    monkeypatch.setattr("subnet.net.http.MAX_UNREAD_BYTES", 1000)
    await served.grow(5)
    async with SignedClient(served.listener.url, MINER, LEADER.hotkey) as client:
        directives = Directives(client, "toy")
        frames: asyncio.Queue[bytes] = asyncio.Queue()

        async def read_slowly() -> None:
            path = "/v1/directives?run=toy&term=0&after=0"
            async for frame in client.stream(path, connect=Deadline.after(30)):
                await asyncio.sleep(0.03)
                frames.put_nowait(frame)

        task = asyncio.create_task(read_slowly())
        try:
            for number in range(40):
                for _ in range(40):
                    served.run.emit(ev.HardwareClassSet(("x" * 4000,), f"operator {number}"))
                await served.show()
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                while directives.cursor.number < len(served.journal):
                    directives.take(await frames.get())
        finally:
            task.cancel()
            await asyncio.wait([task])
    assert directives.state.number == len(served.journal)
