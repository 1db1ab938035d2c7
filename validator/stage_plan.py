"""Where a model is cut, where a joiner goes and who moves: pure, exact, with reasons; no stage loses its last layer or member.

A move is a removal and a joining: who moves goes where :func:`place_joiner` puts a joiner once it is away, so the rejoin
lands where the plan wanted it. Every move raises the poorest stage and leaves its source above where that one was; so the
sorted throughputs rise with each, whatever was estimated, and moves come to an end (``tests/test_stage_plan.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from subnet.errors import ConfigError
from subnet.words import Member

MAX_LOOK_AHEAD = 16
"""Moves that are thought of at once; more are found out one look later."""


class Reason(msgspec.Struct, frozen=True):
    """Why, as a code with its numbers; rendered at the edge."""

    code: str
    numbers: dict[str, float] = {}

    def __str__(self) -> str:
        return " ".join([self.code, *(f"{name}={value:g}" for name, value in self.numbers.items())])


class Placement(NamedTuple):
    stage: int
    reason: Reason


class Replica(NamedTuple):
    """A live member of a stage. ``free``: it may move, as far as it is concerned."""

    name: Member
    rate: float
    """Microbatches a second that it does at its stage."""
    free: bool = True


class Move(NamedTuple):
    """A member is better used at another stage."""

    member: Member
    source: int
    target: int
    reason: Reason


def stage_costs(unit_costs: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """Cost of each stage: its layers, the embedding with the first, the head with the last."""
    num_layers = len(unit_costs) - 2
    costs = [sum(unit_costs[1 + first : 1 + end]) for first, end in pairwise([*cuts, num_layers])]
    costs[0] += unit_costs[0]
    costs[-1] += unit_costs[-1]
    return costs


def plan_cuts(unit_costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """First layer of each stage such that the slowest stage is as fast as it can be.

    ``unit_costs`` are those of [embedding, layer 0, ..., head]. Of equally good cuts the one is taken whose sum of
    squared stage costs is least, then the one that cuts earliest, so that the answer is one.
    """
    num_layers = len(unit_costs) - 2
    if num_layers < 1 or any(not 0 <= cost < float("inf") for cost in unit_costs):
        raise ConfigError(
            f"unit costs {list(unit_costs)} are not allowed", hint="embedding, layers and head, 0 or more"
        )
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"pipeline.stages = {num_stages} is not allowed: the model has {num_layers} layers",
            hint=f"allowed: 1 to {num_layers}",
        )
    before = [0.0, *accumulate(unit_costs[1:-1])]

    def cost(first: int, end: int, stage: int) -> float:
        edge = (unit_costs[0] if stage == 0 else 0.0) + (unit_costs[-1] if stage == num_stages - 1 else 0.0)
        return before[end] - before[first] + edge

    # best[end] after stage s: (slowest, sum of squares, cuts) of s + 1 stages over layers [0, end)
    best = {end: (cost(0, end, 0), cost(0, end, 0) ** 2, (0,)) for end in range(1, num_layers - num_stages + 2)}
    for stage in range(1, num_stages):
        later: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_layers - num_stages + stage + 2):
            found: tuple[float, float, tuple[int, ...]] | None = None
            for first in range(end - 1, stage - 1, -1):
                own = cost(first, end, stage)
                if found is not None and own > found[0]:
                    break  # more layers only make this stage slower
                slowest, squares, cuts = best[first]
                option = (max(slowest, own), squares + own**2, (*cuts, first))
                found = option if found is None else min(found, option)
            assert found is not None
            later[end] = found
        best = later
    return best[num_layers][2]


def throughputs(stages: Sequence[Sequence[Replica]]) -> list[float]:
    """Microbatches a second of each stage."""
    return [sum(replica.rate for replica in replicas) for replicas in stages]


def place_joiner(stages: Sequence[Sequence[Replica]]) -> Placement:
    """The stage that a new member helps most: one that nobody serves, else the one that limits throughput.

    Ties go to the lowest stage.
    """
    rates = throughputs(stages)
    empty = sum(not replicas for replicas in stages)
    stage = _poorest([len(replicas) for replicas in stages], rates)
    if empty:
        return Placement(stage, Reason("stage_empty", {"empty_stages": empty}))
    numbers = {"replicas": len(stages[stage]), "microbatches_per_s": rates[stage]}
    return Placement(stage, Reason("limits_throughput", numbers))


def _poorest(counts: Sequence[int], rates: Sequence[float]) -> int:
    return min(range(len(rates)), key=lambda s: (counts[s] > 0, rates[s], s))


def move_for_empty(stages: Sequence[Sequence[Replica]], stage_cost: Sequence[float]) -> Move | None:
    """Who would best go to an empty stage, or None: a stage's last member never moves."""
    if all(stages):
        return None
    found = _best_move(stages, stage_cost)
    if found is None:
        return None
    reason = Reason("stage_is_empty", {"replicas_at_source": len(stages[found.source])})
    return Move(found.member, found.source, found.target, reason)


def move_for_balance(stages: Sequence[Sequence[Replica]], stage_cost: Sequence[float], factor: float) -> Move | None:
    """The first of the fewest moves, one after the other, that make the pipeline ``factor`` times as fast; or None.

    More than one move may be needed where several stages are equally poor.
    """
    before = min(throughputs(stages))
    if before <= 0:
        return None
    now = [list(replicas) for replicas in stages]
    first: Move | None = None
    for number in range(1, MAX_LOOK_AHEAD + 1):
        move = _best_move(now, stage_cost)
        if move is None:
            return None
        first = first or move
        _carry_out(now, move, stage_cost)
        gain = min(throughputs(now)) / before
        if gain >= factor:
            reason = Reason("stage_starves", {"microbatches_per_s": before, "gain": gain, "moves": number})
            return Move(first.member, first.source, first.target, reason)
    return None


def _best_move(stages: Sequence[Sequence[Replica]], stage_cost: Sequence[float]) -> Move | None:
    """The move that leaves the slower of its two stages fastest; of equally good ones that of the newest member.

    Its source stays faster than its target was: what is made poorer is never as poor as what was helped.
    """
    counts, rates = [len(replicas) for replicas in stages], throughputs(stages)
    best: tuple[tuple[float, float, int, int], Move] | None = None
    for source, replicas in enumerate(stages):
        if len(replicas) < 2:
            continue
        for replica in replicas:
            left = sum(other.rate for other in replicas if other is not replica)
            if not replica.free:
                continue
            target = _poorest(counts, [*rates[:source], left, *rates[source + 1 :]])
            if target == source or left <= rates[target]:
                continue
            gained = rates[target] + _rate_at(replica, stage_cost, source, target)
            rank = (min(left, gained), left, replica.name.term, replica.name.number)
            if best is None or rank > best[0]:
                best = rank, Move(replica.name, source, target, Reason("better_there"))
    return best[1] if best else None


def _rate_at(replica: Replica, stage_cost: Sequence[float], source: int, target: int) -> float:
    """Its rate at another stage: as many times lower as a microbatch costs more there."""
    return replica.rate * stage_cost[source] / stage_cost[target]


def _carry_out(stages: list[list[Replica]], move: Move, stage_cost: Sequence[float]) -> None:
    mover = next(replica for replica in stages[move.source] if replica.name == move.member)
    stages[move.source].remove(mover)
    rate = _rate_at(mover, stage_cost, move.source, move.target)
    stages[move.target].append(Replica(mover.name, rate, free=False))
