"""The optimizers of ``docs/arithmetic.md`` §8 and §13, written a second time: whole tensors, no tiles, no sections."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.entry import F32, Entry, scalar
from benchmarks.setting import learning_rate
from subnet.run.config import RunConfig

CODES = ("exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale")


def begin(config: RunConfig, entry: Entry) -> None:
    """Moments of an untrained tensor."""
    entry.m, entry.v = torch.zeros(entry.shape), torch.zeros(entry.shape)
    if config.optimizer.state_bits == 8:
        size, blocks = math.prod(entry.shape), len(entry.decayed)
        made = (np.zeros(size, np.int8), np.zeros(blocks, F32), np.zeros(size, np.uint8), np.zeros(blocks, F32))
        entry.codes = dict(zip(CODES, made, strict=True))


def update(config: RunConfig, entry: Entry, g: Tensor, t: int, *, since: int = 0) -> None:
    """The weights and moments of one tensor after update ``t`` with the gradient ``g``; moments were zero before ``since``."""
    settings = config.optimizer
    matrix = len(entry.shape) in (2, 3) and not entry.name.endswith("bias")
    outer = entry.name.endswith(("embed_tokens.weight", "lm_head.weight"))
    decay = settings.weight_decay > 0 and matrix
    if entry.name.endswith("embed_tokens.weight") and not settings.decay_embeddings:
        decay = False
    if settings.kind == "muon" and matrix and not outer:
        _muon(config, entry, g, t, decay=decay)
        return
    if entry.codes:
        _decode(entry)
    _adamw(config, entry, g, t, since, decay=decay)
    if entry.codes:
        _encode(entry)


def _adamw(config: RunConfig, entry: Entry, g: Tensor, t: int, since: int, *, decay: bool) -> None:
    settings, n, rate = config.optimizer, t + 1 - since, learning_rate(config, t)
    n += 0 if config.lanes.on else config.run.first_step
    b1, b2 = settings.betas
    m, v = entry.m, entry.v
    m.mul_(scalar(b1)).add_(g * scalar(1 - b1))
    v.mul_(scalar(b2)).add_((g * g).mul_(scalar(1 - b2)))
    root = (v / scalar(1 - b2**n)).numpy()
    np.sqrt(root, out=root)  # rounded as IEEE 754 says; torch's own root on a CPU may be a bit off
    step = (m / scalar(1 - b1**n)).div_(torch.from_numpy(root).add_(scalar(settings.epsilon)))
    if decay:
        entry.weight.mul_(scalar(1 - rate * settings.weight_decay))
    entry.weight.sub_(step.mul_(scalar(rate)))


def _muon(config: RunConfig, entry: Entry, g: Tensor, t: int, *, decay: bool) -> None:
    settings, rate = config.optimizer, learning_rate(config, t)
    mu, rest = scalar(settings.momentum), scalar(1 - settings.momentum)
    part = g * rest
    entry.m.mul_(mu).add_(part)
    ahead = part + entry.m * mu
    rows, columns = entry.shape[-2:]
    if decay:
        entry.weight.mul_(scalar(1 - rate * settings.weight_decay))
    size = scalar(0.2 * math.sqrt(max(rows, columns)))
    for weight, one in zip(entry.weight.view(-1, rows, columns), ahead.view(-1, rows, columns), strict=True):
        weight.sub_(_newton_schulz(one) * size * scalar(rate))


def _newton_schulz(g: Tensor) -> Tensor:
    tall = g.shape[0] > g.shape[1]
    x = (g.T if tall else g).clone(memory_format=torch.contiguous_format)
    norm = np.sqrt((x * x).sum().numpy())
    x = x / (torch.tensor(norm) + scalar(1e-7))
    for _ in range(5):
        a = x @ x.T
        x = x * scalar(3.4445) + (a * scalar(-4.775) + (a @ a) * scalar(2.0315)) @ x
    return x.T if tall else x


def _blocks(entry: Entry, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The tensor's blocks in order."""
    found: list[NDArray[np.float32]] = []
    for row in values.reshape(entry.rows, entry.length):
        found += [row[start : start + 1024] for start in range(0, entry.length, 1024)]
    return found


def _decode(entry: Entry) -> None:
    code, scale, code_sq, scale_sq = (entry.codes[kind] for kind in CODES)
    sizes = [len(block) for block in _blocks(entry, np.empty(entry.shape, F32))]
    k, k_sq = code.astype(F32), code_sq.astype(F32)
    m = np.copysign((k * k) * (k * k), k) * np.repeat(scale, sizes)
    v = (k_sq * k_sq) * (k_sq * k_sq) * np.repeat(scale_sq, sizes)
    entry.m, entry.v = (torch.from_numpy(x.astype(F32).reshape(entry.shape)) for x in (m, v))


def _encode(entry: Entry) -> None:
    code, scale, code_sq, scale_sq = (entry.codes[kind] for kind in CODES)
    at = 0
    smallest = F32(2.0**-126)
    both = zip(_blocks(entry, entry.m.numpy()), _blocks(entry, entry.v.numpy()), strict=True)
    for index, (m, v) in enumerate(both):
        scale[index] = max(np.abs(m).max() / F32(127**4), smallest)
        scale_sq[index] = max(v.max() / F32(255**4), smallest)
        k = np.minimum(np.rint(np.sqrt(np.sqrt(np.abs(m) / scale[index]))), F32(127))
        k_sq = np.minimum(np.rint(np.sqrt(np.sqrt(v / scale_sq[index]))), F32(255))
        code[at : at + len(m)] = np.copysign(k, m).astype(np.int8)
        code_sq[at : at + len(m)] = np.maximum(k_sq, (v > 0).astype(F32)).astype(np.uint8)
        at += len(m)
