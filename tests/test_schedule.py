"""The host scalars and the exact norm, against values worked out by other means."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import InputError
from subnet.run.config import NO_AUDITS, ModelSection, OptimizerSection, RunConfig, RunSection, ScheduleSection
from subnet.run.schedule import (
    SQUARES_BIAS,
    bits_fp32,
    fp32_bits,
    learning_rate,
    norm_and_coefficient,
    squares_as_fraction,
    step_scalars,
)


def config(**optimizer: object) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection("r", steps=100),
        model=ModelSection(config={"model_type": "llama"}),
        optimizer=OptimizerSection(**optimizer),  # type: ignore[arg-type]
        schedule=ScheduleSection(warmup_steps=10, final_fraction=0.1),
    )


@settings(max_examples=50, deadline=None)
@given(st.floats(allow_nan=False, width=64))
def test_fp32_bits_round_as_numpy_does(value: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.float32(value)
    assert fp32_bits(value) == int(expected.view(np.uint32))
    assert bits_fp32(fp32_bits(value)) == float(expected)


def test_bits_outside_32_bits_are_refused() -> None:
    with pytest.raises(InputError):
        bits_fp32(1 << 32)


def test_cosine_schedule_values() -> None:
    run = config(learning_rate=0.5)
    assert learning_rate(run, 0) == 0.5 * 1 / 10
    assert learning_rate(run, 9) == 0.5
    assert learning_rate(run, 10) == 0.5
    assert learning_rate(run, 55) == pytest.approx(0.5 * (0.1 + 0.9 * 0.5), rel=1e-12)
    assert learning_rate(run, 100) == pytest.approx(0.05, rel=1e-12)
    flat = msgspec.structs.replace(run, schedule=ScheduleSection(kind="constant", warmup_steps=2))
    assert [learning_rate(flat, t) for t in (0, 1, 2, 99)] == [0.25, 0.5, 0.5, 0.5]


def test_step_scalars_are_rounded_once_from_fp64() -> None:
    run = config(learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    scalars = step_scalars(run, 6)
    lr = 1e-3 * 7 / 10
    wanted = {
        "lr": lr,
        "beta1": 0.9,
        "one_minus_beta1": 1 - 0.9,
        "beta2": 0.95,
        "one_minus_beta2": 1 - 0.95,
        "epsilon": 1e-8,
        "bias_correction1": 1 - 0.9**7,
        "bias_correction2": 1 - 0.95**7,
        "decay": 1 - lr * 0.1,
    }
    for name, value in wanted.items():
        assert getattr(scalars, name) == int(np.float32(value).view(np.uint32)), name
    assert scalars.decays
    assert not step_scalars(config(weight_decay=0.0), 0).decays
    assert step_scalars(config(weight_decay=0.0), 0).decay == fp32_bits(1.0)
    with pytest.raises(InputError):
        step_scalars(run, -1)


def correctly_rounded(value: Fraction) -> float:
    """Nearest fp64, checked against both neighbours rather than trusted."""
    guess = float(value)
    near = (guess, math.nextafter(guess, math.inf), math.nextafter(guess, -math.inf))
    return min(near, key=lambda x: abs(Fraction(x) - value))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 400), st.integers(1, 1 << 14), st.sampled_from([0.0, 1.0, 0.25]))
def test_norm_and_coefficient_round_once_each(squares: int, counted: int, clip: float) -> None:
    norm, bits = norm_and_coefficient(squares, counted, clip)
    assert norm == math.sqrt(correctly_rounded(Fraction(squares, 4**SQUARES_BIAS))) / counted
    c = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
    assert bits == int(np.float32(c / counted).view(np.uint32))
    assert squares_as_fraction(squares) * 4**SQUARES_BIAS == squares


def test_norm_of_a_known_gradient() -> None:
    squares = (3 * 3 + 4 * 4) << 2 * (SQUARES_BIAS - 2)
    norm, bits = norm_and_coefficient(squares, 2, 0.0)
    assert norm == 5 / 4 / 2
    assert bits_fp32(bits) == 0.5


def test_impossible_norms_are_refused() -> None:
    for squares, counted in ((-1, 1), (1, 0), (1 << 5000, 1)):
        with pytest.raises(InputError):
            norm_and_coefficient(squares, counted, 1.0)
