"""Pictures of the workshop's pages: SVG written here, coloured by the page's style sheet, each in a wide and a narrow form.

Numbers stand beside their marks, so no picture needs a legend; a band is drawn as a bar behind its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from subnet.incentives.outcome import Band
from subnet.incentives.summary import Kind

WIDE_PX, NARROW_PX = 880, 340
ROW_PX = 26
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Row:
    """One line of a chart: a mean with its band. ``tone``: honest, attack or plain."""

    label: str
    value: Band
    text: str
    tone: str


def both(draw: Callable[[int], str], what: str) -> str:
    """The picture for a desktop and for a phone; the style sheet shows the one that fits."""
    return _svg("wide", WIDE_PX, draw(WIDE_PX), what) + _svg("narrow", NARROW_PX, draw(NARROW_PX), what)


def _svg(form: str, width: int, drawn: str, what: str) -> str:
    height, _, body = drawn.partition("|")
    return f'<svg class="{form}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(what)}">{body}</svg>'


def rows_chart(rows: Sequence[Row], what: str, *, unit: str, bend: float | None = None) -> str:
    """Means with bands from zero, one a line. ``bend``: numbers beyond it are drawn logarithmically, on both sides."""
    return both(lambda width: _rows(rows, width, unit, bend), what)


def _rows(rows: Sequence[Row], width: int, unit: str, bend: float | None) -> str:
    """Narrow: label and number stand above their bar, so that neither is cut."""
    is_narrow = width < 500
    left, right, row_px = (8, 8, 42) if is_narrow else (150, 150, ROW_PX)
    bent: Scale = (lambda v: v) if bend is None else (lambda v: math.copysign(math.log1p(abs(v) / bend), v))
    ends = [bent(v) for row in rows for v in (row.value.low, row.value.high, row.value.mean, 0.0)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    reach = (high - low) or 1.0

    def x(value: float) -> float:
        return left + (bent(value) - low) / reach * (width - left - right)

    height = len(rows) * row_px + 30
    parts = [f'<line class="axis" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="4" y2="{height - 22}"/>']
    for tick in _ticks(low, high, bend, 3 if is_narrow else 6):
        at = x(tick)
        anchor = "start" if at < 20 else "end" if at > width - 20 else "middle"
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{height - 22}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{height - 7}" text-anchor="{anchor}">{tick:g}</text>')
    if not is_narrow:
        parts.append(f'<text class="tick" x="{width - 2}" y="{height - 7}" text-anchor="end">{escape(unit)}</text>')
    for index, row in enumerate(rows):
        top = 4 + index * row_px
        y = top + (30 if is_narrow else row_px / 2)
        words = top + 16 if is_narrow else y + 4
        at, anchor = (left, "start") if is_narrow else (left - 8, "end")
        start, end = sorted((x(0), x(row.value.mean)))
        parts.append(
            f'<text class="label" x="{at}" y="{words}" text-anchor="{anchor}">{escape(row.label)}</text>'
            f'<rect class="{row.tone} bar" x="{start:.1f}" y="{y - 6}" width="{max(1.0, end - start):.1f}" height="12" rx="2"/>'
        )
        if row.value.high > row.value.low:
            a, b = x(row.value.low), x(row.value.high)
            parts.append(f'<line class="band" x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}"/>')
            parts += [f'<line class="band" x1="{c:.1f}" x2="{c:.1f}" y1="{y - 4}" y2="{y + 4}"/>' for c in (a, b)]
        at, anchor = (width - right, "end") if is_narrow else (width - right + 8, "start")
        parts.append(f'<text class="value" x="{at}" y="{words}" text-anchor="{anchor}">{escape(row.text)}</text>')
    return f"{height}|{''.join(parts)}"


def _ticks(low: float, high: float, bend: float | None, most: int) -> list[float]:
    if bend is None:
        step = _round_step((high - low) / most if high > low else 1.0)
        first = math.ceil(low / step)
        return [round(k * step, 10) for k in range(first, math.floor(high / step) + 1)]
    ends = [math.copysign(math.expm1(abs(end)) * bend, end) for end in (low, high)]
    powers = [10.0**k for k in range(-2, 6)]
    inside = [sign * p for p in powers for sign in (-1, 1) if p >= bend and ends[0] <= sign * p <= ends[1]]
    every = max(1, -(-len(inside) // most))
    return [0.0, *sorted(inside, key=abs)[::-every]]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= step * 0.999)


# --- income over time ----------------------------------------------------------------------------------------------


def income_chart(kind: Kind, like: Kind | None) -> str:
    """A group's income day by day with its band; its running cost dashed; what honest machines of its hardware earn in grey."""
    width, height, left, right, top, bottom = 250, 150, 34, 10, 12, 24
    days = len(kind.daily_income)
    reference = [day.mean for day in like.daily_income] if like is not None else []
    highest = max(0.01, *(day.high for day in kind.daily_income), *kind.daily_cost, *reference)

    def x(day: float) -> float:
        return left + (day / max(1, days - 1)) * (width - left - right)

    def y(usd: float) -> float:
        return height - bottom - max(0.0, min(usd, highest)) / highest * (height - top - bottom)

    def line(values: Sequence[float]) -> str:
        return " ".join(f"{x(day):.1f},{y(value):.1f}" for day, value in enumerate(values))

    tone = "attack" if kind.is_attack else "honest"
    edge = [*enumerate(day.high for day in kind.daily_income)]
    edge += [*enumerate(day.low for day in kind.daily_income)][::-1]
    area = " ".join(f"{x(day):.1f},{y(usd):.1f}" for day, usd in edge)
    parts: list[str] = []
    for usd in (0.0, _round_step(highest / 2)):
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(usd):.1f}" y2="{y(usd):.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 4}" y="{y(usd) + 4:.1f}" text-anchor="end">{usd:g}</text>')
    for day in (0, days - 1):
        anchor = "start" if day == 0 else "end"
        parts.append(
            f'<text class="tick" x="{x(day):.1f}" y="{height - 7}" text-anchor="{anchor}">day {day + 1}</text>'
        )
    parts.append(f'<polygon class="{tone} area" points="{area}"/>')
    parts.append(f'<polyline class="cost" points="{line(kind.daily_cost)}"/>')
    if reference:
        parts.append(f'<polyline class="reference" points="{line(reference)}"/>')
    parts.append(f'<polyline class="{tone} line" points="{line([day.mean for day in kind.daily_income])}"/>')
    return (
        f'<figure><figcaption>{escape(kind.name)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="income of {escape(kind.name)} by day">{"".join(parts)}</svg></figure>'
    )
