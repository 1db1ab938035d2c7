"""Fingerprints of slices: the merged partition's is told from those of its contributions, whoever merged them.

For the integers it is exact and linear: fp(a) + fp(b) = fp(a + b) mod 2^61 - 1, and different sums differ.
Two different arrays agree with a probability below 2^-50 over the seed, which must be drawn after both are committed.
A pass: each row of 1024 values is dotted with b-bit seeded integers in fp64, exact because b + width + 10 <= 53; the
row results are combined with seeded coefficients modulo the prime. A pass misses a difference with probability at most
2^-b + 2^-61, and as many passes as needed are made.

For the block maxima it is a sample: those of ``SAMPLED_BLOCKS`` blocks that the seed draws. Whoever publishes other maxima
than the largest of the contributions', in a share f of a partition's blocks, is found with probability 1 - (1 - f)^16 a step;
what hides from it does so because it changes next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

PRIME = (1 << 61) - 1
ROW = 1024
"""Values of a row. Changing it, or anything about the seeds, makes members disagree."""
ERROR_BITS = 50
SAMPLED_BLOCKS = 16

_TILE_ROWS = 64
TILE_VALUES = _TILE_ROWS * ROW
_LIMB = 18
_MASK = (1 << _LIMB) - 1
_MAX_ROWS = 1 << 20
"""Rows whose limb products (36 bits) add within 63 bits, with room to spare."""


def random_bits(width_bits: int) -> int:
    """Bits of a random multiplier for sums of this width."""
    if not 1 <= width_bits <= 32:
        raise ValueError(f"fingerprints are for sums of 1 to 32 bits, not {width_bits}")
    return 43 - width_bits


def num_passes(width_bits: int) -> int:
    """Passes that bring the error below 2^-50 for sums of this width."""
    return ERROR_BITS // random_bits(width_bits) + 1


def fingerprint(values: Any, seed: bytes, width_bits: int, partition_index: int) -> tuple[int, ...]:
    """One number below the prime per pass.

    ``values`` are the partition's integers: a CPU tensor or array, of integers or of whole fp32 numbers.
    ``width_bits`` is the width of the *total*, so that contributors and the merged sum make the same passes.
    """
    flat: NDArray[Any] = np.asarray(values).reshape(-1)
    printer = Fingerprinter(seed, width_bits, partition_index, len(flat))
    for first in range(0, len(flat), TILE_VALUES):
        printer.add(first, flat[first : first + TILE_VALUES])
    return printer.result()


class Fingerprinter:
    """The fingerprint of values that come in tiles of ``TILE_VALUES`` (the last may be shorter), in any order."""

    def __init__(self, seed: bytes, width_bits: int, partition_index: int, num_values: int) -> None:
        rows = -(-num_values // ROW)
        passes = range(num_passes(width_bits))
        self._seeds = [_seeds(seed, width_bits, partition_index, number, rows) for number in passes]
        self._dots = [np.empty(rows, dtype=np.int64) for _ in passes]
        self._work = np.empty((_TILE_ROWS, ROW), dtype=np.float64)

    def add(self, first: int, tile: NDArray[Any]) -> NDArray[np.float64]:
        """``first``: index of the tile's first value. Returns the tile as fp64, good until the next one."""
        used = self._work[: -(-len(tile) // ROW)]
        used[-1] = 0.0
        wide = used.reshape(-1)[: len(tile)]
        np.copyto(wide, tile)
        row = first // ROW
        for out, (multipliers, _) in zip(self._dots, self._seeds, strict=True):
            out[row : row + len(used)] = used @ multipliers
        return wide

    def result(self) -> tuple[int, ...]:
        return tuple(_combine(dots, factors) for dots, (_, factors) in zip(self._dots, self._seeds, strict=True))


def add_fingerprints(fingerprints: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The fingerprint of the sum of what the given fingerprints are of."""
    if len({len(fp) for fp in fingerprints}) != 1:
        raise ValueError("only fingerprints of equally many passes can be added, and at least one")
    return tuple(sum(numbers) % PRIME for numbers in zip(*fingerprints, strict=True))


def sampled_maxima(maxima: NDArray[np.float32], seed: bytes, partition_index: int) -> tuple[int, ...]:
    """fp32 bits of the block maxima (finite, no sign bit) of a partition's drawn blocks; of all, if there are so few.

    The bits of such numbers are ordered as the numbers are.
    """
    bits = np.ascontiguousarray(maxima, dtype="<f4").view("<u4")
    if len(bits) > SAMPLED_BLOCKS:
        label = partition_index.to_bytes(8, "little") + len(seed).to_bytes(8, "little")
        stream = blake3(b"iota/sampled-blocks/1\0" + label + seed).digest(length=8 * SAMPLED_BLOCKS)
        bits = bits[np.frombuffer(stream, dtype="<u8") % np.uint64(len(bits))]
    return tuple(bits.tolist())


def slice_fingerprint(
    values: Any, maxima: NDArray[np.float32], seed: bytes, width_bits: int, partition_index: int
) -> tuple[int, ...]:
    """What a contributor reports of its slice of a partition: of its integers, then of its maxima."""
    return fingerprint(values, seed, width_bits, partition_index) + sampled_maxima(maxima, seed, partition_index)


def merged_fingerprint(contributions: Sequence[tuple[int, ...]], width_bits: int) -> tuple[int, ...]:
    """What the merged partition must have: the sum of the integers' fingerprints, the largest of the sampled maxima."""
    passes = num_passes(width_bits)
    sums = add_fingerprints([each[:passes] for each in contributions])
    if len({len(each) for each in contributions}) != 1:
        raise ValueError("only fingerprints of equally many blocks belong to one partition")
    return sums + tuple(max(each) for each in zip(*(each[passes:] for each in contributions), strict=True))


def _seeds(
    seed: bytes, width_bits: int, partition_index: int, number: int, rows: int
) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    """Multipliers of the values of a row, and coefficients of the rows, of pass ``number``."""
    labels = b"".join(n.to_bytes(8, "little") for n in (partition_index, number, len(seed)))
    stream = blake3(b"iota/fingerprint/1\0" + labels + seed).digest(length=8 * (ROW + rows))
    words = np.frombuffer(stream, dtype="<u8")
    mask = np.uint64((1 << random_bits(width_bits)) - 1)
    return (words[:ROW] & mask).astype(np.float64), (words[ROW:] & np.uint64(PRIME)) % np.uint64(PRIME)


def _combine(dots: NDArray[np.int64], factors: NDArray[np.uint64]) -> int:
    """Sum of dots * factors modulo the prime, from products of 18-bit limbs that never overflow."""
    total = 0
    for at in range(0, len(dots), _MAX_ROWS):
        ours = _limbs(dots[at : at + _MAX_ROWS])
        theirs = _limbs(factors[at : at + _MAX_ROWS].astype(np.int64))
        for i, left in enumerate(ours):
            for j, right in enumerate(theirs):
                total += int(np.dot(left, right)) << _LIMB * (i + j)
    return total % PRIME


def _limbs(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Limbs of 18 bits, lowest first; the highest of four bears the sign."""
    limbs = [(numbers >> _LIMB * i) & _MASK for i in range(3)]
    return [*limbs, numbers >> _LIMB * 3]
