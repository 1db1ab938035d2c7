"""Where a model is cut and where a joiner goes: pure, exact, with reasons; no stage loses its last layer or member."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from subnet.errors import ConfigError


class Reason(msgspec.Struct, frozen=True):
    """Why, as a code with its numbers; rendered at the edge."""

    code: str
    numbers: dict[str, float] = {}

    def __str__(self) -> str:
        return " ".join([self.code, *(f"{name}={value:g}" for name, value in self.numbers.items())])


class Placement(NamedTuple):
    stage: int
    reason: Reason


class Move(NamedTuple):
    """A member is better used at another stage."""

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


def throughputs(stage_cost: Sequence[float], stage_speeds: Sequence[Sequence[float]]) -> list[float]:
    """Microbatches a second of each stage: the sum of its members' speeds over the cost of one microbatch."""
    if len(stage_cost) != len(stage_speeds):
        raise ValueError(f"{len(stage_cost)} costs for {len(stage_speeds)} stages")
    return [
        sum(speeds) / cost if cost > 0 else (float("inf") if speeds else 0.0)
        for cost, speeds in zip(stage_cost, stage_speeds, strict=True)
    ]


def place_joiner(stage_cost: Sequence[float], stage_speeds: Sequence[Sequence[float]]) -> Placement:
    """The stage that a new member helps most: one that nobody serves, else the one that limits throughput.

    ``stage_cost[s]`` is the cost of a microbatch, ``stage_speeds[s]`` the relative speeds of the live members at s
    (1.0 where nothing is measured). Ties go to the lowest stage.
    """
    rates = throughputs(stage_cost, stage_speeds)
    stage = min(range(len(rates)), key=lambda s: (bool(stage_speeds[s]), rates[s], s))
    if not stage_speeds[stage]:
        return Placement(stage, Reason("stage_empty", {"empty_stages": sum(not speeds for speeds in stage_speeds)}))
    numbers = {"replicas": len(stage_speeds[stage]), "microbatches_per_s": rates[stage]}
    return Placement(stage, Reason("limits_throughput", numbers))


def move_for_empty(stage_cost: Sequence[float], stage_speeds: Sequence[Sequence[float]]) -> Move | None:
    """From where a member would best go to an empty stage, or None; a stage's last member never moves."""
    empty = [stage for stage, speeds in enumerate(stage_speeds) if not speeds]
    rich = [stage for stage, speeds in enumerate(stage_speeds) if len(speeds) > 1]
    if not empty or not rich:
        return None
    rates = throughputs(stage_cost, stage_speeds)
    source = max(rich, key=lambda s: (rates[s], -s))
    return Move(source, empty[0], Reason("stage_empty", {"replicas_at_source": len(stage_speeds[source])}))
