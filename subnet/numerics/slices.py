"""Slices of integer sums as canonical bytes: the same sums are the same bytes, foreign bytes are checked before use.

A slice of a sum over n microbatches is the partition's integers, little-endian two's complement of the byte width for
n, then one fp32 maximum per block. While calibrating the integers are left out. Merging is exact integer addition, so
neither order nor grouping shows in the result. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from subnet.errors import InputError
from subnet.numerics.layout import Partition, Section, Strip, strips, tiles
from subnet.run.schedule import SQUARES_BIAS

Buffer = bytes | bytearray | memoryview

TILE = 1 << 16
"""Elements worked on at a time, so that intermediate results stay in the cache."""

_INTEGERS: dict[int, type[np.signedinteger[Any]]] = {1: np.int8, 2: np.int16, 4: np.int32}
_EXACT_SQUARES = 1 << 21
"""Up to this magnitude the squares of 1024 integers add exactly in fp64."""


def sum_bits(num_items: int, item_bound: int) -> int:
    """Bits of a signed sum of ``num_items`` terms within +-``item_bound``: 1 + ceil(log2(n * bound + 1))."""
    return 1 + (num_items * item_bound).bit_length()


def byte_width(bits: int) -> int:
    """The next of 1, 2 and 4 bytes."""
    if not 0 < bits <= 32:
        raise InputError(f"a sum of {bits} bits doesn't fit 4 bytes")
    return 1 if bits <= 8 else 2 if bits <= 16 else 4


def slice_width(section: Section, num_items: int) -> int:
    """Bytes of one integer of a slice that sums ``num_items`` microbatches."""
    return byte_width(sum_bits(num_items, section.item_bound))


def slice_size(section: Section, partition: Partition, num_items: int, *, calibration: bool = False) -> int:
    """Bytes of a slice."""
    width = 0 if calibration else slice_width(section, num_items)
    return partition.num_elements * width + partition.num_blocks * 4


def integer_type(section: Section, num_items: int) -> np.dtype[Any]:
    """The little-endian type of a slice's integers."""
    return np.dtype(_INTEGERS[slice_width(section, num_items)]).newbyteorder("<")


def encode_arrays(
    section: Section, partition: Partition, num_items: int, values: NDArray[Any] | None, maxima: NDArray[np.float32]
) -> memoryview:
    """A slice from the partition's own integers (of any numeric type; None while calibrating) and block maxima."""
    size = slice_size(section, partition, num_items, calibration=values is None)
    out = np.empty(size, dtype=np.uint8)
    split = size - partition.num_blocks * 4
    if values is not None:
        integers = out[:split].view(integer_type(section, num_items))
        for at in range(0, len(integers), TILE):
            np.copyto(integers[at : at + TILE], values[at : at + TILE], casting="unsafe")
    out[split:] = np.ascontiguousarray(maxima, dtype="<f4").view(np.uint8)
    return out.data


def parse_slice(
    section: Section,
    partition: Partition,
    buffer: Buffer,
    num_items: int,
    *,
    calibration: bool = False,
    item_bound: int | None = None,
) -> tuple[NDArray[Any] | None, NDArray[np.float32]]:
    """Integers (None while calibrating) and maxima of foreign bytes; anything that can't be a slice is refused.

    ``item_bound`` is the most that a microbatch adds, if less than the section's (one leaf of two).
    """
    size = slice_size(section, partition, num_items, calibration=calibration)
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if len(raw) != size:
        raise InputError(f"a slice of partition {partition.index} has {len(raw)} bytes instead of {size}")
    split = size - partition.num_blocks * 4
    maxima = np.frombuffer(raw[split:].tobytes(), dtype="<f4")
    if not bool(np.isfinite(maxima).all()) or bool(np.signbit(maxima).any()):
        raise InputError(f"a slice of partition {partition.index} has a block maximum that is negative or not finite")
    if calibration:
        return None, maxima
    integers = np.frombuffer(buffer, dtype=integer_type(section, num_items), count=partition.num_elements)
    bound = num_items * (section.item_bound if item_bound is None else item_bound)
    for at in range(0, len(integers), TILE):
        tile = integers[at : at + TILE]
        if int(tile.max()) > bound or int(tile.min()) < -bound:
            raise InputError(f"a slice of partition {partition.index} has a sum beyond {num_items} microbatches' range")
    return integers, maxima


def merge_slices(
    section: Section,
    partition: Partition,
    slices: Sequence[tuple[Buffer, int]],
    *,
    total_items: int,
    exponents: NDArray[np.int16] | None,
) -> tuple[memoryview, int]:
    """The canonical bytes of the sum, and its exact square-sum scaled by 4^SQUARES_BIAS.

    ``slices`` are (bytes, number of microbatches); ``exponents`` are the section's, or None while calibrating.
    Each stage that holds the section contributes every microbatch once.
    """
    counted, due = sum(num_items for _, num_items in slices), total_items * len(section.stages)
    if counted != due or any(n < 0 for _, n in slices):
        raise InputError(f"slices of section {section.name} count {counted} microbatches instead of {due}")
    calibration, item_bound = exponents is None, section.item_bound // len(section.stages)
    parsed = [
        parse_slice(section, partition, buffer, n, calibration=calibration, item_bound=item_bound)
        for buffer, n in slices
    ]
    maxima = np.zeros(partition.num_blocks, dtype=np.float32)
    for _, theirs in parsed:
        np.maximum(maxima, theirs, out=maxima)
    if exponents is None:
        return encode_arrays(section, partition, total_items, None, maxima), 0
    out = np.empty(slice_size(section, partition, total_items), dtype=np.uint8)
    split = len(out) - maxima.nbytes
    out[split:] = maxima.astype("<f4", copy=False).view(np.uint8)
    total = out[:split].view(integer_type(section, total_items))
    _add_up([values for values, _ in parsed if values is not None], total)
    squares = square_sum(section, partition, total, exponents, total_items * section.item_bound)
    return out.data, squares


def _add_up(integers: Sequence[NDArray[Any]], total: NDArray[Any]) -> None:
    work = np.empty(min(TILE, len(total)), dtype=np.int32)
    for at in range(0, len(total), TILE):
        tile = work[: min(TILE, len(total) - at)]
        tile[:] = 0 if not integers else integers[0][at : at + TILE]
        for values in integers[1:]:
            np.add(tile, values[at : at + TILE], out=tile)
        np.copyto(total[at : at + TILE], tile, casting="unsafe")


def decode_merged(
    section: Section,
    partition: Partition,
    buffer: Buffer,
    num_items: int,
    values: NDArray[np.float32] | None,
    maxima: NDArray[np.float32],
) -> None:
    """Check a slice and write it into the section's fp32 arrays (``values`` None while calibrating)."""
    integers, theirs = parse_slice(section, partition, buffer, num_items, calibration=values is None)
    if values is not None and integers is not None:
        target = values[partition.element_start : partition.element_end]
        for at in range(0, len(target), TILE):
            np.copyto(target[at : at + TILE], integers[at : at + TILE], casting="unsafe")
    maxima[partition.block_start : partition.block_end] = theirs


def square_sum(
    section: Section, partition: Partition, integers: NDArray[Any], exponents: NDArray[np.int16], bound: int
) -> int:
    """Sum over the partition's blocks of (sum of squares) * 4^(k + SQUARES_BIAS), exactly."""
    sums = np.zeros(partition.num_blocks, dtype=np.int64)
    work = np.empty(max(TILE, 1024), dtype=np.float64)
    for tile in tiles(strips(section, partition.block_start, partition.block_end), TILE):
        block_sums = _squares_of_tile(_rows(integers, tile, partition.element_start), work, bound)
        first = tile.block_start - partition.block_start
        sums[first : first + (tile.count - 1) * tile.block_stride + 1 : tile.block_stride] = block_sums
    scales = exponents[partition.block_start : partition.block_end].astype(np.int64)
    total = 0
    for scale in cast("list[int]", np.unique(scales).tolist()):
        chosen = sums[scales == scale]
        whole = (int((chosen >> 32).sum()) << 32) + int((chosen & 0xFFFFFFFF).sum())
        total += whole << 2 * (scale + SQUARES_BIAS)
    return total


def _rows(flat: NDArray[Any], tile: Strip, base: int) -> NDArray[Any]:
    """A tile's blocks as rows of a view of ``flat``, whose first element is ``base`` of the section."""
    step = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[tile.element_start - base :], (tile.count, tile.length), (tile.element_stride * step, step)
    )


def _squares_of_tile(rows: NDArray[Any], work: NDArray[np.float64], bound: int) -> NDArray[np.int64]:
    wide = work[: rows.size].reshape(rows.shape)
    np.copyto(wide, rows)
    if bound <= _EXACT_SQUARES:
        return np.vecdot(wide, wide).astype(np.int64)
    high = np.floor(wide / 4096.0)
    low = wide - high * 4096.0
    parts = (np.vecdot(a, b).astype(np.int64) for a, b in ((high, high), (high, low), (low, low)))
    hh, hl, ll = parts
    return (hh << 24) + (hl << 13) + ll
