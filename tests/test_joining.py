"""A joiner takes its state from any of several sources, nothing twice, and what it takes has the right hash and root."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from join_cases import NUM_STEPS, Miner, StoredBlobs, TrainedRun, joined, trained_run

from miner.local_view import BoundaryKey
from miner.member_links import Links
from miner.owes import ApplySeal, Compute, Fetch, MakeSnapshot
from miner.run_member import RunMember
from miner.saved_state import SavedState
from miner.sources import DISK, REPLICAS, STORE, Holdings, Sources
from subnet.engine.stage_executor import PartialKey
from subnet.errors import Busy, NotFound, OutOfSpace, Unreachable
from subnet.model.snapshots import SnapshotManifest, decode_manifest
from subnet.protocol.wire import blob_hash
from subnet.run import state as st
from subnet.store.disk import BlobCache
from subnet.timing import Deadline


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture(scope="module")
def trained() -> TrainedRun:
    return trained_run()


@pytest.fixture
def run(trained: TrainedRun) -> TrainedRun:
    """The same run, with members and a store of the test's own."""
    trained.state.members.clear()
    trained.state.roots.clear()
    trained.state.next_step = NUM_STEPS
    return TrainedRun(
        trained.state, StoredBlobs(dict(trained.store.there)), trained.plan, trained.roots, trained.log_blobs
    )


# --- the order of sources ---------------------------------------------------------------------------------------------


@dataclass
class FakeReplicas:
    blobs: dict[str, bytes] = field(default_factory=dict)
    error: Exception | None = None
    wait: asyncio.Event | None = None
    asked: list[str] = field(default_factory=list)
    cancelled: int = 0

    async def fetch(self, ref: tuple[str, int], deadline: Deadline) -> bytearray:
        self.asked.append(ref[0])
        try:
            if self.wait is not None:
                await self.wait.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        if ref[0] not in self.blobs:
            raise NotFound("nobody has it")
        return bytearray(self.blobs[ref[0]])


def sources(tmp_path: Path, store: StoredBlobs, replicas: FakeReplicas, hedge_s: float = 5.0) -> Sources:
    holdings = Holdings(BlobCache(tmp_path / "cache", 1 << 20), st.new_state)
    return Sources(holdings, store, replicas, hedge_s=hedge_s)  # type: ignore[arg-type]


async def test_disk_then_replicas_then_store(tmp_path: Path) -> None:
    store, replicas = StoredBlobs(), FakeReplicas()
    both, only = store.put(b"both"), store.put(b"only the store's")
    replicas.blobs[both] = b"both"
    found = sources(tmp_path, store, replicas)
    assert await found.fetch((both, 4), soon()) == b"both"
    assert store.gets.total() == 0
    assert await found.fetch_many([(both, 4), (only, 16)], soon()) == [b"both", b"only the store's"]
    assert store.gets == {only: 1}
    again = sources(tmp_path, store, replicas)
    await again.fetch_many([(both, 4), (only, 0)], soon())
    assert dict(again.bytes_from) == {DISK: 20}
    assert dict(found.bytes_from) == {REPLICAS: 4, STORE: 16, DISK: 4}
    assert await found.fetch((store.put(b"now"), 3), soon(), store_first=True) == b"now"
    assert len(replicas.asked) == 2, "for what has just been merged the store is asked first"


async def test_a_slow_source_is_raced_after_a_while(tmp_path: Path) -> None:
    store, replicas = StoredBlobs(), FakeReplicas(wait=asyncio.Event())
    blob = store.put(b"blob")
    found = sources(tmp_path, store, replicas, hedge_s=0.02)
    assert await found.fetch((blob, 4), soon()) == b"blob"
    assert replicas.cancelled == 1
    store.slow = asyncio.Event()
    replicas.wait, replicas.blobs = None, {(other := store.put(b"other")): b"other"}
    assert await found.fetch((other, 5), soon(), store_first=True) == b"other", "the store hangs, a replica helps out"
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_what_came_before_a_failure_is_not_fetched_again(tmp_path: Path) -> None:
    store, replicas = StoredBlobs(), FakeReplicas(error=Unreachable("the donor died"))
    blobs = [store.put(bytes([i]) * 1000) for i in range(6)]
    gone = store.there.pop(blobs[5])
    found = sources(tmp_path, store, replicas)
    refs = [(blob, 1000) for blob in blobs]
    with pytest.raises(NotFound, match="the donor died"):
        await found.fetch_many(refs, soon())
    store.there[blobs[5]] = gone
    assert len(await found.fetch_many(refs, soon())) == 6
    assert max(store.gets.values()) == 1
    store.down = True
    with pytest.raises(Unreachable, match="the store is away"):
        await found.fetch((store.put(b"new"), 3), soon())


async def test_what_nobody_can_need_any_more_goes_from_the_disk(run: TrainedRun, tmp_path: Path) -> None:
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1000)
    await miner.catch_up()
    cache, holdings = miner.context.chunk_cache, miner.context.sources.holdings
    used = cache.used_bytes
    await holdings.tidy()
    assert cache.used_bytes == used, "a joiner would still need all of it"
    sealed, row_group = dict(run.state.sealed), b"tokens"
    cache.put(blob_hash(row_group), row_group)
    for step in (-1, 0, 1):
        del run.state.sealed[step]
    run.state.snapshots[0] = [st.StoredSnapshot(2, "manifest", "root", "hot", "cold", True)]
    await holdings.tidy()
    run.state.sealed.update(sealed)
    run.state.snapshots.clear()
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {blob_hash(row_group), *(b for step in (2, 3) for b, _ in sealed[step].groups[0].blobs)}
    await miner.close()


async def test_two_hundred_failed_fetches_leave_no_task(tmp_path: Path) -> None:
    store, replicas = StoredBlobs(down=True), FakeReplicas(error=Busy("busy"))
    found = sources(tmp_path, store, replicas, hedge_s=0.0)
    for i in range(200):
        with pytest.raises(Unreachable):
            await found.fetch((blob_hash(bytes([i])), 1), soon())
    cancelled = asyncio.create_task(found.fetch((blob_hash(b"x"), 1), soon()))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert found._slots._value == 8
    assert found.holdings._cache.used_bytes == 0


# --- joining, restarting, and what is kept ----------------------------------------------------------------------------


async def test_a_restarted_miner_downloads_nothing(run: TrainedRun, tmp_path: Path) -> None:
    member = joined(run.state, "me", 1)
    first = Miner(run, tmp_path, member, state_every_steps=1000)
    await first.catch_up()
    assert first.root == run.roots[NUM_STEPS]
    assert first.context.sources.bytes_from[STORE] == sum(len(run.store.there[name]) for name in run.store.gets)
    assert set(run.store.gets) >= run.log_blobs
    assert max(run.store.gets.values()) == 1
    await first.close()
    run.store.down = True
    again = Miner(run, tmp_path, joined(run.state, "me", 2), state_every_steps=1000)
    await again.catch_up()
    assert again.root == run.roots[NUM_STEPS]
    assert set(again.context.sources.bytes_from) == {DISK}
    await again.close()


async def test_a_restarted_miner_begins_at_its_own_last_state(run: TrainedRun, tmp_path: Path) -> None:
    member = joined(run.state, "me", 1)
    first = Miner(run, tmp_path, member, state_every_steps=1)
    run.state.next_step = 2
    sealed = {step: run.state.sealed.pop(step) for step in (2, 3)}
    await first.catch_up()
    assert first.root == run.roots[2]
    first.states.save_when_due()
    assert first.states._saving is None, "its root isn't agreed yet"
    run.state.roots[0] = {run.roots[2]: ["cold-me", "cold-other"]}
    first.states.save_when_due()
    assert first.states._save_task is not None
    await first.states._save_task
    await first.close()
    run.state.sealed.update(sealed)
    run.state.next_step = NUM_STEPS
    run.store.gets.clear()
    again = Miner(run, tmp_path, joined(run.state, "me", 2))
    await again.catch_up()
    assert again.root == run.roots[NUM_STEPS]
    assert len(run.store.gets) == len(run.log_blobs) / 5 * 2, "the two steps since, and no snapshot"
    again.states.distrust()
    await again.catch_up()
    assert again.root == run.roots[NUM_STEPS]
    assert again.states._saved.find(0) is None
    assert run.state.run is not None
    assert run.store.gets[run.state.run.snapshot] == 0, "the snapshot is on disk from the first time"
    await again.close()


async def test_a_damaged_or_foreign_saved_state_is_not_used(run: TrainedRun, tmp_path: Path) -> None:
    run.state.next_step = NUM_STEPS
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1)
    await miner.catch_up()
    run.state.roots[0] = {miner.root: ["a", "b"]}
    miner.states.save_when_due()
    assert miner.states._save_task is not None
    await miner.states._save_task
    await miner.close()
    (path,) = (tmp_path / "state").rglob("stage.state")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    again = Miner(run, tmp_path, joined(run.state, "me", 2))
    await again.catch_up()
    assert again.root == run.roots[NUM_STEPS]
    assert not path.exists(), "what fails its hash goes"
    await again.close()
    run.state.roots[0] = {"another": ["a", "b"]}
    path.parent.mkdir(exist_ok=True)
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    third = Miner(run, tmp_path, joined(run.state, "me", 3))
    await third.catch_up()
    assert path.exists()
    assert third.context.sources.bytes_from[DISK] > 0, "others agree on another root: not from the saved state"
    await third.close()


def test_a_saved_state_is_whole_or_absent(tmp_path: Path) -> None:
    def snapshot(put: Any) -> SnapshotManifest:
        put(blob_hash(b"chunk"), memoryview(b"chunk"))
        return SnapshotManifest(3, ())

    (tmp_path / "old-run").mkdir()
    saved = SavedState(tmp_path, "run", budget_bytes=100, reserve_bytes=10, free=lambda _: 50)
    assert not (tmp_path / "old-run").exists()
    with pytest.raises(OutOfSpace, match="the budget is 100"):
        saved.write(0, "root", 101, snapshot, lambda: False)
    with pytest.raises(OutOfSpace, match="leave 5 bytes free"):
        saved.write(0, "root", 45, snapshot, lambda: False)
    assert not saved.write(0, "root", 5, snapshot, lambda: True)
    assert not list((tmp_path / "run").iterdir()), "what was stopped leaves nothing"
    assert saved.write(0, "root", 5, snapshot, lambda: False)
    assert saved.find(0) is None, "not visible before it is durable"
    SavedState(tmp_path, "run", budget_bytes=100)
    assert not list((tmp_path / "run").iterdir()), "a kill between the two leaves nothing"
    assert saved.find(0) is None
    for junk in (b"", b"junk" * 20):
        (tmp_path / "run" / "stage.state").write_bytes(junk)
        assert saved.find(0) is None
        assert not list((tmp_path / "run").iterdir())


async def test_an_update_stops_a_state_from_being_written_not_the_other_way_round(
    run: TrainedRun, tmp_path: Path
) -> None:
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1)
    run.state.next_step = 3
    last = run.state.sealed.pop(3)
    await miner.catch_up()
    run.state.roots[0] = {miner.root: ["a", "b"]}
    miner.states.save_when_due()
    run.state.sealed[3] = last
    run.state.next_step = NUM_STEPS
    await miner.states.apply_seal(ApplySeal(3))
    assert miner.root == run.roots[NUM_STEPS]
    assert miner.states._save_task is not None
    await miner.states._save_task
    found = miner.states._saved.find(0)
    assert found is None or found.root == run.roots[3]
    await miner.close()


async def test_a_cancelled_update_is_taken_up_where_it_is(run: TrainedRun, tmp_path: Path) -> None:
    """A new incarnation cancels the task, not the thread that updates: the next attempt finds the update done."""
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1000)
    last = run.state.sealed.pop(3)
    await miner.catch_up()
    run.state.sealed[3] = last
    stage = miner.context.held_stage()
    apply_step = stage.state.apply_step

    def applied(*args: Any, **options: Any) -> None:
        loop.call_soon_threadsafe(task.cancel)
        apply_step(*args, **options)

    loop = asyncio.get_running_loop()
    stage.state.apply_step = applied  # type: ignore[method-assign]
    task = asyncio.create_task(miner.states.apply_seal(ApplySeal(3)))
    await asyncio.wait({task})
    stage.state.apply_step = apply_step  # type: ignore[method-assign]
    if task.cancelled():
        assert miner.context.local.version == 3
        await miner.states.apply_seal(ApplySeal(3))
    assert miner.root == run.roots[NUM_STEPS]
    await miner.close()


async def test_fifty_new_incarnations_leave_nothing(run: TrainedRun, tmp_path: Path) -> None:
    """Queued work, sums, graphs, slices and merged bytes go with each incarnation."""
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1000)
    await miner.catch_up()
    context, stage = miner.context, miner.context.held_stage()
    if miner.tasks:
        await asyncio.wait(set(miner.tasks))
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted, not walked
    for number in range(50):
        member = joined(run.state, "me", number + 10)
        context.member = member
        key = PartialKey(NUM_STEPS, 1, member.number, 0)
        futures = [
            context.compute.submit(
                Compute(NUM_STEPS, m, 0, backward=True, generation=1),
                (1, m),
                lambda key=key: stage.executor.partials.setdefault(key, object()),  # type: ignore[arg-type]
            )
            for m in range(20)
        ]
        context.slices["slice"] = memoryview(bytes(1000))
        context.merged["merged"] = memoryview(bytes(1000))
        context.local.jobs.update(futures)
        context.new_incarnation()
        context.local.jobs.clear()
        await asyncio.wait(futures)
    while len(context.compute):
        await asyncio.sleep(0.01)
    assert not stage.executor.partials
    assert not stage.executor.retained
    assert not context.slices
    assert not context.merged
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    assert not miner.tasks
    await miner.close()


async def test_failing_rounds_leave_nothing_and_are_tried_again_later(run: TrainedRun, tmp_path: Path) -> None:
    """The pump's own bookkeeping over two hundred failed works and fifty new incarnations in their midst."""
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1000)
    await miner.catch_up()
    context = miner.context
    node = RunMember(context, SimpleNamespace(), SimpleNamespace(), (), Links(context))  # type: ignore[arg-type]
    if miner.tasks:
        await asyncio.wait(set(miner.tasks))
    tasks = asyncio.all_tasks()

    async def fail(error: Exception) -> None:
        await asyncio.sleep(0)
        raise error

    async def hang() -> None:
        await asyncio.Event().wait()

    for round_number in range(50):
        owes = [Fetch(BoundaryKey(round_number, m, 0, False), ()) for m in range(5)]
        for owe in owes[:4]:
            node._start([owe], fail(Unreachable("the store is away")))
        node._start(owes[4:], hang())
        assert len(context.local.jobs) == 5
        while len(node._tasks) > 1:
            await asyncio.sleep(0)
        assert set(node._not_before) == set(owes[:4]), "they wait before they are tried again"
        node._renew("a test")
        await asyncio.wait(set(node._tasks))
        assert not context.local.jobs
        assert not node._not_before
    assert asyncio.all_tasks() == tasks
    assert not node._reporter._sent
    await node._states.close()
    await miner.close()


async def test_chunks_of_a_stored_snapshot_can_be_had_from_its_maker(run: TrainedRun, tmp_path: Path) -> None:
    miner = Miner(run, tmp_path, joined(run.state, "me", 1), state_every_steps=1000)
    await miner.catch_up()
    await miner.states.snapshot(MakeSnapshot(NUM_STEPS, 0))
    stored = miner.context.local.snapshots[NUM_STEPS]
    holdings = miner.context.sources.holdings
    manifest = decode_manifest(run.store.there[stored.manifest])
    assert all(holdings.may_serve(ref.hash) for ref in manifest.chunks)
    assert all(holdings.get(ref.hash) == run.store.there[ref.hash] for ref in manifest.chunks)
    await miner.close()
