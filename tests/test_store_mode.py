"""Boundaries and slices through the store: durable before they are receipted, and whoever can't be reached waits for nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import store_cases
from fault_sim import Cell
from fault_table import cells
from model_cases import tiny_plan
from schedule_nodes import Bad
from schedule_toy import plan_run
from store_cases import StoreSim, attempt_by_store, failures, makes_sense
from test_detection import ALICE, served

from miner import owed as owing
from miner import owed_boundaries
from miner.local_view import BoundaryKey, LocalView
from miner.owed_boundaries import owed_given, owed_wanted
from miner.owes import Fetch, FetchSlice, FetchStored, Owe, Push, StoreBoundary, StoreSlice
from miner.reporter import Reporter
from miner.store_links import LOOKED_BEFORE_MISSING, StoreLinks
from subnet.errors import NotFound, Unreachable
from subnet.model.memory import boundary_bytes
from subnet.protocol import messages as msg
from subnet.protocol.wire import blob_hash
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.run.state import RunState, new_state
from subnet.timing import Deadline
from subnet.words import Cursor, Member
from validator import lost_boundaries
from validator.decision import ProbeSlices
from validator.lost_boundaries import TRIED, decide_replays
from validator.policy import Policy
from validator.retention import AUDIT_WINDOW_STEPS, audit_window, expiries
from validator.watch import Watch

BY_STORE = [cell for cell in cells() if makes_sense(cell)]

# --- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("first", [0, 20])
def test_every_schedule_ends_right(first: int, mixed: bool) -> None:
    """Crashes, takeovers, outages, lost blobs: the same sums, and nothing straight to whom nobody can reach."""
    assert failures(range(first, first + 15), mixed=mixed) == {}


@pytest.mark.parametrize("profile", ["void", "takeover", "stale"])
def test_schedules_of_one_kind_of_trouble_end_right(profile: str) -> None:
    assert failures(range(1000, 1008), profile=profile) == {}
    assert failures(range(1010, 1018), profile=profile, mixed=True) == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thousands_of_schedules_end_right() -> None:
    assert failures(range(10_000, 12_000)) == {}
    assert failures(range(12_000, 14_000), mixed=True) == {}


def test_without_the_order_of_store_and_receipt_something_is_receipted_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owing, "may_receipt", lambda *args: True)
    with pytest.raises(Bad, match="receipts what the store doesn't have"):
        StoreSim(0, checks_all=False).run()


def test_without_a_second_put_a_lost_blob_costs_its_maker_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay asks for bytes that their maker believes to be in the store: it puts them there once more."""
    real, codes = lost_boundaries.silent_outcome, list[str]()

    def noted(state: RunState, stage: int, member: Member, code: str, *more: Any) -> Any:
        codes.append(code)
        return real(state, stage, member, code, *more)

    monkeypatch.setattr(lost_boundaries, "silent_outcome", noted)
    assert failures(range(30), losses=0.9) == {}
    assert codes == []
    monkeypatch.setattr(owed_boundaries, "is_stored", lambda work, me, key, local: key in local.in_store)
    assert failures(range(30), losses=0.9) == {}
    assert set(codes) == {"receipt_without_bytes"}


def test_without_the_way_by_the_store_something_goes_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owed_boundaries, "by_store", lambda *args: False)
    assert any("goes straight" in what for what in failures(range(4), mixed=True))


@pytest.mark.parametrize("cell", BY_STORE[::37], ids=str)
def test_a_fault_changes_no_bit(cell: Any) -> None:
    attempt_by_store(cell)


FALSE = [
    Cell(role, phase, "corrupt", "claims") for role in ("first", "middle", "last") for phase in ("forward", "backward")
]


@pytest.mark.parametrize("cell", FALSE, ids=str)
def test_a_receipt_of_what_the_store_never_had_is_found_out(cell: Cell) -> None:
    attempt_by_store(cell)


def test_without_asking_the_store_a_false_receipt_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_boundaries, "TRIED", 10**6)
    with pytest.raises(Bad, match="stuck"):
        attempt_by_store(FALSE[0])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_fault_in_every_phase_changes_no_bit() -> None:
    for cell in BY_STORE:
        attempt_by_store(cell)


# --- what is owed ------------------------------------------------------------------------------------------------

A, B, C = (Member(name, 1, number + 1) for number, name in enumerate(("a", "b", "c")))
OUTPUT = BoundaryKey(-1, 0, 0, False)


def at_work(*, unreachable: Sequence[Member] = (), by_store: bool = False) -> RunState:
    """A at stage 0 and B at stage 1 have microbatch 0; C is another replica of stage 1."""
    state = new_state()
    planned = plan_run(num_stages=2, num_microbatches=2, num_steps=1)
    if by_store:
        planned = store_cases.planned_by_store(planned)
    events: list[Any] = [planned, ev.TermStarted(1, "validator", "n"), ev.HardwareClassSet(("a", "b"), "operator")]
    for member, stage in ((A, 0), (B, 1), (C, 1)):
        reachable = member not in unreachable
        events.append(ev.Joined(member, f"cold-{member.hotkey}", stage, "boot", "127.0.0.1", 1, reachable))
        events.append(ev.Updated(member, -1, ""))
    events += [ev.StepPlanned(-1, 2, 0, None), ev.Leased(-1, 0, 0, A, 1), ev.Leased(-1, 0, 1, B, 1)]
    for event in events:
        apply(state, event)
    return state


def given(state: RunState, local: LocalView) -> list[Owe]:
    owes: list[Owe] = []
    assert state.work is not None
    owed_given(state, state.work, A, 0, local, owes)
    return owes


def wanted(state: RunState, me: Member, local: LocalView) -> list[Owe]:
    owes: list[Owe] = []
    assert state.work is not None
    owed_wanted(state, state.work, me, OUTPUT, local, owes)
    return owes


@pytest.mark.parametrize("unreachable", [(A,), (B,), (A, B)])
def test_what_one_side_cannot_be_reached_for_goes_through_the_store(unreachable: tuple[Member, ...]) -> None:
    state, local = at_work(unreachable=unreachable), LocalView(version=-1, restored_stage=0)
    local.boundaries[OUTPUT] = "hash"
    assert given(state, local) == [StoreBoundary(OUTPUT, "hash", 0)]
    assert not any(isinstance(owe, owing.Report) for owe in owing.owed(state, A, local)), "not before it is there"
    assert wanted(state, B, LocalView()) == [], "nothing to wait for before it is receipted"
    local.in_store[OUTPUT] = 0
    assert given(state, local) == []
    assert any(isinstance(owe, owing.Report) for owe in owing.owed(state, A, local))
    apply(state, ev.Forwarded(-1, 0, 0, 1, "hash"))
    assert wanted(state, B, LocalView()) == [FetchStored(OUTPUT, "hash")]


def test_who_can_be_reached_is_reached_straight_whoever_else_cannot() -> None:
    state, local = at_work(unreachable=(C,)), LocalView(version=-1, restored_stage=0)
    local.boundaries[OUTPUT] = "hash"
    assert given(state, local) == [Push(OUTPUT, B)]
    assert wanted(state, B, LocalView()) == [Fetch(OUTPUT, (A,))]
    for event in (ev.Gone(B, "lost"), ev.Leased(-1, 0, 1, C, 2)):  # dealt again, to one that can't be reached
        apply(state, event)
    assert given(state, local) == [StoreBoundary(OUTPUT, "hash", 0)]


def test_a_run_by_store_pushes_nothing_and_a_boundary_outlives_its_maker() -> None:
    state, local = at_work(by_store=True), LocalView(version=-1, restored_stage=0)
    local.boundaries[OUTPUT] = "hash"
    assert given(state, local) == [StoreBoundary(OUTPUT, "hash", 0)]
    apply(state, ev.Forwarded(-1, 0, 0, 1, "hash"))
    assert wanted(state, B, LocalView()) == wanted(state, C, LocalView()) == [FetchStored(OUTPUT, "hash")]
    local.in_store[OUTPUT] = 0
    apply(state, ev.ReplayLeased(-1, 0, 0, False, A, 1))
    assert given(state, local) == [StoreBoundary(OUTPUT, "hash", 1)], "somebody didn't find it: once more"


def test_a_straight_run_never_looks_into_the_store() -> None:
    state, local = at_work(), LocalView(version=-1, restored_stage=0)
    local.boundaries[OUTPUT] = "hash"
    assert given(state, local) == [Push(OUTPUT, B)]
    apply(state, ev.Forwarded(-1, 0, 0, 1, "hash"))
    apply(state, ev.Gone(A, "lost"))
    assert wanted(state, B, LocalView()) == [Fetch(OUTPUT, ())]


# --- what can't be had -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_store", "there"), [(True, False), (True, True), (False, False)])
def test_a_partial_is_void_only_if_the_store_lacks_what_it_must_have(by_store: bool, there: bool) -> None:
    """Whoever says again and again that it can't find a boundary gets it made again, and nobody into trouble by that alone."""
    state, watch, policy, now_s = at_work(by_store=by_store), Watch(), Policy(), 0.0
    apply(state, ev.Forwarded(-1, 0, 0, 1, "hash"))
    decided: list[Any] = []
    for _ in range(20):
        now_s += policy.replay_s
        watch.missing[-1, 0, 0, False] = None
        work = state.work
        assert work is not None
        for decision in decide_replays(now_s, state, work, watch, policy, random.Random(0)):
            decided.append(decision.what)
            if isinstance(decision.what, ProbeSlices):
                if there:
                    watch.blob_confirmed("hash")
                watch.done(decision.what)
            else:
                apply(state, decision.what)
        if any(isinstance(what, ev.Voided) for what in decided):
            break
    kinds = [type(what).__name__ for what in decided]
    assert kinds[:TRIED] == ["ReplayLeased"] * TRIED
    assert ("ProbeSlices" in kinds) == by_store
    assert ("Voided" in kinds) == (by_store and not there)


# --- joining -----------------------------------------------------------------------------------------------------


def test_a_record_of_before_says_that_its_member_can_be_reached() -> None:
    old = msgspec.msgpack.encode([0, 0, ["Joined", ["a", 1, 1], "cold", 0, "boot", "127.0.0.1", 1]])
    joined = msgspec.msgpack.decode(old, type=ev.Record).event
    assert isinstance(joined, ev.Joined)
    assert joined.reachable


async def test_a_probe_says_nothing_of_one_that_nobody_can_connect_to_but_its_last_words_do(tmp_path: Path) -> None:
    async with served(tmp_path, Policy(silence_s=1000.0, hung_s=1000.0)) as validator:
        coordinator, closed_port = validator.coordinator, 1
        request = msg.JoinRequest(
            1, "toy", "boot-0", "127.0.0.1", closed_port, ("golden",), Cursor(1, 0), reachable=False
        )
        assert (await coordinator.join(ALICE.hotkey, "cold", request)).accepted
        (member,) = coordinator.state.members
        assert not coordinator.state.members[member].reachable
        coordinator.suspect(member)  # its stream was lost: a probe would be refused
        assert not coordinator._background
        await coordinator.turn()
        assert member in coordinator.state.members
        coordinator.suspect(member, last_words=True)
        assert await validator.until_gone() == "lost"


# --- transfers ---------------------------------------------------------------------------------------------------


class Store:
    """As :class:`miner.blobs.Blobs` shows it."""

    def __init__(self) -> None:
        self.there: dict[str, bytes] = {}
        self.requests: list[tuple[str, tuple[str, ...]]] = []
        self.gate: asyncio.Event | None = None
        self.down = False

    async def _arrive(self, kind: str, names: Sequence[str]) -> None:
        self.requests.append((kind, tuple(names)))
        if self.gate is not None:
            await self.gate.wait()
        if self.down:
            raise Unreachable("the store is away")

    async def put_many(self, blobs: Sequence[tuple[str, Any]], retention: str, deadline: Deadline) -> None:
        assert retention == "evidence"
        await self._arrive("put", [name for name, _ in blobs])
        self.there.update((name, bytes(data)) for name, data in blobs)

    async def get_many(self, refs: Sequence[tuple[str, int]], deadline: Deadline) -> list[bytearray]:
        await self._arrive("get", [name for name, _ in refs])
        if missing := [name for name, _ in refs if name not in self.there]:
            raise NotFound(f"no blob {missing[0][:10]}")
        return [bytearray(self.there[name]) for name, _ in refs]


class Cache:
    def __init__(self) -> None:
        self.held: dict[BoundaryKey, memoryview] = {}

    def put(self, key: BoundaryKey, data: Any, hash_: str) -> None:
        self.held[key] = memoryview(data)

    async def get(self, key: BoundaryKey) -> memoryview | None:
        return self.held.get(key)


class Context:
    """What :class:`StoreLinks` uses of a member's context."""

    def __init__(self, state: RunState, member: Member) -> None:
        self.plan = tiny_plan((0, 2))
        self.blobs, self.cache, self.local = Store(), Cache(), LocalView()
        self.run_state, self.member = state, member
        self.slices: dict[str, memoryview] = {}

    def wake(self) -> None: ...

    def product(self, key: BoundaryKey, fill: int = 1) -> str:
        data = bytes([fill]) * boundary_bytes(self.plan)
        self.cache.put(key, data, "")
        self.local.boundaries[key] = str(blob_hash(data))
        return self.local.boundaries[key]


@pytest.fixture
async def maker():
    context = Context(at_work(by_store=True), A)
    links = StoreLinks(context)  # type: ignore[arg-type]
    yield context, links
    await links.close()


def receipted(context: Context, value: str) -> Context:
    """The context of the next stage's member, once it is receipted."""
    apply(context.run_state, ev.Forwarded(-1, 0, 0, 1, value))
    other = Context(context.run_state, B)
    other.blobs = context.blobs
    return other


async def test_a_boundary_goes_in_and_comes_out(maker: tuple[Context, StoreLinks]) -> None:
    context, links = maker
    value = context.product(OUTPUT)
    await links.store_boundary(StoreBoundary(OUTPUT, value, 3))
    assert context.local.in_store == {OUTPUT: 3}
    consumer = receipted(context, value)
    taking = StoreLinks(consumer)  # type: ignore[arg-type]
    await taking.fetch_stored(FetchStored(OUTPUT, value))
    assert consumer.local.boundaries == {OUTPUT: value}
    assert bytes(consumer.cache.held[OUTPUT]) == context.blobs.there[value]
    await taking.close()


async def test_nothing_is_in_the_store_before_the_store_says_so(maker: tuple[Context, StoreLinks]) -> None:
    context, links = maker
    value = context.product(OUTPUT)
    context.blobs.down = True
    with pytest.raises(Unreachable):
        await links.store_boundary(StoreBoundary(OUTPUT, value, 0))
    assert context.local.in_store == {}


async def test_what_isnt_there_is_missing_after_a_few_looks_and_taken_when_it_comes(
    maker: tuple[Context, StoreLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.store_links.LOOK_AGAIN_S", 0.001)
    context, _ = maker
    value = context.product(OUTPUT)
    consumer = receipted(context, value)
    taking = StoreLinks(consumer)  # type: ignore[arg-type]
    for look in range(LOOKED_BEFORE_MISSING):
        assert consumer.local.unavailable == set(), look
        await taking.fetch_stored(FetchStored(OUTPUT, value))
    assert consumer.local.unavailable == {OUTPUT}
    consumer.blobs.there[value] = bytes(context.cache.held[OUTPUT])
    await taking.fetch_stored(FetchStored(OUTPUT, value))
    assert consumer.local.boundaries == {OUTPUT: value}
    assert consumer.local.unavailable == set()
    await taking.close()


async def test_what_another_maker_contradicts_meanwhile_is_not_taken(maker: tuple[Context, StoreLinks]) -> None:
    context, _ = maker
    value = context.product(OUTPUT)
    consumer = receipted(context, value)
    consumer.blobs.there[value] = bytes(context.cache.held[OUTPUT])
    state = consumer.run_state
    for event in (ev.Voided(-1, 0, A, "late"), ev.Leased(-1, 0, 0, A, 2), ev.Forwarded(-1, 0, 0, 2, "other")):
        apply(state, event)
    taking = StoreLinks(consumer)  # type: ignore[arg-type]
    await taking.fetch_stored(FetchStored(OUTPUT, value))
    assert consumer.local.boundaries == {}
    await taking.close()


async def test_what_comes_together_is_asked_for_together_and_gradients_go_first(
    maker: tuple[Context, StoreLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, links = maker
    context.blobs.gate = asyncio.Event()
    keys = [BoundaryKey(-1, m, 0, False) for m in range(7)] + [BoundaryKey(-1, 9, 0, True)]
    values = [context.product(key, fill) for fill, key in enumerate(keys)]
    async with asyncio.TaskGroup() as group:
        for key, value in zip(keys, values, strict=True):
            group.create_task(links.store_boundary(StoreBoundary(key, value, 0)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        context.blobs.gate.set()
    sent = [names for _, names in context.blobs.requests]
    assert [len(names) for names in sent] == [1, 1, 1, 5]
    assert sent[-1][0] == values[-1], "the gradient, which came last"
    assert set(context.local.in_store) == set(keys)


async def test_one_that_isnt_there_keeps_no_other_from_its_bytes(
    maker: tuple[Context, StoreLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.store_links.LOOK_AGAIN_S", 0.001)
    context, links = maker
    there = str(blob_hash(b"there"))
    context.blobs.there[there] = b"there"
    context.blobs.gate = asyncio.Event()
    names = [there, "lost", "lost too", "and this", there]
    async with asyncio.TaskGroup() as group:
        for partition, name in enumerate(names):
            owe = FetchSlice(-1, 0, partition, 0, name, B, routed=True)
            group.create_task(links.fetch_slice(owe))
            await asyncio.sleep(0)
        context.blobs.gate.set()
    assert set(context.slices) == context.local.slices == {there}


async def test_slices_are_stored_as_evidence(maker: tuple[Context, StoreLinks]) -> None:
    context, links = maker
    context.slices["slice"] = memoryview(b"slice")
    await links.store_slice(StoreSlice(-1, 0, 0, "slice"))
    assert context.local.stored == {"slice"}
    with pytest.raises(NotFound):
        await links.store_slice(StoreSlice(-1, 0, 0, "gone"))


async def test_closing_ends_whoever_waits(maker: tuple[Context, StoreLinks]) -> None:
    context, links = maker
    context.blobs.gate = asyncio.Event()
    value = context.product(OUTPUT)
    waiting = asyncio.create_task(links.store_boundary(StoreBoundary(OUTPUT, value, 0)))
    await asyncio.sleep(0.01)
    await links.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(Unreachable):
        await links.store_boundary(StoreBoundary(OUTPUT, value, 0))


async def test_a_receipt_that_somebody_waits_for_goes_at_once(maker: tuple[Context, StoreLinks]) -> None:
    context, links = maker
    receipt = msg.ForwardReceipt(-1, 0, 0, 1, "", "hash", 0.1)
    assert not links.awaited([receipt])
    context.local.in_store[OUTPUT] = 0
    assert links.awaited([receipt])


# --- what is kept ------------------------------------------------------------------------------------------------


def test_a_store_that_fills_up_keeps_less_evidence() -> None:
    assert [audit_window(used, 1000) for used in (0, 500, 501, 751, 900, 2000)] == [8, 8, 4, 2, 1, 1]
    assert audit_window(10**12, 0) == AUDIT_WINDOW_STEPS, "a budget of 0 is none"
    state = at_work()
    state.next_step = 20
    assert expiries(state)["evidence"] == 13
    assert expiries(state, 1)["evidence"] == 20, "the open step's own evidence has horizon 21"
    assert st.config(state).pipeline.boundaries == "straight"


# --- what is counted ---------------------------------------------------------------------------------------------


async def test_a_report_says_what_was_asked_of_the_store_when_that_has_changed() -> None:
    """With each report, so what a process did until its last word is known, its good-bye included."""
    said: list[msg.Report] = []

    class Client:
        async def request(self, method: str, path: str, body: msg.Report, kind: Any, *, deadline: Deadline) -> Any:
            said.append(body)
            return msg.ReportAnswer(True, 0)

    context = SimpleNamespace(
        member=A,
        run_id="run",
        signer=ALICE,
        directives=SimpleNamespace(cursor=Cursor(1, 0)),
        blobs=SimpleNamespace(used=msg.StoreUse(puts=1), process="one"),
        wake=lambda: None,
    )
    reporter = Reporter(context, Client())  # type: ignore[arg-type]
    await reporter.say([msg.UpdatedClaim(-1, "")])
    await reporter.say([msg.UpdatedClaim(-1, "")])
    context.blobs.used = msg.StoreUse(puts=2, gets=1, bytes_down=10)
    await reporter.leave()
    assert [report.used for report in said] == [msg.StoreUse(puts=1), None, context.blobs.used]
    assert {report.process for report in said} == {"one"}
    assert isinstance(said[-1].claims[0], msg.LeavingClaim)
