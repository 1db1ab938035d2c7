"""When a step is far off those before it: spikes of the loss and of the gradient norm. Said, never acted on, no part of a state."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from subnet.run.config_base import Section, check

MIN_STEPS = 10
"""Fewer steps before it, and nothing is said."""


class AlarmsSection(Section, frozen=True):
    """A step is called a spike where it is above so many times the median of the steps before it."""

    window_steps: int = 50
    """How many steps before it are looked at; from 10 on there is a median to be above of."""
    loss_factor: float = 1.3
    """0: no alarm about losses."""
    norm_factor: float = 5.0
    """Of the gradient's norm before clipping; 0: no alarm about it."""

    def __post_init__(self) -> None:
        ok = MIN_STEPS <= self.window_steps <= 10_000
        check(ok, "alarms.window_steps", self.window_steps, f"{MIN_STEPS} to 10,000")
        for name in ("loss_factor", "norm_factor"):
            value = getattr(self, name)
            check(value == 0 or 1 < value <= 1e6, f"alarms.{name}", value, "0 (off), or above 1, at most 1e6")


def spike(section: AlarmsSection, losses: Sequence[float], norms: Sequence[float], loss: float, norm: float) -> str:
    """What is wrong with a step of this loss and norm after steps of those, in words; "" if nothing is."""
    found: list[str] = []
    for what, factor, before, value in (
        ("loss", section.loss_factor, losses, loss),
        ("gradient norm", section.norm_factor, norms, norm),
    ):
        if not factor:
            continue
        if not math.isfinite(value):
            found.append(f"{what} is {value}")
        elif len(before) >= MIN_STEPS:
            median = statistics.median(before)
            if value > factor * median > 0:
                found.append(f"{what} {value:.4g} is {value / median:.3g} times the median of {len(before)} steps")
    return "; ".join(found)
