"""Slices of integer sums as canonical bytes: the same sums are the same bytes, foreign bytes are checked before use.

A slice of a sum over n microbatches is the partition's integers, little-endian two's complement of the byte width for
n, then one fp32 maximum per block. While calibrating the integers are left out. Merging is exact integer addition, so
neither order nor grouping shows in the result. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from subnet.errors import InputError
from subnet.numerics.layout import Partition, Section, block_starts
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


def encode_hashed(
    section: Section,
    partition: Partition,
    num_items: int,
    values: NDArray[Any],
    maxima: NDArray[np.float32],
    out: NDArray[np.uint8] | None = None,
) -> tuple[memoryview, str]:
    """:func:`encode_arrays`, into ``out`` if given, with the BLAKE3: each tile is hashed right after it was written."""
    if out is None:
        out = np.empty(slice_size(section, partition, num_items), dtype=np.uint8)
    split, hasher = len(out) - partition.num_blocks * 4, blake3()
    integers = out[:split].view(integer_type(section, num_items))
    for at in range(0, len(integers), TILE):
        tile = integers[at : at + TILE]
        np.copyto(tile, values[at : at + TILE], casting="unsafe")
        hasher.update(tile.view(np.uint8).data)
    out[split:] = np.ascontiguousarray(maxima, dtype="<f4").view(np.uint8)
    return out.data, hasher.update(out[split:].data).hexdigest()


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
    integers, maxima = _parse(section, partition, buffer, num_items, calibration=calibration)
    if integers is not None:
        bound = num_items * (section.item_bound if item_bound is None else item_bound)
        for at in range(0, len(integers), TILE):
            check_range(partition, integers[at : at + TILE], bound)
    return integers, maxima


def _parse(
    section: Section, partition: Partition, buffer: Buffer, num_items: int, *, calibration: bool
) -> tuple[NDArray[Any] | None, NDArray[np.float32]]:
    """The same, but the integers' range is still to be checked."""
    size = slice_size(section, partition, num_items, calibration=calibration)
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if len(raw) != size:
        raise InputError(f"a slice of partition {partition.index} has {len(raw)} bytes instead of {size}")
    split = size - partition.num_blocks * 4
    maxima = np.frombuffer(raw[split:].tobytes(), dtype="<f4")
    check_maxima(partition, maxima)
    if calibration:
        return None, maxima
    return np.frombuffer(buffer, dtype=integer_type(section, num_items), count=partition.num_elements), maxima


def check_maxima(partition: Partition, maxima: NDArray[np.float32]) -> None:
    if not bool(np.isfinite(maxima).all()) or bool(np.signbit(maxima).any()):
        raise InputError(f"a slice of partition {partition.index} has a block maximum that is negative or not finite")


def check_range(partition: Partition, tile: NDArray[Any], bound: int) -> None:
    if len(tile) and (int(tile.max()) > bound or int(tile.min()) < -bound):
        raise InputError(f"a slice of partition {partition.index} has a sum beyond +-{bound}, its microbatches' range")


def merge_slices(
    section: Section,
    partition: Partition,
    slices: Sequence[tuple[Buffer, int]],
    *,
    total_items: int,
    exponents: NDArray[np.int16] | None,
) -> tuple[memoryview, int, str]:
    """The canonical bytes of the sum, its exact square-sum scaled by 4^SQUARES_BIAS, and the BLAKE3 of the bytes.

    ``slices`` are (bytes, number of microbatches); ``exponents`` are the section's, or None while calibrating.
    Each stage that holds the section contributes every microbatch once.
    """
    counted, due = sum(num_items for _, num_items in slices), total_items * len(section.stages)
    if counted != due or any(n < 0 for _, n in slices):
        raise InputError(f"slices of section {section.name} count {counted} microbatches instead of {due}")
    calibration, item_bound = exponents is None, section.item_bound // len(section.stages)
    parsed = [_parse(section, partition, buffer, num_items, calibration=calibration) for buffer, num_items in slices]
    maxima = np.zeros(partition.num_blocks, dtype=np.float32)
    for _, theirs in parsed:
        np.maximum(maxima, theirs, out=maxima)
    if exponents is None:
        data = encode_arrays(section, partition, total_items, None, maxima)
        return data, 0, blake3(data).hexdigest()
    out = np.empty(slice_size(section, partition, total_items), dtype=np.uint8)
    split = len(out) - maxima.nbytes
    out[split:] = maxima.astype("<f4", copy=False).view(np.uint8)
    total = out[:split].view(integer_type(section, total_items))
    added = [
        (values, num_items * item_bound)
        for (values, _), (_, num_items) in zip(parsed, slices, strict=True)
        if values is not None
    ]
    squares, hasher = _add_up(section, partition, added, total, total_items * section.item_bound)
    return out.data, squares.total(exponents), hasher.update(out[split:].data).hexdigest()


def _add_up(
    section: Section,
    partition: Partition,
    added: Sequence[tuple[NDArray[Any], int]],
    total: NDArray[Any],
    bound: int,
) -> tuple[BlockSquares, blake3]:
    """Into ``total``, whose type holds the whole sum and so every part of it: nothing is widened on the way.

    ``added`` are (integers, what none of them may be beyond). While a tile is in the cache it is checked, added, squared and
    hashed.
    """
    squares, hasher, work = BlockSquares(section, partition, bound), blake3(), np.empty(TILE, dtype=np.float64)
    for at in range(0, len(total), TILE):
        tile = total[at : at + TILE]
        if not added:
            tile[:] = 0
        for number, (values, limit) in enumerate(added):
            theirs = values[at : at + TILE]
            check_range(partition, theirs, limit)
            if number:
                np.add(tile, theirs, out=tile, casting="unsafe")
            else:
                np.copyto(tile, theirs, casting="unsafe")
        wide = work[: len(tile)]
        np.copyto(wide, tile)
        squares.add(at, wide)
        hasher.update(tile.view(np.uint8).data)
    return squares, hasher


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


class BlockSquares:
    """Sums of squares by block of a partition, from pieces of its integers as fp64, wherever they are cut."""

    def __init__(self, section: Section, partition: Partition, bound: int) -> None:
        """``bound``: no integer's magnitude is above it."""
        self._partition = partition
        self._starts = relative_starts(section, partition)
        self._lengths = np.diff(self._starts)
        self._sums = np.zeros(partition.num_blocks, dtype=np.int64)
        self._split = bound > _EXACT_SQUARES

    def add(self, first: int, values: NDArray[np.float64]) -> None:
        """``first``: where in the partition the values begin."""
        if not len(values):
            return
        low = int(np.searchsorted(self._starts, first, side="right")) - 1
        high = int(np.searchsorted(self._starts, first + len(values), side="left"))
        target = self._sums[low:high]
        if not self._split:
            target += self._products(first, values, values, low, high)
            return
        upper = np.floor(values / 4096.0)
        lower = values - upper * 4096.0
        target += self._products(first, upper, upper, low, high) << 24
        target += self._products(first, upper, lower, low, high) << 13
        target += self._products(first, lower, lower, low, high)

    def _products(
        self, first: int, a: NDArray[np.float64], b: NDArray[np.float64], low: int, high: int
    ) -> NDArray[np.int64]:
        """By block, from ``low`` to ``high``, the sum of a * b: whole blocks of one length at once."""
        starts = self._starts[low : high + 1] - first
        full_low, full_high = int(starts[0] < 0), high - low - int(starts[-1] > len(a))
        lengths = self._lengths[low + full_low : low + full_high]
        if full_low >= full_high or int(lengths.min()) != int(lengths.max()):
            return np.add.reduceat(a * b, np.maximum(starts[:-1], 0)).astype(np.int64)
        found = np.empty(high - low, dtype=np.int64)
        begin, end = int(starts[full_low]), int(starts[full_high])
        shape = (full_high - full_low, -1)
        found[full_low:full_high] = np.vecdot(a[begin:end].reshape(shape), b[begin:end].reshape(shape))
        if full_low:
            found[0] = np.dot(a[:begin], b[:begin])
        if full_high < high - low:
            found[-1] = np.dot(a[end:], b[end:])
        return found

    def total(self, exponents: NDArray[np.int16]) -> int:
        """``exponents`` are the section's."""
        scales = exponents[self._partition.block_start : self._partition.block_end].astype(np.int64)
        total = 0
        for scale in cast("list[int]", np.unique(scales).tolist()):
            chosen = self._sums[scales == scale]
            whole = (int((chosen >> 32).sum()) << 32) + int((chosen & 0xFFFFFFFF).sum())
            total += whole << 2 * (scale + SQUARES_BIAS)
        return total


@lru_cache(maxsize=256)
def relative_starts(section: Section, partition: Partition) -> NDArray[np.int64]:
    """Where each block of the partition begins in it, and its end."""
    starts = block_starts(section)[partition.block_start : partition.block_end + 1]
    return starts - partition.element_start
