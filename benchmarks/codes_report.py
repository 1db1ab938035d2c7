"""The table and the curves of the codes benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

Curve = list[tuple[int, float]]

_NOTES = {"raw": "fp32", "trim": "control: last 4 bits cleared", "int8": "", "int4": ""}


def write_table(figures: Mapping[str, float], variants: Sequence[str], path: Path) -> str:
    """As Markdown, to the file; also returned."""
    lines = [
        "| code | bytes a token and boundary (formula) | packed | hold-out loss | difference | largest of a seed "
        "| training loss difference | error energy forward, backward | coding, share of a microbatch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in variants:

        def get(what: str, form: str, name: str = name) -> str:
            value = figures.get(f"{name}_{what}")
            return "" if value is None else format(value, form)

        known = f"{name}_bytes_per_token" in figures
        size = f"{get('bytes_per_token', '.0f')} ({get('formula_bytes_per_token', '.0f')})" if known else ""
        errors = ", ".join((get("error_energy_forward", ".1e"), get("error_energy_backward", ".1e"))) if known else ""
        cells = [
            f"{name} {_NOTES.get(name, '')}".strip(),
            size,
            get("packed_bytes_per_token", ".0f"),
            get("holdout_loss", ".4f"),
            get("holdout_difference", "+.3%"),
            get("holdout_largest_seed_difference", "+.3%"),
            get("training_difference", "+.3%"),
            errors,
            get("share_of_microbatch", ".2%"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    path.write_text(text)
    return text


def plot(runs: Mapping[tuple[str, int], tuple[Curve, Curve]], path: Path) -> None:
    """Hold-out loss, and what each code adds to it, means over the seeds with the range as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    variants, seeds = list(dict.fromkeys(v for v, _ in runs)), sorted({s for _, s in runs})
    for variant in variants:
        curves = [dict(runs[variant, seed][1]) for seed in seeds]
        raw = [dict(runs["raw", seed][1]) for seed in seeds]
        steps = sorted(curves[0])
        left.plot(steps, [fmean(c[t] for c in curves) for t in steps], label=variant)
        if variant == "raw":
            continue
        over = [[100 * (c[t] / r[t] - 1) for c, r in zip(curves, raw, strict=True)] for t in steps]
        (line,) = right.plot(steps, [fmean(each) for each in over], label=variant)
        low, high = [min(each) for each in over], [max(each) for each in over]
        right.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
    left.set(xlabel="step", ylabel="hold-out loss")
    right.set(xlabel="step", ylabel="hold-out loss over raw, %")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    pyplot.close(figure)
    partial.replace(path)
