"""How evenly a model's experts are used: counted in plain ``transformers`` on an export, and drawn beside the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

BATCH_ROWS = 8


class ExpertLoad(msgspec.Struct, frozen=True):
    """Choices of each layer's experts on the hold-out text, as multiples of an even share (1.0)."""

    step: int
    shares: tuple[tuple[float, ...], ...]

    @property
    def busiest(self) -> float:
        return max(max(layer) for layer in self.shares)

    @property
    def idlest(self) -> float:
        return min(min(layer) for layer in self.shares)


def measure_load(directory: Path, step: int, tokens: NDArray[Any], length: int, rows: int) -> ExpertLoad:
    """Of an exported model, on the first ``rows`` samples of ``tokens``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    experts, chosen = int(model.config.num_experts), int(model.config.num_experts_per_tok)
    rows = max(1, min(rows, len(tokens) // length))
    samples_BL = torch.from_numpy(tokens[: rows * length].astype(np.int64)).view(rows, length)
    counts_LE = torch.zeros(int(model.config.num_hidden_layers), experts)
    with torch.no_grad():
        for batch_BL in samples_BL.split(BATCH_ROWS):
            made = model(input_ids=batch_BL, output_router_logits=True, use_cache=False)
            for layer, logits_NE in enumerate(made.router_logits):
                picked = torch.topk(logits_NE, chosen, dim=-1).indices.reshape(-1)
                counts_LE[layer] += torch.bincount(picked, minlength=experts)
    even = rows * length * chosen / experts
    return ExpertLoad(step, tuple(tuple(float(count / even) for count in layer) for layer in counts_LE))


def draw(
    path: Path, loads: Sequence[ExpertLoad], losses: Mapping[str, Sequence[tuple[int, float]]], step_tokens: int
) -> None:
    """The experts' shares at the start and at the end, the widest of them over time, and the hold-out losses."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4), dpi=110)
    for where, load, name in ((axes[0][0], loads[0], "before the first step"), (axes[0][1], loads[-1], "at the end")):
        image = where.imshow(np.array(load.shares), vmin=0.0, vmax=2.0, cmap="RdBu_r", aspect="auto")
        where.set_title(f"share of the choices, {name} (1 = even)", fontsize=10)
        where.set_xlabel("expert")
        where.set_ylabel("layer")
        where.set_yticks(range(len(load.shares)))
        figure.colorbar(image, ax=where)
    tokens = [load.step * step_tokens / 1000 for load in loads]
    axes[1][0].plot(tokens, [load.busiest for load in loads], "o-", color="#c0392b", label="busiest of all layers")
    axes[1][0].plot(tokens, [load.idlest for load in loads], "o-", color="#3b6ea5", label="idlest of all layers")
    axes[1][0].axhline(1.0, color="#888888", linewidth=0.8)
    axes[1][0].set_ylim(bottom=0)
    axes[1][0].set_ylabel("share (1 = even)")
    for name, points in losses.items():
        axes[1][1].plot(
            [step * step_tokens / 1000 for step, _ in points], [loss for _, loss in points], "o-", label=name
        )
    axes[1][1].set_ylabel("hold-out loss")
    for where in axes[1]:
        where.set_xlabel("thousand tokens")
        where.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
