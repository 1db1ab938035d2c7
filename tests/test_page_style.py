"""The page's colours can be read in both themes: contrast by WCAG 2.2, from the style sheet as it is."""

from __future__ import annotations

import re

import pytest

from subnet.net.pages import SHARED

TEXT = [("text", "bg"), ("text", "surface"), ("text", "raised"), ("muted", "bg"), ("muted", "surface")]
TEXT += [(name, "surface") for name in ("accent", "good", "warn", "bad", "calm", "loss", "holdout", "speed")]
TEXT += [("accent", "bg"), ("good", "bg"), ("warn", "bg"), ("bad", "bg")]
SHAPES = [
    (name, "surface") for name in ("focus", "mark-good", "mark-warn", "mark-bad", "mark-calm", "working", "silent")
]


def themes() -> dict[str, dict[str, str]]:
    text = (SHARED / "page.css").read_text(encoding="utf-8")
    blocks = re.findall(r"([^{}]*:root[^{]*)\{([^{}]*)\}", text)
    found = {}
    for selector, body in blocks:
        dark = "dark" in selector or 'not([data-theme="light"])' in selector
        name = "light" if not dark else "dark, chosen" if '="dark"' in selector else "dark, by the system"
        found[name] = dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})\b", body))
    return found


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_counted_as_the_standard_counts_it():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark, by the system", "dark, chosen"])
def test_text_and_shapes_stand_out(theme: str):
    colors = themes()[theme]
    for least, pairs in ((4.5, TEXT), (3.0, SHAPES)):
        low = {
            pair: round(contrast(colors[pair[0]], colors[pair[1]]), 2)
            for pair in pairs
            if contrast(colors[pair[0]], colors[pair[1]]) < least
        }
        assert not low, f"{theme}: below {least}: {low}"


def test_both_dark_themes_are_the_same():
    assert themes()["dark, by the system"] == themes()["dark, chosen"]
