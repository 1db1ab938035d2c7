"""Two owners a partition: the faster counts, a lost one isn't waited for, a wrong one is found, and nothing else changes."""

from __future__ import annotations

import pytest
from schedule_sim import LIES, Sim, run_many

from subnet.numerics.owners import choose_owners, choose_seconds, pair
from subnet.run import events as ev
from subnet.words import GroupShape, Member

A, B, C = (Member(name, 1, number) for number, name in enumerate("abc", 1))
SHAPE = GroupShape((0, 1), ((0,), (0,), (0, 1), (1,)))


@pytest.mark.parametrize("profile", ["", "void", "takeover", "stale", "rivals", "calm"])
def test_schedules_with_two_owners_end_right(profile: str) -> None:
    assert run_many(range(4000, 4004), profile=profile, owners=2)[1] == {}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_of_one_of_two_owners_stops_the_run_or_convicts_an_honest_one(lie: str) -> None:
    assert run_many(range(5000, 5001), lie=lie, checks_all=False, owners=2)[1] == {}


def test_each_of_both_comes_first_now_and_then() -> None:
    """A test of the tests above."""
    seconds = [event.second for seed in range(4) for event in merged(seed, 2)]
    assert 0.1 < sum(seconds) / len(seconds) < 0.9
    assert not any(event.second for event in merged(0, 1))


def merged(seed: int, owners: int) -> list[ev.PartitionMerged]:
    sim = Sim(seed, profile="calm", checks_all=False, owners=owners)
    sim.run()
    found = [record.event for record in sim.coordinator.journal]
    return [event for event in found if isinstance(event, ev.PartitionMerged)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_schedules_with_two_owners_end_right() -> None:
    outcomes, examples = run_many(range(10_000, 12_000), checks_all=False, owners=2)
    assert examples == {}
    assert outcomes["ok"] == 2_000


def test_the_second_owner_is_another_replica_where_there_is_one() -> None:
    candidates = {0: [A, B], 1: [C]}
    owners = choose_owners(SHAPE, candidates, step=3, group=0)
    assert owners is not None
    seconds = choose_seconds(SHAPE, candidates, owners, step=3, group=0)
    for p, stages in enumerate(SHAPE.partitions):
        both = pair(owners, seconds, p)
        held = [k for stage in stages for k in candidates[stage]]
        assert len(both) == min(2, len(held))
        assert set(both) <= set(held)
    again = {0: [B, A], 1: [C]}
    assert choose_seconds(SHAPE, again, owners, step=3, group=0) == seconds


def test_where_every_partition_has_one_holder_there_are_no_second_owners() -> None:
    shape = GroupShape((0,), ((0,), (0,)))
    assert choose_seconds(shape, {0: [A]}, (A, A), step=0, group=0) == ()
    assert pair((A,), (), 0) == (A,)
