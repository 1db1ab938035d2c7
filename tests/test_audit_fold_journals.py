"""Journals of whole runs with audits, liars, cases, rewinds and new terms: folded, cut, copied, seen by stage and followed."""

from __future__ import annotations

import functools

import msgspec
import pytest
from audit_nodes import AUDIT_LIES
from audit_sim import AuditSim
from hypothesis import given, settings
from hypothesis import strategies as some
from test_views import seen

from subnet.audit.ledger import WorkLedger
from subnet.run import events as ev
from subnet.run.apply import apply_record, fold
from subnet.run.follower import Follower, Took
from subnet.run.invariants import InvariantBroken, check
from subnet.run.state import new_state, num_stages
from subnet.run.state_codec import dump_state, load_state, state_bytes
from subnet.run.views import NO_STAGE, apply_seen_record, seen_bytes, view_of

NEWER = 6
"""With those liars alone whose charges came later."""
KINDS_THEN = 16
RUNS = (("all", 38), ("rewind", 3), ("probation", 29), ("all", NEWER))
"""Mode and seed; together they have every event about audits, a new term, and three stages."""


@functools.cache
def journal(mode: str, seed: int) -> tuple[ev.Record, ...]:
    sim = AuditSim(
        seed, mode=mode, checks_all=False, kinds=AUDIT_LIES[:KINDS_THEN] if seed != NEWER else ("nan", "root")
    )
    sim.run()
    return tuple(sim.coordinator.journal)


def test_these_runs_have_all_of_it():
    kinds = {type(record.event) for run in RUNS for record in journal(*run)}
    assert kinds >= {
        *(ev.AuditOpened, ev.AuditClosed, ev.WindowClosed, ev.WindowAudited, ev.CaseOpened, ev.CaseClosed),
        *(ev.WitnessAsked, ev.WitnessSaid, ev.Rewound, ev.TermStarted, ev.RunFinished),
    }
    charges = {r.event.charge for run in RUNS for r in journal(*run) if isinstance(r.event, ev.CaseOpened)}
    assert charges >= {"partial", "root", "unusable"}
    assert any(num_stages(fold(journal(*run)[:1])) == 3 for run in RUNS)


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_every_state_on_the_way_holds_its_invariants(mode: str, seed: int):
    state = new_state()
    for record in journal(mode, seed):
        apply_record(state, record)
        check(state)
    assert state_bytes(state) == state_bytes(fold(journal(mode, seed)))


@settings(max_examples=25, deadline=None)
@given(run=some.sampled_from(RUNS), cut=some.floats(0, 1))
def test_a_copy_and_the_rest_equal_the_whole(run: tuple[str, int], cut: float):
    records = journal(*run)
    at = int(cut * len(records))
    state = load_state(dump_state(fold(records[:at])))
    assert state_bytes(state) == state_bytes(fold(records[:at]))
    for record in records[at:]:
        apply_record(state, record)
    assert state_bytes(state) == state_bytes(fold(records))


REPEATABLE = (
    *(ev.Voided, ev.StoreRouted, ev.OwnerFailed, ev.TraceStarted, ev.HardwareClassSet, ev.SnapshotOrdered),
    ev.Appealed,
)


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_no_event_about_audits_applies_twice(mode: str, seed: int):
    """Whatever the numbers say: what has been applied can't follow itself."""
    state = new_state()
    tried = set[type]()
    for record in journal(mode, seed):
        apply_record(state, record)
        kind = type(record.event)
        if kind in REPEATABLE or kind in tried:
            continue
        tried.add(kind)
        with pytest.raises(InvariantBroken):
            apply_record(load_state(dump_state(state)), msgspec.structs.replace(record, number=state.number))


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_a_view_has_the_same_of_its_stage_as_the_whole(mode: str, seed: int):
    records = journal(mode, seed)
    first = fold(records[:1])
    assert first.run is not None
    for stage in (NO_STAGE, *range(num_stages(first))):
        view = view_of(first.run, stage)
        whole, part = new_state(), new_state()
        mine = {record.number: record for record in seen(list(records), view)}
        for record in records:
            apply_record(whole, record)
            if record.number in mine:
                apply_seen_record(part, mine[record.number], view)
            if record.number % 10 == 0 or isinstance(record.event, ev.Rewound | ev.AuditClosed):
                assert seen_bytes(part, view) == seen_bytes(whole, view), (stage, record)
        assert seen_bytes(part, view) == seen_bytes(whole, view)


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_a_rewind_ends_every_incarnation_of_a_follower(mode: str, seed: int):
    follower = Follower()
    for record in journal(mode, seed):
        took = follower.take(1, follower.number, [record])
        assert (took is Took.NEW_TERM) == (record.number == 0 or isinstance(record.event, ev.Rewound))
    assert state_bytes(follower.state) == state_bytes(fold(journal(mode, seed)))


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_a_ledger_folds_the_same_from_any_dump(mode: str, seed: int):
    state, whole, loaded = new_state(), WorkLedger(), WorkLedger()
    for record in journal(mode, seed):
        if record.number % 50 == 0:
            dump = loaded.dump()
            loaded = WorkLedger()
            loaded.load(dump)
        for ledger in (whole, loaded):
            ledger.note(state, record.event)
        apply_record(state, record)
    assert loaded.dump() == whole.dump()
    assert whole.branch == state.audits.branch
