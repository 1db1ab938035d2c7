"""The planner is exact, leaves no stage empty, and says why it places a joiner where it does."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import ConfigError
from validator.stage_plan import move_for_empty, place_joiner, plan_cuts, stage_costs, throughputs

costs = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(layers=costs, embedding=st.integers(0, 30), head=st.integers(0, 30), data=st.data())
def test_cuts_are_as_good_as_the_best_of_all(layers: list[int], embedding: int, head: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(layers)))
    units = [embedding, *layers, head]
    cuts = plan_cuts(units, num_stages)
    assert len(cuts) == num_stages
    assert cuts[0] == 0
    assert all(a < b for a, b in zip(cuts, [*cuts[1:], len(layers)], strict=True))
    every = [(0, *rest) for rest in combinations(range(1, len(layers)), num_stages - 1)]
    assert max(stage_costs(units, cuts)) == min(max(stage_costs(units, other)) for other in every)


def test_embedding_and_head_count() -> None:
    assert plan_cuts([0, 1, 1, 1, 1, 0], 2) == (0, 2)
    assert plan_cuts([0, 1, 1, 1, 1, 2], 2) == (0, 3)
    assert plan_cuts([2, 1, 1, 1, 1, 0], 2) == (0, 1)
    assert stage_costs([2, 1, 1, 1, 1, 5], (0, 1)) == [3, 8]


@pytest.mark.parametrize(
    ("units", "stages", "message"),
    [
        ([1, 1, 1, 1], 3, "pipeline.stages = 3 is not allowed: the model has 2 layers (allowed: 1 to 2)"),
        ([1, 1, 1, 1], 0, "pipeline.stages = 0 is not allowed: the model has 2 layers (allowed: 1 to 2)"),
        ([1, 1], 1, "unit costs [1, 1] are not allowed (embedding, layers and head, 0 or more)"),
        ([1, -1, 1], 1, "unit costs [1, -1, 1] are not allowed (embedding, layers and head, 0 or more)"),
    ],
)
def test_bad_plans(units: list[float], stages: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cuts(units, stages)
    assert str(caught.value) == message


def test_joiner_goes_where_throughput_is_least() -> None:
    assert place_joiner([1, 2, 1], [[1.0], [1.0], [1.0]]).stage == 1
    assert place_joiner([1, 2, 1], [[1.0], [1.0, 1.0], [1.0]])[0] == 0  # all equal: the lowest
    placed = place_joiner([1, 1], [[1.0, 0.25], [1.0]])
    assert (placed.stage, placed.reason.code, placed.reason.numbers["replicas"]) == (1, "limits_throughput", 1)
    empty = place_joiner([0.0, 1, 5], [[], [0.001], []])
    assert (empty.stage, empty.reason.code, empty.reason.numbers) == (0, "stage_empty", {"empty_stages": 2})
    assert str(empty.reason) == "stage_empty empty_stages=2"


def test_seven_members_fill_three_stages_by_cost() -> None:
    speeds: list[list[float]] = [[], [], []]
    for _ in range(7):
        speeds[place_joiner([1.0, 1.4, 1.0], speeds).stage].append(1.0)
    assert [len(s) for s in speeds] == [2, 3, 2]
    assert min(throughputs([1.0, 1.4, 1.0], speeds)) == 2.0


def test_no_move_empties_a_stage() -> None:
    assert move_for_empty([1, 1], [[1.0], []]) is None
    assert move_for_empty([1, 1], [[1.0], [1.0, 1.0]]) is None
    moved = move_for_empty([1, 1, 1], [[1.0, 1.0], [1.0, 1.0, 1.0], []])
    assert moved is not None
    assert (moved.source, moved.target, moved.reason.code) == (1, 2, "stage_empty")
