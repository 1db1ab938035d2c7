"""Optimizers in separately rounded operations (`docs/arithmetic.md` §8 and §13): updates of a section's flat buffers, in place.

AdamW, with fp32 moments or 8-bit ones, has the same bits on CPU and CUDA: only `mul, add, sub, sqrt, div` between tensors, and
rounding to whole numbers; scalars are 0-dim fp32 tensors on the device, from journaled bits. Muon (:mod:`subnet.numerics.muon`)
multiplies matrices, so its bits are those of a hardware class. Work goes through tiles that stay in the cache. `torch.sqrt` on
a CPU may go to a vector library whose results are not all correctly rounded (one in six differs on some hosts), so roots are
numpy's there, which are the processor's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from subnet.errors import InputError
from subnet.numerics.fixed_point import power_of_two, strip_blocks, strip_rows
from subnet.numerics.layout import Section, Strip, section_tiles
from subnet.numerics.state_arrays import ARRAYS
from subnet.run.config import OptimizerSection
from subnet.run.schedule import StepScalars, bits_fp32
from subnet.words import TensorSpec

_CPU_TILE, _CUDA_TILE = 1 << 16, 1 << 24
_CODE_MAX, _CODE_SQ_MAX = 127, 255
_SMALLEST = 2.0**-126
_EMBEDDING = "embed_tokens.weight"


def decays(spec: TensorSpec, settings: OptimizerSection) -> bool:
    """Whether weight decay is for this tensor: matrices and experts; never norms, biases, and (by choice) the embedding."""
    if len(spec.shape) < 2 or spec.name.endswith("bias"):
        return False
    return settings.decay_embeddings or not spec.name.endswith(_EMBEDDING)


def is_muons(spec: TensorSpec, settings: OptimizerSection) -> bool:
    """Whether Muon updates this tensor: hidden matrices and stacks of experts; embedding, head and the rest are AdamW's."""
    hidden = not spec.row_blocked and len(spec.shape) in (2, 3)
    return settings.kind == "muon" and hidden and not spec.name.endswith("bias")


class Scalars:
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
        self.momentum, self.rest = on_device(scalars.momentum), on_device(scalars.one_minus_momentum)
        self.coefficient = on_device(coefficient_bits)


@dataclass(frozen=True)
class Merged:
    """A section's merged gradient: integers, the powers of two of their blocks, and the step's scalars."""

    values: Tensor
    scale: Tensor
    scalars: Scalars

    def gradient(self, tile: Strip, out: Tensor) -> Tensor:
        """The tile's gradient in ``out``."""
        torch.mul(strip_rows(self.values, tile), strip_blocks(self.scale, tile), out=out)
        return torch.mul(out, self.scalars.coefficient, out=out)


def sqrt_(values: Tensor) -> Tensor:
    """Correctly rounded square roots in place, on any device and host."""
    if values.device.type != "cpu":
        return values.sqrt_()
    host = values.numpy()
    np.sqrt(host, out=host)
    return values


def update_(
    section: Section,
    arrays: Mapping[str, Tensor],
    values: Tensor,
    exponents: Tensor,
    coefficient_bits: int,
    scalars: StepScalars,
    settings: OptimizerSection,
) -> None:
    """Update a section's flat buffers in place from the merged integers ``values`` (fp32) and their block exponents.

    ``arrays`` by kind: those of the optimizer's state (:func:`subnet.numerics.state_arrays.state_kinds`), others are left alone.
    Raises ValueError for a buffer of another size or type, InputError for too few exponents.
    """
    _check(section, arrays, values)
    if exponents.shape != (section.num_blocks,):
        raise InputError(f"{len(exponents)} exponents for the {section.num_blocks} blocks of {section.name}")
    device = values.device
    scale = power_of_two(exponents.to(device))
    merged = Merged(values, scale, Scalars(scalars, coefficient_bits, device))
    tensors = [span.spec for span in section.tensors]
    matrices = {index for index, spec in enumerate(tensors) if is_muons(spec, settings)}
    decaying = [scalars.decays and decays(spec, settings) for spec in tensors]
    with torch.no_grad():
        if matrices:
            from subnet.numerics.muon import muon_update_

            muon_update_(section, arrays["weight"], arrays["exp_avg"], merged, matrices, decaying)
        if settings.state_bits == 8:
            _adamw_8bit_(section, arrays, merged, decaying)
        else:
            _adamw_(section, arrays, merged, decaying, matrices)


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
    """:func:`update_` by AdamW with fp32 moments."""
    arrays = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    update_(section, arrays, values, exponents, coefficient_bits, scalars, OptimizerSection())


def _check(section: Section, arrays: Mapping[str, Tensor], values: Tensor) -> None:
    for kind, buffer in (*arrays.items(), ("the merged integers", values)):
        array = ARRAYS.get(kind)
        size = section.num_blocks if array is not None and array.per_block else section.num_elements
        bits = 4 if array is None else int(array.dtype[1:])
        fits = buffer.shape == (size,) and buffer.element_size() == bits and buffer.is_contiguous()
        if not fits or (bits == 4 and buffer.dtype != torch.float32):
            raise ValueError(f"{kind} of section {section.name} must be a flat buffer of {size} numbers")


def tiles_of(section: Section, device: torch.device) -> tuple[Strip, ...]:
    """Pieces of the section that stay in the cache."""
    return section_tiles(section, _CPU_TILE if device.type == "cpu" else _CUDA_TILE)


class _Work:
    """Two buffers for the largest tile."""

    def __init__(self, tiles: tuple[Strip, ...], device: torch.device) -> None:
        largest = max((tile.count * tile.length for tile in tiles), default=0)
        self._first, self._second = (torch.empty(largest, dtype=torch.float32, device=device) for _ in range(2))

    def of(self, tile: Strip) -> tuple[Tensor, Tensor]:
        shape, size = (tile.count, tile.length), tile.count * tile.length
        return self._first[:size].view(shape), self._second[:size].view(shape)


def _moments_(m: Tensor, v: Tensor, a: Tensor, b: Tensor, s: Scalars) -> None:
    """Both moments from the gradient in ``a``, which is overwritten."""
    torch.mul(a, s.rest1, out=b)
    m.mul_(s.beta1).add_(b)
    torch.mul(a, a, out=a)
    torch.mul(a, s.rest2, out=a)
    v.mul_(s.beta2).add_(a)


def _weights_(w: Tensor, m: Tensor, v: Tensor, a: Tensor, b: Tensor, s: Scalars, *, decay: bool) -> None:
    torch.div(v, s.correction2, out=a)
    sqrt_(a).add_(s.epsilon)
    torch.div(m, s.correction1, out=b)
    torch.div(b, a, out=b)
    if decay:
        w.mul_(s.decay)
    torch.mul(b, s.lr, out=b)
    w.sub_(b)


def _adamw_(
    section: Section, arrays: Mapping[str, Tensor], merged: Merged, decaying: list[bool], but: Collection[int]
) -> None:
    device = merged.values.device
    tiles = tiles_of(section, device)
    work = _Work(tiles, device)
    for tile in tiles:
        if tile.tensor in but:
            continue
        w, m, v = (strip_rows(arrays[kind], tile) for kind in ("weight", "exp_avg", "exp_avg_sq"))
        a, b = work.of(tile)
        _moments_(m, v, merged.gradient(tile, a), b, merged.scalars)
        _weights_(w, m, v, a, b, merged.scalars, decay=decaying[tile.tensor])


def _adamw_8bit_(section: Section, arrays: Mapping[str, Tensor], merged: Merged, decaying: list[bool]) -> None:
    """A moment is a whole number and its block's scale: k^4·s, signed with k in ±127 for the first, k in 0..255 for the second.

    So numbers of a block may differ by five and nine powers of ten. What is above 0 in the second never becomes 0, so that no
    update is divided by epsilon alone.
    """
    device = merged.values.device
    tiles = tiles_of(section, device)
    work, more = _Work(tiles, device), _Work(tiles, device)
    for tile in tiles:
        w = strip_rows(arrays["weight"], tile)
        code, code_sq = (strip_rows(arrays[kind], tile) for kind in ("exp_avg_code", "exp_avg_sq_code"))
        scale, scale_sq = (strip_blocks(arrays[kind], tile) for kind in ("exp_avg_scale", "exp_avg_sq_scale"))
        (a, b), (m, v) = work.of(tile), more.of(tile)
        b.copy_(code)
        torch.mul(b, b, out=a)
        torch.copysign(torch.mul(a, a, out=a), b, out=m).mul_(scale)
        v.copy_(code_sq)
        torch.mul(v, v, out=v)
        torch.mul(v, v, out=v).mul_(scale_sq)
        _moments_(m, v, merged.gradient(tile, a), b, merged.scalars)
        _weights_(w, m, v, a, b, merged.scalars, decay=decaying[tile.tensor])
        _encode_(m, code, scale, a)
        _encode_sq_(v, code_sq, scale_sq, a)


def _block_scales(largest: Tensor, code_range: float) -> Tensor:
    device = largest.device
    scale = largest / torch.tensor(code_range, dtype=torch.float32, device=device)
    return torch.maximum(scale, torch.tensor(_SMALLEST, dtype=torch.float32, device=device))


def _encode_(m: Tensor, code: Tensor, scale: Tensor, work: Tensor) -> None:
    torch.abs(m, out=work)
    _root_codes_(work, scale, _CODE_MAX)
    code.copy_(torch.copysign(work, m, out=work))


def _encode_sq_(v: Tensor, code: Tensor, scale: Tensor, work: Tensor) -> None:
    work.copy_(v)
    _root_codes_(work, scale, _CODE_SQ_MAX)
    code.copy_(torch.maximum(work, (v > 0).to(torch.float32)))


def _root_codes_(work: Tensor, scale: Tensor, largest: int) -> None:
    """New block scales, and in place of magnitudes the whole numbers nearest to the fourth roots of what they are in them."""
    scale.copy_(_block_scales(work.amax(dim=1, keepdim=True), float(largest**4)))
    sqrt_(sqrt_(work.div_(scale))).round_().clamp_(max=largest)
