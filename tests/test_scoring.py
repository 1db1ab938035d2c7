"""Scores follow the formula in the docstring, belong to registrations, and are the same floats every time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import ConfigError
from validator.scoring import ScoreBook, ScorePolicy

NAMES = st.sampled_from(["5a", "5b", "5c", "5d"])
STEP = st.tuples(st.floats(0, 500), st.dictionaries(NAMES, st.floats(0, 1e15), max_size=4))


@settings(max_examples=50, deadline=None)
@given(st.lists(STEP, max_size=12), st.floats(0, 1000))
def test_scores_are_the_formula(steps: list[tuple[float, dict[str, float]]], later_s: float):
    half_life_s = 100.0
    book = ScoreBook(ScorePolicy(half_life_s=half_life_s, forget_after_half_lives=1000))
    seals: list[tuple[float, dict[str, float]]] = []
    time_s = 0.0
    for step, (gap_s, work) in enumerate(steps):
        time_s += gap_s
        book.apply_sealed(step, time_s, work)
        seals.append((time_s, work))
    now_s = time_s + later_s
    expected: dict[str, float] = {}
    for sealed_s, work in seals:
        for hotkey, flops in work.items():
            expected[hotkey] = expected.get(hotkey, 0.0) + flops * 2 ** (-(now_s - sealed_s) / half_life_s)
    scores = book.scores(now_s)
    whole = sum(expected.values())
    for hotkey, work in expected.items():
        got = scores[hotkey].work if hotkey in scores else 0.0
        assert got == pytest.approx(work, rel=1e-9, abs=1e-300)
        if whole > 1e-200 and hotkey in scores:
            assert scores[hotkey].total == pytest.approx(work / whole, rel=1e-9, abs=1e-300)
    assert list(scores) == sorted(scores)
    assert book.scores(now_s) == scores  # reading changes nothing


def test_equal_seals_give_equal_floats_in_any_order_of_hotkeys():
    work = {"5a": 1e12 / 3, "5b": 2e12 / 7, "5c": 1e11 / 9}
    one, two = ScoreBook(), ScoreBook()
    for step in range(50):
        one.apply_sealed(step, step * 1.7, work)
        two.apply_sealed(step, step * 1.7, dict(reversed(work.items())))
    assert one.scores(1000.1) == two.scores(1000.1)


def test_half_the_score_is_gone_after_a_half_life():
    book = ScoreBook(ScorePolicy(half_life_s=60))
    book.apply_sealed(0, 100.0, {"5a": 8.0, "5b": 8.0})
    book.apply_sealed(1, 160.0, {"5b": 8.0})
    scores = book.scores(160.0)
    assert (scores["5a"].work, scores["5b"].work) == (4.0, 12.0)
    assert (scores["5a"].total, scores["5b"].total) == (0.25, 0.75)
    assert (scores["5b"].sealed_work, scores["5b"].sealed_steps, scores["5b"].last_sealed_s) == (16.0, 2, 160.0)
    assert book.scores(100.0)["5a"].work == 8.0  # a reader whose clock is behind doesn't raise anybody


def test_a_new_registration_starts_at_zero_and_an_old_one_comes_back():
    book = ScoreBook()
    book.apply_sealed(0, 0.0, {"5a": 8.0, "5b": 8.0})
    book.apply_registrations({"5a": 10, "5b": 11})
    assert book.scores(0.0)["5a"].registered_at_block == 10
    book.apply_registrations({"5b": 11})  # 5a isn't there, for now
    assert book.scores(0.0)["5a"].work == 8.0
    book.apply_registrations({"5a": 99, "5b": 11})
    assert "5a" not in book.scores(0.0)
    assert book.scores(0.0)["5b"].total == 1.0
    book.apply_sealed(1, 1.0, {"5a": 2.0})
    book.apply_registrations({"5a": 99, "5b": 11})
    assert book.scores(1.0)["5a"].registered_at_block == 99


def test_idle_hotkeys_are_forgotten_and_no_work_makes_no_entry():
    book = ScoreBook(ScorePolicy(half_life_s=1, forget_after_half_lives=10))
    book.apply_sealed(0, 0.0, {"5a": 1.0, "5z": 0.0})
    assert list(book.scores(0.0)) == ["5a"]
    book.apply_sealed(1, 10.5, {"5b": 1.0})
    assert list(book.scores(10.5)) == ["5b"]


def test_steps_come_once_in_order_within_their_run():
    book = ScoreBook()
    book.apply_sealed(-1, 0.0, {"5a": 1.0}, run="x")
    book.apply_sealed(0, 1.0, {"5a": 1.0}, run="x")
    book.apply_sealed(0, 0.5, {"5a": 1.0}, run="y")  # an earlier time counts as the last one
    assert book.scores(1.0)["5a"].sealed_steps == 3
    for step in (0, -1):
        with pytest.raises(ValueError, match="came after"):
            book.apply_sealed(step, 2.0, {}, run="x")
    for work in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="work of 5a"):
            book.apply_sealed(1, 2.0, {"5a": work}, run="x")
    assert book.scores(1.0)["5a"].sealed_steps == 3


def test_explanations_give_each_term():
    book = ScoreBook(ScorePolicy(half_life_s=60))
    book.apply_sealed(0, 0.0, {"5a": 6e12, "5b": 2e12})
    book.apply_registrations({"5a": 7})
    text = "\n".join(book.explain("5a", 60.0))
    for words in ("block 7", "6e+12 FLOPs in 1 steps", "x 0.5000 = 3e+12", "3e+12 / 4e+12 = 0.7500"):
        assert words in text
    assert "not yet read" in book.explain("5b", 0.0)[0]
    assert "no sealed work" in book.explain("5q", 0.0)[0]


@pytest.mark.parametrize("bad", [{"half_life_s": 0.0}, {"half_life_s": float("nan")}, {"forget_after_half_lives": 0.5}])
def test_policies_are_checked(bad: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ScorePolicy(**bad)
