"""After a rewind a member has nothing of the branch that was left: not in memory, not on disk, not from what was under way."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from join_cases import NUM_STEPS, Miner, TrainedRun, joined, trained_run

from miner.local_view import BoundaryKey, MadeFrom, StoredLocally
from miner.member_links import Links
from miner.owes import ApplySeal, MakeSnapshot, Restore
from miner.run_member import RunMember
from subnet.protocol.messages import BoundaryFrame
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import CALIBRATION_STEP, Member

BACK = 2
"""The step that the run goes back to."""


@pytest.fixture(scope="module")
def trained() -> TrainedRun:
    return trained_run()


@pytest.fixture
def run(trained: TrainedRun) -> TrainedRun:
    """A state of its own over the same store."""
    return TrainedRun(copy.deepcopy(trained.state), trained.store, trained.plan, trained.roots, trained.log_blobs)


class Node:
    """A member at the newest state of the old branch, with its pump's parts."""

    def __init__(self, run: TrainedRun, directory: Path, **settings: Any) -> None:
        self.run = run
        self.miner = Miner(run, directory, joined(run.state, "me", 1), **{"state_every_steps": 1000, **settings})
        self.context = self.miner.context
        self.member = RunMember(self.context, SimpleNamespace(), SimpleNamespace(), (), Links(self.context))  # type: ignore[arg-type]
        self.states = self.member._states

    def rewind(self, *, seen: bool = True, branch: int = 1, step: int = BACK) -> None:
        """As the fold does it; ``seen`` False: only a copy of it arrives."""
        state = self.run.state
        state.members, state.boots, state.roots, state.seals, state.work = {}, {}, {}, {}, None
        state.next_step, state.audits.branch = step, branch
        state.sealed = {at: log for at, log in state.sealed.items() if at < step}
        records = [ev.Record(1, 0, ev.Rewound(step, branch, 3))] if seen else []
        self.member.on_took(records, True)

    async def restore(self) -> None:
        """As the pump does it, on the branch that the fold is on."""
        self.context.member = joined(self.run.state, "me", 2)
        point = st.restore_point(self.run.state, 0)
        await self.states.restore(Restore(0, point.version, point.manifest, point.whole))
        while (step := self.context.local.version) in self.run.state.sealed:
            assert step is not None
            await self.states.apply_seal(ApplySeal(step))

    async def close(self) -> None:
        for task in list(self.member._tasks):
            task.cancel()
        if self.member._tasks:
            await asyncio.wait(set(self.member._tasks))
        await self.states.close()
        await self.miner.close()


@pytest.fixture
async def node(run: TrainedRun, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(run, tmp_path)
    await made.restore()
    assert made.context.local.version == NUM_STEPS
    yield made
    await made.close()


def fill(node: Node) -> None:
    """Something of every step in everything that is kept by step."""
    local, cache = node.context.local, node.context.cache
    for step in range(NUM_STEPS + 1):
        made = BoundaryKey(step, 0, 0, True)
        cache.put(made, bytes([step]) * 10, f"hash{step}", own=True)
        local.boundaries[made] = local.produced[made] = f"hash{step}"
        local.made_from[made] = MadeFrom("x", "g", 1)
        local.added[step, 0, 0] = 1
        local.snapshots[step] = StoredLocally("manifest", "root")
    node.context.slices["slice"] = node.context.merged["merged"] = memoryview(b"x")
    stranger = Member("other", 1, 7)
    frame = BoundaryFrame(node.context.run_id, NUM_STEPS, 0, 1, True, stranger, 1, "0" * 64)
    node.member.links._keep_early(BoundaryKey(NUM_STEPS, 0, 1, True), frame, memoryview(b"x"))


async def test_later_steps_are_gone_and_the_state_is_rebuilt_from_snapshot_and_log(node: Node) -> None:
    fill(node)
    boot = node.member._joiner.boot
    node.rewind()
    local, cache = node.context.local, node.context.cache
    assert sorted(key.step for key in cache.kept) == [0, 1], "what may still be audited stays"
    assert local.kept is cache.kept
    assert local.version is None
    assert not any((local.added, local.snapshots, local.produced, node.context.slices, node.context.merged))
    assert all(key.step < BACK for key in local.boundaries)
    assert not node.member.links._early
    assert node.context.member is None
    assert node.member._joiner.boot != boot
    await node.restore()
    assert (local.version, local.root) == (BACK, node.run.roots[BACK])


async def test_a_rewind_that_was_missed_shows_in_a_copy_and_all_of_it_goes(node: Node) -> None:
    fill(node)
    node.rewind(seen=False)
    assert not node.context.cache.kept
    assert not node.context.local.boundaries
    assert node.context.local.version is None
    await node.restore()
    assert node.context.local.root == node.run.roots[BACK]
    member = node.context.member
    node.member.on_took([], False)
    assert node.context.member is member, "only once"


async def test_of_two_rewinds_the_lower_counts_and_one_that_was_missed_takes_all(node: Node) -> None:
    fill(node)
    node.run.state.audits.branch = 2
    node.member.on_took([ev.Record(1, 0, ev.Rewound(3, 1, 1)), ev.Record(2, 0, ev.Rewound(1, 2, 2))], True)
    assert sorted(key.step for key in node.context.cache.kept) == [0]
    fill(node)
    node.run.state.audits.branch = 4
    node.member.on_took([ev.Record(3, 0, ev.Rewound(3, 4, 1))], True)
    assert not node.context.cache.kept


async def test_an_update_that_was_under_way_ends_in_nobodys_state(node: Node) -> None:
    """The compute thread can't be stopped: it finishes the old branch's update while the member already restores."""
    log = dict(node.run.state.sealed)
    node.rewind(step=NUM_STEPS - 1, branch=1)
    await node.restore()
    node.run.state.sealed, node.run.state.next_step = log, NUM_STEPS
    go = threading.Event()
    held = node.context.compute.submit("hold", (0,), go.wait)
    node.member._start([ApplySeal(NUM_STEPS - 1)], node.states.apply_seal(ApplySeal(NUM_STEPS - 1)))
    while len(node.context.compute) < 2:
        await asyncio.sleep(0.001)
    node.rewind(branch=2)
    restoring = asyncio.create_task(node.restore())
    await asyncio.sleep(0.01)
    go.set()
    await held
    await restoring
    stage = node.context.held_stage()
    assert (node.context.local.version, stage.state.next_step) == (BACK, BACK)
    assert stage.state.stage_root() == node.run.roots[BACK]
    assert stage.merge().step == BACK


async def test_a_restore_under_way_is_let_go(run: TrainedRun, tmp_path: Path) -> None:
    node, store = Node(run, tmp_path), run.store
    store.slow = asyncio.Event()
    point = st.restore_point(run.state, 0)
    owe = Restore(0, point.version, point.manifest, point.whole)
    node.member._start([owe], node.states.restore(owe))
    while node.context.stage is None:
        await asyncio.sleep(0.001)
    node.rewind()
    store.slow.set()
    store.slow = None
    await asyncio.wait(set(node.member._tasks))
    assert not node.context.local.jobs
    assert node.context.local.version is None
    await node.restore()
    assert node.context.local.root == run.roots[BACK]
    await node.close()


async def test_a_snapshot_under_way_is_let_go(node: Node) -> None:
    owe = MakeSnapshot(NUM_STEPS, 0)
    node.member._start([owe], node.states.snapshot(owe))
    await asyncio.sleep(0)
    node.rewind()
    await asyncio.wait(set(node.member._tasks))
    assert not node.context.local.snapshots
    await node.restore()
    assert node.context.local.root == node.run.roots[BACK]


async def test_the_state_on_disk_is_of_its_branch(run: TrainedRun, tmp_path: Path) -> None:
    """Written on the old branch, it isn't begun with on the new one, by this process or the next."""
    node = Node(run, tmp_path, state_every_steps=1)
    await node.restore()
    run.state.roots[0] = {node.context.local.root: ["cold-a", "cold-b"]}
    node.states.save_when_due()
    assert node.states._save_task is not None
    await asyncio.wait({node.states._save_task})
    kept = (tmp_path / "state" / node.context.run_id / "stage.state").read_bytes()
    node.rewind()
    (tmp_path / "state" / node.context.run_id / "stage.state").write_bytes(kept)
    run.state.next_step = NUM_STEPS  # as far again, with other updates as far as anybody here can know
    assert await node.states._from_disk(Restore(0, CALIBRATION_STEP, "", True), node.context.held_stage()) is None
    await node.close()
    run.state.audits.branch = 0
    again = Node(run, tmp_path)
    again.context.stage = node.context.stage
    found = await again.states._from_disk(Restore(0, CALIBRATION_STEP, "", True), again.context.held_stage())
    assert found == run.roots[NUM_STEPS], "it was there all the time"
    await again.close()


async def test_a_state_being_written_while_the_run_is_rewound_is_not_begun_with(
    run: TrainedRun, tmp_path: Path
) -> None:
    node = Node(run, tmp_path, state_every_steps=1)
    await node.restore()
    run.state.roots[0] = {node.context.local.root: ["cold-a", "cold-b"]}
    node.states.save_when_due()
    node.rewind()
    assert node.states._save_task is not None
    await asyncio.wait({node.states._save_task})
    run.state.next_step = NUM_STEPS
    assert await node.states._from_disk(Restore(0, CALIBRATION_STEP, "", True), node.context.held_stage()) is None
    await node.close()
