"""Seconds of a step on a fleet, by formula: the simulator's own costs, without its queues and without faults.

Compute is what the slowest stage needs for its share plus the way down the pipeline and back; a merge is the sum of its passes
over memory, its bytes over the slowest link of the stage, and its round trips. Its error against the simulator is in
docs/simulate.md, and tests hold it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from subnet.simulate import costs as passes
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet, GroupPart
from subnet.simulate.links import BYTES_PER_MBIT
from validator.coordinator import TURN_GAP_MAX_S, TURN_GAP_MEMBER_S
from validator.decide_leases import window
from validator.policy import Policy

Served = Sequence[Mapping[int, int]]
"""By stage: how many GPUs of each group of the fleet file."""

ONE_WAYS = 9
"""Messages of a merge, one after the other: freeze, commitment, order, sums, seed, fingerprint, check, seal, update."""
TURNS = 8
STORE_TRIPS = 3
"""Sums put, sums fetched, and the journal's segment with the seals."""


class StepTimes(msgspec.Struct, frozen=True):
    """Seconds of a step; ``compute_s`` by stage is of its slowest member, ``merge_s`` by stage."""

    step_s: float
    compute_s: float
    """From the opening to the last item: work of the slowest stage, and the way."""
    fill_s: float
    """Of it: the way down and back, in which the slowest stage has nothing yet, or nothing more."""
    merge_s: float
    stage_compute_s: tuple[float, ...]
    stage_merge_s: tuple[float, ...]
    link_bound: tuple[bool, ...]
    """By stage: whether boundaries take its links longer than an item its GPU."""
    recomputed: bool
    """Whether forwards are done again for want of graph memory."""


def estimate(costs: StageCosts, fleet: Fleet, served: Served, policy: Policy | None = None) -> StepTimes:
    """Of a calm step. ``served`` has at least one GPU at each stage."""
    config = costs.plan.config
    delay = config.pipeline.update_delay
    counts = [sum(stage.values()) for stage in served]
    stages = range(costs.num_stages)
    items: list[float] = []
    fills: list[float] = []
    bound: list[bool] = []
    again = False
    for stage in stages:
        each: list[tuple[float, int]] = []
        limited = False
        for number, count in served[stage].items():
            gpu_s, recomputes = item_s(costs, fleet.group[number], stage)
            link_s = item_link_s(costs, fleet, fleet.group[number], stage)
            again = again or recomputes
            limited = limited or link_s > gpu_s
            each.append((max(gpu_s, link_s), count))
        items.append(makespan(each, config.pipeline.microbatches))
        fills.append(sum(s * n for s, n in each) / counts[stage])
        bound.append(limited)
    hops_s = sum(hop_s(costs, fleet, served, stage) for stage in stages[:-1])
    slowest = max(stages, key=lambda stage: items[stage])
    fill_s = sum(fills) - fills[slowest] + 2 * hops_s
    way_s = sum(fills) + 2 * hops_s
    first_s = fills[0]
    ahead = window(policy or Policy(), costs.num_stages, first_s, by_store=_by_store(costs, fleet)) * counts[0]
    starved_s = way_s * config.pipeline.microbatches / ahead
    compute_s = max(items[slowest] + fill_s, starved_s) + start_s(fleet)
    merges = [stage_merge_s(costs, fleet, served, stage) for stage in stages]
    merge_s = max(merges)
    step_s = compute_s + merge_s
    if delay:  # side by side, but for the links: boundaries go first there
        share = config.pipeline.microbatches
        busy_s = [
            max(item_link_s(costs, fleet, fleet.group[n], s) for n in served[s]) * share / counts[s] for s in stages
        ]
        step_s = max(compute_s, merge_s + max(busy_s))
    return StepTimes(step_s, compute_s, fill_s, merge_s, tuple(items), tuple(merges), tuple(bound), again)


def makespan(each: Sequence[tuple[float, int]], num_items: int) -> float:
    """Seconds until so many items are done by GPUs of (seconds an item, how many), each doing whole ones."""
    rate = sum(count / seconds for seconds, count in each)
    candidates = sorted(
        {seconds * k for seconds, _ in each for k in range(1, 2 + math.ceil(num_items / rate / seconds + 1))}
    )
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        done = sum(count * math.floor(candidates[middle] / seconds + 1e-9) for seconds, count in each)
        low, high = (low, middle) if done >= num_items else (middle + 1, high)
    return candidates[low]


def item_s(costs: StageCosts, group: GroupPart, stage: int) -> tuple[float, bool]:
    """Forward, backward and adding of one microbatch on one GPU, and whether its forward is done twice."""
    whole_s = costs.item_s(stage, group.gpu)
    last = stage == costs.num_stages - 1
    room = max(1, int(group.graph_memory_gb * 2**30 / max(1, costs.graph_bytes[stage])))
    again = not last and room < min(costs.num_stages - stage, costs.plan.config.pipeline.microbatches)
    # while the pipeline fills, one graph more waits for each stage behind; those beyond the budget are made again
    share = max(0.0, 1 - room / max(1, costs.num_stages - stage)) if again else 0.0
    extra_s = share * whole_s * passes.FORWARD_SHARE
    add_s = costs.pass_s(stage, group.gpu, passes.ADD_BYTES)
    return whole_s + extra_s + add_s + 2 * group.item_overhead_ms / 1000, again


def _rates(group: GroupPart) -> tuple[float, float]:
    share = BYTES_PER_MBIT / min(group.per_link, group.count)
    return group.up_mbit * share, group.down_mbit * share


def item_link_s(costs: StageCosts, fleet: Fleet, group: GroupPart, stage: int) -> float:
    """Seconds that one item's boundaries keep the busier direction of the link."""
    directions = (stage > 0) + (stage < costs.num_stages - 1)
    up, down = _rates(group)
    size = directions * costs.boundary_bytes
    own_s = max(size / up, size / down)
    if not _by_store(costs, fleet):
        return own_s
    whole = 2 * (costs.num_stages - 1) * costs.boundary_bytes
    store = min(fleet.store.up_mbit, fleet.store.down_mbit) * BYTES_PER_MBIT
    return max(own_s, whole / costs.num_stages / store * fleet.num_gpus)


def _by_store(costs: StageCosts, fleet: Fleet) -> bool:
    return costs.plan.config.pipeline.boundaries == "store" or any(not group.reachable for group in fleet.group)


def hop_s(costs: StageCosts, fleet: Fleet, served: Served, stage: int) -> float:
    """One boundary from a member of the stage to one of the next, in the mean."""

    def mean(at: int, of_group: list[float]) -> float:
        return sum(count * of_group[number] for number, count in served[at].items()) / sum(served[at].values())

    up_s = [costs.boundary_bytes / _rates(group)[0] for group in fleet.group]
    down_s = [costs.boundary_bytes / _rates(group)[1] for group in fleet.group]
    one_way_s = [(group.rtt_ms + fleet.validator.rtt_ms) / 2000 for group in fleet.group]
    travel_s = mean(stage, one_way_s) + mean(stage + 1, one_way_s)
    sent_s = max(mean(stage, up_s), mean(stage + 1, down_s))
    if _by_store(costs, fleet):
        return 2 * sent_s + 2 * travel_s + fleet.store.rtt_ms / 500 + TURN_GAP_MAX_S
    return sent_s + travel_s


def one_way_s(fleet: Fleet) -> float:
    """Of the slowest member."""
    return (max(group.rtt_ms for group in fleet.group) + fleet.validator.rtt_ms) / 2000


def turn_s(fleet: Fleet) -> float:
    """A claim's wait for the coordinator's next turn, and the commit behind it."""
    return min(TURN_GAP_MAX_S, TURN_GAP_MEMBER_S * fleet.num_gpus) / 2 + fleet.validator.commit_ms / 1000


def start_s(fleet: Fleet) -> float:
    """From the last update reported to the first leases at work."""
    return one_way_s(fleet) + turn_s(fleet)


def stage_merge_s(costs: StageCosts, fleet: Fleet, served: Served, stage: int) -> float:
    """From the stage's last item to its members' new state, if all its links are otherwise idle."""
    plan = costs.plan
    group = plan.layout.groups[plan.layout.group_of_stage[stage]]
    microbatches = plan.config.pipeline.microbatches
    replicas = sum(served[stage].values())
    holders = sum(sum(served[s].values()) for s in group.stages)
    share = max(1, round(microbatches / replicas))
    merged = costs.partition_bytes(group, microbatches, calibration=False)
    partial = costs.partition_bytes(group, share, calibration=False)
    held = [p for p, part in enumerate(group.partitions) if stage in plan.layout.sections[part.section].stages]
    whole, own = sum(merged[p] for p in held), sum(partial[p] for p in held)
    num_owned = math.ceil(len(held) / replicas)  # the busiest owner sets the pace
    owned = max(num_owned / len(held), 1 / replicas)
    rates = [_rates(fleet.group[number]) for number in served[stage]]
    up, down = min(rate[0] for rate in rates), min(rate[1] for rate in rates)
    store_up = fleet.store.up_mbit * BYTES_PER_MBIT / fleet.num_gpus
    store_down = fleet.store.down_mbit * BYTES_PER_MBIT / fleet.num_gpus
    slices_s = max(own * (1 - 1 / replicas) / up, own * owned * (holders - 1) / down) if holders > 1 else 0.0
    fetched = whole * (1 - 1 / replicas)
    store_s = max(whole / replicas / store_down, fetched / store_up)  # one while the other goes on
    sums_s = max(whole * owned / up + fetched / down, store_s)
    gpus = [fleet.group[number].gpu for number in served[stage]]
    memory_s = max(
        costs.pass_s(stage, gpu, passes.COMMIT_BYTES)
        + costs.pass_s(stage, gpu, passes.REDUCE_BYTES, owned) * holders
        + 2 * costs.pass_s(stage, gpu, passes.FINGERPRINT_BYTES)
        + costs.pass_s(stage, gpu, passes.UPDATE_BYTES)
        for gpu in gpus
    )
    trips_s = ONE_WAYS * one_way_s(fleet) + TURNS * turn_s(fleet) + STORE_TRIPS * fleet.store.rtt_ms / 1000
    return slices_s + sums_s + memory_s + trips_s
