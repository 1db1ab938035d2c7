"""Whoever lied in a merge is found from the slices in the store, and nobody else; what can't be told yet convicts nobody."""

from __future__ import annotations

import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import tiny_plan
from trace_cases import Lies, World, cut_small, soon

from subnet.errors import Corrupt, NotFound
from subnet.numerics import fixed_point
from subnet.numerics.layout import block_lengths
from subnet.run import events as ev
from subnet.run import state as st
from subnet.store.embedded import EmbeddedStore
from subnet.store.server import start_store
from subnet.words import BlobHash, Member
from validator import scale_replay
from validator.scale_replay import ScaleReplay
from validator.tasks import Completion, RunTasks
from validator.trace_io import TraceReader

SECRET = b"s" * 32


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedStore]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here is about power cuts
    listener = await start_store(tmp_path / "store", "127.0.0.1", 0, SECRET, 64 << 20)
    store = EmbeddedStore(listener.url, SECRET)
    yield store
    await store.close()
    await listener.close()


BOTH = pytest.mark.parametrize("world", [False, True], ids=["untied", "tied"], indirect=True)


@pytest.fixture
async def world(request: pytest.FixtureRequest, store: EmbeddedStore) -> World:
    """Calibrated, step 0 open: a group of one stage, or first and last stage with two leaves."""
    world = World(cut_small(tiny_plan((0, 2), tie_word_embeddings=getattr(request, "param", True))), store)
    world.begin()
    await world.seal_step()
    world.open_step()
    return world


def contributor(world: World, stage: int = 0) -> Member:
    """The one with more than one microbatch."""
    return world.members(stage)[0]


def accuser(world: World) -> Member:
    return world.members(0)[1]


async def convict(world: World, lies: Lies) -> tuple[set[Member], list[ev.AnyEvent]]:
    """Group 0 merged with these lies and traced; the events are folded, as the coordinator would."""
    action = await world.merge(0, lies)
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    for event in events:
        world.emit(event)
    return {event.member for event in events if isinstance(event, ev.Gone) and event.why == "liar"}, events


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def inflated(data: bytes) -> bytes:
    """The last block's maximum, twice as large."""
    return data[:-4] + struct.pack("<f", 2 * struct.unpack("<f", data[-4:])[0])


def accuses(world: World) -> Lies:
    return Lies(checks=lambda member: member != accuser(world))


# --- verdicts -----------------------------------------------------------------------------------------------------


@BOTH
async def test_who_accuses_an_honest_merge_lied(world: World) -> None:
    liar = accuser(world)
    guilty, _ = await convict(world, Lies(checks=lambda member: member != liar))
    assert guilty == {liar}
    assert liar.hotkey in world.state.convicted


@BOTH
async def test_a_changed_slice_is_its_contributors(world: World) -> None:
    liar = contributor(world)
    lies = accuses(world)
    lies.slice = lambda member, p, data: flipped(data) if (member, p) == (liar, 1) else data
    guilty, _ = await convict(world, lies)
    assert guilty == {liar}


async def test_two_liars_are_found_at_once(world: World) -> None:
    first, second = world.members(0)
    lies = accuses(world)
    lies.slice = lambda member, p, data: flipped(data) if (member, p) in ((first, 0), (second, 2)) else data
    guilty, _ = await convict(world, lies)
    assert guilty == {first, second}


@pytest.mark.parametrize("form", ["short", "out of range", "maximum"])
async def test_bytes_that_are_no_slice_are_their_contributors(world: World, form: str) -> None:
    liar = contributor(world)

    def malformed(member: Member, p: int, data: bytes) -> bytes:
        if (member, p) != (liar, 0):
            return data
        if form == "short":
            return data[:-1]
        if form == "out of range":
            return struct.pack("<h", 32767) + data[2:]
        return data[:-4] + struct.pack("<f", -1.0)

    lies = accuses(world)
    lies.slice = malformed
    guilty, _ = await convict(world, lies)
    assert guilty == {liar}


@BOTH
async def test_a_wrong_sum_is_its_owners(world: World) -> None:
    lies = accuses(world)
    lies.merged = lambda p, data, squares: (flipped(data) if p == 1 else data, squares)
    action = await world.merge(0, lies)
    merge = st.merge_of(world.state, action.step, 0)
    assert merge is not None
    owner = merge.owners[1]
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert [event.member for event in events if isinstance(event, ev.Gone)] == [owner]
    for event in events:
        world.emit(event)
    assert owner.hotkey in world.state.convicted


async def test_inflated_maxima_of_a_right_sum_are_the_owners(world: World) -> None:
    lies = accuses(world)
    lies.merged = lambda p, data, squares: (inflated(data) if p == 1 else data, squares)
    action = await world.merge(0, lies)
    merge = st.merge_of(world.state, action.step, 0)
    assert merge is not None
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert [event.member for event in events if isinstance(event, ev.Gone)] == [merge.owners[1]]


async def test_who_says_that_its_maxima_were_larger_lied(world: World) -> None:
    """An owner's accomplice covers inflated maxima with its word: the committed slice says otherwise."""
    liar = contributor(world)
    lies = accuses(world)
    lies.print = lambda member, p, value: (*value[:-1], value[-1] + 1) if (member, p) == (liar, 1) else value
    guilty, _ = await convict(world, lies)
    assert guilty == {liar}


@BOTH
async def test_wrong_squares_of_a_right_sum_are_the_owners(world: World) -> None:
    lies = accuses(world)
    lies.merged = lambda p, data, squares: (data, squares + (p == 0))
    action = await world.merge(0, lies)
    merge = st.merge_of(world.state, action.step, 0)
    assert merge is not None
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert [event.member for event in events if isinstance(event, ev.Gone)] == [merge.owners[0]]


async def test_other_bytes_stored_under_a_right_hash_are_the_owners(world: World) -> None:
    """Whoever fetches them says that the check failed, and is right."""
    lies = accuses(world)
    lies.blob = lambda p, data: data if p else flipped(data)
    action = await world.merge(0, lies)
    merge = st.merge_of(world.state, action.step, 0)
    assert merge is not None
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert [event.member for event in events if isinstance(event, ev.Gone)] == [merge.owners[0]]


async def test_a_packed_sum_is_as_good(world: World) -> None:
    action = await world.merge(0, accuses(world), packed=True)
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert [event.member for event in events if isinstance(event, ev.Gone)] == [accuser(world)]


async def test_a_withheld_slice_judges_nobody_and_voids_its_contributor(world: World) -> None:
    liar = contributor(world)
    lies = accuses(world)
    lies.merged = lambda p, data, squares: (flipped(data), squares)
    lies.withhold = lambda member, p: (member, p) == (liar, 1)
    action = await world.merge(0, lies)
    reader = TraceReader(world.plan, world.store)
    patient = type(action)(action.step, action.group, action.version, patient=True)
    assert list((await reader.verdict(patient, world.state))(world.state)) == []
    events = list((await reader.verdict(action, world.state))(world.state))
    assert events == [ev.Voided(action.step, 0, liar, "silent")]


async def test_what_is_no_hash_is_withheld(world: World) -> None:
    action = await world.merge(0, accuses(world))
    merge = st.merge_of(world.state, action.step, 0)
    assert merge is not None
    liar = merge.entries[0]
    bad = type(liar)(liar.member, liar.stage, liar.microbatches, tuple((p, "no hash") for p, _ in liar.hashes))
    merge.entries = (bad, *merge.entries[1:])
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert events == [ev.Voided(action.step, liar.stage, liar.member, "silent")]


async def test_who_names_anothers_slice_cant_convict_it(world: World) -> None:
    """The same bytes are a slice of three microbatches, and too large for one of one."""
    first, second = world.members(0)
    copied: dict[int, bytes] = {}

    def copy(member: Member, p: int, data: bytes) -> bytes:
        if member == first:
            copied[p] = data
        return copied[p] if member == second else data

    lies = accuses(world)
    lies.slice = copy
    guilty, _ = await convict(world, lies)
    assert guilty == {second}


async def test_liars_at_both_ends_of_a_tied_model(store: EmbeddedStore) -> None:
    """One slice of the section that both stages hold, one of the last stage's own."""
    world = World(cut_small(tiny_plan((0, 2), tie_word_embeddings=True)), store)
    world.begin()
    await world.seal_step()
    world.open_step()
    group = world.plan.layout.groups[0]
    tied = next(s for s in world.plan.layout.sections if s.name == "tied")
    shared = next(p.index for p in group.partitions if p.section == tied.index)
    own = next(p.index for p in group.partitions if p.section == 1)
    first, last = contributor(world, 0), contributor(world, 1)
    lies = accuses(world)
    lies.slice = lambda member, p, data: flipped(data) if (member, p) in ((first, shared), (last, own)) else data
    guilty, _ = await convict(world, lies)
    assert guilty == {first, last}


async def test_one_leaf_of_two_has_half_the_range(store: EmbeddedStore) -> None:
    world = World(cut_small(tiny_plan((0, 2), tie_word_embeddings=True)), store)
    world.begin()
    await world.seal_step()
    world.open_step()
    liar, layout = contributor(world), world.plan.layout
    tied = next(p.index for p in layout.groups[0].partitions if layout.sections[p.section].name == "tied")
    too_much = struct.pack("<h", 3 * 511 + 1)
    lies = accuses(world)
    lies.slice = lambda member, p, data: too_much + data[2:] if (member, p) == (liar, tied) else data
    guilty, _ = await convict(world, lies)
    assert guilty == {liar}


@pytest.mark.parametrize("liar", ["accuser", "owner", "contributor"])
async def test_calibration(store: EmbeddedStore, liar: str) -> None:
    world = World(cut_small(tiny_plan((0, 2))), store)
    world.begin()
    world.open_step()
    lies = accuses(world)
    if liar == "owner":
        lies.merged = lambda p, data, squares: (struct.pack("<f", 99.0) + data[4:] if p == 0 else data, squares)
    if liar == "contributor":
        lies.print = lambda member, p, value: (7,) if (member, p) == (contributor(world), 1) else value
    action = await world.merge(0, lies)
    merge = st.merge_of(world.state, -1, 0)
    assert merge is not None
    expected = {"accuser": accuser(world), "owner": merge.owners[0], "contributor": contributor(world)}[liar]
    events = list((await TraceReader(world.plan, world.store).verdict(action, world.state))(world.state))
    assert [event.member for event in events if isinstance(event, ev.Gone)] == [expected]


# --- the fold goes on meanwhile ------------------------------------------------------------------------------------


async def test_a_merge_that_went_on_gets_no_verdict(world: World) -> None:
    action = await world.merge(0, accuses(world))
    verdict = await TraceReader(world.plan, world.store).verdict(action, world.state)
    world.emit(ev.Gone(contributor(world), "left"))
    assert list(verdict(world.state)) == []
    reader = TraceReader(world.plan, world.store)
    assert list((await reader.verdict(action, world.state))(world.state)) == []


async def test_the_task_completes_with_the_verdict_and_without_one_where_the_store_fails(world: World) -> None:
    tasks, completions = RunTasks(world.plan, world.store), list[Completion]()
    tasks.bind(completions.append)
    action = await world.merge(0, accuses(world))
    await tasks.perform(action, world.state)
    assert ev.Gone(accuser(world), "liar") in list(completions[0].events(world.state))
    log = world.state.sealed[-1].groups[0].blobs
    await world.store.delete(BlobHash(log[0][0]), deadline=soon())
    failing = RunTasks(world.plan, world.store)
    failing.bind(completions.append)
    await failing.perform(action, world.state)
    assert list(completions[1].events(world.state)) == []


# --- scales --------------------------------------------------------------------------------------------------------


def test_the_scale_rule_is_the_replicas_to_the_bit() -> None:
    plan = cut_small(tiny_plan((0, 2), tie_word_embeddings=True))
    rng = np.random.default_rng(11)
    for section in plan.layout.sections:
        assert len(block_lengths(section)) == section.num_blocks
        theirs = (torch.zeros(section.num_blocks), torch.zeros(section.num_blocks))
        ours = (theirs[0].numpy(), theirs[1].numpy())
        for step in range(-1, 12):
            spread = 10.0 ** rng.uniform(-44, 38, section.num_blocks) * (rng.random(section.num_blocks) > 0.2)
            maxima = spread.astype(np.float32)
            theirs = fixed_point.update_scales(section, *theirs, torch.from_numpy(maxima), first=step < 0)
            ours = scale_replay.update_scales(section, *ours, maxima, first=step < 0)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.dtype == np.float32
                assert mine.tobytes() == other.numpy().tobytes()
            for qmax in (section.leaf_qmax, 3, 512, 1023):
                other = fixed_point.exponents(theirs[1], qmax).numpy()
                assert np.array_equal(scale_replay.exponents(ours[1], qmax), other)


@pytest.mark.parametrize("delay", [0, 1])
async def test_replayed_scales_from_calibration_on(store: EmbeddedStore, delay: int) -> None:
    world = World(cut_small(tiny_plan((0, 2), tie_word_embeddings=True, update_delay=delay)), store)
    world.begin()
    kept = ScaleReplay(world.plan, store)
    for step in range(3 + delay):
        for section in world.plan.layout.sections:
            fresh = ScaleReplay(world.plan, store)
            for replay in (kept, fresh):
                found = await replay.exponents(section, world.state.next_step, world.state, deadline=soon())
                expected = world.exponents(section)
                assert (found is None) == (expected is None) == (step == 0)
                assert found is None or np.array_equal(found, expected)
        await world.seal_step(packed=step == 1)


async def test_a_known_scale_isnt_read_again(store: EmbeddedStore) -> None:
    world = World(cut_small(tiny_plan((0, 2))), store)
    world.begin()
    await world.seal_step()
    replay, section = ScaleReplay(world.plan, store), world.plan.layout.sections[0]
    await replay.exponents(section, 0, world.state, deadline=soon())
    for blob, _ in world.state.sealed[-1].groups[0].blobs:
        await store.delete(BlobHash(blob), deadline=soon())
    await world.seal_step()
    found = await replay.exponents(section, 1, world.state, deadline=soon())
    assert np.array_equal(found, world.exponents(section))
    with pytest.raises(NotFound):
        await ScaleReplay(world.plan, store).exponents(section, 1, world.state, deadline=soon())


@pytest.mark.parametrize(("tied", "delay"), [(False, 0), (True, 0), (True, 1)], ids=["untied", "tied", "delayed"])
async def test_replayed_scales_from_a_verified_snapshot(store: EmbeddedStore, tied: bool, delay: int) -> None:
    world = World(cut_small(tiny_plan((0, 2), tie_word_embeddings=tied, update_delay=delay)), store)
    world.begin()
    for _ in range(2):
        await world.seal_step()
    for stage in range(2):
        await world.store_snapshot(stage)
    if delay:
        await world.seal_step()  # the state before the snapshots may be needed until then
    assert min(world.state.sealed, default=1) == 1, "the log before the snapshots is trimmed"
    for _ in range(2):
        for section in world.plan.layout.sections:
            replay = ScaleReplay(world.plan, store)
            found = await replay.exponents(section, world.state.next_step, world.state, deadline=soon())
            assert np.array_equal(found, world.exponents(section))
        await world.seal_step()


async def test_a_snapshot_with_false_scales_makes_nobody_guilty(store: EmbeddedStore) -> None:
    world = World(cut_small(tiny_plan((0, 2))), store)
    world.begin()
    await world.seal_step()
    await world.seal_step()
    for stage in range(2):
        await world.store_snapshot(stage, lambda kind, array: array * np.float32(64) if kind == "limit" else array)
    replay, section = ScaleReplay(world.plan, store), world.plan.layout.sections[0]
    with pytest.raises(Corrupt, match="don't give its leaf"):
        await replay.exponents(section, 1, world.state, deadline=soon())


def test_constants_are_those_of_the_arithmetic() -> None:
    names = ("DECAY", "TENSOR_SHARE", "HEADROOM", "FLOOR", "LIMIT_SHRINK", "LIMIT_GROWTH", "CEILING")
    for name in names:
        assert getattr(scale_replay, name) == np.float32(getattr(fixed_point, name)), name
