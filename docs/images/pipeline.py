"""Draws docs/images/pipeline.png: where a microbatch goes, and how a step's gradients become one sum."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

INK, QUIET = "#222222", "#777777"
STAGES = ("#dbe7f3", "#e3f0e0", "#f6e8d6")
EDGES = ("#3b6ea5", "#4f8a45", "#b57a2c")


def box(axes, x, y, w, h, text, face="white", edge=QUIET, size=9.0):
    axes.add_patch(
        FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02,rounding_size=0.12", fc=face, ec=edge, linewidth=1.2)
    )
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(axes, start, end, color=QUIET, style="-|>", width=1.3, line="-"):
    props = {"arrowstyle": style, "color": color, "linewidth": width, "linestyle": line, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=props)


figure, axes = pyplot.subplots(figsize=(11, 5.6), dpi=110)
axes.set_xlim(0, 22)
axes.set_ylim(0, 11.2)
axes.axis("off")

box(axes, 0.3, 8.9, 21.4, 1.7, "", face="#f4f4f4")
axes.text(
    11,
    9.95,
    "validator: deals every microbatch a path, journals every event, orders the merge, seals the step",
    ha="center",
    fontsize=10,
    color=INK,
)
axes.text(
    11,
    9.3,
    "coordinator = fold of an append-only journal   ·   sets weights on the chain from sealed work",
    ha="center",
    fontsize=8.5,
    color=QUIET,
)

for stage in range(3):
    x = 0.6 + stage * 4.3
    axes.text(x + 1.5, 8.2, f"stage {stage}", ha="center", fontsize=10, color=EDGES[stage], fontweight="bold")
    for replica in range(3 if stage == 1 else 2):
        y = 6.9 - 1.25 * replica
        box(axes, x, y, 3, 0.9, f"miner {'abc'[stage]}{replica + 1}", STAGES[stage], EDGES[stage])
for start, end in (((3.65, 7.45), (4.85, 6.2)), ((7.95, 6.2), (9.15, 7.45))):
    arrow(axes, start, end, EDGES[0], width=1.8)
arrow(axes, (9.15, 7.2), (7.95, 5.95), "#a33", line="--")
arrow(axes, (4.85, 5.95), (3.65, 7.2), "#a33", line="--")
axes.text(
    6.5,
    3.65,
    "microbatch m goes forward (solid) and its gradient back (dashed);",
    fontsize=8.5,
    color=QUIET,
    ha="center",
)
axes.text(
    6.5,
    3.15,
    "when b2 dies, m is dealt to b1 or b3 and computed again: same bits",
    fontsize=8.5,
    color=QUIET,
    ha="center",
)

arrow(axes, (12.4, 6.4), (13.6, 6.4), INK, width=1.8)
box(
    axes,
    13.7,
    5.2,
    3.3,
    2.5,
    "whole numbers\nq = rint(g · 2$^{-k}$)\n\npartial sums by\nstage and member",
    "white",
    EDGES[1],
    8.5,
)
arrow(axes, (17.05, 6.4), (17.75, 6.4), INK, width=1.8)
MERGE = "butterfly merge\neach owner adds\nits partition:\nany order, any fleet,\nthe same sum"
box(axes, 17.85, 5.2, 3.6, 2.5, MERGE, "white", EDGES[1], 8.5)
arrow(axes, (19.65, 5.1), (19.65, 4.3), INK, width=1.8)
box(axes, 17.85, 2.7, 3.6, 1.5, "every replica checks\nthe sum's fingerprint", "white", EDGES[1], 8.5)
arrow(axes, (17.75, 3.45), (17.05, 3.45), INK, width=1.8)
box(axes, 13.7, 2.7, 3.3, 1.5, "stage sealed,\nstep sealed, update", "white", EDGES[1], 8.5)

box(
    axes,
    0.3,
    0.3,
    10.4,
    1.7,
    "object store: token shards, snapshots, merged gradients\n(all addressed by their hash)",
    "#f4f4f4",
)
STATE = "state after step t = a function of (run file, data, t):\nsnapshot + log gives any member the same state root"
box(axes, 11.3, 0.3, 10.4, 1.7, STATE, "#f4f4f4")

figure.tight_layout(pad=0.3)
figure.savefig(Path(__file__).with_name("pipeline.png"))
