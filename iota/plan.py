"""What a run will need, before anything starts: stages, memory by stage, bytes on the wire and in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from subnet.errors import ConfigError
from subnet.model.data import ROW_GROUP_BYTES
from subnet.model.memory import (
    Budgets,
    StageMemory,
    boundary_bytes,
    boundary_bytes_per_token,
    graphs_in_flight,
    made_bytes,
    slice_bytes,
    stage_memory,
)
from subnet.model.plan import ModelPlan
from subnet.model.registry import check_run, load_architecture, plan_model
from subnet.model.unit_costs import measure_unit_costs as _measure
from subnet.numerics.codes import RAW
from subnet.numerics.state_arrays import ARRAYS, state_kinds
from subnet.run.audits import evidence_steps
from subnet.run.config import RunConfig
from validator.stage_plan import plan_cuts, stage_costs

JOURNAL_BYTES_PER_ITEM = 1200
"""Lease, receipts and commitments of one work item in the journal, about."""


class StageWire(msgspec.Struct, frozen=True):
    """Bytes a step that one replica sends and receives, on average where not every replica does it."""

    boundaries_up: int
    boundaries_down: int
    tokens_down: int
    """At most: row groups are kept."""
    slices_up: int
    slices_down: int
    merged_up: int
    merged_down: int
    snapshot_up: int

    @property
    def up(self) -> int:
        return self.boundaries_up + self.slices_up + self.merged_up + self.snapshot_up

    @property
    def down(self) -> int:
        return self.boundaries_down + self.tokens_down + self.slices_down + self.merged_down


class StagePlan(msgspec.Struct, frozen=True):
    """One stage: what it holds and what a miner that serves it needs."""

    stage: int
    first_layer: int
    num_layers: int
    num_parameters: int
    cost_share: float
    """Of the whole model's cost; the largest sets the pace."""
    num_graphs: int
    memory: StageMemory
    wire: StageWire


class StoreBytes(msgspec.Struct, frozen=True):
    """What the object store takes."""

    merged_per_step: int
    journal_per_step: int
    snapshot: int
    """One snapshot: weights, moments and scales."""
    horizon_steps: int
    """Merged gradients are kept back to the snapshot before the newest verified one."""

    @property
    def to_horizon(self) -> int:
        return self.horizon_steps * (self.merged_per_step + self.journal_per_step) + 2 * self.snapshot


class Plan(msgspec.Struct, frozen=True):
    """A whole run's needs."""

    name: str
    model: str
    num_parameters: int
    cuts: tuple[int, ...]
    unit_costs: tuple[float, ...]
    measured: bool
    """Whether unit costs are seconds of this machine; else FLOPs a token."""
    replicas: tuple[int, ...]
    num_steps: int
    tokens_per_step: int
    boundary_code: str
    boundary_bytes_per_token: float
    """One way, at one boundary."""
    evidence: tuple[int, ...]
    """Bytes of boundaries that a miner keeps on its disk for audits: while these keep up, and at most."""
    raw_bytes_per_token: int
    """Without a code."""
    stages: tuple[StagePlan, ...]
    store: StoreBytes
    lanes: int = 0
    """Of a round; 0: a merge each step."""
    inner_steps: int = 1

    @property
    def step_compute_s(self) -> float | None:
        """Compute of a step, all stages in one thread; None without a measurement."""
        return sum(self.unit_costs) if self.measured else None


def measure_unit_costs(config: RunConfig, model_config: Mapping[str, Any], *, budget_s: float = 20.0) -> list[float]:
    """Seconds of a *microbatch* for [embedding, layer 0, ..., head], measured on this machine."""
    architecture = load_architecture(model_config)
    check_run(config, architecture)
    return [cost * config.pipeline.chunks for cost in _measure(config, architecture, budget_s=budget_s)]


def make_plan(
    config: RunConfig,
    model_config: Mapping[str, Any] | None = None,
    *,
    unit_costs: Sequence[float] | None = None,
    replicas: Sequence[int] | int = 1,
) -> Plan:
    """Plan a run. Without ``unit_costs`` (from :func:`measure_unit_costs`) stages are cut by FLOPs."""
    chosen = model_config if model_config is not None else config.model.config
    if chosen is None:
        raise ConfigError("the run's model config isn't known", hint="give the config.json of model.pretrained")
    architecture = load_architecture(chosen)
    check_run(config, architecture)
    flops = architecture.units(config.data.sequence_length).unit_flops_per_token
    costs = tuple(unit_costs) if unit_costs is not None else flops
    if len(costs) != architecture.num_layers + 2:
        raise ConfigError(
            f"{len(costs)} unit costs for {architecture.num_layers} layers", hint="embedding, each layer, head"
        )
    num_stages = config.pipeline.stages
    served = (replicas,) * num_stages if isinstance(replicas, int) else tuple(replicas)
    if len(served) != num_stages or any(count < 1 for count in served):
        raise ConfigError(
            f"replicas = {list(served)} is not allowed", hint=f"one number above 0 for each of {num_stages} stages"
        )
    plan = plan_model(config, architecture, plan_cuts(costs, num_stages))
    shares = stage_costs(costs, plan.cuts)
    total = sum(shares) or 1.0
    snapshot = snapshot_bytes(plan)
    stages = tuple(
        StagePlan(
            stage=stage,
            first_layer=first,
            num_layers=end - first,
            num_parameters=sum(spec.num_elements for spec in plan.stage_tensors[stage]),
            cost_share=shares[stage] / total,
            num_graphs=graphs_in_flight(plan, stage),
            memory=stage_memory(plan, stage, Budgets(replicas=served[stage])),
            wire=stage_wire(plan, stage, served),
        )
        for stage, (first, end) in enumerate(pairwise([*plan.cuts, architecture.num_layers]))
    )
    items = (config.num_items + config.num_evaluation_items) * num_stages
    store = StoreBytes(
        merged_per_step=sum(slice_bytes(plan, s, config.num_items) for s in plan.layout.sections),
        journal_per_step=JOURNAL_BYTES_PER_ITEM * items,
        snapshot=snapshot,
        horizon_steps=min(config.run.steps, 2 * config.snapshot.every_steps),
    )
    return Plan(
        name=config.run.name,
        model=architecture.family.model_type,
        num_parameters=plan.units.num_parameters,
        cuts=plan.cuts,
        unit_costs=costs,
        measured=unit_costs is not None,
        replicas=served,
        num_steps=config.run.steps,
        tokens_per_step=config.tokens_per_step,
        boundary_code=config.pipeline.boundary_code,
        boundary_bytes_per_token=boundary_bytes_per_token(plan),
        raw_bytes_per_token=4 * plan.hidden_size,
        evidence=tuple(
            max(made_bytes(plan, stage, count) for stage, count in enumerate(served)) * steps
            for steps in evidence_steps(config)
        ),
        stages=stages,
        store=store,
        lanes=config.lanes.count if config.lanes.on else 0,
        inner_steps=config.lanes.inner_steps,
    )


def snapshot_bytes(plan: ModelPlan) -> int:
    """Weights, moments and scales of the whole model."""
    trained = (spec for spec in plan.canonical if plan.is_trainable(spec.name))
    return sum(ARRAYS[kind].num_bytes(spec) for spec in trained for kind in state_kinds(plan.config))


def stage_wire(plan: ModelPlan, stage: int, replicas: Sequence[int]) -> StageWire:
    """What one of ``replicas[stage]`` miners moves in a step."""
    config, layout = plan.config, plan.layout
    share = config.num_items * config.parts_per_item / replicas[stage]
    directions = (not plan.is_first(stage)) + (not plan.is_last(stage))
    boundaries = int(share * directions * boundary_bytes(plan))
    reads_tokens = plan.needs_tokens(stage)
    slices = merged_up = merged_down = snapshot = 0.0
    for index in layout.stage_sections[stage]:
        section = layout.sections[index]
        holders = sum(replicas[s] for s in section.stages)
        size = slice_bytes(plan, section, config.num_items)
        slices += size * (holders - 1) / holders
        merged_up += size / holders
        merged_down += size * (holders - 1) / holders
        kinds = state_kinds(plan.config)
        state = sum(ARRAYS[kind].num_bytes(span.spec) for span in section.tensors for kind in kinds)
        snapshot += state / holders / config.snapshot.every_steps
    return StageWire(
        boundaries_up=boundaries,
        boundaries_down=boundaries,
        tokens_down=int(share * config.pipeline.microbatch_rows) * ROW_GROUP_BYTES if reads_tokens else 0,
        slices_up=int(slices),
        slices_down=int(slices),
        merged_up=int(merged_up),
        merged_down=int(merged_down),
        snapshot_up=int(snapshot),
    )


def human_bytes(size: float) -> str:
    """``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def human_count(count: float) -> str:
    """``29.5M``."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def render(plan: Plan) -> Group:
    """The plan as tables for a terminal."""
    by = "measured here" if plan.measured else "by FLOPs, not measured"
    lines = [
        f"run {plan.name}: {plan.model}, {human_count(plan.num_parameters)} parameters, {plan.num_steps} steps of "
        f"{plan.tokens_per_step} tokens; cut {by}",
        f"boundaries: {plan.boundary_code}, {plan.boundary_bytes_per_token:.0f} bytes a token and boundary each way"
        + (f" (raw: {plan.raw_bytes_per_token})" if plan.boundary_code != RAW else ""),
        f"evidence: {human_bytes(plan.evidence[0])} of boundaries kept by a miner of the stage with most, at most "
        f"{human_bytes(plan.evidence[1])} (see --limit.boundary_disk_gib)",
    ]
    if plan.lanes:
        merged = max(plan.stages, key=lambda s: s.wire.slices_up + s.wire.merged_up).wire
        lines.append(
            f"lanes: a step is a round of {plan.lanes} lanes, {plan.inner_steps} inner steps each; merging takes at most "
            f"{human_bytes((merged.slices_up + merged.merged_up) / plan.inner_steps)} up an inner step, all else is boundaries"
        )
    store = plan.store
    store_lines = [
        f"store: {human_bytes(store.merged_per_step)} merged gradients and {human_bytes(store.journal_per_step)} journal "
        f"a step, {human_bytes(store.snapshot)} a snapshot; {human_bytes(store.to_horizon)} to the retention horizon "
        f"({store.horizon_steps} steps, 2 snapshots)"
    ]
    return Group(*lines, _stage_table(plan), _memory_table(plan), _wire_table(plan), *store_lines)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _stage_table(plan: Plan) -> Table:
    table = _table("Stages", ["stage", "layers", "parameters", "share of cost", "replicas", "graphs in flight"])
    for s in plan.stages:
        layers = f"{s.first_layer} to {s.first_layer + s.num_layers - 1}"
        share = f"{100 * s.cost_share:.1f} %"
        replicas = str(plan.replicas[s.stage])
        table.add_row(str(s.stage), layers, human_count(s.num_parameters), share, replicas, str(s.num_graphs))
    return table


def _memory_table(plan: Plan) -> Table:
    names = [f"stage {s.stage}" for s in plan.stages]
    table = _table("Memory of a miner, above its level after import", ["", "when", *names])
    for number, term in enumerate(plan.stages[0].memory.terms):
        sizes = [human_bytes(s.memory.terms[number].size_bytes) for s in plan.stages]
        table.add_row(term.name, term.phase, *sizes)
    table.add_section()
    table.add_row("peak", "", *[human_bytes(s.memory.peak_bytes) for s in plan.stages])
    return table


def _wire_table(plan: Plan) -> Table:
    names = [f"stage {s.stage}" for s in plan.stages]
    table = _table(f"Bytes on the wire, a {'round' if plan.lanes else 'step'} and replica (up / down)", ["", *names])
    rows: list[tuple[str, str | None, str | None]] = [
        ("boundaries", "boundaries_up", "boundaries_down"),
        ("tokens (at most)", None, "tokens_down"),
        ("packed slices", "slices_up", "slices_down"),
        ("merged slices", "merged_up", "merged_down"),
        ("snapshot (average)", "snapshot_up", None),
        ("all", "up", "down"),
    ]
    for name, up, down in rows:
        cells = [
            " / ".join("-" if field is None else human_bytes(getattr(s.wire, field)) for field in (up, down))
            for s in plan.stages
        ]
        table.add_row(name, *cells)
    return table
