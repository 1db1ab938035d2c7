"""``iota simulate``: a run file on a fleet file in virtual time, beside a calm fleet and the legacy model; figures and pictures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from iota.plan import human_bytes, human_count
from iota.simulate_tally import Figures
from iota.simulate_world import World
from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.run.config import RunConfig
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet
from subnet.simulate.legacy import ASSUMPTIONS, LegacyFigures, LegacySettings, simulate_legacy
from validator.stage_plan import plan_cuts

OURS = (
    "compute takes FLOPs / (vendor's dense bf16 peak x mfu of the fleet file); passes over memory take bytes / bandwidth",
    "links are queues at the fleet file's rates, boundaries before bulk; nothing is lost on them but what a fault cuts off",
    "no audits, no liars; every claim is true; boundaries, slices and states have the sizes of the real formats",
    "a killed process loses its state and fetches snapshot and log anew; after silence the state is still there",
    "the coordinator answers at once: its CPU is measured beside, and isn't a part of virtual time",
)


class Here(msgspec.Struct, frozen=True):
    """What this machine took: not a part of the simulation, and another each time."""

    coordinator_cpu_s_per_step: float
    simulator_s: float
    events_per_s: float


class Report(msgspec.Struct, frozen=True):
    """All that ``--json`` prints; ``here`` apart it is the same for the same files, seed and version."""

    run: str
    seed: int
    num_parameters: int
    figures: Figures
    calm: Figures | None
    """The same fleet without faults, where it has any."""
    cost_of_churn: float
    """Share of the calm throughput that faults take."""
    legacy: LegacyFigures | None
    assumptions: tuple[str, ...]
    here: Here | None


def model_of(config: RunConfig, cuts: tuple[int, ...] | None = None) -> ModelPlan:
    """The run's model cut as a submission would be."""
    chosen = config.model.config
    if chosen is None:
        from iota.submission import load_model

        architecture = load_model(config)[0]
    else:
        architecture = load_architecture(chosen)
    flops = architecture.units(config.data.sequence_length).unit_flops_per_token
    return plan_model(config, architecture, cuts or plan_cuts(flops, config.pipeline.stages))


def simulate(
    plan: ModelPlan,
    fleet: Fleet,
    *,
    num_steps: int,
    seed: int = 0,
    reference: bool = True,
    legacy: LegacySettings | None = None,
    pictures: Path | None = None,
) -> Report:
    """Simulates, and draws into ``pictures`` (a directory) if that is given."""
    if fleet.num_gpus < plan.num_stages:
        raise ConfigError(
            f"{fleet.num_gpus} GPUs can't serve {plan.num_stages} stages", hint="lower pipeline.stages, or add GPUs"
        )
    if num_steps < 1:
        raise ConfigError(f"--steps {num_steps} is not allowed", hint="allowed: 1 or more")
    began = time.perf_counter()
    shown = num_steps // 2 if pictures is not None else None
    world = World(plan, fleet, num_steps=num_steps, seed=seed, picture_step=shown).run()
    took_s = time.perf_counter() - began
    figures = world.tally.figures()
    calm: Figures | None = None
    if fleet.has_faults and reference:
        calm = World(plan, fleet.calm(), num_steps=min(num_steps, 10), seed=seed).run().tally.figures()
    if pictures is not None:
        from iota.simulate_pictures import draw

        draw(world, figures, pictures)
    old = simulate_legacy(StageCosts(plan), fleet, legacy, seed=seed) if legacy is not None else None
    return Report(
        run=plan.config.run.name,
        seed=seed,
        num_parameters=plan.units.num_parameters,
        figures=figures,
        calm=calm,
        cost_of_churn=1 - figures.tokens_per_s / calm.tokens_per_s if calm is not None else 0.0,
        legacy=old,
        assumptions=(*OURS, *(f"legacy [{source}]: {text}" for source, text in ASSUMPTIONS if old is not None)),
        here=Here(
            coordinator_cpu_s_per_step=world.coordinator.cpu_s / max(1, figures.steps),
            simulator_s=took_s,
            events_per_s=world.num_handled / took_s,
        ),
    )


def render(report: Report) -> Group:
    """For a terminal."""
    f = report.figures
    parts: list[Any] = [
        f"run {report.run}: {human_count(report.num_parameters)} parameters, {f.stages} stages on {f.gpus} GPUs; "
        f"{f.steps} steps in {f.seconds:,.1f} simulated seconds, seed {report.seed}",
        _headline(f),
        _shares(f.time_share),
        f"bytes a step: {', '.join(f'{kind} {human_bytes(size)}' for kind, size in f.bytes_per_step.items())}",
        f"journal a step: {f.records_per_step:,.0f} records, {human_bytes(f.journal_bytes_per_step)}; "
        f"{f.claims_per_step:,.0f} claims",
    ]
    if f.faults:
        faults = ", ".join(f"{count} {kind}" for kind, count in f.faults.items())
        parts.append(
            f"faults: {faults}; {f.redone_items} items dealt again; all {f.items_counted} microbatches counted once"
        )
    if report.calm is not None:
        parts.append(
            f"without faults {report.calm.tokens_per_s:,.0f} tokens/s: churn costs {100 * report.cost_of_churn:.1f} %"
        )
    if f.too_small:
        parts.append(f"warning: {f.too_small} GPUs hold less memory than the stage they were placed at needs")
    if report.here is not None:
        here = report.here
        parts.append(
            f"this machine: {here.coordinator_cpu_s_per_step:.3f} CPU s of the coordinator a step; simulated in "
            f"{here.simulator_s:.1f} s ({here.events_per_s:,.0f} events/s)"
        )
    if report.legacy is not None:
        parts.append(_compared(report.figures, report.legacy))
    parts.append("Assumed: " + "; ".join(report.assumptions) + ".")
    return Group(*parts)


def _headline(f: Figures) -> str:
    usd = f", ${f.usd_per_million_tokens:.2f} a million tokens" if f.usd_per_million_tokens else ""
    return (
        f"{f.tokens_per_s:,.0f} tokens/s, MFU {100 * f.mfu:.1f} %, {f.step_s:.3g} s a step "
        f"({100 * f.computing_share:.0f} % until its last item, the rest merging){usd}"
    )


def _shares(share: Mapping[str, float]) -> str:
    words = {"input": "waiting for input", "idle": "no work (imbalance)", "join": "joining", "lost": "lost to churn"}
    return "where time goes: " + ", ".join(f"{words.get(k, k)} {100 * v:.1f} %" for k, v in share.items())


def _compared(f: Figures, old: LegacyFigures) -> Table:
    table = Table(title="Beside the legacy model, same fleet", title_justify="left")
    for name in ("", "this", "legacy", "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    merge_s = f.step_s * (1 - f.computing_share)
    rows = (
        ("tokens/s", f.tokens_per_s, old.tokens_per_s),
        ("MFU, %", 100 * f.mfu, 100 * old.mfu),
        ("seconds of one merge", merge_s, old.merge_s),
        ("work thrown away, %", 100 * f.time_share["lost"], 100 * old.discarded_share),
    )
    for name, ours, theirs in rows:
        table.add_row(name, f"{ours:,.3g}", f"{theirs:,.3g}", f"{ours / theirs:.2f}" if theirs else "-")
    return table
