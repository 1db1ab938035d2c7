"""What one simulated world comes to, and numbers over several: mean with a confidence band, Gini."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""Student's t for a two-sided band of 90 %, by degrees of freedom from 1 on; beyond the last it is used as it is."""


class Band(msgspec.Struct, frozen=True):
    """Over seeds: mean, and the ends of a two-sided 90 % confidence band of it (Student's t); of one seed just the mean."""

    mean: float
    low: float
    high: float


def band(values: Sequence[float]) -> Band | None:
    """None of no values."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Band(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = T_90[min(len(values) - 2, len(T_90) - 1)] * math.sqrt(variance / len(values))
    return Band(mean, mean - half, mean + half)


def gini(incomes: Sequence[float]) -> float:
    """0: all alike; towards 1: one has it all. 0 where there is none."""
    ordered = sorted(incomes)
    whole, n = math.fsum(ordered), len(ordered)
    if not whole > 0:
        return 0.0
    return math.fsum((2 * rank - n - 1) * value for rank, value in enumerate(ordered, start=1)) / (n * whole)


class KindSeed(msgspec.Struct):
    """One group in one seed."""

    machines: int
    income_usd: float = 0.0
    running_usd: float = 0.0
    """Power or rent."""
    registering_usd: float = 0.0
    capital_usd: float = 0.0
    machine_h: float = 0.0
    """Hours in which the machine was a member, under whichever hotkey."""
    registrations: int = 0
    convictions: int = 0
    faults: int = 0
    departures: int = 0
    """Left by its own choice."""
    daily_usd: list[float] = []
    """Income per machine, day by day."""
    daily_running_usd: list[float] = []
    found_out_h: list[float] = []
    """From a hotkey's first lie until it was established."""
    undetected: int = 0
    """Hotkeys that lied and weren't found out by the end."""


class Seed(msgspec.Struct):
    """One simulated world."""

    seed: int
    kinds: dict[str, KindSeed]
    burned_share: float
    """Of what miners' weights are paid."""
    gini: float
    """Of machines' incomes."""
    churn: float
    """Hours that machines stayed away for the price, as a share of all machine-hours."""
    departures: int
    honest_dividends: float
    """USD a day per 1,000 tokens staked with a validator that counts for itself."""
    copying_dividends: float | None
    """The same with one that copies; None without one."""


def sure(values: Sequence[float]) -> Band:
    """Of at least one value."""
    found = band(values)
    assert found is not None
    return found
