"""Modules of a builder's own for the tests: causal convolutions, and sequences that must be refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A causal convolution, dropout that must not drop, and a table that isn't stored."""

    def __init__(self, width: int, kernel: int = 4) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.5))
        self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seen = functional.pad(self.norm(x).transpose(1, 2), (self.kernel - 1, 0))
        return x + self.mlp(self.conv(seen).transpose(1, 2)) * self.table


class Whole(nn.Module):
    """Sees the whole row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x.mean(1, keepdim=True))


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.rand(())


class Idle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def build(vocab_size: int = 64, width: int = 24, depth: int = 4, tied: bool = False) -> list[nn.Module]:
    embedding, head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False)
    if tied:
        head.weight = embedding.weight
    return [embedding, *(Block(width) for _ in range(depth)), nn.LayerNorm(width), head]


def with_block(kind: str) -> list[nn.Module]:
    """The usual sequence with another first block."""
    modules, width = build(), 24
    blocks: dict[str, nn.Module] = {
        "whole": Whole(width),
        "noisy": Noisy(width, width),
        "idle": Idle(width),
        "wide": nn.Linear(width, width + 1),
        "double": nn.Linear(width, width).double(),
        "bare": nn.GELU(),
        "frozen": nn.Linear(width, width).requires_grad_(False),
    }
    shared = modules[2]
    return [modules[0], blocks.get(kind, shared), *modules[2:]]


def biased() -> list[nn.Module]:
    return [*build()[:-1], nn.Linear(24, 64)]


def narrow() -> list[nn.Module]:
    return [*build()[:-1], nn.Linear(24, 60, bias=False)]


def not_modules() -> int:
    return 3


def falls() -> list[nn.Module]:
    raise RuntimeError("no modules today")
