"""The fold: journal and state say the same, at every cut, under every hash seed; what can't follow raises."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from schedule_sim import Sim

from subnet.run import events as ev
from subnet.run.apply import apply, apply_record, fold
from subnet.run.follower import Follower, Took
from subnet.run.invariants import InvariantBroken, check
from subnet.run.state import new_state
from subnet.run.state_codec import dump_state, load_state, state_bytes
from subnet.words import Cursor, Member

SEEDS = (1, 2, 5, 8, 11)


@functools.cache
def journal(seed: int) -> tuple[ev.Record, ...]:
    sim = Sim(seed, checks_all=False)
    sim.run()
    return tuple(sim.coordinator.journal)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_state_is_the_fold_of_the_journal_and_holds_its_invariants(seed: int) -> None:
    state = new_state()
    for record in journal(seed):
        apply_record(state, record)
        check(state)
    assert state_bytes(state) == state_bytes(fold(journal(seed)))


@settings(max_examples=25, deadline=None)
@given(seed=some.sampled_from(SEEDS), cut=some.floats(0, 1))
def test_a_copy_and_the_rest_equal_the_whole_fold(seed: int, cut: float) -> None:
    records = journal(seed)
    at = int(cut * len(records))
    state = load_state(dump_state(fold(records[:at])))
    for record in records[at:]:
        apply_record(state, record)
    assert state_bytes(state) == state_bytes(fold(records))


@settings(max_examples=25, deadline=None)
@given(seed=some.sampled_from(SEEDS), at=some.floats(0, 1))
def test_a_duplicate_and_a_gap_raise(seed: int, at: float) -> None:
    records = journal(seed)
    cut = 1 + int(at * (len(records) - 2))
    with pytest.raises(InvariantBroken, match="is due"):
        apply_record(fold(records[:cut]), records[cut - 1])
    with pytest.raises(InvariantBroken, match="is due"):
        apply_record(fold(records[: cut - 1]), records[cut])


@settings(max_examples=40, deadline=None)
@given(seed=some.sampled_from(SEEDS), at=some.floats(0, 1))
def test_an_event_never_applies_twice(seed: int, at: float) -> None:
    """Whatever the numbers say: an event that has been applied can't follow itself."""
    records = journal(seed)
    cut = 1 + int(at * (len(records) - 2))
    event = records[cut - 1].event
    if isinstance(event, ev.Voided | ev.StoreRouted | ev.OwnerFailed | ev.TraceStarted | ev.HardwareClassSet):
        return
    if isinstance(event, ev.SnapshotOrdered):
        return
    with pytest.raises(InvariantBroken):
        apply(fold(records[:cut]), event)


def test_an_unknown_event_raises() -> None:
    with pytest.raises(InvariantBroken, match="no event of this version"):
        apply(fold(journal(1)[:1]), object())  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([0, 0, ["Invented", 1]]), type=ev.Record)


def test_nothing_comes_before_the_run_and_little_after_it() -> None:
    member = Member("hot", 1, 1)
    with pytest.raises(InvariantBroken, match="before RunPlanned"):
        apply(new_state(), ev.Gone(member, "lost"))
    finished = fold(journal(1))
    assert finished.finished is not None
    with pytest.raises(InvariantBroken, match="after RunFinished"):
        apply(finished, ev.Updated(member, 1, ""))


def test_every_record_survives_the_wire() -> None:
    for seed in SEEDS:
        data = msgspec.msgpack.encode(list(journal(seed)))
        assert tuple(msgspec.msgpack.decode(data, type=list[ev.Record])) == journal(seed)


def test_equal_folds_give_equal_bytes_under_any_hash_seed() -> None:
    script = (
        "import hashlib, msgspec, sys;"
        "from subnet.run import events as ev;"
        "from subnet.run.apply import fold;"
        "from subnet.run.state_codec import state_bytes;"
        "records = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[ev.Record]);"
        "cuts = [len(records) * i // 8 for i in range(1, 9)];"
        "print(hashlib.sha256(b''.join(state_bytes(fold(records[:cut])) for cut in cuts)).hexdigest())"
    )
    records = list(journal(2))
    cuts = [len(records) * i // 8 for i in range(1, 9)]
    here = hashlib.sha256(b"".join(state_bytes(fold(records[:cut])) for cut in cuts)).hexdigest()
    root = Path(__file__).parent.parent
    for hash_seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=msgspec.msgpack.encode(records),
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.decode().strip() == here


# --- the follower ------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(seed=some.sampled_from(SEEDS), data=some.data())
def test_a_follower_takes_stretches_in_any_order(seed: int, data: some.DataObject) -> None:
    records = journal(seed)
    follower = Follower()
    for _ in range(12):
        start = data.draw(some.integers(0, len(records)))
        stretch = records[start : start + data.draw(some.integers(0, 80))]
        before = follower.number
        took = follower.take(1, start, stretch)
        if start > before:
            assert took is Took.NOTHING
            assert follower.number == before
    follower.take(1, follower.number, records[follower.number :])
    assert state_bytes(follower.state) == state_bytes(fold(records))
    assert follower.cursor == Cursor(1, len(records))


def test_a_follower_rewinds_to_where_a_new_term_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subnet.run.follower.RECORDS_BETWEEN_COPIES", 10)
    records = journal(1)
    last_seal = max(r.number for r in records if isinstance(r.event, ev.StepSealed))
    follower = Follower()
    assert follower.take(1, 0, records[: last_seal + 1]) is Took.NEW_TERM
    stale = ev.Record(last_seal + 1, 0, ev.StepPlanned(0, 1, 0, None))
    term = ev.Record(last_seal + 1, 0, ev.TermStarted(fold(records).term + 1, "other", "n"))
    beyond = follower.take(1, last_seal + 1, records[last_seal + 1 : last_seal + 2])
    assert beyond is Took.RECORDS
    assert follower.take(2, last_seal + 1, [term]) is Took.NEW_TERM
    assert state_bytes(follower.state) == state_bytes(fold([*records[: last_seal + 1], term]))
    assert follower.take(1, follower.number, [stale]) is Took.NOTHING
    with pytest.raises(InvariantBroken, match="final"):
        follower.take(3, 5, [])


def test_a_follower_starts_from_a_copy() -> None:
    records = journal(1)
    cut = 1 + max(r.number for r in records if isinstance(r.event, ev.StepSealed))
    follower = Follower()
    follower.start_from(1, dump_state(fold(records[:cut])))
    follower.take(1, cut, records[cut:])
    assert state_bytes(follower.state) == state_bytes(fold(records))
