"""A witness does the work of a case again from the store alone, says what came of it, and declines where it can't."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, edit_item, edit_log, other_hash

from miner.local_view import LocalView
from miner.member_witness import TRIES, WitnessWork
from miner.owes import RunWitness
from miner.settings import MinerSettings
from subnet.audit.bundle import BLOBS_NAME, CASE_NAME, encode_case, open_bundle
from subnet.audit.case import Case, Findings, digest
from subnet.audit.redo import redo
from subnet.errors import NotFound, Refusal, Refused, Unreachable
from subnet.protocol.claims import check_claims
from subnet.protocol.messages import WitnessClaim
from subnet.protocol.wire import blob_hash
from subnet.run.audits import CaseState
from subnet.run.state import RunState, new_state
from subnet.timing import Deadline

CASE = 3


@cache
def live() -> LiveRun:
    return LiveRun(a_plan((0, 2))).run(2)


@cache
def a_case() -> Case:
    run = live()
    return run.case(1, 0, [run.members[0]])


class Store:
    """As :class:`miner.blobs.Blobs` shows it; counts what it moves."""

    def __init__(self, there: dict[str, bytes]) -> None:
        self.there, self.moved, self.down = dict(there), 0, False

    async def sizes(self, hashes: Sequence[str], deadline: Deadline) -> list[int]:
        return [len(self._at(hash_)) for hash_ in hashes]

    async def get(self, ref: tuple[str, int], deadline: Deadline) -> bytearray:
        data = self._at(ref[0])
        assert ref[1] == len(data), "the size is known before anything is moved"
        self.moved += len(data)
        return bytearray(data)

    async def get_range(self, ref: tuple[str, int], start: int, num_bytes: int, deadline: Deadline) -> bytearray:
        self.moved += num_bytes
        return bytearray(self._at(ref[0])[start : start + num_bytes])

    def _at(self, hash_: str) -> bytes:
        if self.down:
            raise Unreachable("the store is away")
        if hash_ not in self.there:
            raise NotFound(f"no blob {hash_[:10]}")
        return self.there[hash_]


class Told:
    """A process that only looks at what it is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.closed, self.blobs, self.wrong_roots = error, 0, set[str](), ()

    async def run(self, directory: Path, deadline: Deadline, *, fresh: bool = False) -> Findings:
        assert (directory / CASE_NAME).is_file()
        self.blobs = set(os.listdir(directory / BLOBS_NAME))  # noqa: PTH208
        if self.error is not None:
            raise self.error
        open_bundle(directory).require()
        return Findings("d" * 64, (), None, self.wrong_roots, 0.0, 0.0, 0)

    async def close(self) -> None:
        self.closed += 1


class World:
    """A witness' context, and the case in the store."""

    def __init__(self, directory: Path, case: Case | None = None, process: Any = None, **settings: Any) -> None:
        case = case or a_case()
        data = encode_case(case)
        self.bundle, self.process = str(blob_hash(data)), process or Told()
        self.store = Store({**live().blobs, self.bundle: data})
        self.local, self.state = LocalView(), told(case, self.bundle)
        self.directory = directory
        self.context = SimpleNamespace(
            settings=MinerSettings(directory=directory, **settings),
            blobs=self.store,
            chunk_cache=SimpleNamespace(get=lambda hash_: None),
            run_state=self.state,
            plan=live().plan,
            local=self.local,
            device="cpu",
            wake=lambda: None,
        )
        self.work = WitnessWork(self.context, None if process == "real" else self.make)  # type: ignore[arg-type]

    def make(self, spare_bytes: int) -> Any:
        self.spare_bytes = spare_bytes
        return self.process

    async def run(self) -> str | None:
        """The digest, "" where it is declined."""
        await self.work.run(RunWitness(CASE, self.bundle))
        assert not (self.directory / "witness").exists(), "nothing of the bundle stays"
        assert not (CASE in self.local.witnessed and CASE in self.local.unwitnessed)
        if CASE in self.local.unwitnessed:
            check_claims([WitnessClaim(CASE, "", self.local.unwitnessed[CASE])])
            return ""
        return self.local.witnessed.get(CASE)

    @property
    def why(self) -> str:
        return self.local.unwitnessed[CASE]


def told(case: Case, bundle: str) -> RunState:
    state = new_state()
    state.run = case.planned
    member = case.partials[0].member
    state.audits.cases[CASE] = CaseState(
        hotkey=member.hotkey,
        member=member,
        coldkey="cold",
        step=case.step,
        stage=case.stage,
        charge="partial",
        bundle=bundle,
        digest="",
        sealed=True,
        branch=case.branch,
    )
    return state


async def test_its_bundle_is_whole_and_the_process_is_there_only_while_it_replays(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert await world.run() == "d" * 64
    assert world.process.closed == 1
    assert len(world.process.blobs) > 4
    assert await world.run() == "d" * 64
    assert world.process.closed == 1, "once is enough"


async def test_the_digest_is_that_of_the_work_whatever_was_claimed(tmp_path: Path) -> None:
    """In the real process: an honest case, and the same work with another claimed output."""
    run, case = live(), a_case()
    lied = edit_item(case, forward=other_hash("forward"))
    true = redo(case, run.pool(), lambda h: memoryview(run.read(h)), run.rows).digest
    world = World(tmp_path, lied, "real")
    assert await world.run() == true
    assert true == digest(redo(lied, run.pool(), lambda h: memoryview(run.read(h)), run.rows).partials)


async def test_what_this_machine_has_on_disk_isnt_moved(tmp_path: Path) -> None:
    world = World(tmp_path / "a")
    await world.run()
    other = World(tmp_path / "b")
    other.context.chunk_cache = SimpleNamespace(get=lambda hash_: live().all_blobs().get(hash_))
    await other.run()
    assert other.local.witnessed == world.local.witnessed
    assert other.store.moved == len(other.store.there[other.bundle]) < world.store.moved


@pytest.mark.parametrize("settings", [{"witness_disk_bytes": 1 << 10}, {"witness_disk_bytes": 0}])
async def test_a_bundle_over_the_budget_is_left_to_others_before_it_is_fetched(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    world = World(tmp_path, **settings)
    assert await world.run() == ""
    assert world.store.moved == len(world.store.there[world.bundle])
    assert not world.process.closed


async def test_a_stage_that_takes_too_much_memory_is_left_to_others(tmp_path: Path) -> None:
    world = World(tmp_path, witness_memory_bytes=1 << 16)
    assert await world.run() == ""
    assert world.why.startswith("out_of_space: stage 0 takes ")
    assert not world.process.closed


@pytest.mark.parametrize("free_bytes", [1 << 16, 0])
async def test_a_machine_that_has_no_memory_to_spare_declines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    monkeypatch.setattr("miner.member_witness.free_memory", lambda device, limit: free_bytes)
    world = World(tmp_path)
    assert await world.run() == ""
    assert f"there are {free_bytes} for it" in world.why


async def test_the_graphs_of_a_replay_are_within_what_the_budget_leaves(tmp_path: Path) -> None:
    wide, narrow = World(tmp_path / "a"), World(tmp_path / "b", witness_memory_bytes=80 << 20)
    assert await wide.run() == await narrow.run() == "d" * 64
    assert 0 <= narrow.spare_bytes < 80 << 20 < wide.spare_bytes
    assert narrow.work._process(narrow.spare_bytes)._graph_bytes == narrow.spare_bytes  # type: ignore[attr-defined]
    assert wide.work._process(wide.spare_bytes)._graph_bytes == 1 << 30  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", ["step", "stage", "branch", "planned"])
async def test_a_case_that_isnt_of_this_run_is_not_run(tmp_path: Path, field: str) -> None:
    case = a_case()
    other = {"step": 0, "stage": 1, "branch": 5, "planned": msgspec.structs.replace(case.planned, submitter="other")}
    world = World(tmp_path, msgspec.structs.replace(case, **{field: other[field]}))
    world.state.run = case.planned
    told_ = world.state.audits.cases[CASE]
    told_.step, told_.stage = case.step, case.stage
    assert await world.run() == ""
    assert not world.process.closed


async def test_what_is_no_case_or_lacks_a_blob_is_not_run(tmp_path: Path) -> None:
    world = World(tmp_path / "a")
    world.store.there[world.bundle] = b"\x93junk"
    assert await world.run() == ""
    assert world.why.startswith("bad_input: ")
    world = World(tmp_path / "b")
    del world.store.there[a_case().partials[0].items[0].gradient]
    assert await world.run() == ""
    world = World(tmp_path / "c", edit_log(a_case(), 0, num_counted=0))
    assert await world.run() == ""


async def test_a_store_that_is_away_is_tried_again_and_then_left(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.down = True
    for _ in range(TRIES - 1):
        with pytest.raises(Unreachable):
            await world.run()
        assert world.local.witnessed == {}
    world.store.down = False
    assert await world.run() == "d" * 64
    world = World(tmp_path)
    world.store.down = True
    for _ in range(TRIES - 1):
        with pytest.raises(Unreachable):
            await world.run()
    assert await world.run() == ""


@pytest.mark.parametrize("code", ["other_hardware", "machine_fault"])
async def test_a_machine_that_computes_otherwise_declines(tmp_path: Path, code: str) -> None:
    world = World(tmp_path, process=Told(Refused(Refusal(code, "why" * 500), who="the worker")))
    assert await world.run() == ""
    assert world.why.startswith(f"{code}: ")
    assert world.process.closed == 1


async def test_a_snapshot_that_is_not_the_agreed_one_says_nothing_and_a_wrong_update_much(tmp_path: Path) -> None:
    process = Told()
    process.wrong_roots = ((-1, "another root"),)
    assert await World(tmp_path / "a", process=process).run() == ""
    process.wrong_roots = ((0, "another root after the update"),)
    assert await World(tmp_path / "b", process=process).run() == "d" * 64
