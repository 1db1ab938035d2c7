"""Host scalars of a step as exact fp32 bits, and the exact norm: what `docs/arithmetic.md` §7 and §8 compute in fp64.

Everything here is plain Python: a coordinator without torch and a second implementation get the same bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

import msgspec

from subnet.errors import InputError
from subnet.run.config import RunConfig

SQUARES_BIAS = 128
"""Square-sums are whole numbers: sum of Q^2 * 4^(k + 128), so that exponents down to -128 need no fractions."""


class StepScalars(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """Whether what decays (matrices, by the run's decay groups) is multiplied by ``decay``."""
    momentum: int = 0
    one_minus_momentum: int = 0
    """Muon's; 0 without it."""


class Terms(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the run's owner has said of its steps: in force for updates from ``first_step`` on, until the next terms."""

    first_step: int = 0
    steps: int = 0
    """Length of the schedule; 0: the run file's."""
    lr_factor: float = 1.0
    """Times the schedule."""
    lr_value: float = 0.0
    """Instead of the schedule, where it is above 0."""
    end: int = 0
    """Updates of the run in all; 0: the run file's."""
    end: int = 0
    """Updates of the run in all; 0: the run file's."""


AS_FILED = Terms()


def terms_of(said: Sequence[Terms], step: int) -> Terms:
    """Of terms in the order of their first steps, those in force for update ``step``."""
    return next((terms for terms in reversed(said) if terms.first_step <= step), AS_FILED)


def newest_terms(said: Sequence[Terms]) -> Terms:
    """What was said last, also of steps to come."""
    return said[-1] if said else AS_FILED


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


def learning_rate(config: RunConfig, step: int, terms: Terms = AS_FILED) -> float:
    """lr(step) in fp64: linear warm-up, then the schedule; beyond its length it stays where it ended.

    With lanes ``step`` counts inner steps: round · inner_steps + inner step.
    """
    if terms.lr_value > 0:
        return terms.lr_value
    inner, before = config.lanes.inner_steps, config.run.first_step
    steps = before + (terms.steps or config.run.steps)
    scheduled = _scheduled(config, step + before * inner, steps * inner)
    return scheduled if terms.lr_factor == 1.0 else scheduled * terms.lr_factor


def _scheduled(config: RunConfig, step: int, steps: int) -> float:
    top, schedule = config.optimizer.learning_rate, config.schedule
    if step < schedule.warmup_steps:
        return top * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return top
    begins = schedule.warmup_steps
    if schedule.kind == "wsd":
        begins = max(begins, steps - decay_steps(config, steps))
        if step < begins:
            return top
    progress = min(1.0, max(0, step - begins) / max(1, steps - begins))
    return top * (schedule.final_fraction + (1 - schedule.final_fraction) * _left(config, progress))


def _left(config: RunConfig, progress: float) -> float:
    """1 where the fall begins, 0 at its end."""
    schedule = config.schedule
    if schedule.kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.kind == "wsd" and schedule.decay_shape == "sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress


def decay_steps(config: RunConfig, steps: int) -> int:
    """Steps at the end of so many in which ``wsd`` falls."""
    schedule = config.schedule
    return schedule.decay_steps or max(1, math.floor(schedule.decay_fraction * steps + 0.5))


def step_scalars(config: RunConfig, step: int, terms: Terms = AS_FILED) -> StepScalars:
    """The scalars of update ``step`` (0 is the first), each rounded once from fp64; with lanes those of the outer update."""
    if step < 0:
        raise InputError(f"step {step} has no update")
    if config.lanes.on:
        return _outer_scalars(config)
    return _optimizer_scalars(config, learning_rate(config, step, terms), config.run.first_step + step + 1)


def inner_scalars(config: RunConfig, round_: int, inner_step: int, terms: Terms = AS_FILED) -> StepScalars:
    """The scalars of a lane's inner step (0 is a round's first), whose moments were zero when the round began.

    Round -1 uses those of round 0.
    """
    step = max(round_, 0) * config.lanes.inner_steps + inner_step
    return _optimizer_scalars(config, learning_rate(config, step, terms), inner_step + 1)


def _outer_scalars(config: RunConfig) -> StepScalars:
    """Nesterov's: ``lr`` and ``momentum``; nothing decays and there are no moments."""
    one, zero = fp32_bits(1.0), 0
    return StepScalars(
        lr=fp32_bits(config.lanes.outer_learning_rate),
        beta1=zero,
        one_minus_beta1=one,
        beta2=zero,
        one_minus_beta2=one,
        epsilon=zero,
        bias_correction1=one,
        bias_correction2=one,
        decay=one,
        decays=False,
        momentum=fp32_bits(config.lanes.outer_momentum),
    )


def _optimizer_scalars(config: RunConfig, lr: float, num_updates: int) -> StepScalars:
    """``num_updates`` counts this one: moments that were zero are corrected by it."""
    optimizer = config.optimizer
    beta1, beta2 = optimizer.betas
    muon = optimizer.kind == "muon"
    return StepScalars(
        lr=fp32_bits(lr),
        beta1=fp32_bits(beta1),
        one_minus_beta1=fp32_bits(1 - beta1),
        beta2=fp32_bits(beta2),
        one_minus_beta2=fp32_bits(1 - beta2),
        epsilon=fp32_bits(optimizer.epsilon),
        bias_correction1=fp32_bits(1 - beta1**num_updates),
        bias_correction2=fp32_bits(1 - beta2**num_updates),
        decay=fp32_bits(1 - lr * optimizer.weight_decay),
        decays=optimizer.weight_decay > 0,
        momentum=fp32_bits(optimizer.momentum) if muon else 0,
        one_minus_momentum=fp32_bits(1 - optimizer.momentum) if muon else 0,
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
