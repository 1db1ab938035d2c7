"""The arguments of an owner's words, from numbers; what isn't one is refused before anybody is asked."""

from __future__ import annotations

import math

from subnet.errors import ConfigError


def rate_argument(factor: float | None, value: float | None) -> str:
    """Of ``set-lr``. Raises ConfigError unless exactly one of the two is given, and a number above 0."""
    if (factor is None) == (value is None):
        raise ConfigError("a learning rate needs a factor or a value, one of the two", hint="for example --factor 0.5")
    kind, number = ("value", value) if factor is None else ("factor", factor)
    if number is None or not math.isfinite(number) or number <= 0:
        raise ConfigError(f"{kind} = {number} is not allowed", hint="a number above 0")
    return f"{kind} {number!r}"


def length_argument(steps: int, *, keep_schedule: bool) -> str:
    """Of ``extend``. Raises ConfigError for less than one step."""
    if steps < 1:
        raise ConfigError(f"steps = {steps} is not allowed", hint="the number of steps in all, 1 or more")
    return f"{steps} keep" if keep_schedule else str(steps)
