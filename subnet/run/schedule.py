"""Host scalars of a step as exact fp32 bits, and the exact norm: what `docs/arithmetic.md` §7 and §8 compute in fp64.

Everything here is plain Python: a coordinator without torch and a second implementation get the same bits.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import msgspec

from subnet.errors import InputError
from subnet.run.config import RunConfig

SQUARES_BIAS = 128
"""Square-sums are whole numbers: sum of Q^2 * 4^(k + 128), so that exponents down to -128 need no fractions."""


class StepScalars(msgspec.Struct, frozen=True):
    """The optimizer's scalars of one step, each the bit pattern of an fp32 (see :func:`bits_fp32`)."""

    lr: int
    beta1: int
    one_minus_beta1: int
    beta2: int
    one_minus_beta2: int
    epsilon: int
    bias_correction1: int
    bias_correction2: int
    decay: int
    decays: bool
    """Whether tensors of two or more dimensions are multiplied by ``decay``."""


def fp32_bits(value: float) -> int:
    """The bits of fp32(value): one rounding to nearest, ties to even; overflow gives infinity as IEEE 754 has it."""
    try:
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def bits_fp32(bits: int) -> float:
    """The fp32 with these bits, as a Python float (exact)."""
    if not 0 <= bits < 2**32:
        raise InputError(f"{bits} is no bit pattern of an fp32")
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def learning_rate(config: RunConfig, step: int) -> float:
    """lr(step) in fp64: linear warm-up, then the schedule."""
    top, schedule = config.optimizer.learning_rate, config.schedule
    if step < schedule.warmup_steps:
        return top * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return top
    progress = (step - schedule.warmup_steps) / max(1, config.run.steps - schedule.warmup_steps)
    final = schedule.final_fraction
    return top * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


def step_scalars(config: RunConfig, step: int) -> StepScalars:
    """The scalars of update ``step`` (0 is the first), each rounded once from fp64."""
    if step < 0:
        raise InputError(f"step {step} has no update")
    optimizer = config.optimizer
    beta1, beta2 = optimizer.betas
    lr = learning_rate(config, step)
    return StepScalars(
        lr=fp32_bits(lr),
        beta1=fp32_bits(beta1),
        one_minus_beta1=fp32_bits(1 - beta1),
        beta2=fp32_bits(beta2),
        one_minus_beta2=fp32_bits(1 - beta2),
        epsilon=fp32_bits(optimizer.epsilon),
        bias_correction1=fp32_bits(1 - beta1 ** (step + 1)),
        bias_correction2=fp32_bits(1 - beta2 ** (step + 1)),
        decay=fp32_bits(1 - lr * optimizer.weight_decay),
        decays=optimizer.weight_decay > 0,
    )


def norm_and_coefficient(squares: int, num_counted: int, clip_norm: float) -> tuple[float, int]:
    """The gradient norm (fp64) and the fp32 bits of the update's coefficient, from the whole model's exact squares.

    ``num_counted`` is M less the skipped microbatches.
    """
    if squares < 0 or num_counted < 1:
        raise InputError(f"a norm needs squares >= 0 and at least one microbatch, not {squares} and {num_counted}")
    try:
        # int / int is correctly rounded, so this is fp64(N)
        total = squares / 4**SQUARES_BIAS
    except OverflowError:
        raise InputError("the gradient's square-sum is beyond fp64: the run has diverged") from None
    norm = math.sqrt(total) / num_counted
    clip = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
    return norm, fp32_bits(clip / num_counted)


def squares_as_fraction(squares: int) -> Fraction:
    """The exact rational N that ``squares`` stands for."""
    return Fraction(squares, 4**SQUARES_BIAS)
