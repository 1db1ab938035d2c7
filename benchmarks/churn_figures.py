"""What is kept of a disturbed run, and what a set of them says: time lost a disruption, compute done twice, the picture."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.run_log import run_records
from iota.chaos.verdict import ChaosResult
from subnet.run.events import (
    AnyEvent,
    Backwarded,
    Forwarded,
    Gone,
    ReplayLeased,
    RunPlanned,
    StepSealed,
    Voided,
)

WARM_STEPS = 2
"""The first steps, in which members still arrive, count for no speed."""


def kept(result: ChaosResult, swarm: Path) -> dict[str, Any]:
    """One run as JSON: its root, curve, times of seals, disruptions, and counts over its whole log."""
    status = result.status
    if status is None:
        raise ValueError("the run has no status")
    counts: Counter[str] = Counter()
    compute = Compute()
    seals: list[tuple[int, float]] = []
    for record in run_records(swarm / "store"):
        event = record.event
        compute.take(event)
        if isinstance(event, ReplayLeased | Voided):
            counts[type(event).__name__] += 1
        elif isinstance(event, Gone):
            counts[f"Gone {event.why}"] += 1
        elif isinstance(event, StepSealed):
            seals.append((event.step, record.time_ns / 1e9))
    return {
        "root": result.root,
        "seconds": result.ended_s - result.began_s,
        "losses": [(view.step, view.loss) for view in status.steps],
        "seals": seals,
        "disruptions": [(d.kind.value, d.began_s, d.ended_s) for d in result.done if d.happened],
        "num_done": sum(d.happened for d in result.done),
        "skipped": [(d.kind.value, why) for d, why in result.skipped],
        "died": list(result.died),
        "counts": dict(counts),
        "redone_share": compute.redone_share(),
        "longest_stall_s": max((stall.seconds for stall in result.stalls), default=0.0),
    }


class Compute:
    """Work that was receipted, in forwards of one stage: a backward is two, and at the last stage, which turns round, three.

    Work that was lost before its receipt isn't seen; replayed boundaries are counted when they are dealt.
    """

    def __init__(self) -> None:
        self._items = 0
        self._stages = 1
        self._done: dict[tuple[int, int, int, bool], int] = {}
        self._replayed = 0

    def take(self, event: AnyEvent) -> None:
        if isinstance(event, RunPlanned):
            self._items, self._stages = event.config.num_items, len(event.cuts)
        elif isinstance(event, ReplayLeased):
            self._replayed += 2 if event.backward else 1
        elif isinstance(event, Forwarded | Backwarded) and event.microbatch < self._items:
            key = (event.step, event.microbatch, event.stage, isinstance(event, Backwarded))
            self._done[key] = self._done.get(key, 0) + 1

    def redone_share(self) -> float:
        """What was done more than once, over what was needed."""
        needed = again = 0
        for (_, _, stage, backward), times in self._done.items():
            weight = (3 if stage == self._stages - 1 else 2) if backward else 1
            needed += weight
            again += weight * (times - 1)
        return (again + self._replayed) / needed


def step_seconds(run: dict[str, Any]) -> list[tuple[float, float]]:
    """(begin, end) of each training step after the first ones, from seal to seal."""
    times = [time for step, time in run["seals"] if step >= WARM_STEPS]
    return list(itertools.pairwise(times))


def steps_per_s(run: dict[str, Any]) -> float:
    spans = step_seconds(run)
    return len(spans) / (spans[-1][1] - spans[0][0])


def lost_seconds(run: dict[str, Any], calm_step_s: float) -> list[float]:
    """Of each disruption: what its step took beyond an undisturbed one, shared among the disruptions of that step."""
    lost: list[float] = []
    began = sorted(start for _, start, _ in run["disruptions"])
    for begin, end in step_seconds(run):
        here = sum(begin <= start < end for start in began)
        if here:
            lost += [max(0.0, end - begin - calm_step_s) / here] * here
    return lost


def churn_figures(calm: dict[str, Any], disturbed: list[dict[str, Any]]) -> dict[str, Any]:
    calm_step_s = median(end - begin for begin, end in step_seconds(calm))
    lost = [each for run in disturbed for each in lost_seconds(run, calm_step_s)]
    kinds = Counter(kind for run in disturbed for kind, _, _ in run["disruptions"])
    kills = [sum(kind == "validator-kill" for kind, _, _ in run["disruptions"]) for run in disturbed]
    return {
        "num_runs": len(disturbed),
        "num_disruptions": sum(run["num_done"] for run in disturbed),
        "by_kind": dict(kinds),
        "num_kinds": len(kinds.keys() - {"validator-kill"}),
        "least_validator_kills": min(kills),
        "num_died": sum(len(run["died"]) for run in disturbed),
        "lost_s_median": median(lost),
        "lost_s_p95": quantiles(lost, n=20)[-1] if len(lost) > 1 else lost[0],
        "redone_share": [round(run["redone_share"], 3) for run in disturbed],
        "throughput_share": [round(steps_per_s(run) / steps_per_s(calm), 3) for run in disturbed],
        "calm_step_s": calm_step_s,
        "longest_stall_s": max(run["longest_stall_s"] for run in disturbed),
        "root": calm["root"],
    }


def rate_figures(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Shares are of the undisturbed run of the same round."""
    figures: dict[str, Any] = {"num_different": len({run["root"] for runs in found.values() for run in runs}) - 1}
    for name, runs in found.items():
        figures[f"{name}_steps_per_s"] = [round(steps_per_s(run), 3) for run in runs]
        figures[f"{name}_disruptions"] = [run["num_done"] for run in runs]
        if name != "calm":
            pairs = zip(runs, found["calm"], strict=True)
            figures[f"{name}_share"] = median(steps_per_s(run) / steps_per_s(calm) for run, calm in pairs)
            figures[f"{name}_redone_share"] = [round(run["redone_share"], 3) for run in runs]
    return figures


def draw(calm: dict[str, Any], disturbed: list[dict[str, Any]], path: Path) -> None:
    """All curves over each other: by step, where they can't be told apart, and by time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=120, sharey=True)
    try:
        for number, run in enumerate([*disturbed, calm]):
            last = number == len(disturbed)
            style: dict[str, Any] = (
                {"linewidth": 1.4, "color": "#222222"} if last else {"linewidth": 3.2, "alpha": 0.35}
            )
            label = "undisturbed" if last else f"run {number + 1}: {run['num_done']} disruptions"
            seals = dict(run["seals"])
            begin = seals[min(seals)]
            steps, losses = zip(*run["losses"], strict=True)
            by_step.plot([s + 1 for s in steps], losses, label=label, **style)
            by_time.plot([seals[s] - begin for s in steps], losses, **style)
        by_step.set_title("by step: one curve", loc="left", fontsize=11)
        by_time.set_title("by time: what the disruptions cost", loc="left", fontsize=11)
        by_step.set_xlabel("optimizer step")
        by_time.set_xlabel("seconds since the calibration step's seal")
        by_step.set_ylabel("loss (nats per token)")
        by_step.legend(frameon=False, fontsize=8)
        for axes in (by_step, by_time):
            axes.grid(axis="y", linewidth=0.4, color="#dddddd")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        pyplot.close(figure)
