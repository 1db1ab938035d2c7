"""The head start of a merge: nothing of it can change a sum, what a death makes worthless is dropped, liars gain nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from join_cases import TrainedRun, trained_run
from merge_cases import SEED, STEP, MergeSwarm, Seat, refused

from miner import member_slices
from miner.owes import Check, Commit, Examine, FetchMerged, FetchSlice, Fingerprint, Reduce, SendSlice
from subnet.engine.stage_merge import StageMerge
from subnet.errors import HashMismatch, InputError, NotFound
from subnet.protocol import messages as msg
from subnet.run import state as st

MODEL = {"vocab_size": 1200, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def trained() -> TrainedRun:
    return trained_run(**MODEL)


@pytest.fixture
def run(trained: TrainedRun) -> TrainedRun:
    state = msgspec.structs.replace(trained.state, members={}, roots={}, work=None)
    return replace(trained, state=state)


@pytest.fixture
async def swarm(run: TrainedRun, tmp_path: Path) -> AsyncIterator[MergeSwarm]:
    """Two contributors, and a third replica that was late."""
    swarm = await MergeSwarm(run, tmp_path, [[0, 2], [1, 3], []]).open()
    yield swarm
    await swarm.close()


def commits(seat: Seat) -> list[Commit]:
    return [owe for owe in seat.ahead() if isinstance(owe, Commit)]


def slices_of(swarm: MergeSwarm, seat: Seat) -> dict[int, bytes]:
    return {p: bytes(seat.context.slices[hash_]) for p, hash_ in seat.entry().hashes}


# --- when there is a head start ----------------------------------------------------------------------------------


async def test_a_sum_is_committed_ahead_only_when_no_more_can_come(swarm: MergeSwarm) -> None:
    one, _, idle = swarm.seats
    items, work = swarm.work.items[0], swarm.work
    assert [owe.microbatches for owe in commits(one)] == [(0, 2)]
    assert commits(idle) == []
    work.undealt[0].add(3)
    assert commits(one) == [], "somebody will get it, and it may be me"
    work.undealt[0] = {4}
    assert commits(one), "a hold-out item adds nothing"
    work.undealt[0].clear()
    items[2].status = st.REVOKING
    assert commits(one) == []
    items[2].status = st.LIVE
    items[2].generation = 2
    assert commits(one) == [], "what is in the sum was added under an older lease"
    items[2].generation = 1
    work.held[one.member].add(1)
    assert commits(one) == []
    work.held[one.member].discard(1)
    work.epochs[one.member] = 1
    assert commits(one) == [], "the sum is void"
    work.epochs.clear()
    swarm.merge.phase = st.SEALED
    assert one.ahead() == []


async def test_slices_go_to_those_who_will_own_them_and_only_once(swarm: MergeSwarm) -> None:
    one, two, idle = swarm.seats
    assert len(one.context.held_stage().merge().partitions) >= 3
    await swarm.commit_ahead()
    owes = [owe for owe in one.ahead() if isinstance(owe, SendSlice)]
    assert owes
    assert {owe.to for owe in owes} <= {two.member, idle.member}
    await swarm.send_ahead()
    assert all(not seat.ahead() for seat in swarm.seats)
    owners = {owe.partition: owe.to for owe in owes} | {
        p: one.member for p in one.context.held_stage().merge().partitions if p not in {owe.partition for owe in owes}
    }
    assert all(not seat.local.slices for seat in swarm.seats), "held, and not added"
    swarm.order(tuple(owners[p] for p in sorted(owners)))
    for seat in swarm.seats:
        assert not [owe for owe in seat.owed() if isinstance(owe, SendSlice | FetchSlice)]
        mine = [p for p, owner in owners.items() if owner == seat.member]
        assert sorted(owe.partition for owe in seat.owed() if isinstance(owe, Reduce)) == sorted(mine)


@pytest.mark.parametrize("packing", ["bytes", "bits"])
async def test_a_merge_with_a_head_start_is_the_merge(swarm: MergeSwarm, packing: str) -> None:
    plan = swarm.run.plan
    config = msgspec.structs.replace(plan.config, merge=msgspec.structs.replace(plan.config.merge, packing=packing))
    for seat in swarm.seats:
        seat.context.plan = replace(plan, config=config) if hasattr(plan, "__dataclass_fields__") else plan
    await swarm.commit_ahead()
    await swarm.send_ahead()
    merge = swarm.seats[0].context.held_stage().merge()
    swarm.order(tuple(swarm.seats[p % 3].member for p in sorted(merge.partitions)))
    for seat in swarm.seats:
        await seat.do([owe for owe in seat.owed() if isinstance(owe, SendSlice)])
    swarm.settle()
    await swarm.reduce()
    assert sorted(swarm.merge.merged) == sorted(merge.partitions)
    for p, told in swarm.merge.merged.items():
        given = [(slices_of(swarm, seat)[p], 2) for seat in swarm.seats[:2]]
        plainly = StageMerge(plan, 0, swarm.seats[0].context.held_stage().state).merge_partition(
            p, given, total_items=4
        )
        assert (told.hash, told.squares) == (plainly.hash, plainly.squares_hex)
        assert (told.blob == told.hash) == (packing == "bytes")
    for seat in swarm.seats:
        fetches = [owe for owe in seat.ahead() if isinstance(owe, FetchMerged)]
        assert len(fetches) == len(merge.partitions) - sum(o == seat.member for o in swarm.merge.owners)
        await seat.do(fetches)
        assert not seat.ahead()
    swarm.reveal()
    await prove(swarm)
    for seat in swarm.seats:
        (check,) = [owe for owe in seat.owed() if isinstance(owe, Check)]
        await seat.merges.check(check)
        assert seat.local.checks == {(STEP, 0, 1): True}
    roots = {await applied(seat, swarm, early) for seat, early in zip(swarm.seats, (True, True, False), strict=True)}
    assert len(roots) == 1, "sums that were kept at the check and sums read again are the same"


async def prove(swarm: MergeSwarm) -> None:
    """Fingerprints of all, and the merged partitions looked at before they are known."""
    for seat in swarm.seats:
        if any(entry.member == seat.member for entry in swarm.merge.entries):
            assert not [owe for owe in seat.ahead() if isinstance(owe, Examine)], "my own word comes first"
        for owe in seat.owed():
            if isinstance(owe, Fingerprint):
                await seat.merges.fingerprint(owe)
        (examine,) = seat.ahead()
        assert isinstance(examine, Examine)
        await seat.merges.examine(examine)
        assert not seat.ahead()
    for seat in swarm.seats:
        for claim in seat.claims(msg.FingerprintClaim):
            swarm.merge.fingerprints[seat.member] = claim.values


async def applied(seat: Seat, swarm: MergeSwarm, early: bool) -> str:
    merge, told = seat.context.held_stage().merge(), swarm.merge.merged
    hashes = {p: told[p].hash for p in merge.partitions} if early else None
    merged = {p: seat.context.merged[told[p].hash] for p in merge.partitions}
    loaded = dict(merge._loaded)
    assert loaded == {p: told[p].hash for p in merge.partitions}
    sections = merge.merged_sections(merged, total_items=4, hashes=hashes)
    return "".join(str(hash(bytes(part.values.numpy()) + bytes(part.maxima.numpy()))) for part in sections.values())  # type: ignore[union-attr]


# --- what becomes worthless --------------------------------------------------------------------------------------


async def test_a_sum_that_grows_is_committed_anew_and_its_old_slices_go(swarm: MergeSwarm) -> None:
    one, two, _ = swarm.seats
    await swarm.commit_ahead()
    await swarm.send_ahead()
    old = {hash_ for _, hash_ in one.entry().hashes}
    early = sum(len(seat.slices.early) for seat in swarm.seats)
    # the second dies: its items are dealt to the first
    for m in (1, 3):
        swarm.work.items[0][m] = st.Item(status=st.LIVE, member=one.member, generation=2)
        swarm.work.held[one.member].add(m)
        swarm.add(one, m)
    del swarm.work.held[two.member]
    del swarm.state.members[two.member]
    swarm.settle()
    assert sum(len(seat.slices.early) for seat in swarm.seats) < early
    (commit,) = commits(one)
    assert commit.microbatches == (0, 1, 2, 3)
    await one.do([commit])
    assert [key[2] for key in one.local.commitments] == [(0, 1, 2, 3)]
    assert not old & set(one.context.slices)
    await one.do([owe for owe in one.ahead() if isinstance(owe, SendSlice) and owe.to != two.member])
    left = {held.hash for seat in swarm.seats if seat is not two for held in seat.slices.early._held.values()}
    assert left, "in place of the old"
    assert left <= {hash_ for _, hash_ in one.entry().hashes}


async def test_a_commitment_is_refused_once_the_sum_has_grown_amid_it(swarm: MergeSwarm) -> None:
    one = swarm.seats[0]
    (owe,) = commits(one)
    compute, number = one.context.compute, 0
    submit = compute.submit

    def growing(*args: Any) -> Any:
        nonlocal number
        number += 1
        if number == 2:
            swarm.work.items[0][1] = st.Item(status=st.LIVE, member=one.member, generation=2)
            swarm.add(one, 1)
        return submit(*args)

    compute.submit = growing  # type: ignore[method-assign]
    error = await refused(one.merges.commit(owe))
    assert isinstance(error, NotFound)
    assert number == 2
    assert not one.local.commitments


async def test_slices_that_no_manifest_names_are_never_added(swarm: MergeSwarm) -> None:
    one, two, idle = swarm.seats
    await swarm.commit_ahead()
    await swarm.send_ahead()
    assert any(len(seat.slices.early) for seat in swarm.seats)
    # the second was void after its slices were sent: its sum is another one now
    swarm.work.epochs[two.member] = 1
    two.local.commitments.clear()
    two.local.made.clear()
    for m in (1, 3):
        swarm.add(two, m)
    swarm.settle()
    for seat in swarm.seats:
        assert all(place[0] != two.member for place in seat.slices.early._held)
    await two.do(commits(two))
    swarm.order(tuple(idle.member for _ in one.context.held_stage().merge().partitions))
    named = {hash_ for entry in swarm.merge.entries for _, hash_ in entry.hashes}
    assert set(idle.context.slices) <= named
    assert len(idle.slices.early) == 0


async def test_an_owner_that_dies_costs_the_head_start_and_nothing_else(swarm: MergeSwarm) -> None:
    one, two, idle = swarm.seats
    await swarm.commit_ahead()
    await swarm.send_ahead()
    del swarm.state.members[idle.member]
    swarm.seats.remove(idle)
    merge = one.context.held_stage().merge()
    swarm.order(tuple((one, two)[p % 2].member for p in sorted(merge.partitions)))
    for seat in swarm.seats:
        for owe in seat.owed():
            if isinstance(owe, SendSlice):
                await seat.slices.send(owe)
    await swarm.reduce()
    assert sorted(swarm.merge.merged) == sorted(merge.partitions)
    await idle.miner.close()


# --- hostile slices ----------------------------------------------------------------------------------------------


def frame_of(swarm: MergeSwarm, seat: Seat, partition: int, **changes: Any) -> msg.SliceFrame:
    hash_ = dict(seat.entry().hashes)[partition]
    frame = msg.SliceFrame("joining", STEP, 0, partition, 0, seat.member, hash_, 2, "bytes")
    return msgspec.structs.replace(frame, **changes)


async def test_slices_that_cannot_be_right_end_their_connection_and_are_not_held(swarm: MergeSwarm) -> None:
    one, two, _ = swarm.seats
    await swarm.commit_ahead()
    merge = two.context.held_stage().merge()
    swarm.order(tuple(two.member for _ in merge.partitions))
    good = slices_of(swarm, one)[0]
    held = dict(two.context.slices)
    over = (2 * 1023 + 1).to_bytes(2, "little") + good[2:]
    lies: list[tuple[msg.SliceFrame, bytes, type]] = [
        (frame_of(swarm, one, 0), good[:-1], InputError),
        (frame_of(swarm, one, 0), good + bytes(1 << 20), InputError),
        (frame_of(swarm, one, 0), bytes([good[0] ^ 1]) + good[1:], HashMismatch),
        (msgspec.structs.replace(frame_of(swarm, one, 0), partition=99), good, InputError),
        (frame_of(swarm, one, 0, packing="zip"), good, InputError),
        (frame_of(swarm, one, 0, num_items=0), good, InputError),
        (frame_of(swarm, one, 0, num_items=5), good, InputError),
        (frame_of(swarm, one, 0, packing="bits"), good, InputError),
        (frame_of(swarm, one, 0, hash=blake3(over).hexdigest()), over, InputError),
    ]
    for frame, body, kind in lies:
        error = await refused(two.slices.take(frame, bytearray(body)))
        assert isinstance(error, kind), frame
    assert two.context.slices == held
    assert len(two.slices.early) == 0
    await two.slices.take(frame_of(swarm, one, 0), bytearray(good))
    assert set(two.context.slices) - set(held) == {dict(one.entry().hashes)[0]}


async def test_what_nobody_is_entitled_to_send_is_dropped(swarm: MergeSwarm) -> None:
    one, two, idle = swarm.seats
    await swarm.commit_ahead()
    good = slices_of(swarm, one)
    foreseen = {owe.partition: owe.to for owe in one.ahead() if isinstance(owe, SendSlice)}
    theirs = next(p for p, owner in foreseen.items() if owner == two.member)
    mine = next(p for p in good if foreseen.get(p) != two.member)
    for frame in (
        frame_of(swarm, one, theirs, step=STEP + 1),
        frame_of(swarm, one, theirs, step=STEP - 1),
        frame_of(swarm, one, theirs, group=1),
        frame_of(swarm, one, theirs, stage=1),
        frame_of(swarm, one, theirs, sender=idle.member),
        frame_of(swarm, one, theirs, sender=msgspec.structs.replace(one.member, number=77)),
        frame_of(swarm, one, mine),
    ):
        await two.slices.take(frame, bytearray(good[frame.partition]))
    assert len(two.slices.early) == 0
    await two.slices.take(frame_of(swarm, one, theirs), bytearray(good[theirs]))
    assert len(two.slices.early) == 1


async def test_one_sender_holds_one_early_slice_of_a_partition_within_the_budget(
    swarm: MergeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = swarm.seats
    await swarm.commit_ahead()
    good = slices_of(swarm, one)
    theirs = next(owe.partition for owe in one.ahead() if isinstance(owe, SendSlice) and owe.to == two.member)
    for value in range(5):
        other = bytes([value]) + b"\0" + good[theirs][2:]
        frame = frame_of(swarm, one, theirs, hash=blake3(other).hexdigest())
        await two.slices.take(frame, bytearray(other))
        assert len(two.slices.early) == 1
    monkeypatch.setattr(member_slices, "MAX_SLICE_BYTES", 10)
    two.slices.early.clear()
    await two.slices.take(frame_of(swarm, one, theirs), bytearray(good[theirs]))
    assert len(two.slices.early) == 0
    assert two.slices.early.was_refused(dict(one.entry().hashes)[theirs])


async def test_a_slice_that_found_no_room_is_asked_for_at_once(swarm: MergeSwarm) -> None:
    one, two, _ = swarm.seats
    await swarm.commit_ahead()
    value = dict(one.entry().hashes)[0]
    two.slices.early.refuse(value)
    swarm.order(tuple(two.member for _ in one.context.held_stage().merge().partitions))
    owe = next(owe for owe in two.owed() if isinstance(owe, FetchSlice) and owe.hash == value)
    spawned: list[asyncio.Task[None]] = []
    one.context.background = lambda work: spawned.append(asyncio.create_task(work))
    task = asyncio.create_task(two.slices.fetch(owe))
    async with asyncio.timeout(20):
        while value not in two.context.slices:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task, *spawned})


async def test_a_slice_of_a_step_that_ended_meanwhile_is_not_held(swarm: MergeSwarm) -> None:
    one, two, _ = swarm.seats
    await swarm.commit_ahead()
    theirs = next(owe.partition for owe in one.ahead() if isinstance(owe, SendSlice) and owe.to == two.member)
    beside = two.slices._beside

    async def ends(work: Any) -> Any:
        found = await beside(work)
        swarm.state.work = None
        return found

    two.slices._beside = ends  # type: ignore[method-assign]
    await two.slices.take(frame_of(swarm, one, theirs), bytearray(slices_of(swarm, one)[theirs]))
    assert len(two.slices.early) == 0


async def test_merged_bytes_that_are_no_sum_are_found_by_the_check(swarm: MergeSwarm) -> None:
    one = swarm.seats[0]
    await swarm.commit_ahead()
    swarm.order(tuple(one.member for _ in one.context.held_stage().merge().partitions))
    for seat in swarm.seats:
        await seat.do([owe for owe in seat.owed() if isinstance(owe, SendSlice)])
    await swarm.reduce()
    told = swarm.merge.merged[0]
    wrong = bytearray(one.context.merged[told.hash])
    wrong[0:2] = (0x7FFF).to_bytes(2, "little")
    blob = swarm.run.store.put(bytes(wrong))
    swarm.merge.merged[0] = st.MergedPartition(blob, blob, len(wrong), told.squares)
    idle = swarm.seats[2]
    await idle.do([owe for owe in idle.ahead() if isinstance(owe, FetchMerged)])
    swarm.reveal()
    for seat in swarm.seats[:2]:
        for owe in seat.owed():
            if isinstance(owe, Fingerprint):
                await seat.merges.fingerprint(owe)
        for claim in seat.claims(msg.FingerprintClaim):
            swarm.merge.fingerprints[seat.member] = claim.values
    (examine,) = idle.ahead()
    await idle.merges.examine(examine)  # type: ignore[arg-type]
    (check,) = [owe for owe in idle.owed() if isinstance(owe, Check)]
    await idle.merges.check(check)
    assert idle.local.checks == {(STEP, 0, 1): False}
    assert swarm.merge.seed == SEED
