"""Bytes and time of a code on boundaries of a trained model: what the executor would send, beside the formula."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.reference import Reference
from benchmarks.rounding import cut_model, rounded
from subnet.errors import InputError
from subnet.numerics.codes import INT4, INT8, decode, encode, planes_of
from subnet.numerics.planes import pack, unpack

REPEATS = 5
AT_LEAST_BYTES = 8 << 20
"""Of fp32: smaller tensors are repeated before they are timed."""

Floats = NDArray[np.float32]


class CodeCost(msgspec.Struct, frozen=True):
    bytes_per_token: float
    """One way, at one boundary."""
    formula_bytes_per_token: float
    packed_bytes_per_token: float
    """After byte planes and zstd, mean over forward and backward."""
    error_energy_forward: float
    """Of the rounding: |decoded - x|² / |x|²."""
    error_energy_backward: float
    encode_mb_per_s: float
    """Of fp32, one core; raw: a copy's."""
    decode_mb_per_s: float
    pack_mb_per_s: float
    """Of coded bytes."""
    unpack_mb_per_s: float
    share_of_microbatch: float
    """Coding and decoding at all cuts, both ways, over the time of forward and backward of the same microbatch."""


def boundaries_of(run: Reference, cuts: Sequence[int]) -> tuple[tuple[list[Floats], list[Floats]], float]:
    """Hidden states and gradients at the cuts in one microbatch of one chunk, and the CPU seconds it takes (median)."""
    times: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        run.microbatch(run.updates - 1, 0)
        times.append(time.process_time() - began)
    seen: list[Floats] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x.detach().reshape(-1, x.shape[-1]).numpy().copy())
        return x

    cut_model(run.model, cuts, keep)
    run.microbatch(run.updates - 1, 0)
    half = len(cuts) - 1
    if len(seen) != 2 * half:
        raise InputError(f"{len(seen)} tensors at {half} cuts")
    return (seen[:half], seen[half:]), median(times)


def formula_bytes_per_token(code: str, hidden: int, chunk_tokens: int) -> float:
    """As written in ``docs/arithmetic.md``, for even widths."""
    if code == "raw":
        return 4 * hidden
    found = {"int8": INT8, "int4": INT4}[code]
    return hidden / found.per_byte + 2 * -(-hidden // found.block) + hidden / chunk_tokens


def cost_of(code: str, tensors: tuple[list[Floats], list[Floats]], microbatch_s: float) -> CodeCost:
    every = [*tensors[0], *tensors[1]]
    tokens, hidden = every[0].shape
    parts = planes_of(code, tokens, hidden)
    coded = [encode(code, x) for x in every]
    packed = [len(pack(data, parts)) for data in coded]
    errors = [fmean(_error(code, x) for x in way) for way in tensors]
    times = _times(code, np.concatenate([every[0]] * max(1, AT_LEAST_BYTES // every[0].nbytes)))
    spent = sum(every[0].nbytes / 1e6 / speed for speed in times[:2]) * len(every)
    return CodeCost(
        bytes_per_token=fmean(data.nbytes for data in coded) / tokens,
        formula_bytes_per_token=formula_bytes_per_token(code, hidden, tokens),
        packed_bytes_per_token=fmean(packed) / tokens,
        error_energy_forward=errors[0],
        error_energy_backward=errors[1],
        encode_mb_per_s=times[0],
        decode_mb_per_s=times[1],
        pack_mb_per_s=times[2],
        unpack_mb_per_s=times[3],
        share_of_microbatch=spent / microbatch_s,
    )


def _error(code: str, x: Floats) -> float:
    off = rounded(code, torch.from_numpy(x)).numpy().astype(np.float64) - x
    return float((off**2).sum() / (x.astype(np.float64) ** 2).sum())


def _times(code: str, x: Floats) -> tuple[float, float, float, float]:
    """MB per CPU second: of fp32 to encode and decode, of coded bytes to pack and unpack."""
    parts, out = planes_of(code, *x.shape), np.empty_like(x)
    source = encode(code, x)
    body = pack(source, parts)
    copy = code == "raw"

    def speed(work: Callable[[], object], num_bytes: int) -> float:
        spent: list[float] = []
        for _ in range(REPEATS):
            began = time.process_time()
            work()
            spent.append(time.process_time() - began)
        return num_bytes / 1e6 / median(spent)

    return (
        speed((lambda: np.copyto(out, x)) if copy else (lambda: encode(code, x)), x.nbytes),
        speed(lambda: decode(code, source, out, finite=True), x.nbytes),
        speed(lambda: pack(source, parts), source.nbytes),
        speed(lambda: unpack(body, parts), source.nbytes),
    )
