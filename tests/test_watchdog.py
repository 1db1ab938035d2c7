"""A run without seals is called stalled, with everyone who is waited for; dumps are bounded; a blocked loop is found out."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from test_decide import Desk

from iota.live import headline, stalled
from subnet.protocol import messages as msg
from subnet.protocol.api import RunStatus, RunSummary, StallView, WaitView
from subnet.run import events as ev
from subnet.run import state as st
from subnet.timing import ManualClock
from subnet.words import Commitment, Member
from validator.decision import FinishRun
from validator.history import History
from validator.journal_core import JournalCore
from validator.presence import Dumps, LoopWatchdog, task_stacks, thread_stacks
from validator.progress import ProgressWatch
from validator.watchdog import StallPolicy, stall, waits

POLICY = StallPolicy()


def named(desk: Desk, **options: int) -> dict[str, str]:
    return {wait.who: wait.what for wait in waits(desk.now, 0.0, desk.state, desk.watch, **options)}


def working(num_stages: int = 2, num_microbatches: int = 4) -> tuple[Desk, list[Member]]:
    desk = Desk(num_stages, num_microbatches)
    members = [desk.member(f"hot{n}") for n in range(num_stages)]
    for member in members:
        desk.say(member, msg.UpdatedClaim(-1, ""))
    desk.settle()
    return desk, members


def computed(desk: Desk, members: list[Member]) -> None:
    """All items of the open step, forward and backward."""
    last = len(members) - 1
    for m in range(4):
        for stage, member in enumerate(members):
            desk.say(member, msg.ForwardReceipt(-1, m, stage, 1, "", "out", 0.1))
        for stage, member in reversed(list(enumerate(members))):
            loss = 0 if stage == last else None
            desk.say(member, msg.BackwardReceipt(-1, m, stage, 1, "", "out", 0.1, loss_bits=loss))
        desk.settle()


def committed(desk: Desk, member: Member) -> None:
    stage = desk.state.members[member].stage
    hashes = tuple((p, f"slice{p}") for p in st.partitions_of(desk.state, stage, stage))
    done = st.done_set(desk.state, member)
    desk.emit(ev.Committed(-1, stage, 1, Commitment(member, stage, done, hashes)))
    desk.settle()


def test_the_limit_is_ten_median_steps_and_a_floor() -> None:
    assert POLICY.limit_s([]) == POLICY.first_s
    assert POLICY.limit_s([0.5]) == POLICY.floor_s
    assert POLICY.limit_s([10.0, 12.0, 900.0]) == 120.0, "one long step is no measure"
    assert POLICY.limit_s([100.0] * 30 + [5.0] * 20) == 50.0, "the last twenty"


def test_a_run_is_stalled_only_past_its_limit_and_until_it_has_finished() -> None:
    desk, _ = working()
    limit_s = POLICY.limit_s([20.0])
    assert stall(limit_s - 1, 0.0, [20.0], desk.state, desk.watch) is None
    found = stall(limit_s, 0.0, [20.0], desk.state, desk.watch)
    assert found is not None
    assert (found.since_s, found.limit_s) == (0.0, limit_s)
    assert stall(limit_s + 5, 5.1, [20.0], desk.state, desk.watch) is None, "sealed since"
    desk.state.finished = ev.RunFinished(1, "root")
    assert stall(1e9, 0.0, [20.0], desk.state, desk.watch) is None
    assert stall(1e9, 0.0, [], st.new_state(), desk.watch) is None


def test_stages_without_a_miner_and_members_without_the_state_are_named() -> None:
    desk = Desk(2)
    member = desk.member("hot0")
    desk.settle()
    desk.now = 30.0
    assert named(desk)["stage 1"] == "a miner"
    assert named(desk)[str(member)] == "to have the state of step -1"
    ages = {wait.who: wait.waited_s for wait in waits(desk.now, 10.0, desk.state, desk.watch)}
    assert ages["stage 1"] == 30.0, "by its own clock"
    assert ages[str(member)] == 20.0, "since the last seal"


def test_leases_are_named_with_the_age_of_the_oldest() -> None:
    desk, members = working()
    desk.now = 3.0
    assert not named(desk)[str(members[0])].startswith("to have")
    found = named(desk)
    assert found == {str(members[n]): f"leases of stage {n}: 0, 1, 2, 3" for n in range(2)}
    assert {wait.waited_s for wait in waits(desk.now, 0.0, desk.state, desk.watch)} == {3.0}
    desk.emit(ev.Voided(-1, 1, members[1], "silent"))
    assert named(desk)["stage 1"] == "items to be dealt: 0, 1, 2, 3"


def test_each_phase_of_a_merge_names_who_is_late() -> None:
    desk, members = working()
    computed(desk, members)
    assert desk.state.work is not None
    desk.now += 7.0
    assert named(desk) == {str(members[n]): f"commitment of group {n}" for n in range(2)}
    assert waits(desk.now, -50.0, desk.state, desk.watch)[0].waited_s == 7.0
    committed(desk, members[0])
    assert named(desk)[str(members[0])].startswith("merged partitions of group 0: 0")
    merge = desk.state.work.merges[0]
    for partition, owner in enumerate(merge.owners):
        desk.emit(ev.PartitionMerged(-1, 0, merge.version, partition, "h", "b", 1, "1"))
        assert owner == members[0]
    desk.settle()
    assert named(desk)[str(members[0])] == "fingerprints of group 0"
    values = tuple((p, (1,)) for p, _ in merge.entries[0].hashes)
    desk.emit(ev.Fingerprinted(-1, 0, merge.version, members[0], 0, values))
    desk.settle()
    assert named(desk)[str(members[0])] == "check of group 0"
    assert named(desk)[str(members[1])] == "commitment of group 1", "the other group waits for its own"


def test_the_store_and_the_log_store_are_named() -> None:
    desk, members = working()
    desk.now = 9.0
    desk.watch.not_confirmed("ab" * 32, members[0], 4.0)
    desk.watch.started.add(FinishRun(1, (), ()))
    found = {wait.what: wait for wait in waits(desk.now, 0.0, desk.state, desk.watch, log_records=12)}
    assert found["to take 12 journal records"].who == "the log store"
    assert found[f"1 blobs of {members[0]}"].waited_s == 5.0
    assert found["the final snapshots' manifests"].who == "the store"
    desk.watch.blob_confirmed("ab" * 32)
    assert not any(wait.what.startswith("1 blobs") for wait in waits(9.0, 0.0, desk.state, desk.watch))


# --- marking and dumping ---------------------------------------------------------------------------------------------


class Leader:
    """What the progress watch reads of a coordinator."""

    def __init__(self, desk: Desk) -> None:
        self.state, self.watch, self.history = desk.state, desk.watch, History()
        self.core = JournalCore(1)


async def test_a_stall_is_said_once_dumped_and_ends_with_a_seal(tmp_path: Path) -> None:
    desk, _ = working()
    clock = ManualClock()
    progress = ProgressWatch(clock, Dumps(tmp_path / "stalls"))
    leader = Leader(desk)
    clock.advance(POLICY.first_s - 1)
    assert progress.look(leader) is None  # type: ignore[arg-type]
    assert progress.view() is None
    clock.advance(2)
    for _ in range(3):
        assert progress.look(leader) is not None  # type: ignore[arg-type]
        clock.advance(1)
    view = progress.view()
    assert view is not None
    assert view.no_seal_s == POLICY.first_s + 4
    assert view.limit_s == POLICY.first_s
    assert {wait.what.split(":")[0] for wait in view.waits} == {"leases of stage 0", "leases of stage 1"}
    files = list((tmp_path / "stalls").iterdir())
    assert [str(file) for file in files] == [view.dump], "one dump a stall"
    text = files[0].read_text()
    assert "leases of stage 0" in text
    assert "--- thread MainThread" in text
    assert "test_a_stall_is_said_once" in text, "tasks show where they wait"
    progress.sealed()
    assert progress.view() is None, "taken back at once, not at the next look"
    assert progress.look(leader) is None  # type: ignore[arg-type]


async def test_a_run_that_waits_for_its_first_miner_is_not_dumped(tmp_path: Path) -> None:
    clock = ManualClock()
    progress = ProgressWatch(clock, Dumps(tmp_path / "stalls"))
    clock.advance(1000)
    assert progress.look(Leader(Desk(2))) is not None  # type: ignore[arg-type]
    assert not (tmp_path / "stalls").exists()


def test_dumps_are_bounded_and_never_fail(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path / "stalls", 2)
    assert [dumps.write("x") is not None for _ in range(4)] == [True, True, False, False]
    assert Dumps(tmp_path / "stalls", 2).write("x") is None, "also over restarts"
    (tmp_path / "file").write_text("")
    assert Dumps(tmp_path / "file" / "below").write("x") is None


async def test_stacks_name_threads_and_tasks() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="somebody")
    thread.start()
    sleeper = asyncio.create_task(asyncio.sleep(600), name="sleeper")
    await asyncio.sleep(0)
    try:
        assert "--- thread somebody" in thread_stacks()
        assert "--- task sleeper" in task_stacks()
    finally:
        stop.set()
        thread.join()
        sleeper.cancel()


def first_dump(directory: Path) -> str:
    return (directory / "stall-1.txt").read_text()


async def test_a_loop_that_is_blocked_is_dumped_from_outside(tmp_path: Path) -> None:
    seen = threading.Event()
    with LoopWatchdog(Dumps(tmp_path), 0.2, on_blocked=lambda blocked_s: seen.set()) as watchdog:
        turning = asyncio.create_task(watchdog.turn_forever())
        await asyncio.sleep(0)
        assert seen.wait(60)  # this blocks the loop
        turning.cancel()
        await asyncio.wait([turning])
    assert "test_a_loop_that_is_blocked_is_dumped_from_outside" in first_dump(tmp_path)


# --- what people see -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1])
def test_people_are_told(num_steps: int) -> None:
    from subnet.protocol.api import StepView

    many = tuple(WaitView(f"hot{n}", "leases of stage 0: 1", float(n)) for n in range(5))
    stall_view = StallView(0, 75.0, 40.0, many, "stalls/stall-1.txt")
    summary = RunSummary("name", "id", "stalled", 0, 3, 9, 1.0, None, "x", stall_view)
    steps = (StepView(2, 1.0, 1.0, 1, 1.0, None),) * num_steps
    status = RunStatus(summary, 0, (), steps, 1.0, 0, 0, 0, 0, (), 0, "", 0)
    text = stalled(stall_view)
    assert text.startswith("stalled, no seal for 75 s: waits for hot4: leases of stage 0: 1 (4 s); hot3")
    assert text.endswith("and 2 more")
    assert text in headline(status)
