"""The loss curve of a run as a picture: training loss, hold-out points, marks for what happened to the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from subnet.protocol.api import StepView

INK, LINE, POINTS, MARKS = "#222222", "#3b6ea5", "#c8553d", "#8a8a8a"


def draw_curve(
    steps: Sequence[StepView],
    marks: Sequence[tuple[int, str]],
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    final_holdout: float | None = None,
) -> None:
    """Write a PNG (or what the suffix says). ``marks``: (step, text), drawn as vertical lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    trained = [view for view in steps if view.step >= 0 and view.tokens > 0]
    evaluated = [(view.step, view.holdout_loss) for view in steps if view.holdout_loss is not None]
    if final_holdout is not None and trained:
        evaluated.append((trained[-1].step + 1, final_holdout))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    try:
        axes.plot([v.step + 1 for v in trained], [v.loss for v in trained], color=LINE, linewidth=1.4, label="training")
        if evaluated:
            axes.plot(
                [step for step, _ in evaluated],
                [loss for _, loss in evaluated],
                "o",
                color=POINTS,
                markersize=6,
                label="hold-out",
                zorder=3,
            )
        top = axes.get_ylim()[1]
        for number, (step, text) in enumerate(marks):
            axes.axvline(step, color=MARKS, linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(
                text,
                (step, top),
                xytext=(4, -4 - 14 * (number % 3)),
                textcoords="offset points",
                va="top",
                fontsize=9,
                color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss (nats per token)")
        axes.set_title(title, loc="left", fontsize=12, color=INK)
        if subtitle:
            axes.text(1, 1.02, subtitle, transform=axes.transAxes, fontsize=8, color=MARKS, ha="right")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="y", linewidth=0.4, color="#dddddd")
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.86))
        figure.tight_layout()
        figure.savefig(path)
    finally:
        pyplot.close(figure)
