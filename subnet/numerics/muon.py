"""Muon (Jordan et al., 2024; scaled as in "Muon is Scalable for LLM Training", 2025): momentum, made orthogonal, is the update.

A matrix is whole on each member of its stage, so its update depends on it alone, never on cuts. The iteration multiplies
matrices in fp32: the same bits wherever the hardware class is the same, and there only.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from subnet.numerics.fixed_point import strip_rows
from subnet.numerics.layout import Section, TensorSpan
from subnet.numerics.optimizer import Merged, sqrt_, tiles_of
from subnet.run.schedule import bits_fp32, fp32_bits

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic iteration: it leaves singular values between about 0.7 and 1.2, which is as good, and fast."""
EPSILON = 1e-7
RMS = 0.2
"""Root mean square of an update before the learning rate: what AdamW's is about, so that both go with one learning rate."""


def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(bits_fp32(fp32_bits(value)), dtype=torch.float32, device=device)


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """Nearly U·Vᵀ of the singular value decomposition U·S·Vᵀ, by five quintic Newton-Schulz iterations in fp32.

    A new tensor; of a matrix of zeros it is zero.
    """
    device = matrix_RC.device
    a, b, c = (_scalar(value, device) for value in COEFFICIENTS)
    wide = matrix_RC.shape[0] <= matrix_RC.shape[1]
    x = (matrix_RC if wide else matrix_RC.T).contiguous()
    norm = sqrt_(torch.sum(x * x).reshape(1))
    x = x / norm.add_(_scalar(EPSILON, device))
    for _ in range(NUM_ITERATIONS):
        gram = torch.mm(x, x.T)
        inner = (gram * b).add_(torch.mm(gram, gram).mul_(c))
        x = (x * a).add_(torch.mm(inner, x))
    return x if wide else x.T.contiguous()


def update_scale(rows: int, columns: int) -> float:
    """What an orthogonal update of this shape is multiplied by, so that its root mean square is :data:`RMS`."""
    return RMS * math.sqrt(max(rows, columns))


def muon_update_(
    section: Section, weight: Tensor, momentum: Tensor, merged: Merged, matrices: Collection[int], decaying: list[bool]
) -> None:
    """Update the tensors of these indices in place; ``weight`` and ``momentum`` are the section's flat buffers."""
    s, device = merged.scalars, weight.device
    size = max(section.tensors[index].num_elements for index in matrices)
    nesterov = torch.empty(size, dtype=torch.float32, device=device)
    tiles = tiles_of(section, device)
    for index in sorted(matrices):
        span = section.tensors[index]
        ahead = nesterov[: span.num_elements]
        for tile in tiles:
            if tile.tensor != index:
                continue
            m = strip_rows(momentum, tile)
            part = merged.gradient(tile, torch.empty_like(m)).mul_(s.rest)
            m.mul_(s.momentum).add_(part)
            strip_rows(ahead, tile, base=span.element_start).copy_(part.add_(m * s.momentum))
        _apply_(span, weight, ahead, merged, decay=decaying[index])


def _apply_(span: TensorSpan, weight: Tensor, ahead: Tensor, merged: Merged, *, decay: bool) -> None:
    rows, columns = span.spec.shape[-2:]
    s, scale = merged.scalars, _scalar(update_scale(rows, columns), weight.device)
    size = rows * columns
    for first in range(0, span.num_elements, size):
        w = weight[span.element_start + first : span.element_start + first + size].view(rows, columns)
        update = orthogonal(ahead[first : first + size].view(rows, columns))
        if decay:
            w.mul_(s.decay)
        w.sub_(update.mul_(scale).mul_(s.lr))
