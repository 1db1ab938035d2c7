"""A proposal of :mod:`iota.plan_fleet` as text and tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from iota.plan import human_bytes, human_count
from iota.plan_fleet import Proposal
from subnet.simulate.fleet import Fleet


def render(proposal: Proposal, fleet: Fleet) -> Group:
    """What to set, what comes of it, why, and what would help."""
    p = proposal
    kinds = ", ".join(f"{group.count} {group.label}" for group in fleet.group)
    parts: list[Any] = [
        f"run {p.run}: {human_count(p.parameters)} parameters on {kinds}",
        f"proposed: {p.run_file}",
        f"expected on a calm fleet: {p.tokens_per_s:,.0f} tokens/s, MFU {100 * p.mfu:.1f} %, {p.times.step_s:.3g} s a step, "
        f"${p.usd_per_million_tokens:.2f} a million tokens (${p.usd_per_hour:,.2f} an hour)",
        f"bytes a step of the busiest member: {human_bytes(p.bytes_up_per_step)} up, {human_bytes(p.bytes_down_per_step)} down",
        _stages(p),
        "why:",
        *(f"  - {reason}" for reason in p.why),
    ]
    if p.unused:
        unused = ", ".join(f"{count} {label}" for label, count in p.unused.items())
        parts.append(f"unused, too little memory for any stage: {unused}")
    if p.unequal_cuts:
        parts.append(
            f"unequal cuts for unequal GPUs, first layers {', '.join(map(str, p.unequal_cuts))}: "
            f"{p.unequal_factor:.2f} times the speed"
        )
    if p.helps:
        parts += [
            "what would help most:",
            *(f"  - {help.change}: {help.factor:.2f} times the tokens/s" for help in p.helps),
        ]
    parts.append("GPU rates are vendors' peaks times the fleet file's mfu; `iota simulate` adds queues and faults.")
    return Group(*parts)


def _stages(p: Proposal) -> Table:
    table = Table(title="Stages", title_justify="left")
    for name in ("stage", "layers", "parameters", "GPUs", "memory of one", "of", "computing", "merge"):
        table.add_column(name, justify="left" if name in ("stage", "GPUs") else "right")
    for s in p.each_stage:
        gpus = ", ".join(f"{count} {label}" for label, count in s.gpus.items())
        table.add_row(
            str(s.stage),
            str(s.layers),
            human_count(s.parameters),
            gpus,
            f"{s.memory_bytes / 1e9:.1f} GB",
            f"{s.smallest_memory_gb:g} GB",
            f"{s.compute_s:.3g} s",
            f"{s.merge_s:.3g} s",
        )
    return table
