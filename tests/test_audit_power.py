"""The table of an audit's power: its theory is that of simple cases, and a small Monte Carlo of the production rule agrees."""

from __future__ import annotations

import math

import pytest

from benchmarks.audit_power import BY_STEP, Row, Trial, fold_of, measure, power, shown, sigmas, theory
from benchmarks.two_validators import ranks, spearman
from subnet.run.audits import must_audit

ROW = Row(0.2, 16, 4)


def test_full_time_in_probation_is_caught_at_once() -> None:
    assert theory(ROW, 1.0, 3, probation=True) == 1.0
    assert theory(ROW, 1.0, 1, probation=True) == 1.0


def test_after_probation_it_is_the_rate() -> None:
    assert theory(ROW, 1.0, 1, probation=False) == pytest.approx(0.2)
    assert theory(ROW, 1.0, 10, probation=False) == pytest.approx(1 - 0.8**10)
    wrong = 1 - 0.95**4
    assert theory(ROW, 0.05, 50, probation=False) == pytest.approx(1 - (1 - 0.2 * wrong) ** 50)


def test_in_probation_seldom_lies_are_missed_by_chance_alone() -> None:
    wrong = 1 - 0.95**4
    assert theory(ROW, 0.05, 3, probation=True) == pytest.approx(1 - (1 - wrong) ** 3)
    assert theory(ROW, 0.05, 10, probation=True) == pytest.approx(1 - (1 - wrong) ** 4 * (1 - 0.2 * wrong) ** 6)


def test_a_trial_redoes_everything_until_probation_is_over() -> None:
    trial = Trial(ROW, 0, 200, probation=True)
    assert trial.redone[:4] == [True] * 4, "16 items at 4 a step"
    assert 15 < sum(trial.redone[4:]) < 70
    assert Trial(ROW, 0, 200, probation=False).redone[4:] != [True] * 196
    assert trial.caught_at([step == 2 for step in range(200)]) == 2
    assert trial.caught_at([False] * 200) is None


def test_the_production_rule_says_who_is_in_probation() -> None:
    state = fold_of(ROW)
    assert must_audit(state, "miner-0")
    state.audits.clean["miner-0"] = 16
    assert not must_audit(state, "miner-0")


def test_measured_agrees_with_theory() -> None:
    trials = 300
    for probation in (True, False):
        found = measure(ROW, trials, probation=probation, seed=5)
        for share, fractions in found.items():
            for by, fraction in zip(BY_STEP, fractions, strict=True):
                assert sigmas(fraction, theory(ROW, share, by, probation=probation), trials) < 4.5, (share, by)


def test_another_theory_is_told_from_the_measurement() -> None:
    """The comparison is able to fail."""
    trials = 300
    found = measure(ROW, trials, probation=False, seed=5)[1.0][BY_STEP.index(10)]
    assert sigmas(found, theory(Row(0.1, 16, 4), 1.0, 10, probation=False), trials) > 5


def test_sigmas() -> None:
    assert sigmas(1.0, 1.0, 100) == 0
    assert sigmas(0.99, 1.0, 100) == math.inf
    assert sigmas(0.6, 0.5, 100) == pytest.approx((0.1 - 0.005) / 0.05)


def test_a_lone_replica_is_drawn_more_often() -> None:
    alone = Row(0.05, 16, 1)
    assert theory(alone, 1.0, 1, probation=False) == pytest.approx(0.2)
    found = measure(alone, 300, probation=False, seed=2)[1.0][0]
    assert sigmas(found, 1 - 0.8**3, 300) < 4.5
    assert sigmas(found, 1 - 0.95**3, 300) > 5


def test_the_table_has_a_row_for_each_setting() -> None:
    cells = power(ROW, 20, 1)
    assert len(cells) == 6
    text = shown(cells)
    assert text.count("\n") == 7
    assert "after probation" in text


def test_rank_correlation() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert spearman([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0
