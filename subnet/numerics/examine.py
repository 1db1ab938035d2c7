"""Foreign slices and merged partitions looked at in one pass: what can't be right is refused, and nothing is read twice.

A tile that stays in the cache is unpacked, range-checked and hashed (:func:`accept_slice`), or range-checked, fingerprinted,
squared and written where the update reads it (:func:`examine_merged`). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from subnet.errors import HashMismatch, InputError
from subnet.numerics.fingerprint import TILE_VALUES, Fingerprinter, sampled_maxima
from subnet.numerics.layout import Partition, Section
from subnet.numerics.packing import split_packed, unpack_tiles
from subnet.numerics.slices import (
    BlockSquares,
    Buffer,
    check_maxima,
    check_range,
    integer_type,
    parse_slice,
    slice_size,
    sum_bits,
)


@dataclass(frozen=True)
class Examined:
    """What a merged partition is, whoever says otherwise. ``squares`` are in units of 4^-128."""

    fingerprint: tuple[int, ...]
    squares: int
    maxima: NDArray[np.float32]


def accept_slice(
    section: Section,
    partition: Partition,
    body: Buffer,
    num_items: int,
    *,
    hash: str,
    packed: bool,
    item_bound: int | None = None,
    calibration: bool = False,
) -> memoryview:
    """The canonical bytes of a slice over ``num_items`` microbatches that came from somebody else, or an error.

    The hash is that of the canonical bytes; ``item_bound`` as for :func:`~subnet.numerics.slices.parse_slice`.
    """
    if calibration or not packed:
        if blake3(body).hexdigest() != hash:
            raise HashMismatch(f"a slice of partition {partition.index} has other bytes than those of its hash")
        parse_slice(section, partition, body, num_items, calibration=calibration, item_bound=item_bound)
        return memoryview(body)
    view, bits = memoryview(body).cast("B"), sum_bits(num_items, section.item_bound)
    split = split_packed(partition, len(view), bits)
    out = np.empty(slice_size(section, partition, num_items), dtype=np.uint8)
    maxima = out[len(out) - partition.num_blocks * 4 :]
    integers = out[: len(out) - len(maxima)].view(integer_type(section, num_items))
    bound = num_items * (section.item_bound if item_bound is None else item_bound)
    hasher = blake3()
    for first, end in unpack_tiles(view[:split], bits, integers):
        check_range(partition, integers[first:end], bound)
        hasher.update(integers[first:end].view(np.uint8).data)
    maxima[:] = np.frombuffer(view[split:], dtype=np.uint8)
    check_maxima(partition, maxima.view("<f4"))
    if hasher.update(maxima.data).hexdigest() != hash:
        raise HashMismatch(f"a slice of partition {partition.index} has other bytes than those of its hash")
    return out.data


def examine_merged(
    section: Section,
    partition: Partition,
    buffer: Buffer,
    total_items: int,
    *,
    exponents: NDArray[np.int16],
    seed: bytes,
    width_bits: int,
    values: NDArray[np.float32] | None = None,
    squares: int | None = None,
) -> Examined:
    """Fingerprint and square-sum of merged bytes whose hash is known; bytes that can't be a sum are refused.

    ``values``, if given, is the partition's part of the section's fp32 array: the integers are written there.
    ``squares``: the square-sum of the same bytes, if they were summed here.
    """
    size = slice_size(section, partition, total_items)
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if len(raw) != size:
        raise InputError(f"a slice of partition {partition.index} has {len(raw)} bytes instead of {size}")
    integers: NDArray[Any] = np.frombuffer(
        buffer, dtype=integer_type(section, total_items), count=partition.num_elements
    )
    maxima = np.frombuffer(raw[integers.nbytes :].tobytes(), dtype="<f4")
    check_maxima(partition, maxima)
    bound = total_items * section.item_bound
    printer = Fingerprinter(seed, width_bits, partition.index, len(integers))
    summed = BlockSquares(section, partition, bound) if squares is None else None
    for at in range(0, len(integers), TILE_VALUES):
        tile = integers[at : at + TILE_VALUES]
        check_range(partition, tile, bound)
        wide = printer.add(at, tile)
        if summed is not None:
            summed.add(at, wide)
        if values is not None:
            np.copyto(values[at : at + TILE_VALUES], tile, casting="unsafe")
    fingerprint = printer.result() + sampled_maxima(maxima, seed, partition.index)
    if summed is not None:
        squares = summed.total(exponents)
    assert squares is not None
    return Examined(fingerprint, squares, maxima)
