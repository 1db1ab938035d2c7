"""What a run should look like on a fleet: stages, cuts, who serves what, codes; what a step takes, costs, and what would help.

A search over the number of stages with :mod:`iota.plan_estimate`; then the run file's own options one by one. Production cuts
for equal stages and evens out unequal GPUs by how many serve each; where a stage has too few GPUs for that, unequal cuts are
proposed as well, with what they would gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from iota.plan_estimate import StepTimes, estimate, item_s
from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan
from subnet.model.registry import Architecture, plan_model
from subnet.run.config import RunConfig
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet, GroupPart
from validator.stage_plan import plan_cuts

WORTH_IT = 1.03
"""An option is taken where the run gets so many times as fast; it has a price of its own."""
MAX_STAGES_TRIED = 24
RESERVE = 0.92
"""Of a GPU's memory may be used: the rest is the driver's and the allocator's."""


class StageNeeds(msgspec.Struct, frozen=True):
    """One stage of a proposal."""

    stage: int
    layers: int
    parameters: int
    gpus: dict[str, int]
    """By label of the fleet file's groups."""
    memory_bytes: int
    """Of one member, at its peak."""
    smallest_memory_gb: float
    """Of the GPUs that serve it."""
    compute_s: float
    merge_s: float
    link_bound: bool


class Help(msgspec.Struct, frozen=True):
    """A change and what it would make of the tokens per second (1.2: a fifth more)."""

    change: str
    factor: float


class Proposal(msgspec.Struct, frozen=True):
    """What is proposed, and what comes of it on a calm fleet."""

    run: str
    parameters: int
    stages: int
    cuts: tuple[int, ...]
    unequal_cuts: tuple[int, ...]
    """Cuts for unequal GPUs, where they gain: :attr:`unequal_factor` times the tokens per second."""
    unequal_factor: float
    microbatches: int
    boundary_code: str
    packing: str
    update_delay: int
    unused: dict[str, int]
    """GPUs that fit no stage."""
    times: StepTimes
    each_stage: tuple[StageNeeds, ...]
    tokens_per_s: float
    mfu: float
    usd_per_hour: float
    usd_per_million_tokens: float
    bytes_up_per_step: float
    """Of one member of the busiest stage: boundaries, slices, merged sums."""
    bytes_down_per_step: float
    why: tuple[str, ...]
    helps: tuple[Help, ...]
    """Best first."""

    @property
    def run_file(self) -> str:
        """The keys to set."""
        return (
            f"[pipeline] stages = {self.stages}, microbatches = {self.microbatches}, "
            f'boundary_code = "{self.boundary_code}", update_delay = {self.update_delay}; [merge] packing = "{self.packing}"'
        )


class _Option(msgspec.Struct, frozen=True):
    config: RunConfig
    costs: Any
    served: tuple[dict[int, int], ...]
    unused: dict[int, int]
    times: StepTimes

    @property
    def tokens_per_s(self) -> float:
        return self.config.tokens_per_step / self.times.step_s


def propose(config: RunConfig, architecture: Architecture, fleet: Fleet, *, stages: int | None = None) -> Proposal:
    """The best number of stages (or the given one) for this model on this fleet. Raises where the model fits nowhere."""
    most = min(architecture.num_layers, fleet.num_gpus, 256)
    tried = [stages] if stages is not None else _numbers_of_stages(most, config.pipeline.stages)
    options = [option for count in tried if (option := _option(config, architecture, fleet, count)) is not None]
    if not options:
        raise ConfigError(
            _no_fit(config, architecture, fleet, max(tried)), hint="GPUs with more memory, or smaller stages"
        )
    best = max(options, key=lambda option: option.tokens_per_s)
    best, why = _with_codes(best, architecture, fleet)
    reasons = [_why_stages(options, best, tried), *why, *_why_slow(best)]
    return _proposal(best, architecture, fleet, reasons)


def _numbers_of_stages(most: int, own: int) -> list[int]:
    """All, where they are few; else denser where they are small."""
    numbers = set(range(1, min(most, 12) + 1)) | {min(own, most), most}
    step = max(1, (most - 12) // max(1, MAX_STAGES_TRIED - 12))
    numbers |= set(range(12, most, step)) if most > 12 else set()
    return sorted(numbers)


def _changed(config: RunConfig, **pipeline: Any) -> RunConfig:
    return msgspec.structs.replace(config, pipeline=msgspec.structs.replace(config.pipeline, **pipeline))


def _option(config: RunConfig, architecture: Architecture, fleet: Fleet, count: int) -> _Option | None:
    """With so many stages, cut equally; None where some stage fits on no GPU."""
    flops = architecture.units(config.data.sequence_length).unit_flops_per_token
    staged = _changed(config, stages=count)
    return _cut(staged, plan_model(staged, architecture, plan_cuts(flops, count)), fleet)


def _cut(config: RunConfig, plan: ModelPlan, fleet: Fleet) -> _Option | None:
    costs = StageCosts(plan)
    found = assign(costs, fleet)
    if found is None:
        return None
    served, unused = found
    return _Option(config, costs, served, unused, estimate(costs, fleet, served))


def assign(costs: StageCosts, fleet: Fleet) -> tuple[tuple[dict[int, int], ...], dict[int, int]] | None:
    """Each GPU to the stage that is slowest so far, fast ones first, where its memory allows; None if a stage stays empty.

    What fits few stages is placed before what fits many.
    """
    stages = range(costs.num_stages)
    replicas = max(1, fleet.num_gpus // costs.num_stages)
    fits = [[stage for stage in stages if _fits(costs, group, stage, replicas)] for group in fleet.group]
    seconds = [[item_s(costs, group, stage)[0] for stage in stages] for group in fleet.group]
    order = sorted(range(len(fleet.group)), key=lambda number: (len(fits[number]), seconds[number][0]))
    served: tuple[dict[int, int], ...] = tuple({} for _ in stages)
    rates, counts, unused = [0.0] * costs.num_stages, [0] * costs.num_stages, dict[int, int]()
    for number in order:
        for _ in range(fleet.group[number].count):
            if not fits[number]:
                unused[number] = unused.get(number, 0) + 1
                continue
            stage = min(fits[number], key=lambda s: (counts[s] > 0, rates[s], s))
            served[stage][number] = served[stage].get(number, 0) + 1
            rates[stage] += 1 / seconds[number][stage]
            counts[stage] += 1
    return (served, unused) if all(served) else None


def _fits(costs: StageCosts, group: GroupPart, stage: int, replicas: int) -> bool:
    peak = costs.peak_bytes(stage, replicas, int(group.graph_memory_gb * 2**30))
    return peak <= RESERVE * group.gpu.memory_gb * 1e9


def _no_fit(config: RunConfig, architecture: Architecture, fleet: Fleet, count: int) -> str:
    flops = architecture.units(config.data.sequence_length).unit_flops_per_token
    plan = plan_model(_changed(config, stages=count), architecture, plan_cuts(flops, count))
    costs = StageCosts(plan)
    needs = max(costs.peak_bytes(stage, 1, 4 << 30) for stage in range(count)) / 1e9
    most = max(group.gpu.memory_gb for group in fleet.group)
    return f"with {count} stages the largest needs {needs:.1f} GB, or some stage has no GPU; the largest GPU has {most:g} GB"


# --- options of the run file -----------------------------------------------------------------------------------------


def _again(option: _Option, architecture: Architecture, fleet: Fleet, config: RunConfig) -> _Option | None:
    return _cut(config, plan_model(config, architecture, option.costs.plan.cuts), fleet)


def _with_codes(best: _Option, architecture: Architecture, fleet: Fleet) -> tuple[_Option, list[str]]:
    """Coded boundaries and exact widths, where links make them worth it."""
    why: list[str] = []
    bits = msgspec.structs.replace(best.config, merge=msgspec.structs.replace(best.config.merge, packing="bits"))
    for config, name in (
        (bits, 'merge.packing = "bits"'),
        (_changed(best.config, boundary_code="int8"), 'pipeline.boundary_code = "int8"'),
    ):
        merged = msgspec.structs.replace(
            best.config,
            merge=config.merge if "packing" in name else best.config.merge,
            pipeline=config.pipeline if "code" in name else best.config.pipeline,
        )
        other = _again(best, architecture, fleet, merged)
        if other is not None and other.tokens_per_s > WORTH_IT * best.tokens_per_s:
            why.append(
                f"{name}: links are what it waits for; {other.tokens_per_s / best.tokens_per_s:.2f} times the speed"
            )
            best = other
    return best, why


def _why_stages(options: Sequence[_Option], best: _Option, tried: Sequence[int]) -> str:
    count = best.costs.num_stages
    fewest = min(option.costs.num_stages for option in options)
    text = f"{count} stages"
    if len(tried) == 1:
        return text + ": as asked"
    if count == fewest and fewest > min(tried):
        return text + ": the fewest that fit into the GPUs' memory"
    if count == fewest:
        return text + ": the fewest; every further stage makes the way longer"
    return (
        text
        + f": {best.tokens_per_s / options[0].tokens_per_s:.2f} times the speed of {fewest}, whose merges are larger"
    )


def _why_slow(best: _Option) -> list[str]:
    times = best.times
    why = [
        f"of a step's {times.step_s:.3g} s, {times.compute_s:.3g} s are computing ({times.fill_s:.3g} s of them the way "
        f"down the pipeline and back) and {times.merge_s:.3g} s the merge"
    ]
    if any(times.link_bound):
        stages = [str(stage) for stage, bound in enumerate(times.link_bound) if bound]
        why.append(f"boundaries take the links of stages {', '.join(stages[:8])} longer than an item takes their GPUs")
    if times.recomputed:
        why.append("graphs don't fit into graph_memory_gb, so some forwards are done twice")
    return why


# --- the proposal ----------------------------------------------------------------------------------------------------


def _proposal(best: _Option, architecture: Architecture, fleet: Fleet, why: list[str]) -> Proposal:
    costs, config = best.costs, best.config
    unequal, factor = _unequal(best, architecture, fleet)
    up, down = _bytes(best)
    useful = costs.flops_per_step / best.times.step_s
    usd_per_s = fleet.usd_per_hour / 3600
    return Proposal(
        run=config.run.name,
        parameters=costs.plan.units.num_parameters,
        stages=costs.num_stages,
        cuts=costs.plan.cuts,
        unequal_cuts=unequal,
        unequal_factor=factor,
        microbatches=config.pipeline.microbatches,
        boundary_code=config.pipeline.boundary_code,
        packing=config.merge.packing,
        update_delay=config.pipeline.update_delay,
        unused={fleet.group[number].label: count for number, count in best.unused.items()},
        times=best.times,
        each_stage=tuple(_stage_needs(best, fleet, stage) for stage in range(costs.num_stages)),
        tokens_per_s=best.tokens_per_s,
        mfu=useful / fleet.peak_flops,
        usd_per_hour=fleet.usd_per_hour,
        usd_per_million_tokens=usd_per_s / best.tokens_per_s * 1e6,
        bytes_up_per_step=up,
        bytes_down_per_step=down,
        why=tuple(why),
        helps=tuple(sorted(_helps(best, architecture, fleet), key=lambda help: -help.factor)),
    )


def _stage_needs(best: _Option, fleet: Fleet, stage: int) -> StageNeeds:
    costs, here = best.costs, best.served[stage]
    replicas = sum(here.values())
    labels: dict[str, int] = {}
    for number, count in sorted(here.items()):
        label = fleet.group[number].label
        labels[label] = labels.get(label, 0) + count
    graph = max(int(fleet.group[number].graph_memory_gb * 2**30) for number in here)
    return StageNeeds(
        stage=stage,
        layers=len(costs.plan.layers_of(stage)),
        parameters=costs.params[stage],
        gpus=labels,
        memory_bytes=costs.peak_bytes(stage, replicas, graph),
        smallest_memory_gb=min(fleet.group[number].gpu.memory_gb for number in here),
        compute_s=best.times.stage_compute_s[stage],
        merge_s=best.times.stage_merge_s[stage],
        link_bound=best.times.link_bound[stage],
    )


def _bytes(best: _Option) -> tuple[float, float]:
    """(up, down) of a step, of the stage whose members move most."""
    from iota.plan import stage_wire

    replicas = [sum(stage.values()) for stage in best.served]
    wires = [stage_wire(best.costs.plan, stage, replicas) for stage in range(best.costs.num_stages)]
    return max(float(wire.up) for wire in wires), max(float(wire.down) for wire in wires)


def _unequal(best: _Option, architecture: Architecture, fleet: Fleet) -> tuple[tuple[int, ...], float]:
    """Cuts such that each stage gets layers by what its GPUs can do; () where that gains less than it is worth."""
    costs = best.costs
    speeds = [
        sum(count / item_s(costs, fleet.group[n], s)[0] for n, count in best.served[s].items()) * costs.stage_flops[s]
        for s in range(costs.num_stages)
    ]
    cuts = speed_cuts(costs.plan.units.unit_flops_per_token, speeds)
    if cuts is None or cuts == costs.plan.cuts:
        return (), 1.0
    other = StageCosts(plan_model(best.config, architecture, cuts))
    for stage, here in enumerate(best.served):
        if not all(_fits(other, fleet.group[number], stage, sum(here.values())) for number in here):
            return (), 1.0
    factor = best.times.step_s / estimate(other, fleet, best.served).step_s
    return (cuts, factor) if factor > WORTH_IT else ((), 1.0)


def speed_cuts(unit_costs: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """First layers such that the largest of (cost of a stage / its speed) is least; at least one layer a stage."""
    num_layers, num_stages = len(unit_costs) - 2, len(speeds)
    if num_stages > num_layers:
        return None
    before = [0.0, *accumulate(unit_costs[1:-1])]

    def cost(first: int, end: int, stage: int) -> float:
        edge = (unit_costs[0] if stage == 0 else 0.0) + (unit_costs[-1] if stage == num_stages - 1 else 0.0)
        return (before[end] - before[first] + edge) / speeds[stage]

    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost(0, end, 0), (0,)) for end in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        best = {
            end: min(
                (max(best[first][0], cost(first, end, stage)), (*best[first][1], first)) for first in range(stage, end)
            )
            for end in range(stage + 1, num_layers + 1)
        }
    return best[num_layers][1]


def _helps(best: _Option, architecture: Architecture, fleet: Fleet) -> list[Help]:
    """One change at a time, on the same cuts."""

    def groups(change: Callable[[GroupPart], GroupPart]) -> Fleet:
        return msgspec.structs.replace(fleet, group=tuple(change(group) for group in fleet.group))

    def faster(group: GroupPart, **times: float) -> GroupPart:
        return msgspec.structs.replace(group, **{name: getattr(group, name) * by for name, by in times.items()})

    store = msgspec.structs.replace(fleet.store, up_mbit=2 * fleet.store.up_mbit, down_mbit=2 * fleet.store.down_mbit)
    fleets = {
        "links twice as fast up": groups(lambda g: faster(g, up_mbit=2)),
        "links twice as fast down": groups(lambda g: faster(g, down_mbit=2)),
        "half the round-trip time": groups(lambda g: faster(g, rtt_ms=0.5)),
        "twice the graph memory": groups(lambda g: faster(g, graph_memory_gb=2)),
        "a store twice as fast": msgspec.structs.replace(fleet, store=store),
        "twice the compute": groups(lambda g: msgspec.structs.replace(g, tflops=2 * g.gpu.tflops)),
    }
    helps = [
        Help(name, best.times.step_s / estimate(best.costs, changed, best.served).step_s)
        for name, changed in fleets.items()
    ]
    pipeline = best.config.pipeline
    configs: dict[str, RunConfig] = {}
    if 2 * pipeline.microbatches * best.config.qmax < 2**24:
        configs["twice the microbatches (a larger batch)"] = _changed(
            best.config, microbatches=2 * pipeline.microbatches
        )
    if pipeline.boundary_code != "int4":
        configs['boundary_code = "int4"'] = _changed(best.config, boundary_code="int4")
    if not pipeline.update_delay:
        configs["update_delay = 1 (merges beside the next step)"] = _changed(best.config, update_delay=1)
    for name, config in configs.items():
        other = StageCosts(plan_model(config, architecture, best.costs.plan.cuts))
        speed = config.tokens_per_step / estimate(other, fleet, best.served).step_s
        helps.append(Help(name, speed / best.tokens_per_s))
    return [help for help in helps if help.factor > 1.005]
