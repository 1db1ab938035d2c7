"""The outer update of a round (docs/arithmetic.md, 14): Nesterov's momentum on the lanes' merged pseudo-gradients.

As AdamW's it is separately rounded fp32 operations between tensors, so its bits are the same on CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from subnet.errors import InputError
from subnet.numerics.fixed_point import power_of_two, strip_rows
from subnet.numerics.layout import Section
from subnet.numerics.optimizer import Merged, Scalars, tiles_of
from subnet.numerics.state_arrays import OUTER_MOMENTUM
from subnet.run.schedule import StepScalars, bits_fp32, fp32_bits


def nesterov_update_(
    section: Section,
    arrays: Mapping[str, Tensor],
    values: Tensor,
    exponents: Tensor,
    coefficient_bits: int,
    scalars: StepScalars,
) -> None:
    """Update a section's flat weights and momentum in place from the merged integers ``values`` (fp32).

    A tensor of two leaves takes the mean of what the leaves changed: the coefficient is divided by their number.
    Raises ValueError for a buffer of another size or type, InputError for too few exponents.
    """
    weight, momentum = arrays["weight"], arrays[OUTER_MOMENTUM]
    for name, buffer in (("weight", weight), (OUTER_MOMENTUM, momentum), ("the merged integers", values)):
        if buffer.shape != (section.num_elements,) or buffer.dtype != torch.float32 or not buffer.is_contiguous():
            raise ValueError(f"{name} of section {section.name} must be flat fp32 of {section.num_elements} numbers")
    if exponents.shape != (section.num_blocks,):
        raise InputError(f"{len(exponents)} exponents for the {section.num_blocks} blocks of {section.name}")
    device = values.device
    coefficient = fp32_bits(bits_fp32(coefficient_bits) / section.num_leaves)
    merged = Merged(values, power_of_two(exponents.to(device)), Scalars(scalars, coefficient, device))
    with torch.no_grad():
        for tile in tiles_of(section, device):
            w, b = strip_rows(weight, tile), strip_rows(momentum, tile)
            g = merged.gradient(tile, torch.empty_like(w))
            b.mul_(merged.scalars.momentum).add_(g)
            g.add_(b * merged.scalars.momentum)
            w.sub_(g.mul_(merged.scalars.lr))
