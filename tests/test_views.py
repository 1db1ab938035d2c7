"""The view of a stage is enough: a member that folds only its view owes what one owes that folds the whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from random_run import RandomRun

from miner.directives import Directives
from miner.local_view import BoundaryKey, LocalView
from miner.owed import owed
from subnet.errors import InputError
from subnet.net.client import SignedClient
from subnet.protocol.signing import Signer
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.events import Record
from subnet.run.follower import Follower, Took
from subnet.run.state import RunState
from subnet.run.views import EVERYONE, NO_STAGE, View, ViewBatch, is_seal, scope_of, seen_bytes, short_seal, view_of
from subnet.words import Member
from validator.copies import Beside, Copy, encode_beside
from validator.directive_stream import DirectiveFeed
from validator.journal_store import JournalStore
from validator.watch import Watch

LEADER = Signer.from_uri("//Leader")
MINER = Signer.from_uri("//Miner")


def seen(records: list[Record], view: View) -> list[Record]:
    found: list[Record] = []
    for record in records:
        scope = scope_of(record.event)
        if scope in view.scopes:
            found.append(record)
        elif is_seal(scope) and isinstance(record.event, ev.StageSealed):
            found.append(msgspec.structs.replace(record, event=short_seal(record.event)))
    return found


def some_local(state: RunState, me: Member) -> LocalView:
    """Up to date, with every boundary near it, and everything added that the fold shows as done."""
    local, stage = LocalView(), state.members[me].stage
    local.version, local.restored_stage, local.root = state.next_step, stage, state.members[me].root
    work = state.work
    if work is None:
        return local
    epoch = st.epoch(state, me)
    for m, found in work.items[stage].items():
        for at in (stage - 1, stage, stage + 1):
            local.boundaries[BoundaryKey(work.step, m, at, False)] = "forward"
            local.boundaries[BoundaryKey(work.step, m, at, True)] = "backward"
        if found.member == me and found.status == st.DONE:
            local.added[work.step, m, epoch] = found.generation
    return local


class Compared:
    """Followers of every view beside the whole, fed in stretches."""

    def __init__(self, stages: int, stretch: int) -> None:
        self.folds = {stage: Follower(stage) for stage in range(NO_STAGE, stages)}
        self.stretch, self.pending = stretch, list[Record]()
        self.number, self.num_records, self.num_seen, self.num_owed = 0, 0, 0, 0

    def on_event(self, state: RunState, event: ev.AnyEvent) -> None:
        self.pending.append(Record(self.number, 0, event))
        self.number += 1
        if len(self.pending) >= self.stretch:
            self.flush(state)

    def flush(self, state: RunState) -> None:
        first, records, self.pending = self.pending[0].number, self.pending, []
        self.num_records += len(records)
        assert state.run is not None
        for stage, follower in self.folds.items():
            view = view_of(state.run, stage)
            part = seen(records, view)
            self.num_seen += len(part)
            assert follower.take(1, first, part, self.number) is not Took.NOTHING
            assert follower.number == state.number
            assert seen_bytes(follower.state, view) == seen_bytes(state, view)
        for me, info in state.members.items():
            mine = self.folds[info.stage].state
            for local in (LocalView(), some_local(state, me)):
                owes = owed(state, me, local)
                assert owed(mine, me, local) == owes
                self.num_owed += len(owes)


@settings(max_examples=10, deadline=None)
@given(seed=some.integers(0, 10**6), tied=some.booleans(), stretch=some.sampled_from([5, 17, 60]))
def test_owes_the_same(seed: int, tied: bool, stretch: int) -> None:
    compared = Compared(7, stretch)
    options = {"tied": tied, "evaluation_items": 2, "evaluation_every": 2, "snapshot_every": 2}
    run = RandomRun(seed, 7, 6, [Watch()], compared.on_event, **options)
    run.play(60, 14)
    assert compared.num_owed > 0
    assert compared.num_seen < 0.8 * compared.num_records * len(compared.folds)


def test_every_event_has_a_scope() -> None:
    run = RandomRun(3, 6, 3, [Watch()])
    run.play(400, 24)
    by_scope: dict[bool, set[type]] = {True: set(), False: set()}
    for event in run.events:
        by_scope[scope_of(event) == EVERYONE].add(type(event))
    assert {ev.StepPlanned, ev.StepSealed, ev.Joined, ev.Gone, ev.Updated, ev.Voided} <= by_scope[True]
    assert {ev.Leased, ev.Forwarded, ev.Backwarded, ev.Committed, ev.Checked, ev.StageSealed} <= by_scope[False]
    assert not by_scope[True] & by_scope[False]


# --- through the real feed and the real client ---------------------------------------------------------------------


class Rig:
    """A journal of a random run, its feed, and a member that joins it."""

    def __init__(self, path: Path, seed: int = 5) -> None:
        self.journal = JournalStore(path)
        self.feed = DirectiveFeed(self.journal, LEADER)
        self.feed.term = 1
        self.run = RandomRun(seed, 7, 6, [Watch()], self._on_event)
        self.member = Directives(SignedClient("http://127.0.0.1:1", MINER, LEADER.hotkey), "toy")
        self.took: list[bool] = []
        self.member.on_took = lambda records, new_term: self.took.append(new_term)

    def _on_event(self, state: RunState, event: ev.AnyEvent) -> None:
        self.journal.stage(event, 0)
        self.feed.note(event)

    async def visible(self) -> None:
        await self.journal.commit()
        self.feed.advance(len(self.journal))

    async def follow(self, stage: int | None, position: int | None = None) -> None:
        """What a reader of this view is sent, from the member's position (or the given one) on."""
        assert self.run.state.run is not None
        view = None if stage is None else view_of(self.run.state.run, stage)
        reader = self.feed.reader(self.member.cursor.number if position is None else position, view)
        while not reader.is_level:
            frame = await reader.next_frame()
            assert frame is not None
            self.member.take(frame.data)

    def keep_copy(self) -> None:
        """Take a copy of the fold as it is now, and let the journal begin with it."""
        beside = encode_beside(Beside(((1, 1),), b"", b""))
        from subnet.run.state_codec import dump_state

        self.journal.stage_segment(0, len(self.journal))
        self.journal.stage_copy(Copy(len(self.journal), self.journal.head, dump_state(self.run.state), beside))

    def agrees(self) -> bool:
        view = self.member.view
        assert view is not None
        return seen_bytes(self.member.state, view) == seen_bytes(self.run.state, view)


async def test_a_member_changes_its_view_without_losing_sight(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "j.db")
    rig.run.play(40, 14)
    await rig.visible()
    await rig.follow(NO_STAGE)
    assert rig.agrees()
    before = rig.member.cursor
    rig.run.play(10, 14)
    await rig.visible()
    states = [rig.member.state.number]
    rig.took.clear()
    rig.member.on_took = lambda records, new_term: (states.append(rig.member.state.number), rig.took.append(new_term))
    await rig.follow(3, position=0)
    assert rig.member.view is not None
    assert rig.member.view.stage == 3
    assert rig.agrees()
    assert rig.member.cursor.number == len(rig.journal) > before.number
    assert states == sorted(states), "what is shown never goes back"
    assert not any(rig.took)
    rig.run.play(20, 14)
    await rig.visible()
    await rig.follow(3)
    assert rig.agrees()
    rig.journal.close()


async def test_a_view_begins_with_a_copy(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "j.db")
    rig.run.play(40, 14)
    rig.keep_copy()
    await rig.visible()
    rig.run.play(15, 14)
    await rig.visible()
    await rig.follow(2)
    assert rig.agrees()
    await rig.follow(5, position=0)
    assert rig.member.view is not None
    assert rig.member.view.stage == 5
    assert rig.agrees()
    rig.journal.close()
    again = JournalStore(tmp_path / "j.db")
    first = again.base
    assert again.scopes_between(first, len(again)) == [scope_of(event) for event in rig.run.events[first:]]
    again.close()


@pytest.mark.parametrize("what", ["signature", "head", "record", "left out", "stage", "gap", "outside"])
async def test_refuses_a_view_that_does_not_fit(tmp_path: Path, what: str) -> None:
    rig = Rig(tmp_path / "j.db")
    rig.run.play(30, 14)
    await rig.visible()
    assert rig.run.state.run is not None
    frame = rig.feed.view_batch(view_of(rig.run.state.run, 3), 0)
    batch = msgspec.msgpack.decode(frame.data, type=ViewBatch)
    record = bytearray(bytes(batch.records[-1]))
    record[-1] ^= 1
    changed = {
        "signature": {"signature": bytes(64)},
        "head": {"head": "0" * 64},
        "record": {"records": (*batch.records[:-1], msgspec.Raw(bytes(record)))},
        "left out": {"records": batch.records[:-1]},
        "stage": {"stage": 4},
        "gap": {"first_number": 3},
        "outside": {"cursor": msgspec.structs.replace(batch.cursor, number=batch.cursor.number - 1)},
    }[what]
    with pytest.raises(InputError):
        rig.member.take(msgspec.msgpack.encode(msgspec.structs.replace(batch, **changed)))
    assert rig.member.cursor.number == 0
    rig.member.take(frame.data)
    assert rig.agrees()
    with pytest.raises(InputError, match="don't follow"):
        rig.member.take(frame.data)
    rig.journal.close()
