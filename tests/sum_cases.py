"""Shapes, gradients and a plain transcription of quantising, for the tests of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subnet.numerics.layout import Partition, RunLayout, Section, TensorSpec, build_layout
from subnet.numerics.slices import BlockSquares

QMAX = 1023
SHAPES: list[tuple[tuple[int, ...], bool]] = [
    ((6, 128), True),
    ((5, 1536), True),
    ((4, 2048), True),
    ((3, 40, 33), False),
    ((2, 9), False),
    ((70, 33), False),
    ((3, 1024), False),
    ((576,), False),
    ((1,), False),
]


def layout_of(shapes: list[tuple[tuple[int, ...], bool]], partitions: int = 1) -> RunLayout:
    specs = [TensorSpec(f"t{i}", shape, rows) for i, (shape, rows) in enumerate(shapes)]
    return build_layout([specs], tied=None, qmax=QMAX, target_partitions=partitions, min_partition_elements=1)


def random_grads(shapes: list[tuple[tuple[int, ...], bool]], rng: np.random.Generator) -> list[tuple[int, Tensor]]:
    """Heavy tails and zeros, so that clipping, ties and empty blocks occur."""
    out: list[tuple[int, Tensor]] = []
    for i, (shape, _) in enumerate(shapes):
        g = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 1, shape) * (rng.random(shape) > 0.2)
        out.append((i, torch.from_numpy(g.astype(np.float32))))
    return out


def plain_blocks(layout: RunLayout, grads: list[tuple[int, Tensor]]) -> np.ndarray:
    return np.concatenate([g.numpy().reshape(-1) for _, g in sorted(grads, key=lambda x: x[0])])


def plain_quantise(flat: np.ndarray, lengths: np.ndarray, ks: np.ndarray, qmax: int) -> np.ndarray:
    """§5 in fp64, where every product with a power of two is exact too."""
    scale = np.repeat(2.0 ** -ks.astype(np.float64), lengths)
    return np.clip(np.rint(flat.astype(np.float64) * scale), -qmax, qmax).astype(np.int64)


def plain_maxima(flat: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.maximum.reduceat(np.abs(flat), starts[:-1])


def some_exponents(num_blocks: int, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.integers(-18, -6, num_blocks).astype(np.int16))


def square_sum(
    section: Section, partition: Partition, integers: NDArray[Any], exponents: NDArray[np.int16], bound: int
) -> int:
    """Sum over the partition's blocks of (sum of squares) * 4^(k + SQUARES_BIAS), in one piece."""
    squares = BlockSquares(section, partition, bound)
    squares.add(0, integers.astype(np.float64))
    return squares.total(exponents)
