"""Two open steps: what may be journaled of which, what is kept for the older one, and that no trouble changes a bit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from schedule_audit import Audit
from schedule_nodes import Bad
from schedule_sim import LIES, Sim, run_many
from test_decide import POLICY, Desk
from test_replicas import moved, staged, takes, with_steps

from miner import owed as owing
from miner.local_view import LocalView
from miner.owes import Compute, Fetch
from subnet.run import events as ev
from subnet.run import state
from subnet.run import state as st
from subnet.run.apply import apply, fold
from subnet.run.invariants import InvariantBroken, check
from subnet.run.state_codec import dump_state, load_state, state_bytes
from subnet.words import CALIBRATION_STEP
from validator import decide_leases, suspects
from validator.watch import Watch


def broken(seeds: range, **options: object) -> dict[str, int]:
    """First seed of each kind of failure."""
    return run_many(seeds, delay=1, **options)[1]


@functools.cache
def journal(seed: int, profile: str = "") -> tuple[ev.Record, ...]:
    sim = Sim(seed, profile=profile, checks_all=False, delay=1)
    sim.run()
    return tuple(sim.coordinator.journal)


# --- any trouble ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_every_schedule_ends_right(first: int) -> None:
    assert broken(range(first, first + 10)) == {}


@pytest.mark.parametrize("profile", ["void", "takeover", "stale", "rivals", "calm"])
def test_schedules_of_one_kind_of_trouble_end_right(profile: str) -> None:
    assert broken(range(1000, 1010), profile=profile, checks_all=False) == {}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_stops_the_run_or_gets_an_honest_member_convicted(lie: str) -> None:
    assert broken(range(2000, 2001), lie=lie, checks_all=False) == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_schedules_end_right() -> None:
    outcomes, examples = run_many(range(10_000, 20_000), delay=1, checks_all=False)
    assert examples == {}
    assert outcomes["ok"] == 10_000


def overlaps(records: tuple[ev.Record, ...]) -> Counter[str]:
    """What happens to a step while the one before it is open, and to that one while the next is worked on."""
    found: Counter[str] = Counter()
    at = st.new_state()
    for record in records:
        event, ahead = record.event, at.ahead
        kind = type(event).__name__
        if ahead is not None:
            begun = any(ahead.held.values())
            if getattr(event, "step", None) == ahead.step:
                found[f"{kind} ahead"] += 1
            elif begun and getattr(event, "step", None) == at.next_step:
                found[f"{kind} behind"] += 1
        apply(at, event)
    return found


def test_the_schedules_go_where_it_hurts() -> None:
    """A test of the test: steps do overlap, and lose leases, sums and boundaries of both while they do."""
    found: Counter[str] = Counter()
    for seed in range(3000, 3040):
        found += overlaps(journal(seed))
    for seed in range(3000, 3010):
        found += overlaps(journal(seed, "void"))
    for kind in ("Leased", "Forwarded", "Backwarded", "Voided", "ReplayLeased", "Revoking", "MicrobatchSkipped"):
        assert found[f"{kind} ahead"] > 0, (kind, found)
        assert found[f"{kind} behind"] > 0, (kind, found)
    for kind in ("Frozen", "ReduceOrdered", "PartitionMerged", "Checked", "StageSealed", "StepSealed"):
        assert found[f"{kind} behind"] > 0, kind
        assert found[f"{kind} ahead"] == 0, kind


def test_a_step_is_planned_with_the_state_that_it_is_computed_from() -> None:
    for seed in range(3000, 3012):
        at = st.new_state()
        for record in journal(seed):
            event = record.event
            if isinstance(event, ev.StepPlanned) and event.num_training:
                version = st.config(at).version_of(event.step)
                assert version <= at.next_step
                first = event.step in (CALIBRATION_STEP, 0)
                assert first or at.next_step == event.step - 1, (
                    "at once: nothing but the seal before last is waited for"
                )
            if isinstance(event, ev.Leased):
                assert not st.is_evaluation(at, event.microbatch) or event.step == at.next_step
            apply(at, event)
        assert at.finished is not None
        assert at.work is None
        assert at.ahead is None


# --- a test that can fail: each thing that the delay needs, taken away -----------------------------------------------


def one_version_too_new(patch: pytest.MonkeyPatch) -> None:
    """A step is computed from whatever state is the newest."""
    patch.setattr("schedule_miner.Miner.weights", lambda miner, owe: miner.w)


def one_epoch(patch: pytest.MonkeyPatch) -> None:
    """A void of one step's sum counts for the other's."""
    real = state.epoch
    patch.setattr(state, "epoch", lambda at, member, step=None: real(at, member, at.next_step))


@pytest.mark.parametrize(
    ("remove", "seeds", "profile"),
    [
        (one_version_too_new, range(10), ""),
        (one_epoch, range(200), "void"),
    ],
)
def test_without_it_a_schedule_fails(
    remove: Callable[[pytest.MonkeyPatch], None], seeds: range, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(monkeypatch)
    for seed in seeds:
        try:
            Sim(seed, profile=profile, checks_all=False, delay=1).run()
        except (Bad, InvariantBroken, KeyError):
            return
    raise AssertionError("no schedule fails without it")


# --- the fold ------------------------------------------------------------------------------------------------------


def in_the_midst(kind: type[ev.Event], *, evaluation_items: int = 0) -> st.RunState:
    """A run at the first event of this kind that the older step sees while the other has begun."""
    for seed in range(3000, 3100):
        records = journal(seed, "calm")
        run = records[0].event
        assert isinstance(run, ev.RunPlanned)
        if run.config.num_evaluation_items < evaluation_items:
            continue
        at = st.new_state()
        for record in records:
            event, ahead = record.event, at.ahead
            begun = ahead is not None and any(ahead.done) and any(ahead.undealt[0])
            if begun and isinstance(event, kind) and getattr(event, "step", None) == at.next_step:
                return at
            apply(at, event)
    raise AssertionError("no schedule goes there")


def test_nothing_of_the_step_ahead_is_merged_or_sealed() -> None:
    at = in_the_midst(ev.PartitionMerged)
    assert at.ahead is not None
    step, copy = at.ahead.step, dump_state(at)
    illegal = [
        ev.Frozen(step, 0, 1),
        ev.StageSealed(step, 0, 0, (), (), (), "0"),
        ev.StepSealed(step, 4, 0, 0, 0, 0),
        ev.StepPlanned(step, 4, 0, at.ahead.scalars),
        ev.StepPlanned(step + 1, 4, 0, at.ahead.scalars),
    ]
    for event in illegal:
        with pytest.raises(InvariantBroken):
            apply(load_state(copy), event)
    check(load_state(copy))


def test_a_state_that_is_not_there_yet_is_not_evaluated() -> None:
    """Hold-out items of a step are of the state that it updates: the step ahead's wait until that one is there."""
    for seed in range(3000, 3100):
        at = st.new_state()
        for record in journal(seed, "calm"):
            apply(at, record.event)
            if at.ahead is None or not at.ahead.num_evaluation:
                continue
            member = next(iter(at.members), None)
            if member is None:
                continue
            event = ev.Leased(at.ahead.step, st.num_microbatches(at), at.members[member].stage, member, 1)
            with pytest.raises(InvariantBroken, match="isn't there yet"):
                apply(at, event)
            return
    raise AssertionError("no schedule evaluates there")


@pytest.mark.parametrize("kind", [ev.Backwarded, ev.PartitionMerged])
def test_who_is_gone_is_void_in_both_steps_and_a_new_term_opens_both(kind: type[ev.Event]) -> None:
    at = in_the_midst(kind)
    work, ahead = at.work, at.ahead
    assert work is not None
    assert ahead is not None
    member = next(k for k in at.members if ahead.held.get(k) and work.held.get(k))
    other = load_state(dump_state(at))
    apply(at, ev.Gone(member, "lost"))
    check(at)
    stage_items = [found for each in (work, ahead) for items in each.items for found in items.values()]
    assert not any(found.member == member and found.status != st.OPEN for found in stage_items)
    apply(other, ev.TermStarted(other.term + 1, "another", "nonce"))
    check(other)
    assert other.work is not None
    assert other.ahead is not None
    assert not any(other.work.done) or other.seals
    assert not any(other.ahead.done)


def test_a_void_of_one_step_leaves_the_other_alone() -> None:
    at = in_the_midst(ev.Backwarded)
    assert at.work is not None
    assert at.ahead is not None
    member = next(k for k in at.members if at.ahead.held.get(k) and at.work.held.get(k))
    step, stage = at.ahead.step, at.members[member].stage
    before = msgspec.msgpack.encode(at.work.items[stage])
    apply(at, ev.Voided(step, stage, member, "silent"))
    check(at)
    assert msgspec.msgpack.encode(at.work.items[stage]) == before
    assert (st.epoch(at, member, step), st.epoch(at, member, at.next_step)) == (1, 0)


def test_the_fold_is_the_same_from_a_copy_and_at_every_cut() -> None:
    records = journal(3002)
    whole = state_bytes(fold(records))
    for at in range(0, len(records), 17):
        resumed = load_state(dump_state(fold(records[:at])))
        for record in records[at:]:
            apply(resumed, record.event)
        assert state_bytes(resumed) == whole


def test_the_state_before_can_always_be_restored() -> None:
    """Snapshots and seals are kept so that a joiner goes through the state that the older open step is computed from."""
    replaced = too_new = 0
    for seed in range(3000, 3020):
        at = st.new_state()
        for record in journal(seed):
            apply(at, record.event)
            if at.run is None or at.next_step < 1:
                continue
            for stage in range(st.num_stages(at)):
                version = st.restore_point(at, stage).version
                assert version <= st.config(at).version_of(at.next_step)
                assert all(step in at.sealed for step in range(version, at.next_step))
                replaced += version > CALIBRATION_STEP
                too_new += any(s.verified and s.step > version for s in at.snapshots.get(stage, []))
    assert replaced > 0, "snapshots were verified, and older ones dropped"
    assert too_new > 0, "there was a newer one, from which the older open step can't be computed"


# --- decisions -----------------------------------------------------------------------------------------------------


class Overlapping(Desk):
    """A desk in the first training step of a long delayed run."""

    def __init__(self, *stages: int) -> None:
        super().__init__(2, 4, update_delay=1)
        self.state.run = with_steps(self.state.run, 1000)
        self.members = staged(self, *stages)

    def seal(self) -> None:
        """The open step is done and everybody has updated."""
        step = self.state.next_step
        self.state.work, self.state.ahead = self.state.ahead, None
        self.state.next_step, self.state.roots = step + 1, {}
        for info in self.state.members.values():
            info.version = step
        self.now += 10.0


def test_the_step_behind_is_opened_at_once_but_for_calibration_and_the_end() -> None:
    desk = Overlapping(0, 1)
    desk.settle()
    assert (desk.state.work.step, desk.state.ahead) == (-1, None)  # type: ignore[union-attr]
    desk.seal()
    desk.settle()
    assert (desk.state.work.step, desk.state.ahead.step) == (0, 1)  # type: ignore[union-attr]
    desk.state.next_step, desk.state.work, desk.state.ahead = 998, None, None
    desk.settle()
    assert (desk.state.work.step, desk.state.ahead.step) == (998, 999)  # type: ignore[union-attr]
    desk.seal()
    desk.settle()
    assert (desk.state.work.step, desk.state.ahead) == (999, None)  # type: ignore[union-attr]


def test_before_a_move_the_open_step_ends_alone() -> None:
    desk = Overlapping(0, 0, 0, 1)
    for member in desk.members:
        takes(desk, member, 0.1)
    desk.settle()
    opened: list[bool] = []
    for _ in range(100):
        desk.seal()
        for member in desk.members:
            desk.watch.heard(member, desk.now)
        between = desk.state.work is None
        found = moved(desk)
        if found:
            assert between, "nothing is redone for it"
            break
        desk.settle()
        opened.append(desk.state.ahead is not None)
    assert [member for member, _ in found] == [desk.members[2]]
    assert opened[-1] is False
    assert all(opened[:-1])
    assert len(opened) > POLICY.rebalance_steps
    desk.emit(ev.Gone(desk.members[2], "replaced"))
    desk.settle()
    assert desk.state.ahead is not None, "and goes on as before"


def test_the_older_step_is_dealt_first_and_windows_count_both() -> None:
    desk = Overlapping(0, 1)
    desk.settle()
    desk.seal()
    for member, info in desk.state.members.items():
        info.version, info.root = 0, "root"
        desk.state.roots.setdefault(info.stage, {}).setdefault("root", []).append(info.coldkey)
        takes(desk, member, 1.0)
    dealt = [what for what, code in desk.settle() if code == "dealt"]
    order = [event.step for event in dealt if event.stage == 0]  # type: ignore[attr-defined]
    wide = decide_leases.window(POLICY, 2, 1.0)
    assert order == [0] * 4 + [1] * (wide - 4)
    assert 0 < wide - 4 < 4, "the window ends within the second step"


def test_who_died_of_an_item_died_of_that_steps() -> None:
    desk, watch = Overlapping(0, 1), Watch()
    desk.settle()
    desk.seal()
    for info in desk.state.members.values():
        info.version, info.root = 0, "root"
        desk.state.roots.setdefault(info.stage, {}).setdefault("root", []).append(info.coldkey)
    desk.settle()
    holder = desk.members[0]
    suspects.note_lost(0.0, desk.state, watch, holder)
    assert {key[0] for key in watch.lost_with} == {0, 1}
    watch.at_step(0)
    watch.at_step(1)
    assert {key[0] for key in watch.lost_with} == {1}, "the step ahead is still open"


# --- members -------------------------------------------------------------------------------------------------------


def test_a_member_computes_the_older_step_before_it_has_updated_and_the_other_one_after() -> None:
    at = in_the_midst(ev.Backwarded)
    assert at.work is not None
    assert at.ahead is not None
    member = next(k for k in at.members if at.ahead.live[at.members[k].stage] and at.work.held.get(k))
    stage = at.members[member].stage

    def steps(local: LocalView) -> set[int]:
        owes = owing.owed(at, member, local)
        return {owe.step for owe in owes if isinstance(owe, Compute)} | {
            owe.key.step for owe in owes if isinstance(owe, Fetch)
        }

    newest = at.next_step
    version = st.config(at).version_of(newest)
    local = LocalView(version=newest, version_before=version if version < newest else None, restored_stage=stage)
    assert newest + 1 in steps(local)
    assert steps(local) <= {newest, newest + 1}
    behind = LocalView(version=version, restored_stage=stage)
    assert at.ahead.step not in steps(behind) or version == newest
    restored_too_new = LocalView(version=newest, restored_stage=stage)
    assert newest not in steps(restored_too_new) or version == newest


def test_the_audit_sees_a_wrong_version() -> None:
    """The reference isn't the production code's own opinion of what a step is computed from."""
    assert issubclass(Sim, Audit)
    sim = Sim(3001, checks_all=False, delay=1)
    sim.reference.version_of = lambda step: step  # type: ignore[method-assign]
    with pytest.raises(Bad, match="wrong"):
        sim.run()
