"""Pictures of a simulated run: one step by member, where the time goes, throughput over time with its faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iota.simulate_tally import Figures
    from iota.simulate_world import World

COLOURS = {
    "compute": "#3b6ea5",
    "lost": "#7d3c98",
    "input": "#b8cfe6",
    "merge": "#4f8a45",
    "idle": "#e6e6e6",
    "join": "#e2b04a",
    "down": "#222222",
}
WORDS = {
    "compute": "computing",
    "lost": "computed in vain",
    "input": "waiting for input",
    "merge": "merging, updating",
    "idle": "no work",
    "join": "joining",
    "down": "down",
}
MAX_ROWS = 60


def draw(world: World, figures: Figures, directory: Path) -> list[Path]:
    """Writes ``step.png``, ``time.png`` and ``throughput.png``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    pictures = {"step.png": _gantt, "time.png": _split, "throughput.png": _throughput}
    paths: list[Path] = []
    for name, paint in pictures.items():
        figure: Any = pyplot.figure(figsize=(10, 5), dpi=110)
        paint(figure, world, figures)
        figure.tight_layout()
        figure.savefig(directory / name, bbox_inches="tight")
        pyplot.close(figure)
        paths.append(directory / name)
    return paths


def _gantt(figure: Any, world: World, figures: Figures) -> None:
    """One step, a line a member, by stage."""
    number = world.tally.picture_step or 0
    step = next((s for s in figures.each_step if s.step == number), figures.each_step[-1])
    nodes = sorted((node.stage, index) for index, node in enumerate(world.nodes) if node.stage >= 0)
    stride = max(1, -(-len(nodes) // MAX_ROWS))
    rows = {index: row for row, (_, index) in enumerate(nodes[::stride])}
    axes = figure.subplots()
    begin_s = step.opened_s
    bars: dict[str, list[tuple[int, float, float]]] = {}
    for node, phase, start_s, end_s in world.tally.intervals:
        start_s, end_s = max(start_s, begin_s), min(end_s, step.sealed_s)
        if node in rows and end_s > start_s:
            bars.setdefault(phase, []).append((rows[node], start_s - begin_s, end_s - start_s))
    for phase, drawn in bars.items():
        axes.barh(
            [row for row, _, _ in drawn],
            [width for _, _, width in drawn],
            left=[left for _, left, _ in drawn],
            height=0.9,
            color=COLOURS[phase],
            label=WORDS[phase],
        )
    axes.axvline(step.computed_s - begin_s, color="#c0392b", linewidth=1)
    stages = [stage for stage, _ in nodes[::stride]]
    first = [row for row, stage in enumerate(stages) if row == 0 or stages[row - 1] != stage]
    axes.set_yticks(first, [f"stage {stages[row]}" for row in first])
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of step {step.step}; red: its last item is done")
    shown = f"{len(rows)} of {len(nodes)}" if stride > 1 else f"{len(nodes)}"
    axes.set_title(f"One step, {shown} members")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=6, frameon=False, fontsize=8)


def _split(figure: Any, world: World, figures: Figures) -> None:
    axes = figure.subplots()
    figure.set_size_inches(10, 2.8)
    left = 0.0
    for phase, share in figures.time_share.items():
        axes.barh([0], [100 * share], left=[left], color=COLOURS[phase], label=f"{WORDS[phase]} {100 * share:.1f} %")
        left += 100 * share
    axes.set_yticks([])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time of all GPUs")
    axes.set_title(f"Where time goes: MFU {100 * figures.mfu:.1f} %, {figures.tokens_per_s:,.0f} tokens/s")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.6), ncols=4, frameon=False, fontsize=8)


def _throughput(figure: Any, world: World, figures: Figures) -> None:
    axes = figure.subplots()
    steps = figures.each_step
    unit, name = (
        (3600, "hours") if steps[-1].sealed_s > 7200 else (60, "minutes") if steps[-1].sealed_s > 120 else (1, "s")
    )
    edges = [steps[0].opened_s, *(step.sealed_s for step in steps)]
    rates = [step.tokens / max(1e-9, step.sealed_s - edges[number]) for number, step in enumerate(steps)]
    axes.stairs(rates, [edge / unit for edge in edges], color=COLOURS["compute"], linewidth=1.6, baseline=None)
    axes.set_ylim(0, 1.12 * max(rates))
    colours = {"kill": "#c0392b", "silence": "#e67e22", "leave": "#f1c40f", "store": "#7d3c98", "validator": "#222222"}
    for kind, colour in colours.items():
        times = [fault.at_s / unit for fault in world.faults.happened if fault.kind == kind and fault.at_s >= edges[0]]
        if times:
            axes.plot(
                times, [0.03 * max(rates)] * len(times), "^", color=colour, markersize=6, label=f"{kind}: {len(times)}"
            )
    axes.set_xlabel(f"simulated {name}")
    axes.set_ylabel("tokens/s, by step")
    axes.set_title(f"Throughput of {figures.gpus} GPUs and its disruptions")
    if world.faults.happened:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5, frameon=False, fontsize=8)
