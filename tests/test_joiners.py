"""Who is new, or too far behind, begins with one signed copy of the fold, over the real border, and ends with the same state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from journal_cases import LEADER, NEVER, Rig, said
from long_run import LongRun

from miner.directives import Directives
from subnet.errors import InputError, IotaError
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.protocol import wire
from subnet.protocol.copies import LIMIT_COPY_BYTES, PURPOSE_COPY, CopyPart, copy_statement, is_copy_part
from subnet.protocol.signing import RequestVerifier, Signer, sign_statement
from subnet.run import events as ev
from subnet.run.apply import fold
from subnet.run.chain_hash import GENESIS_HEAD
from subnet.run.state_codec import dump_state, load_state, state_bytes
from subnet.words import Cursor
from validator.directive_stream import DirectiveFeed
from validator.http_api import HttpApi

MINER = Signer.from_uri("//Miner")
RECORDS = LongRun().records(355)
WHOLE = state_bytes(fold(RECORDS))


class Leader:
    """The border of a validator over a rig; :meth:`lead` replaces the journal behind it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.streams = 0

    def follow(self, run: str, after: Cursor) -> tuple[DirectiveFeed, int]:
        core = self.rig.coordinator.core
        position = core.resume(after)
        if position is None:
            raise InputError(f"you have seen term {after.term}, this validator leads {core.term}")
        return self.rig.coordinator.feed, position

    def stream_opened(self, hotkey: str) -> None:
        self.streams += 1

    def stream_lost(self, hotkey: str) -> None:
        pass

    def lead(self, rig: Rig) -> None:
        self.rig.coordinator.feed.close()
        self.rig = rig


class Member(Directives):
    """Counts what it takes."""

    def __init__(self, url: str) -> None:
        super().__init__(SignedClient(url, MINER, LEADER.hotkey), "run", self._on_took)
        self.frames: list[bytes] = []
        self.new_terms = 0

    def take(self, frame: bytes) -> None:
        self.frames.append(frame)
        super().take(frame)

    def _on_took(self, records: object, new_term: bool) -> None:
        self.new_terms += new_term

    @property
    def copies(self) -> list[CopyPart]:
        """First parts."""
        parts = [msgspec.msgpack.decode(frame, type=CopyPart) for frame in self.frames if is_copy_part(frame)]
        return [part for part in parts if part.offset == 0]

    @property
    def num_records(self) -> int:
        batches = [msgspec.msgpack.decode(frame, type=ev.Batch) for frame in self.frames if not is_copy_part(frame)]
        return sum(len(batch.records) for batch in batches)

    async def until(self, reached: Callable[[], bool]) -> None:
        follower = asyncio.create_task(self.follow())
        try:
            async with asyncio.timeout(60):
                while not reached():
                    self.changed.clear()
                    changed = asyncio.create_task(self.changed.wait())
                    await asyncio.wait({changed, follower}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                    if follower.done():
                        follower.result()
        finally:
            follower.cancel()
            await asyncio.wait({follower})
            await self._client.close()

    async def until_number(self, number: int) -> None:
        await self.until(lambda: self.cursor.number >= number)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A leader that has compacted its journal."""
    rig = Rig(tmp_path / "leader" / "j.db")
    await rig.emit(RECORDS)
    assert 0 < rig.journal.base < len(RECORDS) - 10
    yield rig
    rig.close()


@pytest.fixture
async def leader(rig: Rig) -> AsyncIterator[tuple[Leader, Listener]]:
    backend = Leader(rig)
    verifier = RequestVerifier(LEADER.hotkey, is_known=lambda hotkey: hotkey == MINER.hotkey)
    listener = await listen(HttpApi(backend, verifier).app, "127.0.0.1", 0)  # type: ignore[arg-type]
    yield backend, listener
    backend.rig.coordinator.feed.close()
    await listener.close()


async def follower_of(records: tuple[ev.Record, ...], tmp_path: Path, url: str) -> Member:
    """A member that has folded these records, from batches."""
    early = Rig(tmp_path / f"early{len(records)}" / "j.db", copies=NEVER)
    await early.emit(records)
    member = Member(url)
    reader = early.coordinator.feed.reader(0)
    while member.cursor.number < len(records):
        frame = await reader.next_frame()
        assert frame is not None
        member.take(frame.data)
    early.close()
    member.frames.clear()
    member.new_terms = 0
    return member


# --- over HTTP -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [4 << 20, 700])
async def test_a_new_member_takes_one_copy_and_the_tail(
    rig: Rig, leader: tuple[Leader, Listener], monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr("validator.directive_stream.PART_BYTES", part_bytes)
    member = Member(leader[1].url)
    await member.until_number(len(RECORDS))
    copy = rig.journal.copy
    assert copy is not None
    assert state_bytes(member.state) == WHOLE
    assert member.cursor == Cursor(rig.coordinator.state.term, len(RECORDS))
    assert [part.cursor.number for part in member.copies] == [copy.number]
    assert member.num_records == len(RECORDS) - copy.number
    assert len(member.frames) >= (len(copy.state) / part_bytes)
    assert member.new_terms == 1


async def test_a_new_member_follows_on(rig: Rig, leader: tuple[Leader, Listener]) -> None:
    """After the copy the stream goes on as ever, and a reconnection asks for records only."""
    member = Member(leader[1].url)
    await member.until_number(len(RECORDS))
    term = rig.coordinator.state.term + 1
    await rig.emit([ev.Record(len(RECORDS), 0, ev.TermStarted(term, LEADER.hotkey, "n"))])
    assert rig.coordinator.core.term == term
    await member.until(lambda: member.cursor == Cursor(term, len(RECORDS) + 1))
    assert len(member.copies) == 1
    assert member.new_terms == 2
    assert state_bytes(member.state) == state_bytes(rig.coordinator.state)


@pytest.mark.parametrize("behind", [5, 60])
async def test_one_that_is_too_far_behind_gets_a_copy(
    rig: Rig, leader: tuple[Leader, Listener], tmp_path: Path, behind: int
) -> None:
    member = await follower_of(RECORDS[:behind], tmp_path, leader[1].url)
    await member.until_number(len(RECORDS))
    assert len(member.copies) == 1
    assert state_bytes(member.state) == WHOLE
    assert member.new_terms == 0


async def test_one_whose_records_are_kept_gets_records(
    rig: Rig, leader: tuple[Leader, Listener], tmp_path: Path
) -> None:
    base = rig.journal.base
    member = await follower_of(RECORDS[:base], tmp_path, leader[1].url)
    await member.until_number(len(RECORDS))
    assert member.copies == []
    assert member.num_records == len(RECORDS) - base
    assert state_bytes(member.state) == WHOLE


async def test_a_term_that_takes_back_final_records_is_followed_from_a_copy(
    rig: Rig, leader: tuple[Leader, Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a log store was restored from an old backup: no member is stuck with what was taken back."""
    monkeypatch.setattr("subnet.run.follower.RECORDS_BETWEEN_COPIES", 10)
    member = await follower_of(RECORDS, tmp_path, leader[1].url)
    number = 1 + max(r.number for r in RECORDS[:150] if isinstance(r.event, ev.StepSealed))
    other = Rig(tmp_path / "other" / "j.db")
    await other.emit(RECORDS[:number])
    term = other.coordinator.state.term + 1
    await other.emit([ev.Record(number, 0, ev.TermStarted(term, LEADER.hotkey, "again"))])
    leader[0].lead(other)
    with said() as lines:
        await member.until(lambda: member.cursor.term == term)
        await member.until_number(number + 1)
    assert any("what was folded is given up, asking for a copy" in line for line in lines)
    assert member.new_terms == 1
    assert state_bytes(member.state) == state_bytes(other.coordinator.state)
    other.close()


async def test_a_term_that_takes_back_everything_is_followed_from_the_first_record(
    rig: Rig, leader: tuple[Leader, Listener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.directives.KEPT_HEADS", 50)
    member = await follower_of(RECORDS, tmp_path, leader[1].url)
    other = Rig(tmp_path / "other" / "j.db", copies=NEVER)
    await other.emit([RECORDS[0], ev.Record(1, 0, ev.TermStarted(9, LEADER.hotkey, "again"))])
    leader[0].lead(other)
    with said() as lines:
        await member.until(lambda: member.cursor == Cursor(9, 2))
    assert any("takes back" in line and "more than are kept" in line for line in lines)
    assert state_bytes(member.state) == state_bytes(other.coordinator.state)
    other.close()


# --- the feed ------------------------------------------------------------------------------------------------------


async def test_a_slow_reader_whose_records_go_is_given_a_copy(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "j.db")
    await rig.emit(RECORDS[:60])
    reader, member = rig.coordinator.feed.reader(0), Member("http://127.0.0.1:1")
    frame = await reader.next_frame()
    assert frame is not None
    member.take(frame.data)
    before = reader.position
    await rig.emit(RECORDS[60:])
    assert rig.journal.base > before
    while reader.position < len(RECORDS):
        frame = await reader.next_frame()
        assert frame is not None
        member.take(frame.data)
    assert state_bytes(member.state) == WHOLE
    rig.close()


async def test_nothing_is_said_before_the_term_is_in_the_log_store(rig: Rig, tmp_path: Path) -> None:
    again = Rig(rig.copy_files(tmp_path / "again"), rig.keys)
    await again.emit([ev.Record(len(RECORDS), 0, ev.TermStarted(7, LEADER.hotkey, "n"))], publish=False)
    assert again.journal.copy is not None
    waiting = asyncio.create_task(again.coordinator.feed.reader(0).next_frame())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    await again.settle()
    frame = await waiting
    assert frame is not None
    assert msgspec.msgpack.decode(frame.data, type=CopyPart).cursor == Cursor(7, again.journal.copy.number)
    again.close()


# --- refusals ------------------------------------------------------------------------------------------------------


def signed(part: CopyPart, signer: Signer = LEADER, **changes: object) -> CopyPart:
    changed = msgspec.structs.replace(part, **changes)
    return msgspec.structs.replace(changed, signature=sign_statement(signer, PURPOSE_COPY, copy_statement(changed)))


def of_state(part: CopyPart, data: bytes, **changes: object) -> CopyPart:
    return signed(part, data=data, size_bytes=len(data), hash=wire.blob_hash(data), **changes)


def other_state(part: CopyPart) -> bytes:
    state = load_state(part.data)
    state.number += 1
    return dump_state(state)


BAD: dict[str, tuple[Callable[[CopyPart], CopyPart], str]] = {
    "signature": (lambda p: msgspec.structs.replace(p, signature=bytes(64)), "isn't signed"),
    "signer": (lambda p: signed(p, Signer.from_uri("//Mallory")), "isn't signed"),
    "head": (lambda p: msgspec.structs.replace(p, head="0" * 64), "isn't signed"),
    "cursor": (lambda p: msgspec.structs.replace(p, cursor=Cursor(1, 7)), "isn't signed"),
    "hash": (lambda p: signed(p, hash="0" * 64), "doesn't fit its hash"),
    "data": (lambda p: msgspec.structs.replace(p, data=p.data[:-1] + b"\xff"), "doesn't fit its hash"),
    "huge": (lambda p: signed(p, size_bytes=LIMIT_COPY_BYTES + 1), "allowed are"),
    "empty": (lambda p: of_state(p, b""), "allowed are"),
    "no progress": (lambda p: msgspec.structs.replace(p, data=b""), "don't add up"),
    "too much": (lambda p: msgspec.structs.replace(p, data=p.data + b"x"), "don't add up"),
    "middle": (lambda p: msgspec.structs.replace(p, offset=5, data=p.data[5:]), "don't follow each other"),
    "number": (lambda p: of_state(p, other_state(p)), "isn't what its cursor says"),
    "chain": (lambda p: signed(p, head="no hash"), "isn't what its cursor says"),
    "no state": (lambda p: of_state(p, b"\x93\x01\x02\x03"), "doesn't decode"),
    "fields": (
        lambda p: of_state(p, msgspec.msgpack.encode({"number": p.cursor.number, "term": "x"})),
        "doesn't decode",
    ),
}


async def first_part(rig: Rig) -> CopyPart:
    frame = await rig.coordinator.feed.next_frame(0)
    assert frame is not None
    return msgspec.msgpack.decode(frame.data, type=CopyPart)


@pytest.mark.parametrize("case", BAD)
async def test_a_copy_that_does_not_fit_changes_nothing(rig: Rig, case: str) -> None:
    change, why = BAD[case]
    part = await first_part(rig)
    member = Member("http://127.0.0.1:1")
    with pytest.raises(IotaError, match=why):
        member.take(wire.encode(change(part)))
    assert member.cursor == Cursor(0, 0)
    assert member.state.run is None
    member.take(wire.encode(part))
    assert member.cursor == part.cursor


async def test_parts_come_in_order_and_of_one_copy(rig: Rig) -> None:
    part = await first_part(rig)
    half = len(part.data) // 2
    first = msgspec.structs.replace(part, data=part.data[:half])
    second = msgspec.structs.replace(part, data=part.data[half:], offset=half)
    member = Member("http://127.0.0.1:1")
    for bad in (
        msgspec.structs.replace(second, head=GENESIS_HEAD),
        msgspec.structs.replace(second, offset=half + 1),
        msgspec.structs.replace(second, signature=bytes(64)),
    ):
        member.take(wire.encode(first))
        with pytest.raises(InputError, match="don't follow each other"):
            member.take(wire.encode(bad))
    member.take(wire.encode(first))
    assert member.cursor == Cursor(0, 0)
    member.take(wire.encode(second))
    assert member.cursor == part.cursor


async def test_an_older_copy_is_refused(rig: Rig, tmp_path: Path) -> None:
    part = await first_part(rig)
    member = await follower_of(RECORDS, tmp_path, "http://127.0.0.1:1")
    with pytest.raises(InputError, match="is behind record"):
        member.take(wire.encode(part))
    with pytest.raises(InputError, match="has seen term"):
        member.take(wire.encode(signed(part, cursor=Cursor(0, part.cursor.number))))
    assert state_bytes(member.state) == WHOLE


def test_a_batch_is_no_part_of_a_copy() -> None:
    batch = ev.Batch(Cursor(1, 1), 0, (msgspec.Raw(b"\xa4copy"),), GENESIS_HEAD, b"")
    assert not is_copy_part(msgspec.msgpack.encode(batch))
    assert not is_copy_part(b"")
    assert is_copy_part(wire.encode(CopyPart(Cursor(1, 1), "", "", 1, 0, b"", b"")))
