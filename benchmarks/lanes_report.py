"""The table and the picture of the lanes benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.lane_run import Variant

Curve = list[tuple[int, float]]


def _words(variant: Variant) -> tuple[str, str, str]:
    """Moments, what is sent, outer step."""
    if variant.is_sync:
        return "", "", ""
    sent = "all" if variant.share == 1 else f"largest {variant.share:.0%}"
    sent += {0: ", 16-bit", 7: ", 4-bit"}.get(variant.qmax, f", to ±{variant.qmax}")
    sent += ", feedback" if variant.feedback else ""
    rate, momentum = variant.outer
    outer = "mean" if (rate, momentum) == (1.0, 0.0) else f"{rate:g}, {momentum:g}"
    return "kept" if variant.keep else "reset", sent, outer


def write_table(figures: Mapping[str, float], variants: Sequence[Variant], path: Path) -> str:
    """As Markdown, to the file; also returned."""
    lines = [
        "| H | moments | sent | outer rate, momentum | merge bytes a token | fewer | hold-out loss | difference "
        "| largest of a seed | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        name = variant.name
        if f"{name}_holdout_loss" not in figures:
            continue

        def get(what: str, form: str, name: str = name) -> str:
            value = figures.get(f"{name}_{what}")
            return "" if value is None else format(value, form)

        cells = [
            "1, a merge each step" if variant.is_sync else str(variant.inner_steps),
            *_words(variant),
            get("bytes_per_token", ",.0f"),
            get("spared", ".1f") + ("x" if not variant.is_sync else ""),
            get("holdout_loss", ".4f"),
            get("difference", "+.2%"),
            get("largest_seed_difference", "+.2%"),
            get("seeds", ".0f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    return text


def plot(
    figures: Mapping[str, float], runs: Mapping[tuple[str, int], Curve], variants: Sequence[Variant], path: Path
) -> None:
    """Hold-out loss by inner steps, and its difference from synchronous against merge bytes a token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6))
    for variant in variants:
        curves = [dict(curve) for (name, _), curve in runs.items() if name == variant.name]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        (line,) = left.plot(steps, [fmean(curve[t] for curve in curves) for t in steps], label=variant.name)
        if not variant.is_sync and f"{variant.name}_difference" in figures:
            x, y = figures[f"{variant.name}_bytes_per_token"], 100 * figures[f"{variant.name}_difference"]
            right.scatter([x], [y], color=line.get_color())
            right.annotate(variant.name, (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
    right.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    if "sync_bytes_per_token" in figures:
        right.axvline(figures["sync_bytes_per_token"] / 100, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="inner steps", ylabel="hold-out loss")
    right.set(xlabel="merge bytes a token and member", ylabel="hold-out loss over synchronous, %", xscale="log")
    right.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    right.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    right.xaxis.set_minor_formatter(NullFormatter())
    right.margins(x=0.12)
    left.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    partial.replace(path)
