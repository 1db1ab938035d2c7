"""Gradients to order-free integer sums: scales are powers of two, a microbatch is added whole or not at all.

`docs/arithmetic.md` §5 and §6, on CPU and CUDA, to the same bits. Sums are whole numbers in fp32, exact below 2^24.
On a CPU the work goes through tiles that stay in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from subnet.errors import InputError
from subnet.numerics.layout import BLOCK, Partition, Section, Strip, TensorSpan, adapter_pairs, section_tiles
from subnet.numerics.slices import Buffer, decode_merged, encode_arrays, encode_hashed, integer_type

DECAY = 0.9
TENSOR_SHARE = 0.25
HEADROOM = 2.0
FLOOR = 2.0**-60
LIMIT_SHRINK, LIMIT_GROWTH = 0.5, 8.0
UNSEEN_SHARE = 2.0**-4
"""An adapter's A has no gradient as long as B is zero; until then its limits are this share of B's largest."""
CEILING = 2.0**120
"""No limit is above this, so that exponents stay in a byte and 2^-k in the normal range of fp32."""
EXPONENT_BIAS = 128

_CPU_TILE, _CUDA_TILE = 1 << 17, 1 << 25


class NonFiniteGradient(InputError):
    """A gradient has an element that is infinite or no number: the item fails, nothing of it was added."""

    code = "non_finite_gradient"


class LostEnergy(msgspec.Struct, frozen=True):
    """What quantising a microbatch lost of one leaf: sums of squares of the gradient and of the difference."""

    name: str
    energy: float
    lost: float


class ItemStats(msgspec.Struct, frozen=True):
    """What adding a microbatch did: clipped elements, and (only if measured) the loss of each leaf."""

    num_clipped: int
    lost: tuple[LostEnergy, ...] = ()


def update_scales(
    section: Section, decayed: Tensor, limit: Tensor, maxima: Tensor, *, first: bool
) -> tuple[Tensor, Tensor]:
    """The scale state after a step with these block maxima; ``first``: after the calibration step."""

    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=maxima.device)

    new = maxima.clone() if first else torch.maximum(decayed * scalar(DECAY), maxima)
    share = torch.empty_like(new)
    for span in section.tensors:
        blocks = slice(span.block_start, span.block_start + span.num_blocks)
        share[blocks] = new[blocks].amax() * scalar(TENSOR_SHARE)
    wanted = torch.maximum(torch.maximum(new, share) * scalar(HEADROOM), scalar(FLOOR))
    target = wanted
    if not first:
        target = torch.minimum(torch.maximum(target, limit * scalar(LIMIT_SHRINK)), limit * scalar(LIMIT_GROWTH))
    for a, b in adapter_pairs(section):
        blocks = _blocks(a)
        if not bool(new[blocks].any()):
            largest = target[_blocks(b)].amax() * scalar(UNSEEN_SHARE)
            target[blocks] = torch.maximum(largest, scalar(FLOOR))
        elif not first and not bool(decayed[blocks].any()):
            target[blocks] = wanted[blocks]
    return new, torch.minimum(target, scalar(CEILING))


def _blocks(span: TensorSpan) -> slice:
    return slice(span.block_start, span.block_start + span.num_blocks)


def exponents(limit: Tensor, leaf_qmax: int) -> Tensor:
    """Per block the smallest k with limit <= leaf_qmax * 2^k, exactly, as int16."""
    fraction, exponent = torch.frexp(limit)
    fraction_q, exponent_q = torch.frexp(torch.tensor(float(leaf_qmax), dtype=torch.float32, device=limit.device))
    return (exponent - exponent_q + (fraction > fraction_q)).to(torch.int16)


def scale_bytes(exponents: Tensor) -> bytes:
    """The exponents as they travel: one byte a block, k + 128."""
    return (exponents.cpu() + EXPONENT_BIAS).to(torch.uint8).numpy().tobytes()


def exponents_from_bytes(data: Buffer, *, device: torch.device | str = "cpu") -> Tensor:
    """The exponents that travelled; bytes that the scale rule can't have made are refused."""
    raw = np.frombuffer(data, dtype=np.uint8).astype(np.int16) - EXPONENT_BIAS
    if len(raw) and (int(raw.min()) < -126 or int(raw.max()) > 120):
        raise InputError("a scale byte is outside of what the scale rule can give")
    return torch.from_numpy(raw).to(device)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^k as fp32, from its bits."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def strip_rows(flat: Tensor, strip: Strip, base: int = 0) -> Tensor:
    """The strip's blocks as rows of a view of ``flat``, whose first element is ``base`` of the section."""
    offset = flat.storage_offset() + strip.element_start - base
    return flat.as_strided((strip.count, strip.length), (strip.element_stride, 1), offset)


def strip_blocks(per_block: Tensor, strip: Strip, base: int = 0) -> Tensor:
    """The strip's entries of a tensor of one number a block, as a column."""
    offset = per_block.storage_offset() + strip.block_start - base
    return per_block.as_strided((strip.count, 1), (strip.block_stride, 1), offset)


def tile_elements(device: torch.device) -> int:
    """Elements to work on at a time on this device."""
    return _CPU_TILE if device.type == "cpu" else _CUDA_TILE


def _fused_kernel(total: Tensor, grad: Tensor, inverse: Tensor, qmax: int) -> Tensor:
    rounded = torch.round(grad * inverse)
    total.add_(torch.clamp(rounded, -qmax, qmax))
    return (torch.abs(rounded) > qmax).sum()


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # in this process: a pool of compilers would outlive the one kernel it is for
    return torch.compile(_fused_kernel, dynamic=True, fullgraph=True, options={"compile_threads": 1})


@dataclasses.dataclass
class _Leaf:
    """One gradient of one item on its way into a sum."""

    tensor: int
    grad: Tensor
    maxima: Tensor


class PartialSum:
    """A member's sum over its microbatches of one section: ``values`` (whole numbers), block ``maxima``, ``num_items``.

    ``exponents`` is None in the calibration step, whose sums have maxima only. One thread at a time.
    """

    def __init__(self, section: Section, exponents: Tensor | None, *, device: torch.device | str = "cpu") -> None:
        self.section = section
        self.device = torch.device(device)
        self.maxima = torch.zeros(section.num_blocks, dtype=torch.float32, device=self.device)
        self.values = torch.empty(0, dtype=torch.float32, device=self.device)
        tiles = section_tiles(section, tile_elements(self.device))
        self._tiles = [[tile for tile in tiles if tile.tensor == index] for index in range(len(section.tensors))]
        largest = max((tile.count * tile.length for tile in tiles), default=0)
        self._work = torch.empty(largest, dtype=torch.float32, device=self.device)
        self.reset(exponents)

    def reset(self, exponents: Tensor | None) -> None:
        """Back to the empty sum, for a step with these exponents; buffers are kept."""
        self.num_items = 0
        self.intact = True
        self.maxima.zero_()
        self.calibration = exponents is None
        if exponents is None:
            self.values = self.values[:0]
            return
        if len(exponents) != self.section.num_blocks:
            raise ValueError(f"{len(exponents)} exponents for {self.section.num_blocks} blocks")
        if len(self.values) != self.section.num_elements:
            self.values = torch.empty(self.section.num_elements, dtype=torch.float32, device=self.device)
        self.values.zero_()
        held = exponents.to(self.device)
        self._scale = power_of_two(held)
        self._inverse = power_of_two(-held)
        self._clips_above = self._scale * torch.tensor(float(self.section.leaf_qmax), device=self.device)

    def add_item(self, grads: Sequence[tuple[int, Tensor]], *, fused: bool = False, measure: bool = False) -> ItemStats:
        """Add one microbatch: (index of tensor in section, gradient); a tensor twice if both leaves are here."""
        return add_item_to_sections([(self, grads)], fused=fused, measure=measure)

    def encode(self, partition: Partition) -> memoryview:
        """The canonical slice of a partition of this section."""
        self._require_intact()
        maxima = self.maxima[partition.block_start : partition.block_end].cpu().numpy()
        if self.calibration:
            return encode_arrays(self.section, partition, self.num_items, None, maxima)
        values = self.values[partition.element_start : partition.element_end]
        if values.device.type != "cpu":
            wire = {1: torch.int8, 2: torch.int16, 4: torch.int32}
            values = values.to(wire[integer_type(self.section, self.num_items).itemsize]).cpu()
        return encode_arrays(self.section, partition, self.num_items, values.numpy(), maxima)

    def encode_hashed(self, partition: Partition, out: NDArray[np.uint8] | None = None) -> tuple[memoryview, str]:
        """The canonical slice, in ``out`` where that is of use, and its BLAKE3: one pass over tiles that stay cached."""
        if self.calibration or self.device.type != "cpu":
            data = self.encode(partition)
            return data, blake3(data).hexdigest()
        self._require_intact()
        values = self.values[partition.element_start : partition.element_end].numpy()
        maxima = self.maxima[partition.block_start : partition.block_end].numpy()
        return encode_hashed(self.section, partition, self.num_items, values, maxima, out)

    def integers(self, partition: Partition) -> NDArray[np.float32]:
        """The partition's whole numbers on the host, to fingerprint."""
        self._require_intact()
        return self.values[partition.element_start : partition.element_end].cpu().numpy()

    def _require_intact(self) -> None:
        if not self.intact:
            raise RuntimeError(f"the sum of section {self.section.name} was interrupted amid an addition: void it")

    def _measure_maxima(self, grads: Sequence[tuple[int, Tensor]]) -> list[_Leaf]:
        leaves: list[_Leaf] = []
        for tensor, grad in grads:
            span = self.section.tensors[tensor]
            if grad.dtype != torch.float32 or tuple(grad.shape) != span.spec.shape:
                raise ValueError(f"gradient of {span.spec.name} is {grad.dtype} {tuple(grad.shape)}")
            flat = grad.detach().reshape(-1)
            maxima = torch.empty(span.num_blocks, dtype=torch.float32, device=self.device)
            for tile in self._tiles[tensor]:
                rows = strip_rows(flat, tile, span.element_start)
                work = self._work[: rows.numel()].view(rows.shape)
                out = strip_blocks(maxima, tile, span.block_start)
                out.copy_(torch.amax(torch.abs(rows, out=work), dim=1, keepdim=True))
            leaves.append(_Leaf(tensor, flat, maxima))
        counts = [sum(leaf.tensor == tensor for leaf in leaves) for tensor in range(len(self.section.tensors))]
        if any(not 1 <= count <= self.section.num_leaves for count in counts):
            raise ValueError(f"a microbatch needs each tensor of section {self.section.name} once for each leaf")
        return leaves

    def _add(self, leaf: _Leaf, *, fused: bool) -> Tensor | int:
        """Quantise and add a leaf whose maxima are known; returns the number of clipped elements."""
        span, qmax = self.section.tensors[leaf.tensor], self.section.leaf_qmax
        blocks = slice(span.block_start, span.block_start + span.num_blocks)
        on_cpu = self.device.type == "cpu"
        can_clip = (leaf.maxima > self._clips_above[blocks]).numpy() if on_cpu else None
        clipped: Tensor | int = 0
        for tile in self._tiles[leaf.tensor]:
            rows = strip_rows(leaf.grad, tile, span.element_start)
            total = strip_rows(self.values, tile)
            inverse = strip_blocks(self._inverse, tile)
            if fused and tile.length == tile.element_stride == BLOCK:
                clipped += _compiled()(total, rows, inverse, qmax)
                continue
            work = self._work[: rows.numel()].view(rows.shape)
            torch.mul(rows, inverse, out=work).round_()
            first = tile.block_start - span.block_start
            if can_clip is None or can_clip[first : first + tile.count * tile.block_stride : tile.block_stride].any():
                clipped += (work.abs() > qmax).sum()
                work.clamp_(-qmax, qmax)
            total.add_(work)
        seen = self.maxima[blocks]
        torch.maximum(seen, leaf.maxima, out=seen)
        return clipped

    def _lost(self, leaf: _Leaf) -> LostEnergy:
        span, qmax = self.section.tensors[leaf.tensor], self.section.leaf_qmax
        energy = lost = 0.0
        for tile in self._tiles[leaf.tensor]:
            rows = strip_rows(leaf.grad, tile, span.element_start)
            kept = torch.clamp(torch.round(rows * strip_blocks(self._inverse, tile)), -qmax, qmax)
            exact = rows.double()
            energy += float(exact.square().sum())
            lost += float((exact - (kept * strip_blocks(self._scale, tile)).double()).square().sum())
        return LostEnergy(span.spec.name, energy, lost)


def add_item_to_sections(
    items: Sequence[tuple[PartialSum, Sequence[tuple[int, Tensor]]]], *, fused: bool = False, measure: bool = False
) -> ItemStats:
    """Add one microbatch to several sections: to all, or, raising :class:`NonFiniteGradient`, to none."""
    for partial, _ in items:
        partial._require_intact()  # pyright: ignore[reportPrivateUsage]
    measured = [(partial, partial._measure_maxima(grads)) for partial, grads in items]  # pyright: ignore[reportPrivateUsage]
    everything = [leaf.maxima for _, leaves in measured for leaf in leaves]
    if everything and not bool(torch.isfinite(torch.cat(everything)).all()):
        names = [
            partial.section.tensors[leaf.tensor].spec.name
            for partial, leaves in measured
            for leaf in leaves
            if not bool(torch.isfinite(leaf.maxima).all())
        ]
        raise NonFiniteGradient(f"the gradient of {names[0]} ({len(names)} tensors in all) is not finite")
    clipped: Tensor | int = 0
    lost: list[LostEnergy] = []
    for partial, _ in items:
        partial.intact = False
    for partial, leaves in measured:
        for leaf in leaves:
            if partial.calibration:
                blocks = partial.section.tensors[leaf.tensor]
                seen = partial.maxima[blocks.block_start : blocks.block_start + blocks.num_blocks]
                torch.maximum(seen, leaf.maxima, out=seen)
                continue
            if measure:
                lost.append(partial._lost(leaf))  # pyright: ignore[reportPrivateUsage]
            clipped += partial._add(leaf, fused=fused)  # pyright: ignore[reportPrivateUsage]
        partial.num_items += 1
    num_clipped = int(clipped)
    for partial, _ in items:
        partial.intact = True
    return ItemStats(num_clipped, tuple(lost))


def load_merged(
    section: Section, partition: Partition, buffer: Buffer, num_items: int, values: Tensor | None, maxima: Tensor
) -> None:
    """Check a merged slice and write it into the section's buffers on any device (``values`` None: calibration)."""
    if maxima.device.type == "cpu":
        decode_merged(section, partition, buffer, num_items, None if values is None else values.numpy(), maxima.numpy())
        return
    shifted = msgspec.structs.replace(
        partition,
        block_start=0,
        block_end=partition.num_blocks,
        element_start=0,
        element_end=partition.num_elements,
    )
    host_values = None if values is None else np.empty(partition.num_elements, dtype=np.float32)
    host_maxima = np.empty(partition.num_blocks, dtype=np.float32)
    decode_merged(section, shifted, buffer, num_items, host_values, host_maxima)
    maxima[partition.block_start : partition.block_end] = torch.from_numpy(host_maxima)
    if values is not None and host_values is not None:
        values[partition.element_start : partition.element_end] = torch.from_numpy(host_values)


def host_exponents(exponents: Tensor) -> NDArray[np.int16]:
    """The exponents as the array that :func:`subnet.numerics.slices.merge_slices` takes."""
    return cast("NDArray[np.int16]", exponents.to(torch.int16).cpu().numpy())
