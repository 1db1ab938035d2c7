"""Powers of one half, the same bits on every machine: made of IEEE additions, products and roots, of nobody's math library.

So whoever folds a journal, on whatever system, has every validator's floats. What changes a line here changes all scores.
"""

from __future__ import annotations

import math

LN2 = 0.6931471805599453
_PARTS = 64
_BEYOND = 1000.0
"""So many half-lives leave nothing."""


def _table() -> tuple[float, ...]:
    """2^(-k/64), from square roots, which IEEE 754 rounds correctly."""
    roots, root = list[float](), 0.5
    for _ in range(6):
        root = math.sqrt(root)
        roots.append(root)
    powers: list[float] = []
    for k in range(_PARTS):
        value = 1.0
        for bit, root in enumerate(roots):
            if k >> (5 - bit) & 1:
                value *= root
        powers.append(value)
    return tuple(powers)


_POWERS = _table()


def half_power(x: float) -> float:
    """2^-x to 3 units in the last place; 1 for x <= 0, and 0 beyond a thousand."""
    if x <= 0.0:
        return 1.0
    if x >= _BEYOND:
        return 0.0
    n = int(x * 64.0)
    y = (x - n / 64.0) * LN2
    series = 1.0 - y * (1.0 - y / 2.0 * (1.0 - y / 3.0 * (1.0 - y / 4.0 * (1.0 - y / 5.0 * (1.0 - y / 6.0)))))
    return math.ldexp(_POWERS[n & 63] * series, -(n >> 6))


def half_power_lost(x: float) -> float:
    """1 - 2^-x, to one part in 10^14 however small x is."""
    if x >= 1.0 / 64.0:
        return 1.0 - half_power(x)
    y = max(x, 0.0) * LN2
    return y * (1.0 - y / 2.0 * (1.0 - y / 3.0 * (1.0 - y / 4.0 * (1.0 - y / 5.0 * (1.0 - y / 6.0)))))


def whole_power(base: float, exponent: int) -> float:
    """base^exponent by multiplication; 1 for exponent 0."""
    value = 1.0
    for _ in range(exponent):
        value *= base
    return value
