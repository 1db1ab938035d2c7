"""What an audit wants comes from whoever holds it, once, and what is lost is said; nothing is held longer than that takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from join_cases import Miner, trained_run
from loguru import logger
from model_cases import tiny_plan
from schedule_toy import plan_run
from test_mismatch import A, B, C, D, at_work
from test_store_mode import Store

from miner import owed as owing
from miner import run_member
from miner.boundaries import BoundaryCache, boundaries_of_run
from miner.local_view import BoundaryKey, LocalView
from miner.member_evidence import LANES, MOST, EvidenceWork
from miner.member_links import Links
from miner.owes import Compute, Owe, Report, RunWitness, StoreEvidence, urgency
from miner.run_member import RunMember
from miner.settings import MinerSettings
from subnet.errors import InputError, NotFound, Unreachable
from subnet.model.memory import made_bytes
from subnet.model.plan import ModelPlan
from subnet.protocol import messages as msg
from subnet.protocol.claims import LIMIT_WANTS, check_claims
from subnet.protocol.wire import blob_hash
from subnet.run import audits as au
from subnet.run.audits import CaseState, OpenAudit
from subnet.run.config import AuditSection
from subnet.run.state import RunState, new_state
from subnet.words import CALIBRATION_STEP, Member, Want

STEP = 0


def audit_of(*wants: Want, step: int = STEP, number: int = 0) -> OpenAudit:
    return OpenAudit(step=step, stage=2, number=number, members=(C,), by="validator", wants=wants)


def audited(*wants: Want, number: int = 0) -> RunState:
    """Somebody audits the work of C at a step that is over (or, with a number, isn't)."""
    state = at_work()
    state.audits.open[7] = audit_of(*wants, number=number)
    return state


def key(want: Want, step: int = STEP) -> BoundaryKey:
    return BoundaryKey(step, want.microbatch, want.stage, want.backward)


WANTS = tuple(Want(1, m, False, f"f{m}") for m in range(3))


def owed(state: RunState, local: LocalView, me: Member = B) -> list[Owe]:
    kinds = (StoreEvidence, RunWitness)
    owes = owing.owed(state, me, local)
    said = [o for o in owes if isinstance(o, Report) and isinstance(o.claim, msg.NotHeldClaim | msg.WitnessClaim)]
    return [owe for owe in owes if isinstance(owe, kinds)] + said


# --- what is owed ------------------------------------------------------------------------------------------------


def test_what_is_wanted_and_held_is_owed_once_whatever_state_the_member_is_at() -> None:
    state, local = audited(*WANTS), LocalView()
    local.kept.update({key(WANTS[0]): "f0", key(WANTS[1]): "other"})
    local.produced[key(WANTS[0])] = "f0"
    opening = StoreEvidence(7, key(WANTS[0]), "f0", own=True, before_seal=False)
    assert owed(state, local) == [opening], "before it has a state; and nothing of other bytes"
    local.jobs.add(opening)
    assert owed(state, local) == []
    local.jobs.clear()
    local.opened.add((7, "f0"))
    assert owed(state, local) == []
    state.audits.open[8] = audit_of(WANTS[0])
    assert [owe.audit for owe in owed(state, local)] == [8], "its evidence may be gone by now: the store knows"
    del state.audits.open[7], state.audits.open[8]
    assert owed(state, local) == []


def test_who_only_received_it_gives_its_copy_and_is_no_maker() -> None:
    state, local = audited(*WANTS, number=3), LocalView()
    local.kept[key(WANTS[0])] = "f0"
    assert owed(state, local, C) == [StoreEvidence(7, key(WANTS[0]), "f0", own=False, before_seal=True)]
    assert owed(state, LocalView(), C) == [], "what it never made it needn't have"


def test_what_went_through_the_store_in_the_open_step_costs_nothing() -> None:
    state, local = audited(*WANTS, number=3), LocalView()
    local.kept[key(WANTS[0])] = local.boundaries[key(WANTS[0])] = "f0"
    local.in_store[key(WANTS[0])] = 0
    assert owed(state, local) == []


def test_what_i_made_and_lost_is_said_until_the_audit_is_over_and_only_by_its_maker() -> None:
    state, local = audited(*WANTS), LocalView()
    local.produced.update({key(want): want.hash for want in WANTS[:2]})
    local.kept[key(WANTS[1])] = "f1"
    said = [owe for owe in owed(state, local) if isinstance(owe, Report)]
    assert [owe.claim for owe in said] == [msg.NotHeldClaim(7, (WANTS[0],))]
    assert said[0] in owed(state, local), "until the fold shows that it is over"
    local.new_incarnation()
    assert not [owe for owe in owed(state, local) if isinstance(owe, Report)], "another incarnation made nothing"
    assert [owe for owe in owed(state, local) if isinstance(owe, StoreEvidence)], "but what it holds it gives"


def test_a_claim_names_no_more_than_a_claim_may() -> None:
    wants = tuple(Want(1, m, False, f"{m:064x}") for m in range(LIMIT_WANTS + 5))
    state, local = audited(*wants), LocalView()
    local.produced.update({key(want): want.hash for want in wants})
    claims = [owe.claim for owe in owed(state, local) if isinstance(owe, Report)]
    check_claims(claims)
    assert [len(claim.wants) for claim in claims if isinstance(claim, msg.NotHeldClaim)] == [LIMIT_WANTS, 5]


def test_a_seal_that_waits_goes_before_new_forwards_and_nothing_else_does() -> None:
    opening = StoreEvidence(7, key(WANTS[0]), "f0", own=True, before_seal=True)
    later = StoreEvidence(7, key(WANTS[0]), "f0", own=True, before_seal=False)
    forward = Compute(0, 0, 1, backward=False, generation=1)
    report = Report(msg.UpdatedClaim(0, ""))
    assert sorted([later, forward, opening, report], key=urgency) == [report, opening, forward, later]


def test_a_step_that_is_over_is_forgotten_except_for_what_may_be_wanted() -> None:
    local = LocalView(version=5)
    for step in range(5):
        made = BoundaryKey(step, 0, 1, False)
        local.kept[made] = local.boundaries[made] = local.produced[made] = f"f{step}"
    local.end_step(4, evidence_from=2)
    assert not local.boundaries
    assert sorted(k.step for k in local.produced) == [2, 3, 4]
    assert len(local.kept) == 5, "that is the cache's business"


def case_of(**changes: Any) -> CaseState:
    told = {
        "hotkey": "d", "member": D, "coldkey": "cold-d", "step": 0, "stage": 1, "charge": "partial", "bundle": "bundle",
        "digest": "digest", "sealed": False, "branch": 0, "asked": (A, B),
    }  # fmt: skip
    return CaseState(**{**told, **changes})


def test_a_witness_runs_the_bundle_and_says_the_digest_until_it_is_journaled() -> None:
    state, local = at_work(), LocalView()
    state.audits.cases[3], state.audits.quarantined["d"] = case_of(), 3
    assert owed(state, local) == [RunWitness(3, "bundle")]
    assert owed(state, local, C) == [], "nobody asked it"
    local.witnessed[3] = "found"
    assert owed(state, local) == [Report(msg.WitnessClaim(3, "found"))]
    state.audits.cases[3].said["b"] = "found"
    assert owed(state, local) == []
    local = LocalView(unwitnessed={3: "out_of_space: why"})
    assert owed(state, local) == [], "it is journaled, whatever was said"
    state.audits.cases[3].said.clear()
    assert owed(state, local) == [Report(msg.WitnessClaim(3, "", "out_of_space: why"))], (
        "somebody else is asked at once"
    )


@pytest.mark.parametrize(
    "claim",
    [
        msg.NotHeldClaim(7, ()),
        msg.NotHeldClaim(7, (Want(1, 0, False, "f0"),)),
        msg.NotHeldClaim(7, (Want(-1, 0, False, "0" * 64),)),
        msg.NotHeldClaim(-7, (Want(1, 0, False, "0" * 64),)),
        msg.NotHeldClaim(7, (Want(1, 0, False, "0" * 64),) * (LIMIT_WANTS + 1)),
        msg.MismatchClaim(0, 0, 1, False, "x1"),
        msg.MismatchClaim(-2, 0, 1, False, "0" * 64),
        msg.MismatchClaim(0, 1 << 60, 1, False, "0" * 64),
        msg.WitnessClaim(1, ""),
        msg.WitnessClaim(1, "0" * 64, "both"),
        msg.WitnessClaim(1, "", "x" * 201),
        msg.MismatchClaim(0, 0, 1, False, "0" * 64, 1, b"x" * 65),
        msg.MismatchClaim(0, 0, 1, False, "0" * 64, -1, b"x"),
        msg.WitnessClaim(-1, "0" * 64),
    ],
)
def test_what_cannot_be_said_to_an_audit_is_refused(claim: msg.AnyClaim) -> None:
    with pytest.raises(InputError):
        check_claims([claim])


def test_what_can_be_said_passes() -> None:
    check_claims(
        [
            msg.NotHeldClaim(7, (Want(1, 0, False, "0" * 64),)),
            msg.MismatchClaim(-1, 0, 1, False, "0" * 64),
            msg.MismatchClaim(-1, 0, 1, False, "0" * 64, 2, b"x" * 64),
            msg.WitnessClaim(1, "0" * 64),
            msg.WitnessClaim(1, "", "out_of_space: why"),
        ]
    )


# --- how long ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window_steps", "open_windows"), [(1, 1), (3, 2), (8, 4)])
def test_a_member_keeps_no_more_steps_than_is_said_and_those_that_an_audit_may_want(
    window_steps: int, open_windows: int
) -> None:
    """Steps go on as fast as may be, windows are audited as late as may be, and the other way round."""
    planned = plan_run(num_stages=3, num_microbatches=2, num_steps=100)
    section = AuditSection(rate=0.1, before_seal="probation", window_steps=window_steps, open_windows=open_windows)
    config = msgspec.structs.replace(planned.config, audit=section)
    for late in (True, False):
        state, kept = new_state(), list[int]()
        state.run = msgspec.structs.replace(planned, config=config)
        while state.next_step < config.run.steps:
            window = au.window_of(config, state.next_step)
            if not late:
                state.audits.audited_to = max(CALIBRATION_STEP, (window - 1) * window_steps)
            while not au.may_plan(state, state.next_step):
                state.audits.audited_to = (au.window_of(config, state.audits.audited_to) + 1) * window_steps
            assert au.evidence_from(state) <= state.audits.audited_to, "of the window that isn't audited nothing lacks"
            state.next_step += 1
            kept.append(state.next_step - max(au.evidence_from(state), 0))
        usual, most = au.evidence_steps(config)
        assert max(kept) <= (most if late else usual), late
        assert not late or max(kept) > most - window_steps, "and no less than that"


async def test_budgets_that_are_too_small_for_the_evidence_are_said_at_the_join(tmp_path: Path) -> None:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), level="WARNING")
    pump = Pump(tmp_path, audited())
    plan = tiny_plan((0, 2))
    on = msgspec.structs.replace(plan.config, audit=AuditSection(rate=0.1, before_seal="probation"))
    pump.miner.context.plan = ModelPlan(on, plan.model_config, plan.units, plan.cuts)
    pump.member._warn_of_evidence(1)
    assert not said
    small = MinerSettings(directory=tmp_path, boundary_memory_bytes=1 << 20, boundary_disk_bytes=1 << 20)
    pump.miner.context.settings = small
    needed_bytes = made_bytes(plan, 1, 1) * 24
    msgspec.structs.force_setattr(small, "boundary_memory_bytes", 0)
    msgspec.structs.force_setattr(small, "boundary_disk_bytes", needed_bytes - 1)
    pump.member._warn_of_evidence(1)
    logger.remove(sink)
    assert f"{needed_bytes} bytes" in said[0]
    assert "--limit.boundary_disk_gib" in said[0]
    await pump.close()


# --- into the store ----------------------------------------------------------------------------------------------


class Holder:
    """What :class:`EvidenceWork` uses of a member's context."""

    def __init__(self, directory: Path) -> None:
        self.cache = BoundaryCache(directory, memory_bytes=0, disk_bytes=1 << 20, durable=True)
        self.blobs, self.local, self.run_state = Store(), LocalView(), audited()

    def wake(self) -> None: ...

    def holds(self, microbatch: int) -> StoreEvidence:
        data = bytes([microbatch]) * 100
        made = BoundaryKey(STEP, microbatch, 1, False)
        self.cache.put(made, data, str(blob_hash(data)), own=True)
        return StoreEvidence(7, made, str(blob_hash(data)), own=True, before_seal=True)


@pytest.fixture
async def holder(tmp_path: Path):
    made = Holder(tmp_path / "boundaries")
    work = EvidenceWork(made)  # type: ignore[arg-type]
    yield made, work
    await work.close()


async def test_boundaries_come_from_disk_into_the_store_several_at_a_time(holder: tuple[Holder, EvidenceWork]) -> None:
    made, work = holder
    owes = [made.holds(m) for m in range(40)]
    await made.cache.spill(keep_step=1)
    made.blobs.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for owe in owes:
            group.create_task(work.store(owe))
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert len(made.blobs.requests) == LANES
        assert sum(len(names) for _, names in made.blobs.requests) <= LANES * MOST, "no more is read than is moved"
        made.blobs.gate.set()
    assert set(made.blobs.there) == {owe.hash for owe in owes}
    assert made.local.opened == {(7, owe.hash) for owe in owes}
    assert len(made.blobs.requests) < 20


async def test_one_that_is_gone_keeps_no_other_and_is_not_opened(holder: tuple[Holder, EvidenceWork]) -> None:
    made, work = holder
    owes = [made.holds(m) for m in range(3)]
    made.cache.drop(owes[1].key)
    results = await asyncio.gather(*(work.store(owe) for owe in owes), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), NotFound, type(None)]
    assert made.local.opened == {(7, owes[0].hash), (7, owes[2].hash)}


async def test_nothing_is_open_before_the_store_says_so(holder: tuple[Holder, EvidenceWork]) -> None:
    made, work = holder
    made.blobs.down = True
    with pytest.raises(Unreachable):
        await work.store(made.holds(0))
    assert not made.local.opened


async def test_a_copy_waits_for_the_maker(holder: tuple[Holder, EvidenceWork], monkeypatch: pytest.MonkeyPatch) -> None:
    made, work = holder
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("miner.member_evidence.asyncio", SimpleNamespace(sleep=sleep))
    owe = made.holds(0)
    await work.store(owe)
    assert not waits
    await work.store(StoreEvidence(7, owe.key, owe.hash, own=False, before_seal=True))
    assert waits == [2.0]
    requests = len(made.blobs.requests)
    made.run_state.audits.open.clear()
    await work.store(StoreEvidence(7, owe.key, owe.hash, own=False, before_seal=True))
    assert len(made.blobs.requests) == requests, "the audit is over meanwhile"


# --- in the pump, over outages and restarts ----------------------------------------------------------------------


class Pump:
    """A miner that isn't a member (a restarted one, or one in quarantine), as its pump drives it."""

    def __init__(self, directory: Path, state: RunState) -> None:
        self.miner = Miner(trained_run(), directory, C)
        context = self.miner.context
        context.cache = boundaries_of_run(
            directory / "evidence", "run", memory_bytes=1 << 20, disk_bytes=1 << 20, durable=True
        )
        context.local.kept, context.member = context.cache.kept, None
        context.directives = SimpleNamespace(state=state)  # type: ignore[assignment]
        context.blobs = self.store = Store()  # type: ignore[assignment]
        context.tokens = SimpleNamespace(close=self._closed)  # type: ignore[assignment]
        self.member = RunMember(context, SimpleNamespace(), SimpleNamespace(), (), Links(context))  # type: ignore[arg-type]

    async def turn(self) -> None:
        """What is owed is started, and ends, done or not."""
        self.member._open_evidence()
        if self.member._tasks:
            await asyncio.wait(set(self.member._tasks))

    async def _closed(self) -> None: ...

    async def close(self, *, killed: bool = False) -> None:
        if not killed:
            await self.member.close()
        await self.miner.close()


def made_by_c() -> tuple[RunState, dict[BoundaryKey, bytes]]:
    """An audit of a step that is over wants what C made of three microbatches."""
    data = {BoundaryKey(STEP, m, 2, True): bytes([m]) * 100 for m in range(3)}
    state = audited(*(Want(2, made.microbatch, True, str(blob_hash(blob))) for made, blob in data.items()))
    state.next_step = STEP + 1
    return state, data


async def test_an_outage_of_the_store_is_outlasted_and_each_boundary_moves_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_member, "RETRY_MAX_S", 0.001)
    state, data = made_by_c()
    pump = Pump(tmp_path, state)
    for made, blob in data.items():
        pump.miner.context.cache.put(made, blob, str(blob_hash(blob)), own=True)
    pump.store.down = True
    for _ in range(4):
        await pump.turn()
        assert not pump.miner.context.local.opened
        await asyncio.sleep(0.002)
    assert pump.store.requests
    pump.store.down = False
    await pump.turn()
    assert sorted(pump.store.there.values()) == sorted(data.values())
    requests = len(pump.store.requests)
    await pump.turn()
    assert len(pump.store.requests) == requests, "once is enough"
    await pump.close()


async def test_a_restarted_miner_opens_what_the_last_process_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.member_evidence.RECEIVED_WAIT_S", 0.0)
    state, data = made_by_c()
    killed = Pump(tmp_path / "killed", state)
    stopped = Pump(tmp_path / "stopped", state)
    for pump in (killed, stopped):
        for made, blob in data.items():
            pump.miner.context.cache.put(made, blob, str(blob_hash(blob)), own=True)
    await killed.miner.context.cache.spill(state.next_step)  # as it does each second
    for pump in (killed, stopped):
        await pump.close(killed=pump is killed)
        assert not pump.store.there
        again = Pump(pump.miner.context.settings.directory, state)
        await again.turn()
        assert sorted(again.store.there.values()) == sorted(data.values())
        await again.close()
