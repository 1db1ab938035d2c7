"""A tensor of the reference: its state, its blocks and their scales (``docs/arithmetic.md``, 2 and 6)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1024
F32 = np.float32
Floats = NDArray[np.float32]


@dataclass
class Entry:
    """A tensor of the canonical list: its state, and how it is cut into blocks.

    ``rows`` x ``length`` is the table whose rows are cut into blocks of 1024, the last of a row shorter.
    """

    name: str
    shape: tuple[int, ...]
    leaves: tuple[str, ...]
    qmax: int
    """Largest magnitude of one leaf's integers."""
    rows: int
    length: int
    weight: Tensor
    m: Tensor
    v: Tensor
    decayed: Floats = field(default_factory=lambda: np.zeros(0, F32))
    limit: Floats = field(default_factory=lambda: np.zeros(0, F32))
    limit_used: Floats = field(default_factory=lambda: np.zeros(0, F32))
    weight_used: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the state that the next gradients are of: ``limit`` and ``weight``, or with a delay those before them (§12)."""
    codes: dict[str, NDArray[Any]] = field(default_factory=lambda: {})
    """With 8-bit moments, what of them is kept; ``m`` and ``v`` are then only there during an update."""

    def views(self, tensor: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Views (row, block, element) of ``tensor``, each with the block columns that it covers."""
        table = tensor.view(self.rows, self.length)
        whole = self.length // BLOCK
        if whole:
            yield table[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)), slice(0, whole)
        if self.length % BLOCK:
            yield table[:, whole * BLOCK :].unsqueeze(1), slice(whole, whole + 1)

    def block_table(self, values: NDArray[Any]) -> Tensor:
        """One value per block as (row, block, 1), to be multiplied with a view."""
        return torch.from_numpy(np.ascontiguousarray(values)).view(self.rows, -1, 1)

    def block_maxima(self, tensor: Tensor) -> Floats:
        parts = [_largest(view) for view, _ in self.views(tensor)]
        return torch.cat(parts, dim=1).reshape(-1).numpy()

    def exponents(self) -> NDArray[np.int64]:
        """The smallest k of each block with limit <= qmax · 2^k."""
        mantissa, exponent = np.frexp(self.limit_used)
        mantissa_q, exponent_q = math.frexp(self.qmax)
        return exponent.astype(np.int64) - exponent_q + (mantissa.astype(np.float64) > mantissa_q)

    def calibrate(self, maxima: Floats) -> None:
        self.decayed = maxima.copy()
        self.limit = self.limit_used = self._target()

    def keep_before(self) -> None:
        """An update is about to change the state: the next gradients are of what it is now."""
        self.weight_used.copy_(self.weight)
        self.limit_used = self.limit.copy()

    def rescale(self, maxima: Floats) -> None:
        delayed = self.limit_used is not self.limit
        self.decayed = np.maximum(self.decayed * F32(0.9), maxima)
        self.limit = np.minimum(np.maximum(self._target(), self.limit * F32(0.5)), self.limit * F32(8))
        if not delayed:
            self.limit_used = self.limit

    def _target(self) -> Floats:
        over = np.maximum(self.decayed, self.decayed.max() * F32(0.25)) * F32(2)
        return np.maximum(over, F32(2.0**-60))


def _largest(view: Tensor) -> Tensor:
    """max |x| over the last dimension, by halves: some ten times faster than ``amax`` on short rows."""
    x = view.abs()
    while x.shape[-1] > 8:
        half = x.shape[-1] // 2
        folded = torch.maximum(x[..., :half], x[..., half : 2 * half])
        if x.shape[-1] % 2:
            folded[..., 0] = torch.maximum(folded[..., 0], x[..., -1])
        x = folded
    return x.amax(dim=-1)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
