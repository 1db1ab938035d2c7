"""AdamW in separately rounded operations: the update of `docs/arithmetic.md` §8, with the same bits on CPU and CUDA.

Only `mul, add, sub, sqrt, div` between tensors; scalars are 0-dim fp32 tensors on the device, from journaled bits. Work
goes through tiles that stay in the cache. `torch.sqrt` on a CPU may go to a vector library whose results are not all
correctly rounded (one in six differs on some hosts), so roots are numpy's there, which are the processor's own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from subnet.errors import InputError
from subnet.numerics.fixed_point import power_of_two, strip_blocks, strip_rows
from subnet.numerics.layout import Section, section_tiles
from subnet.run.schedule import StepScalars, bits_fp32

_CPU_TILE, _CUDA_TILE = 1 << 16, 1 << 24


class _Scalars:
    """A step's scalars as 0-dim fp32 tensors on one device."""

    def __init__(self, scalars: StepScalars, coefficient_bits: int, device: torch.device) -> None:
        def on_device(bits: int) -> Tensor:
            return torch.tensor(bits_fp32(bits), dtype=torch.float32, device=device)

        self.lr = on_device(scalars.lr)
        self.beta1, self.rest1 = on_device(scalars.beta1), on_device(scalars.one_minus_beta1)
        self.beta2, self.rest2 = on_device(scalars.beta2), on_device(scalars.one_minus_beta2)
        self.epsilon = on_device(scalars.epsilon)
        self.correction1, self.correction2 = on_device(scalars.bias_correction1), on_device(scalars.bias_correction2)
        self.decay = on_device(scalars.decay)
        self.coefficient = on_device(coefficient_bits)


def sqrt_(values: Tensor) -> Tensor:
    """Correctly rounded square roots in place, on any device and host."""
    if values.device.type != "cpu":
        return values.sqrt_()
    host = values.numpy()
    np.sqrt(host, out=host)
    return values


def adamw_update_(
    section: Section,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    values: Tensor,
    exponents: Tensor,
    coefficient_bits: int,
    scalars: StepScalars,
) -> None:
    """Update a section's flat fp32 buffers in place from the merged integers ``values`` and their block exponents."""
    for buffer in (weight, exp_avg, exp_avg_sq, values):
        if buffer.dtype != torch.float32 or buffer.shape != (section.num_elements,) or not buffer.is_contiguous():
            raise ValueError(f"buffers of section {section.name} must be flat fp32 of {section.num_elements} elements")
    if exponents.shape != (section.num_blocks,):
        raise InputError(f"{len(exponents)} exponents for the {section.num_blocks} blocks of {section.name}")
    device = weight.device
    s = _Scalars(scalars, coefficient_bits, device)
    scale = power_of_two(exponents.to(device))
    tiles = section_tiles(section, _CPU_TILE if device.type == "cpu" else _CUDA_TILE)
    largest = max((tile.count * tile.length for tile in tiles), default=0)
    first_work, second_work = (torch.empty(largest, dtype=torch.float32, device=device) for _ in range(2))
    decays = [scalars.decays and len(span.spec.shape) >= 2 for span in section.tensors]
    with torch.no_grad():
        for tile in tiles:
            w, m, v, q = (strip_rows(flat, tile) for flat in (weight, exp_avg, exp_avg_sq, values))
            a = first_work[: w.numel()].view(w.shape)
            b = second_work[: w.numel()].view(w.shape)
            torch.mul(q, strip_blocks(scale, tile), out=a)
            torch.mul(a, s.coefficient, out=a)
            torch.mul(a, s.rest1, out=b)
            m.mul_(s.beta1).add_(b)
            torch.mul(a, a, out=a)
            torch.mul(a, s.rest2, out=a)
            v.mul_(s.beta2).add_(a)
            torch.div(v, s.correction2, out=a)
            sqrt_(a).add_(s.epsilon)
            torch.div(m, s.correction1, out=b)
            torch.div(b, a, out=b)
            if decays[tile.tensor]:
                w.mul_(s.decay)
            torch.mul(b, s.lr, out=b)
            w.sub_(b)
