"""The planner is exact, leaves no stage empty, and says why it places a joiner where it does."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import ConfigError
from subnet.words import Member
from validator.stage_plan import (
    Move,
    Replica,
    move_for_balance,
    move_for_empty,
    place_joiner,
    plan_cuts,
    stage_costs,
    throughputs,
)

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


# --- replicas ----------------------------------------------------------------------------------------------------


def fleet(*rates: list[float]) -> list[list[Replica]]:
    """Replicas by stage; the newest are those of the last stage."""
    numbers = iter(range(1, 1000))
    return [[Replica(Member(f"hot{n}", 1, n), rate) for rate in here if (n := next(numbers))] for here in rates]


def test_joiner_goes_where_throughput_is_least() -> None:
    assert place_joiner(fleet([1.0], [0.5], [1.0])).stage == 1
    assert place_joiner(fleet([1.0], [0.5, 0.5], [1.0]))[0] == 0  # all equal: the lowest
    placed = place_joiner(fleet([1.0, 0.25], [1.0]))
    assert (placed.stage, placed.reason.code, placed.reason.numbers["replicas"]) == (1, "limits_throughput", 1)
    empty = place_joiner(fleet([], [0.001], []))
    assert (empty.stage, empty.reason.code, empty.reason.numbers) == (0, "stage_empty", {"empty_stages": 2})
    assert str(empty.reason) == "stage_empty empty_stages=2"


def test_seven_members_fill_three_stages_by_cost() -> None:
    costs = [1.0, 1.4, 1.0]
    stages: list[list[Replica]] = [[], [], []]
    for number in range(7):
        stage = place_joiner(stages).stage
        stages[stage].append(Replica(Member("hot", 1, number), 1.0 / costs[stage]))
    assert [len(s) for s in stages] == [2, 3, 2]
    assert min(throughputs(stages)) == 2.0


def test_no_move_empties_a_stage() -> None:
    assert move_for_empty(fleet([1.0], []), [1, 1]) is None
    assert move_for_empty(fleet([1.0], [1.0, 1.0]), [1, 1]) is None, "none is empty"
    moved = move_for_empty(fleet([1.0, 1.0], [1.0, 1.0, 1.0], []), [1, 1, 1])
    assert moved is not None
    assert (moved.member.number, moved.source, moved.target) == (5, 1, 2), "the newest of the fullest"
    assert moved.reason.code == "stage_is_empty"


def test_who_is_bound_does_not_move() -> None:
    stages = [[Replica(Member("a", 1, 1), 1.0), Replica(Member("b", 1, 2), 1.0, free=False)], []]
    moved = move_for_empty(stages, [1, 1])
    assert moved is not None
    assert moved.member.hotkey == "a"
    assert move_for_empty([[replica._replace(free=False) for replica in stages[0]], []], [1, 1]) is None


def test_a_move_has_to_be_worth_it() -> None:
    """Two of three against one: a move to and fro would change nothing; three against one doubles the pipeline."""
    assert move_for_balance(fleet([1.0, 1.0], [1.0]), [1, 1], 1.25) is None
    move = move_for_balance(fleet([1.0, 1.0, 1.0], [1.0]), [1, 1], 1.25)
    assert move is not None
    assert (move.source, move.target, move.reason.code) == (0, 1, "stage_starves")
    assert move.reason.numbers == {"microbatches_per_s": 1.0, "gain": 2.0, "moves": 1}
    assert move_for_balance(fleet([1.0] * 3, [1.0]), [1, 1], 2.01) is None
    assert move_for_balance(fleet([1.0] * 3, []), [1, 1], 1.25) is None, "an empty stage is another matter"


def test_two_starving_stages_are_helped_by_two_moves() -> None:
    """One move alone would leave the pipeline as slow as before."""
    move = move_for_balance(fleet([1.0], [1.0], [1.0] * 4), [1, 1, 1], 1.25)
    assert move is not None
    assert (move.source, move.target, move.reason.numbers["moves"]) == (2, 0, 2)


def test_the_one_that_helps_most_moves() -> None:
    """The fast one lifts the starving stage in one move."""
    stages = fleet([4.0, 4.0, 1.0, 1.0], [1.0])
    move = move_for_balance(stages, [1, 1], 1.25)
    assert move is not None
    assert (move.member.number, move.reason.numbers["gain"]) == (2, 5.0)


class Pipeline:
    """A fleet whose member ``k`` takes ``seconds[k][s]`` for an item of stage ``s``, whatever the planner believes."""

    def __init__(self, seconds: list[list[float]], costs: list[float], at: list[int]) -> None:
        self.seconds, self.costs = seconds, costs
        self.stages: list[list[int]] = [[k for k, stage in enumerate(at) if stage == s] for s in range(len(costs))]
        self.names = [Member(f"hot{k}", 1, k) for k in range(len(at))]

    def seen(self) -> list[list[Replica]]:
        """What is measured: each member where it is."""
        return [[Replica(self.names[k], 1 / self.seconds[k][s]) for k in here] for s, here in enumerate(self.stages)]

    def rates(self) -> list[float]:
        return throughputs(self.seen())

    def carry_out(self, move: Move) -> int:
        """The member leaves and joins anew, as the production code does it."""
        k = self.names.index(move.member)
        self.stages[move.source].remove(k)
        stage = place_joiner(self.seen()).stage
        self.names[k] = Member(f"hot{k}", 1, max(name.number for name in self.names) + 1)
        self.stages[stage].append(k)
        return stage

    def settle(self, factor: float = 1.25) -> list[Move]:
        moves: list[Move] = []
        while (move := move_for_empty(self.seen(), self.costs)) or (
            move := move_for_balance(self.seen(), self.costs, factor)
        ):
            before = sorted(self.rates())
            assert self.carry_out(move) == move.target, "who moves lands where it was wanted"
            assert self.stages[move.source], "no stage is emptied"
            assert sorted(self.rates()) > before, "what is poorest gets better with every move"
            moves.append(move)
            assert len(moves) <= 64, "it comes to an end"
        return moves


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_members=st.integers(1, 10))
def test_constant_speeds_come_to_rest_whatever_is_believed(
    data: st.DataObject, num_stages: int, num_members: int
) -> None:
    """Speeds may depend on member and stage in any way, far from the costs: no move is ever undone."""
    some = st.floats(0.05, 20.0)
    seconds = [[data.draw(some) for _ in range(num_stages)] for _ in range(num_members)]
    costs = [data.draw(some) for _ in range(num_stages)]
    pipeline = Pipeline(seconds, costs, [data.draw(st.integers(0, num_stages - 1)) for _ in range(num_members)])
    served = sum(bool(here) for here in pipeline.stages)
    moves = pipeline.settle()
    assert sum(bool(here) for here in pipeline.stages) >= served
    if num_members >= num_stages:
        assert all(pipeline.stages), "no stage stays empty while another has two"
    assert pipeline.settle() == []
    assert len(moves) <= 64


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_stages=st.integers(2, 4), num_members=st.integers(2, 12))
def test_equal_members_move_as_little_as_can_be_to_what_is_nearly_best(
    data: st.DataObject, num_stages: int, num_members: int
) -> None:
    costs = [data.draw(st.sampled_from([1.0, 1.5, 2.0, 3.0])) for _ in range(num_stages)]
    at = [data.draw(st.integers(0, num_stages - 1)) for _ in range(num_members)]
    pipeline = Pipeline([costs] * num_members, costs, at)
    start = [len(here) for here in pipeline.stages]
    moves = pipeline.settle()
    end = [len(here) for here in pipeline.stages]
    assert len(moves) == sum(abs(a - b) for a, b in zip(start, end, strict=True)) // 2, "no detours"
    assert len({move.member.hotkey for move in moves}) == len(moves), "nobody moves twice"
    every = product(range(num_members + 1), repeat=num_stages)
    best = max(min(n / c for n, c in zip(counts, costs, strict=True)) for counts in every if sum(counts) == num_members)
    assert min(pipeline.rates()) * 1.25 > best or best == 0
