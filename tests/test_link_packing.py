"""A link is packed where that clearly pays, and not one boundary longer than that; its mind doesn't change at a border."""

from __future__ import annotations

import pytest

from miner.link_packing import MEASURE_AGAIN_AFTER, MIN_BODY_BYTES, Link, LinkPacking, PackingGain

MB = 1_000_000


def gain(bytes_per_s: float = 400 * MB, saved: float = 0.15) -> PackingGain:
    made = PackingGain()
    made.note(MB, round(MB * (1 - saved)), MB / bytes_per_s)
    return made


def at_speed(link: Link, bytes_per_s: float, *, times: int = 30) -> Link:
    now = 0.0
    for _ in range(times):
        link.begin(now)
        now += 2 * MB / bytes_per_s
        link.end(now, 2 * MB)
        now += 5.0  # nothing to send: doesn't count
    return link


def test_slow_links_pack_fast_ones_dont_and_nothing_changes_in_between() -> None:
    even = 400 * MB * 0.15
    assert gain().break_even_bytes_per_s == pytest.approx(even)
    link = Link()
    assert not link.decide(gain())  # not known yet
    assert at_speed(link, 12.5 * MB).bytes_per_s == pytest.approx(12.5 * MB, rel=0.01)
    assert link.decide(gain())
    assert at_speed(link, 0.6 * even).decide(gain())
    assert not at_speed(link, 1.1 * even).decide(gain())
    assert not at_speed(link, 0.6 * even).decide(gain())
    assert at_speed(link, 0.2 * even).decide(gain())
    assert not link.decide(gain(saved=0.01))


def test_time_counts_while_something_waits_and_once() -> None:
    link = Link()
    link.begin(0.0)
    link.begin(0.1)
    link.end(1.0, 5 * MB)
    link.end(1.5, 5 * MB)
    link.begin(9.0)
    link.end(9.5, 0)  # failed: its time counts, its bytes don't
    link.begin(20.0)
    link.end(20.5, 10 * MB)
    assert link.bytes_per_s == pytest.approx(0.7 * (0.7 * 5 * MB + 0.3 * 10 * MB) + 0.3 * 10 * MB, rel=0.01)


def test_what_packing_would_save_is_looked_at_once_and_then_now_and_then() -> None:
    packing = LinkPacking()
    assert not packing.packs("a", MIN_BODY_BYTES - 1)
    assert packing.packs("a", MB)
    assert not packing.packs("b", MB)  # others in the same moment don't measure as well
    packing.gain.note(MB, 850_000, 0.0025)
    assert [packing.packs("a", MB) for _ in range(MEASURE_AGAIN_AFTER)].count(True) == 0
    assert packing.packs("a", MB)
    at_speed(packing.link("a"), 5 * MB)
    assert packing.packs("a", MB)
    assert not packing.packs("b", MB)
