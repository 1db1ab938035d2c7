"""A second writing of the boundary codes in ``docs/arithmetic.md``, in torch, and cuts of a whole model that apply them.

It shares no code with :mod:`subnet.numerics.codes`; the two must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subnet.errors import InputError

FLOOR = 2.0**-100
CLIP = 2.0**112
Rounding = Callable[[Tensor], Tensor]


def rounded(code: str, x: Tensor) -> Tensor:
    """What a chunk's boundary is after its code: fp32 (..., hidden)."""
    if code == "raw":
        return x
    width = {"int8": 128, "int4": 64}[code]
    exponents = channel_exponents(x).numpy()
    up, down = (torch.from_numpy(np.ldexp(np.float32(1), sign * exponents)) for sign in (1, -1))
    small = torch.where(x.isfinite(), x.clamp(-CLIP, CLIP), torch.nan) * down
    pieces = [_block(code, piece) for piece in small.split(width, dim=-1)]
    return torch.cat(pieces, dim=-1) * up


def channel_exponents(x: Tensor) -> Tensor:
    """A whole number for each channel."""
    table = x.reshape(-1, x.shape[-1])
    upper = (table.contiguous().view(torch.int32) & 0x7FFFFFFF) // 65536
    mean = upper.long().sum(dim=0) // len(table)
    median = mean.sort().values[len(mean) // 2]
    return (mean - median).add(128).div(256, rounding_mode="floor").clamp(-15, 15)


def _block(code: str, x: Tensor) -> Tensor:
    """One block of each token."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    if code == "int8":
        scale = (largest * torch.tensor(1 / 127, dtype=torch.float32)).to(torch.bfloat16).float().clamp(min=FLOOR)
        whole = torch.round(x * (1 / scale))
    else:
        scale = (largest * 0.125).to(torch.bfloat16).float().clamp(min=FLOOR)
        turned = (x.amax(dim=-1, keepdim=True) == largest) & (scale > FLOOR)
        scale = torch.where(turned, -scale, scale)
        whole = torch.round(x * (1 / scale)).clamp(max=7)
    return torch.where(largest.isfinite(), (whole + 0.0) * scale, torch.nan)  # integers have no -0


class _Cut(torch.autograd.Function):
    """Rounds the hidden states on their way forward, and their gradient on its way back; otherwise straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding) -> Tensor:
        ctx.rounding = rounding
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.rounding(grad), None


def cut_model(model: Any, cuts: Sequence[int], rounding: Rounding) -> None:
    """Rounds what goes into the first layer of every stage but the first; ``cuts`` as in a run's plan."""
    if not cuts or cuts[0] != 0:
        raise InputError(f"cuts {tuple(cuts)} don't start at layer 0")

    def at_cut(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_Cut.apply(arguments[0], rounding), *arguments[1:])

    for layer in cuts[1:]:
        model.model.layers[layer].register_forward_pre_hook(at_cut)


def cut_for(config: Any, model: Any, cuts: Sequence[int]) -> None:
    """The codes of a run, where it has any and is cut."""
    code = config.pipeline.boundary_code
    if code == "raw" or config.pipeline.stages == 1:
        return
    if len(cuts) != config.pipeline.stages:
        raise InputError(
            f"a run with code {code} is known by its cuts: {config.pipeline.stages} stages, cuts {tuple(cuts)}"
        )
    cut_model(model, cuts, lambda x: rounded(code, x))
