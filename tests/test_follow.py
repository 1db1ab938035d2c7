"""A follower takes a journal as it comes, survives the store and itself, and believes nothing that doesn't fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from follow_cases import Published, journal_of, with_records
from lead_cases import FIRST, Keys
from store_worlds import SECRET, soon

from subnet.errors import InputError, IotaError
from subnet.protocol import wire
from subnet.run import events as ev
from subnet.run.apply import fold
from subnet.run.state_codec import state_bytes
from subnet.store.embedded import EmbeddedStore
from subnet.store.server import start_store
from subnet.timing import ManualClock
from validator.follow_proofs import TwoHeads, read_proof, write_proof
from validator.follow_reader import LIST_S, RECHECK_S, FollowReader
from validator.follow_run import FollowedRun
from validator.log_publisher import segment_key
from validator.scoring import ScoreBook

SEEDS = (5, 36, 54)
"""In 36 another leader takes over."""
END_S = 1_700_001_000.0


class World:
    def __init__(self, directory: Path, keys: Keys, only: tuple[str, ...] = ()) -> None:
        self.clock, self.scores = ManualClock(), ScoreBook(leader_audits=False)
        self.reader = FollowReader(keys, directory, self.scores, only=only, clock=self.clock)

    async def catch_up(self) -> None:
        self.clock.advance(LIST_S + 60)
        while await self.reader.look():
            pass

    @property
    def run(self) -> FollowedRun:
        (run,) = self.reader.runs.values()
        return run


def whole(records: tuple[ev.Record, ...]) -> tuple[bytes, dict[str, object]]:
    """The state and the scores that these records lead to."""
    scores = ScoreBook(leader_audits=False)
    for record in records:
        scores.run("toy-00000001").note(record)
    return state_bytes(fold(records)), dict(scores.scores(END_S))


@pytest.mark.parametrize("seed", SEEDS)
async def test_it_ends_with_the_leaders_state_and_finds_nothing_wrong(tmp_path: Path, seed: int) -> None:
    published = Published(Keys(), journal_of(seed))
    world = World(tmp_path, published.keys)
    while published.sent < len(published.segments):
        published.send(1)
        await world.catch_up()
        assert world.run.folded.num_segments == published.sent
    state, scores = whole(published.records)
    assert state_bytes(world.run.state) == state
    assert world.scores.scores(END_S) == scores
    assert world.run.breaches.items == []
    assert world.run.view().trouble == ""
    assert world.run.finished


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("copied", [True, False], ids=["from its copy", "from segment 0"])
async def test_a_restart_goes_on_as_if_there_had_been_none(tmp_path: Path, seed: int, copied: bool) -> None:
    published = Published(Keys(), journal_of(seed))
    published.send(len(published.segments) // 2)
    before = World(tmp_path, published.keys)
    await before.catch_up()
    if copied:
        await before.reader.close()
    number = before.run.number
    published.send()
    after = World(tmp_path, published.keys)
    taken: list[int] = []
    after.reader._on_run = lambda run: taken.append(run.number)
    await after.catch_up()
    assert taken == [number if copied else 0]
    state, scores = whole(published.records)
    assert state_bytes(after.run.state) == state
    assert after.scores.scores(END_S) == scores
    assert after.run.history.dump() == (await _followed(tmp_path / "other", published)).history.dump()


async def _followed(directory: Path, published: Published) -> FollowedRun:
    world = World(directory, published.keys)
    await world.catch_up()
    return world.run


@pytest.mark.parametrize("damage", ["flipped", "truncated", "of another run"])
async def test_a_copy_that_is_not_whole_is_no_copy(tmp_path: Path, damage: str) -> None:
    published = Published(Keys(), journal_of(5))
    published.send()
    first = World(tmp_path, published.keys)
    await first.catch_up()
    path = first.run.directory / "copy"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "truncated":
        del data[-1:]
    else:
        other = FollowedRun("other", tmp_path / "elsewhere", ScoreBook().run("other"), ManualClock())
        other.folded, other.last = first.run.folded, first.run.last
        other.write_copy(other.copy())
        data = bytearray((other.directory / "copy").read_bytes())
    path.write_bytes(data)
    again = World(tmp_path, published.keys)
    await again.catch_up()
    assert state_bytes(again.run.state) == whole(published.records)[0]
    assert again.run.breaches.items == []


async def test_the_store_may_go_away(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    published.send(3)
    world = World(tmp_path, published.keys)
    await world.catch_up()
    published.keys.down = True
    with pytest.raises(IotaError, match="down") as caught:
        await world.catch_up()
    assert caught.value.retryable  # what ``run`` waits out
    published.keys.down = False
    published.send()
    await world.catch_up()
    assert world.run.finished


async def put(store: EmbeddedStore, published: Published, end: int) -> None:
    for segment in published.segments[published.sent : end]:
        key = segment_key(published.run_id, segment.number)
        await store.put_named(key, wire.encode(segment), deadline=soon())
    published.sent = end


async def reached(reader: FollowReader, count: int) -> FollowedRun:
    deadline = soon()
    while not any(run.folded.num_segments == count for run in reader.runs.values()):
        deadline.check(f"waiting for segment {count}")
        await asyncio.sleep(0.01)
    (run,) = reader.runs.values()
    return run


async def test_over_a_real_store_that_goes_away_and_comes_back_between_two_lives(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(36))
    third = len(published.segments) // 3
    serving = await start_store(tmp_path / "store", "127.0.0.1", 0, SECRET, 512 << 20)
    port = int(serving.url.rpartition(":")[2])
    async with EmbeddedStore(serving.url, SECRET) as theirs, EmbeddedStore(serving.url, SECRET) as ours:
        await put(theirs, published, third)
        reader = FollowReader(ours, tmp_path / "follow", ScoreBook(leader_audits=False))
        task = asyncio.create_task(reader.run(0.01))
        await reached(reader, third)
        await serving.close()
        await asyncio.sleep(0.1)
        serving = await start_store(tmp_path / "store", "127.0.0.1", port, SECRET, 512 << 20)
        await put(theirs, published, 2 * third)
        await reached(reader, 2 * third)
        task.cancel()
        await asyncio.wait({task})
        await reader.close()

        scores = ScoreBook(leader_audits=False)
        again = FollowReader(ours, tmp_path / "follow", scores)
        task = asyncio.create_task(again.run(0.01))
        await put(theirs, published, len(published.segments))
        run = await reached(again, len(published.segments))
        task.cancel()
        await asyncio.wait({task})
        await serving.close()
    state, wanted = whole(published.records)
    assert (state_bytes(run.state), scores.scores(END_S)) == (state, wanted)


async def test_runs_one_after_the_other_and_only_those_wanted(tmp_path: Path) -> None:
    keys = Keys()
    first, second = journal_of(5), journal_of(54)
    one, other = Published(keys, first, "toy-00000001"), Published(keys, second, "toy-00000002")
    one.send()
    all_of_them, by_id = World(tmp_path / "all", keys), World(tmp_path / "one", keys, only=("toy-00000002",))
    by_name = World(tmp_path / "name", keys, only=("other",))
    for world in (all_of_them, by_id, by_name):
        await world.catch_up()
    assert set(all_of_them.reader.runs) == {"toy-00000001"}
    other.send()
    for world in (all_of_them, by_id, by_name):
        await world.catch_up()
    assert {run.run_id: run.finished for run in all_of_them.reader.runs.values()} == {
        "toy-00000001": True,
        "toy-00000002": True,
    }
    assert set(by_id.reader.runs) == {"toy-00000002"}
    assert by_name.reader.runs == {}


# --- what doesn't fit ----------------------------------------------------------------------------------------------


def spoil(published: Published, number: int, how: str) -> None:
    key = segment_key(published.run_id, number)
    segment = published.segments[number]
    before = published.segments[number - 1].head
    if how == "undecodable":
        published.keys.keys[key] = b"\x93junk"
    elif how == "unsigned":
        published.keys.keys[key] = wire.encode(with_records(segment, before, segment.records))[:-1] + b"\x00"
    elif how == "another number":
        published.keys.keys[key] = wire.encode(published.segments[number - 1])
    elif how == "another chain":
        published.keys.keys[key] = wire.encode(with_records(segment, "00" * 32, segment.records))


@pytest.mark.parametrize("how", ["undecodable", "unsigned", "another number", "another chain"])
async def test_a_segment_that_does_not_fit_stops_its_run_until_it_is_restored(tmp_path: Path, how: str) -> None:
    published = Published(Keys(), journal_of(5))
    published.send()
    spoil(published, 4, how)
    world = World(tmp_path, published.keys)
    await world.catch_up()
    assert world.run.folded.num_segments == 4
    assert "segment 4" in world.run.trouble
    assert "--follow.run" in world.run.trouble
    assert world.run.breaches.items == []  # whoever damaged a store is no leader
    published.sent = 4
    published.send()
    await world.catch_up()
    assert world.run.finished
    assert world.run.trouble == ""


async def test_a_leader_that_signs_what_cannot_follow_is_named_and_earns_nobody_anything_more(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    segment, before = published.segments[4], published.segments[3].head
    nonsense = wire.encode(ev.Record(segment.first, 5, ev.StepSealed(99, 1, 0, 0, 0, 0)))
    published.segments[4] = with_records(segment, before, [nonsense])
    published.send()
    world = World(tmp_path, published.keys)
    await world.catch_up()
    (breach,) = world.run.breaches.items
    assert (breach.code, breach.wrong, breach.number, breach.leader) == ("fold", True, segment.first, FIRST.hotkey)
    assert world.run.counted_to == segment.first
    await world.reader.close()
    again = World(tmp_path, published.keys)
    await again.catch_up()
    assert again.run.breaches.items == [breach]  # said once


# --- two heads at one number ---------------------------------------------------------------------------------------


def other_segment(published: Published, number: int):
    """The same place of the journal, told otherwise and signed by the same leader."""
    segment = published.segments[number]
    *records, last = segment.records
    record = wire.decode(last, ev.Record, limit_bytes=1 << 20, what="record")
    changed = wire.encode(ev.Record(record.number, record.time_ns + 1, record.event))
    return with_records(segment, published.segments[number - 1].head, [*records, changed])


async def test_two_signed_heads_at_one_number_are_kept_as_a_proof_and_end_the_trust(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    published.send(4)
    world = World(tmp_path, published.keys)
    await world.catch_up()
    published.keys.keys[segment_key(published.run_id, 3)] = wire.encode(other_segment(published, 3))
    world.clock.advance(RECHECK_S + 1)
    await world.catch_up()
    number = published.segments[3].first + len(published.segments[3].records) - 1
    assert world.reader.distrusted == {FIRST.hotkey: (published.run_id, number)}
    assert f"record {number}" in world.run.trouble
    (path,) = (tmp_path / "proofs").iterdir()
    proof = read_proof(path)
    assert (proof.hotkey, proof.number) == (FIRST.hotkey, number)

    published.send()
    again = World(tmp_path, published.keys)
    await again.catch_up()
    assert again.reader.distrusted == world.reader.distrusted  # for good
    assert again.run.number == world.run.number  # nothing more of that leader is taken


async def test_a_fork_is_found_when_the_next_segment_does_not_go_on(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    published.send(4)
    world = World(tmp_path, published.keys)
    await world.catch_up()
    fork = other_segment(published, 3)
    published.keys.keys[segment_key(published.run_id, 3)] = wire.encode(fork)
    published.segments[4] = with_records(published.segments[4], fork.head, published.segments[4].records)
    published.send()
    await world.catch_up()
    assert set(world.reader.distrusted) == {FIRST.hotkey}


def test_what_proves_nothing(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    before, one, other = published.segments[2].head, published.segments[3], other_segment(published, 3)
    assert TwoHeads(before, one, other).refuted() == ""
    shorter = with_records(one, before, one.records[:-1])
    for proof, why in (
        (TwoHeads(before, one, one), "only says more"),
        (TwoHeads(before, one, shorter), "only says more"),
        (TwoHeads("00" * 32, one, other), "isn't that of its records"),
        (TwoHeads(before, one, published.segments[2]), "one place"),
    ):
        assert why in proof.refuted()
    forged = TwoHeads(before, one, msgspec.structs.replace(other, signature=one.signature))
    assert "signature" in forged.refuted()
    path = write_proof(tmp_path, TwoHeads(before, one, shorter))
    with pytest.raises(InputError, match="proves nothing"):
        read_proof(path)
