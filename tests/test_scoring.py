"""Scores follow the formula in subnet.score.score, belong to registrations, and are taken back and given back as it says."""

from __future__ import annotations

import math
import re

import pytest
from score_cases import TOKENS, Journal, member, planned

from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan, ModelUnits
from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.score.accounts import item_flops
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined
from subnet.score.score import whole_worth
from subnet.score.terms import terms_of
from subnet.words import TensorSpec

A, B = member("a"), member("b")
FLOPS = 2.0 * TOKENS
"""Of an item of stage 0."""
PLAIN = ScorePolicy(half_life_s=100.0, uptime_exponent=0, deadline_exponent=0, audit_exponent=0)


def two(policy: ScorePolicy | None = None, **options: AuditSection) -> Journal:
    return Journal(policy, **options).join("a").join("b")


def test_work_halves_and_shares_sum_to_one():
    j = two(PLAIN).seal(0, {A: 3, B: 1}).wait(100).seal(1, {B: 4})
    scores = j.scores()
    assert scores["a"].work == pytest.approx(1.5 * FLOPS)
    assert scores["b"].work == pytest.approx(4.5 * FLOPS)
    assert (scores["a"].total, scores["b"].total) == (pytest.approx(0.25), pytest.approx(0.75))
    assert scores["b"].rate == pytest.approx(4.5 * FLOPS * math.log(2) / 100)
    assert (scores["b"].sealed_work, scores["b"].sealed_items, scores["b"].sealed_partials) == (5 * FLOPS, 5, 2)
    assert j.scores(-50.0)["b"].work == scores["b"].work  # a reader whose clock is behind doesn't raise anybody
    assert j.scores(100.0)["b"].work == pytest.approx(scores["b"].work / 2)
    assert j.scores() == scores  # reading changes nothing


def test_only_sealed_training_items_are_paid():
    j = two()
    for m in range(4):
        j.add(ev.Leased(0, m, 0, A, 1), ev.Forwarded(0, m, 0, 1, "x"), ev.Backwarded(0, m, 0, 1, ""))
    j.add(ev.ReplayLeased(0, 0, 0, False, B, 1))
    scores = j.scores()
    assert (scores["a"].work, scores["a"].leases_done, scores["b"].work) == (0.0, 4.0, 0.0)
    assert (scores["a"].total, scores["b"].total) == (0.0, 0.0)


def test_absence_counts_only_when_one_is_gone_without_a_word():
    for why, share in (("lost", 0.5), ("silent", 0.5), ("left", 1.0), ("replaced", 1.0), ("accused", 1.0)):
        j = Journal(ScorePolicy(half_life_s=1e6, uptime_prior_s=0.0)).join("a").wait(100)
        j.add(ev.Gone(A, why)).wait(100).join("a", number=2)
        assert j.scores()["a"].uptime == pytest.approx(share, abs=1e-3), why


def test_terms_and_rewinds_are_nobodys_absence():
    j = Journal(ScorePolicy(half_life_s=1e6, uptime_prior_s=0.0)).join("a").seal(0, {A: 4}).wait(10)
    j.add(ev.TermStarted(2, "leader", "m")).wait(1000).join("a", number=2, term=2).wait(10)
    j.add(ev.Rewound(0, 1, 1)).wait(1000).join("a", number=3, term=2)
    assert j.scores()["a"].uptime == 1.0
    assert j.scores()["a"].present_s == pytest.approx(20, rel=1e-2)


def test_an_absence_weighs_less_with_time_and_less_with_the_prior():
    def uptime(prior_s: float, later_s: float) -> float:
        j = Journal(ScorePolicy(half_life_s=100.0, uptime_prior_s=prior_s)).join("a").wait(50)
        j.add(ev.Gone(A, "lost")).wait(50).join("a", number=2).wait(later_s)
        return j.scores()["a"].uptime

    assert uptime(0.0, 0.0) < uptime(0.0, 200.0) < uptime(0.0, 2000.0) <= 1.0
    assert uptime(0.0, 0.0) < uptime(500.0, 0.0) < 1.0


def test_deadlines_kept():
    j = two(ScorePolicy(half_life_s=1e8, unproven_leases=2.0))
    j.add(*(ev.Leased(0, m, 0, A, 1) for m in range(4)), ev.Leased(0, 0, 1, B, 1))
    j.add(*(ev.Backwarded(0, m, 0, 1, "") for m in range(3)))
    j.add(
        ev.Revoking(0, 3, 0, 1), ev.NotAccumulated(0, 3, 0, 1), ev.Voided(0, 0, A, "silent"), ev.Voided(0, 0, A, "left")
    )
    score = j.scores()["a"]
    assert (score.leases_done, score.leases_late, score.silent_voids) == (3.0, 1.0, 1.0)
    assert score.deadlines == pytest.approx((3 - 2) / (3 + 2))
    assert j.scores()["b"].deadlines == 0.0  # nothing shown yet


def test_evaluation_items_keep_deadlines_and_earn_nothing():
    j = two()
    j.add(
        ev.Leased(0, 4, 0, A, 1), ev.Forwarded(0, 4, 0, 1, "x"), ev.Leased(0, 0, 0, A, 1), ev.Forwarded(0, 0, 0, 1, "x")
    )
    assert (j.scores()["a"].leases_done, j.scores()["a"].work) == (1.0, 0.0)


def test_a_failed_audit_takes_the_partial_back_and_a_cleared_case_gives_it_back():
    j = (
        two(ScorePolicy(half_life_s=1e8, audit_prior_partials=2.0))
        .seal(0, {A: 3, B: 1})
        .audit(0, passed=(B,), failed=(A,))
    )
    score = j.scores()["a"]
    assert (score.work, score.sealed_work, score.sealed_items, score.sealed_partials) == (0.0, 0.0, 0, 0)
    assert (score.audits_failed, score.audits) == (1.0, pytest.approx(2 / 3))
    assert [(u.step, u.items, u.why, u.work) for u in j.book.unpaid("a")] == [(0, 3, "failed", 3 * FLOPS)]
    assert j.scores()["b"].audits == 1.0
    j.add(ev.CaseOpened(1, "a", A, 0, 0, "partial", "bundle", "digest", True), ev.CaseClosed(1, "cleared"))
    score = j.scores()["a"]
    assert (score.work, score.sealed_items, score.audits_failed, score.audits_passed) == (3 * FLOPS, 3, 0.0, 1.0)
    assert not j.book.unpaid("a")


def test_what_fails_before_its_seal_was_never_paid_and_can_be_cleared_too():
    j = two().audit(3, failed=(A,))
    assert [(u.step, u.items, u.work, u.why) for u in j.book.unpaid("a")] == [(3, 0, 0.0, "failed")]
    assert j.scores()["a"].audits < 1.0
    j.add(ev.CaseOpened(1, "a", A, 3, 0, "partial", "bundle", "digest", False), ev.CaseClosed(1, "cleared"))
    score = j.scores()["a"]
    assert (score.audits, score.sealed_partials, score.work) == (1.0, 0, 0.0)
    assert not j.book.unpaid("a")


@pytest.mark.parametrize("outcome", ["fault", "unconfirmed"])
def test_a_fault_stays_unpaid_and_is_no_conviction(outcome: str):
    j = two().seal(0, {A: 3, B: 1}).audit(0, failed=(A,)).seal(1, {A: 2})
    j.add(ev.CaseOpened(1, "a", A, 0, 0, "partial", "bundle", "digest", True), ev.CaseClosed(1, outcome))
    assert (j.scores()["a"].work, j.scores()["a"].convicted) == (2 * FLOPS, "")
    assert j.scores()["a"].total > 0


def test_a_conviction_zeroes_the_window_and_an_appeal_ends_it():
    j = two(PLAIN).seal(0, {A: 2, B: 2}).audit(0, failed=(A,)).seal(1, {A: 2, B: 2})
    j.add(ev.CaseOpened(5, "a", A, 0, 0, "partial", "bundle", "digest", True), ev.CaseClosed(5, "convicted"))
    scores = j.scores()
    assert (scores["a"].total, scores["a"].worth, scores["b"].total) == (0.0, 0.0, 1.0)
    assert "case 5" in scores["a"].convicted
    assert j.scores(29 * 100.0)["a"].convicted
    assert not j.scores(31 * 100.0)["a"].convicted  # as long as anything is remembered of it
    j.add(ev.Appealed(5, True, "digest"))
    assert j.scores()["a"].total == 0.0
    j.add(ev.Appealed(5, False, "digest"))
    assert j.scores()["a"].work == pytest.approx(4 * FLOPS)
    assert j.scores()["a"].total == pytest.approx(0.5)


def test_who_is_found_out_by_its_fingerprints_is_convicted_too():
    j = two().seal(0, {A: 2, B: 2}).add(ev.Gone(A, "liar"))
    assert (j.scores()["a"].total, j.scores()["b"].total) == (0.0, 1.0)


def test_who_refuses_evidence_isnt_paid_for_that_step_and_those_who_wait_for_it_are():
    j = (
        two(ScorePolicy(half_life_s=1e8, audit_prior_partials=1.0))
        .seal(0, {A: 4})
        .seal(0, {B: 4}, stage=1)
        .seal(1, {B: 1})
    )
    j.audit(0, undecided=(A,), unopened=(B,))
    assert j.scores()["a"].work == 4 * FLOPS
    assert (j.scores()["b"].sealed_items, j.scores()["b"].audits) == (1, pytest.approx(0.5))
    assert j.book.unpaid("b")[0].why == "unopened"
    half = Journal(ScorePolicy(half_life_s=1e8, undecided_pay=0.5)).join("a").seal(0, {A: 4}).audit(0, undecided=(A,))
    assert (half.scores()["a"].work, half.scores()["a"].sealed_items) == (2 * FLOPS, 4)
    assert half.book.unpaid("a")[0].work == 2 * FLOPS


def test_another_validators_audits_count_nothing():
    j = two().seal(0, {A: 4}).audit(0, by="other", failed=(A,))
    assert (j.scores()["a"].work, j.scores()["a"].audits_failed) == (4 * FLOPS, 0.0)


def test_work_that_a_rewind_undoes_stays_paid_and_is_paid_again():
    j = two(PLAIN).seal(0, {A: 4}).end_step(0).seal(1, {A: 4}).add(ev.Rewound(0, 1, 1)).join("a", number=2)
    j.audit(0, failed=(A,))  # of what can't be audited any more: nothing is there
    j.seal(0, {member("a", 2): 4})
    assert j.scores()["a"].work == pytest.approx(12 * FLOPS)


def test_final_credits_are_never_taken_back():
    j = two(PLAIN).seal(0, {A: 4}).end_step(0)
    for step in range(1, 8):
        j.seal(step, {B: 4}).end_step(step)
    before = j.scores()["a"].work
    assert j.audit(0, failed=(A,)).scores()["a"].work == before == pytest.approx(4 * FLOPS)


def test_a_new_registration_starts_at_zero_and_uids_are_never_asked_for():
    j = Journal(PLAIN).join("a", block=0).seal(0, {A: 4})
    assert j.scores()["a"].registered_at_block is None
    j.join("a", number=2, block=9)
    assert (j.scores()["a"].registered_at_block, j.scores()["a"].work) == (9, 4 * FLOPS)
    j.join("a", number=3, block=0).join("a", number=4, block=9)  # a leader that didn't know it for a while
    assert (j.scores()["a"].registered_at_block, j.scores()["a"].work) == (9, 4 * FLOPS)
    j.join("a", number=5, block=12)
    assert (j.scores()["a"].registered_at_block, j.scores()["a"].work, j.scores()["a"].sealed_items) == (12, 0.0, 0)


def test_the_idle_are_forgotten():
    j = two(ScorePolicy(half_life_s=1.0, forget_after_half_lives=10.0)).seal(0, {A: 4}).add(ev.Gone(A, "left"))
    j.wait(9).seal(1, {B: 4}).end_step(1)
    assert "a" in j.scores()
    j.wait(2).seal(2, {B: 4}).end_step(2)
    assert list(j.scores()) == ["b"]


def test_runs_of_one_validator_add_up_by_hotkey_and_registration():
    one, other = Journal(PLAIN).join("a").seal(0, {A: 4}), Journal(PLAIN).join("a").join("b").seal(0, {A: 1, B: 3})
    scores = combined([one.book, other.book], PLAIN, 1000.0)
    assert (scores["a"].work, scores["b"].work) == (5 * FLOPS, 3 * FLOPS)
    older = Journal(PLAIN).join("a", block=3).seal(0, {A: 4})
    assert combined([one.book, older.book], PLAIN, 1000.0)["a"].work == 4 * FLOPS
    guilty = Journal(PLAIN).join("a").seal(0, {A: 4}).add(ev.Gone(A, "liar"))
    assert combined([one.book, guilty.book], PLAIN, 1000.0)["a"].worth == 0.0


def test_a_book_that_doesnt_believe_the_leader_hears_its_own_audits_alone():
    j = two(PLAIN).seal(0, {A: 2, B: 2}).seal(1, {A: 2, B: 2}).audit(0, failed=(A,))
    j.add(ev.CaseOpened(1, "b", B, 0, 0, "partial", "", "", True), ev.CaseClosed(1, "convicted"), ev.Gone(B, "liar"))
    own = RunBook(PLAIN, leader_audits=False)
    for record in j.records:
        own.note(record)
    scores = combined([own], PLAIN, j.now_s)
    assert (scores["a"].work, scores["b"].work, scores["b"].convicted) == (4 * FLOPS, 4 * FLOPS, "")
    own.judge(round(j.now_s * 1e9), 1, 0, ev.AuditClosed(1, passed=(A,), failed=(B,)))
    scores = combined([own], PLAIN, j.now_s)
    assert (scores["b"].work, scores["b"].audits_failed, scores["a"].audits_passed) == (2 * FLOPS, 1.0, 1.0)
    own.convict(round(j.now_s * 1e9), "b", "two runs of ours")
    assert combined([own], PLAIN, j.now_s)["b"].worth == 0.0
    own.clear(round(j.now_s * 1e9), "b")
    assert combined([own], PLAIN, j.now_s)["b"].worth > 0.0


def test_a_miner_can_redo_the_arithmetic_from_the_words():
    j = (
        two()
        .seal(0, {A: 3, B: 1})
        .wait(30)
        .add(ev.Leased(1, 0, 0, A, 1), ev.Revoking(1, 0, 0, 1))
        .audit(0, failed=(B,), passed=(A,))
    )
    scores = j.scores()
    whole = whole_worth(scores)
    terms = {term.name: term for term in terms_of(j.policy, scores["a"], whole)}
    assert terms["sealed"].how == "3 items in 1 sealed sums, paid"
    for name in ("uptime", "audits"):
        found = re.match(r"\((\S+) \+ (\S+)\) / \((\S+) \+ (\S+) \+ (\S+)\)", terms[name].how)
        assert found is not None
        good, prior, same, bad, again = (float(n) for n in found.groups())
        assert (good, prior) == (same, again)
        assert (good + prior) / (good + bad + prior) == pytest.approx(terms[name].value, rel=1e-4)
    found = re.match(r"\((\S+) - (\S+)\) / \((\S+) \+ (\S+)\)", terms["deadlines"].how)
    assert found is not None
    done, bad, same, unproven = (float(n) for n in found.groups())
    assert (done, bad, unproven) == (same, 1.0, 16.0)
    assert (done - bad) / (done + unproven) == pytest.approx(terms["deadlines"].value, rel=1e-4)
    product = terms["uptime"].value * terms["deadlines"].value * terms["audits"].value ** 2
    assert terms["reliability"].value == pytest.approx(product)
    assert terms["rate"].value == pytest.approx(terms["work"].value * math.log(2) / 100)
    assert terms["worth"].value == pytest.approx(terms["rate"].value * product)
    assert terms["score"].value == pytest.approx(terms["worth"].value / sum(s.worth for s in scores.values()))
    assert f"/ {whole:.6g}, everybody's worth" in terms["score"].how
    j.add(ev.Gone(A, "liar"))
    worth = next(term for term in terms_of(j.policy, j.scores()["a"], whole) if term.name == "worth")
    assert (worth.value, worth.how) == (0.0, "0: its sums contradict their fingerprints")


@pytest.mark.parametrize("cuts", [(0,), (0, 2), (0, 1, 3)])
def test_flops_of_an_item_are_those_of_its_stages_units(cuts: tuple[int, ...]):
    run = planned()
    units = tuple((TensorSpec(f"t{i}", (4, 4)),) for i in range(7))
    flops = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    import msgspec

    run = msgspec.structs.replace(run, cuts=cuts, unit_tensors=units, unit_flops_per_token=flops)
    plan = ModelPlan(run.config, {}, ModelUnits(units, flops, None), cuts)
    assert item_flops(run) == [TOKENS * sum(flops[unit] for unit in stage) for stage in plan.stage_units]


@pytest.mark.parametrize(
    "bad",
    [
        {"half_life_s": 0.0},
        {"half_life_s": float("nan")},
        {"forget_after_half_lives": 0.5},
        {"uptime_prior_s": -1.0},
        {"audit_exponent": 9},
        {"undecided_pay": 1.1},
    ],
)
def test_policies_are_checked(bad: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ScorePolicy(**bad)
