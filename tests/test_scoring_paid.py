"""Who is paid for what a lie cost: honest work that is redone, third parties, the cleared; never the liar, never twice."""

from __future__ import annotations

import msgspec
import pytest
from score_cases import TOKENS, Journal, member

from subnet.run import events as ev
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined
from subnet.score.score import Score
from subnet.words import Member

A, B, C, D = (member(name) for name in "abcd")
FLOPS = 2.0 * TOKENS
"""Of an item of stage 0, or 1."""
PLAIN = ScorePolicy(half_life_s=100.0, uptime_exponent=0, deadline_exponent=0, audit_exponent=0)


def four(policy: ScorePolicy = PLAIN) -> Journal:
    """a and b serve stage 0, c and d stage 1."""
    return Journal(policy).join("a").join("b").join("c", stage=1).join("d", stage=1)


def accused(
    case: int, who: Member, step: int = 0, *, sealed: bool = False, digest: str = "true", what: str = "partial"
):
    return ev.CaseOpened(case, who.hotkey, who, step, 0, what, "bundle", digest, sealed)


def before_seal(j: Journal, who: Member, items: int, step: int = 0) -> Journal:
    """An audit of its partial of stage 0 that isn't closed yet."""
    j.audits += 1
    return j.add(ev.AuditOpened(j.audits, step, 0, 1, (who,), "leader", (), (items,)))


def caught(j: Journal, liar: Member, items: int, step: int = 0) -> Journal:
    """Its audit before the seal fails: it is accused in case 1, and out."""
    before_seal(j, liar, items, step)
    return j.add(accused(1, liar, step), ev.AuditClosed(j.audits, failed=(liar,)), ev.Gone(liar, "accused"))


def redone(j: Journal, hotkey: str) -> tuple[float, int]:
    score = j.scores()[hotkey]
    return score.redone_work, score.redone_items


@pytest.mark.parametrize("outcome", ["convicted", "fault"])
def test_items_that_are_void_for_anothers_lie_are_paid_once_it_is_established(outcome: str):
    j = four().work(0, A, range(4)).work(0, C, range(4), 1)
    caught(j, A, 4).add(ev.Voided(0, 1, C, "inputs"))
    assert redone(j, "c") == (0.0, 0)
    j.wait(100).add(ev.CaseClosed(1, outcome))
    assert redone(j, "c") == (4 * FLOPS, 4)
    assert j.scores()["c"].work == pytest.approx(2 * FLOPS), "half of it has faded since it was done"
    j.seal(0, {B: 4}).seal(0, {C: 4}, 1).end_step(0)
    score = j.scores()["c"]
    assert (score.sealed_items, score.redone_items) == (4, 4)
    assert j.scores()["a"].redone_items == 0


def test_and_those_that_become_void_after_the_verdict_too():
    j = four().work(0, A, range(4)).work(0, C, range(3), 1)
    caught(j, A, 4).add(ev.CaseClosed(1, "convicted"), ev.Voided(0, 1, C, "inputs"))
    assert redone(j, "c") == (3 * FLOPS, 3)
    j.add(ev.Voided(0, 1, C, "inputs"))
    assert redone(j, "c") == (3 * FLOPS, 3), "nothing was done meanwhile"


@pytest.mark.parametrize("outcome", ["cleared", "unconfirmed"])
def test_without_a_lie_no_pay_for_void_work(outcome: str):
    j = four().work(0, A, range(4)).work(0, C, range(4), 1)
    caught(j, A, 4).add(ev.Voided(0, 1, C, "inputs"), ev.CaseClosed(1, outcome))
    assert redone(j, "c") == (0.0, 0)


def test_void_for_another_reason_or_of_another_step_isnt_paid():
    j = four().work(0, A, range(4)).work(0, C, range(4), 1).work(0, D, range(4, 6), 1)
    caught(j, A, 4, step=7).add(
        ev.Voided(0, 1, C, "inputs"), ev.Voided(0, 1, D, "silent"), ev.CaseClosed(1, "convicted")
    )
    assert (redone(j, "c"), redone(j, "d")) == ((0.0, 0), (0.0, 0))


def test_the_liars_own_void_work_isnt_paid_and_no_claim_of_its_own_is():
    j = four().work(0, A, range(4))
    before_seal(j, A, 4)
    j.add(accused(1, A), ev.Voided(0, 0, A, "inputs"), ev.CaseClosed(1, "fault"))
    assert redone(j, "a") == (0.0, 0)


def test_only_what_was_done_and_still_counted_is_paid():
    """Not leases under way, handed back, done by somebody else meanwhile, dropped with a process, or skipped."""
    j = four().work(0, A, range(4)).work(0, C, range(2), 1)
    j.add(ev.Leased(0, 2, 1, C, 1), ev.Leased(0, 3, 1, C, 1), ev.Revoking(0, 3, 1, 1), ev.NotAccumulated(0, 3, 1, 1))
    caught(j, A, 4).add(ev.Voided(0, 1, C, "inputs"), ev.CaseClosed(1, "convicted"))
    assert redone(j, "c") == (2 * FLOPS, 2)
    j.work(0, D, range(4), 1).add(ev.MicrobatchSkipped(0, 1, 0, "nan", True), ev.Voided(0, 1, D, "inputs"))
    assert redone(j, "d") == (0.0, 0), "the skip had made its partial void"
    j.add(ev.Leased(0, 0, 1, D, 3), ev.Backwarded(0, 0, 1, 3, ""), ev.Gone(D, "lost")).join("d", 1, number=2)
    j.add(ev.Voided(0, 1, D, "inputs"), ev.Voided(0, 1, member("d", 2), "inputs"))
    assert redone(j, "d") == (0.0, 0)


def test_what_is_sealed_is_paid_as_such_alone():
    j = four().work(0, A, range(4)).seal(0, {C: 4}, 1)
    j.add(accused(1, A, sealed=True), ev.CaseClosed(1, "convicted"), ev.Rewound(0, 1, 1))
    assert (redone(j, "c"), j.scores()["c"].sealed_items) == ((0.0, 0), 4)


def test_what_a_rewind_finds_unsealed_is_paid_but_not_to_the_liar():
    j = (
        four()
        .seal(0, {A: 4})
        .seal(0, {C: 4}, 1)
        .end_step(0)
        .work(1, A, range(2))
        .work(1, B, range(2, 4))
        .work(1, C, range(1), 1)
    )
    j.add(accused(1, A, sealed=True), ev.CaseClosed(1, "convicted"), ev.Rewound(0, 1, 1))
    assert (redone(j, "a"), redone(j, "b"), redone(j, "c")) == ((0.0, 0), (2 * FLOPS, 2), (1 * FLOPS, 1))
    assert j.scores()["c"].sealed_items == 4
    j.join("c", 1, number=2).seal(0, {member("c", 2): 4}, 1)
    assert (j.scores()["c"].sealed_items, j.scores()["c"].work) == (8, pytest.approx(9 * FLOPS))


def test_a_lie_of_the_branch_before_pays_nothing_on_this_one():
    j = four().work(0, A, range(4)).work(0, C, range(4), 1)
    caught(j, A, 4).add(accused(2, B, 3, sealed=True), ev.CaseClosed(2, "convicted"), ev.Rewound(0, 1, 2))
    paid = redone(j, "c")
    j.join("c", 1, number=2).work(0, member("c", 2), range(4), 1).add(ev.Voided(0, 1, member("c", 2), "inputs"))
    j.add(ev.CaseClosed(1, "convicted"))
    assert redone(j, "c") == paid == (4 * FLOPS, 4)


# --- the cleared ---------------------------------------------------------------------------------------------------


def test_who_is_cleared_is_paid_for_the_work_that_was_made_void():
    j = four(ScorePolicy(half_life_s=1e8)).work(0, A, range(4))
    caught(j, A, 4)
    unpaid = j.book.unpaid("a")
    assert [(u.items, u.work, u.sealed, u.why) for u in unpaid] == [(4, 4 * FLOPS, False, "failed")]
    assert j.scores()["a"].work == 0.0
    j.add(ev.CaseClosed(1, "cleared"))
    assert (redone(j, "a"), j.book.unpaid("a"), j.scores()["a"].audits) == ((4 * FLOPS, 4), (), 1.0)


# --- third parties -------------------------------------------------------------------------------------------------


def witnesses(j: Journal, case: int, **said: str) -> Journal:
    for hotkey, digest in said.items():
        j.add(ev.WitnessAsked(case, member(hotkey)), ev.WitnessSaid(case, hotkey, digest))
    return j


def paid(scores: dict[str, Score]) -> dict[str, int]:
    return {hotkey: score.witness_items for hotkey, score in scores.items() if score.witness_items}


@pytest.mark.parametrize(
    ("digest", "said", "outcome", "expected"),
    [
        ("true", {"b": "true"}, "convicted", {"b": 3}),
        ("true", {"b": "true"}, "fault", {"b": 3}),
        ("true", {"b": "claimed", "c": "true"}, "convicted", {"c": 3}),
        ("true", {"b": "claimed", "c": "claimed"}, "cleared", {"b": 3, "c": 3}),
        ("true", {"b": "", "c": "other", "d": "true"}, "unconfirmed", {}),
        ("true", {"b": ""}, "cleared", {}),
        ("", {"b": "true", "c": "true", "d": "claimed"}, "convicted", {"b": 3, "c": 3}),
        ("", {"b": "", "c": ""}, "unconfirmed", {}),
    ],
)
def test_third_parties_are_paid_whose_answer_decided_the_case(
    digest: str, said: dict[str, str], outcome: str, expected: dict[str, int]
):
    j = four(PLAIN).seal(0, {A: 3})
    before = {hotkey: score.work for hotkey, score in j.scores().items()}
    j.audits += 1
    j.add(ev.AuditOpened(j.audits, 0, 0, 0, (A,), "leader", (), (3,)), accused(1, A, sealed=True, digest=digest))
    j.add(ev.AuditClosed(j.audits, failed=(A,)))
    witnesses(j, 1, **said).add(ev.CaseClosed(1, outcome))
    assert paid(j.scores()) == expected
    for hotkey, items in expected.items():
        score = j.scores()[hotkey]
        assert score.work - before[hotkey] == pytest.approx(items * FLOPS) == pytest.approx(score.witness_work)


def test_who_wasnt_asked_isnt_paid():
    j = (
        four()
        .seal(0, {A: 3})
        .add(accused(1, A, sealed=True), ev.WitnessSaid(1, "b", "true"), ev.CaseClosed(1, "convicted"))
    )
    assert paid(j.scores()) == {}


def test_a_third_party_redoes_what_the_case_is_about():
    """Of a merge all partials of the audit; of evidence that isn't opened nothing; before the seal the partial as frozen."""
    j = four().seal(0, {A: 1, B: 3})
    j.audits += 1
    j.add(ev.AuditOpened(j.audits, 0, 0, 0, (A, B), "leader", (), (1, 3)), accused(1, A, sealed=True, what="merge"))
    witnesses(j.add(ev.AuditClosed(j.audits, passed=(A, B))), 1, c="true").add(ev.CaseClosed(1, "convicted"))
    assert paid(j.scores()) == {"c": 4}
    witnesses(j.add(accused(2, B, what="unopened")), 2, d="true").add(ev.CaseClosed(2, "convicted"))
    assert paid(j.scores()) == {"c": 4}
    j = four().work(0, A, range(4))
    witnesses(caught(j, A, 4), 1, d="true").add(ev.CaseClosed(1, "convicted"))
    assert paid(j.scores()) == {"d": 4}


# --- appeals, terms, other validators ------------------------------------------------------------------------------


def test_an_appeal_long_after_still_ends_the_penalty():
    j = Journal(ScorePolicy(half_life_s=1e6)).join("a").join("b").seal(0, {A: 2, B: 2}).audit(0, failed=(A,))
    j.add(accused(1, A, sealed=True), ev.CaseClosed(1, "convicted")).end_step(0)
    for step in range(1, 600):
        j.add(ev.StepSealed(step, 4, 0, 0, 0, 1))
    assert j.scores()["a"].convicted
    j.add(ev.Appealed(1, False, "claimed"))
    assert (j.scores()["a"].convicted, j.scores()["a"].sealed_items) == ("", 2)
    before = j.scores()["a"]
    assert j.add(ev.Appealed(1, False, "claimed")).scores()["a"] == before, "once"


def test_audits_of_sealed_work_are_the_next_leaders_after_a_term():
    j = Journal(PLAIN).join("a").seal(0, {A: 4})
    j.add(ev.AuditOpened(1, 0, 0, 0, (A,), "leader", (), (4,)), ev.AuditOpened(2, 0, 0, 0, (A,), "other", (), (4,)))
    j.add(ev.AuditOpened(3, 1, 0, 1, (A,), "leader", (), (4,)), ev.TermStarted(2, "second", "m"))
    j.add(ev.AuditClosed(2, failed=(A,)), ev.AuditClosed(3, failed=(A,)))
    assert j.scores()["a"].audits_failed == 0.0, "one is another validator's, one of what the term made void"
    assert j.add(ev.AuditClosed(1, failed=(A,))).scores()["a"].audits_failed == 1.0


def test_what_an_older_registration_did_isnt_held_against_the_new_one():
    j = Journal(PLAIN).join("a").join("b").seal(0, {A: 2, B: 2}).add(ev.Gone(A, "left"))
    j.join("a", number=5, block=12).audit(0, failed=(A,))
    j.add(accused(1, A, sealed=True), ev.CaseClosed(1, "convicted"), ev.Gone(A, "liar"))
    score = j.scores()["a"]
    assert (score.registered_at_block, score.audits_failed, score.convicted, j.book.unpaid("a")) == (12, 0.0, "", ())
    j.seal(1, {member("a", 5): 4}).audit(1, failed=(member("a", 5),))
    assert j.scores()["a"].audits_failed == 1.0


def believing(j: Journal) -> RunBook:
    """The book of who follows: it hears the journal, and believes nothing of what audits say."""
    book = RunBook(j.policy, leader_audits=False)
    for record in j.records:
        book.note(record)
    return book


@pytest.mark.parametrize("late", [False, True])
def test_a_follower_pays_and_withholds_for_cases_that_it_replayed(late: bool):
    """Whether it has replayed the case before the leader closed it or afterwards."""
    j = four().seal(0, {A: 4}).work(0, C, range(4), 1).add(ev.Voided(0, 1, C, "inputs"))
    witnesses(j.add(accused(1, A, sealed=True)), 1, d="true")
    closed = ev.Record(len(j.records), j.records[-1].time_ns, ev.CaseClosed(1, "fault"))
    book = believing(j)
    if late:
        book.note(closed)
    untouched = combined([book], j.policy, j.now_s)
    assert (untouched["a"].sealed_items, untouched["c"].redone_items, untouched["d"].witness_items) == (4, 0, 0)
    for _ in range(2):
        book.believe(j.records[-1].time_ns, 1)
    if not late:
        book.note(closed)
    scores = combined([book], j.policy, j.now_s)
    assert (scores["a"].sealed_items, scores["c"].redone_items, scores["d"].witness_items) == (0, 4, 4)
    assert (scores["a"].audits_failed, scores["a"].convicted) == (1.0, "")
    again = RunBook(j.policy, leader_audits=False)
    again.load(book.dump())
    for one in (book, again):
        one.clear(j.records[-1].time_ns, "a", 1)
        assert combined([one], j.policy, j.now_s)["a"].sealed_items == 4


def test_a_follower_that_found_it_wrong_gives_nothing_back_where_the_leader_clears():
    j = witnesses(four().seal(0, {A: 4}).add(accused(1, A, sealed=True)), 1, d="claimed").add(
        ev.CaseClosed(1, "cleared")
    )
    book, now_ns = believing(j), j.records[-1].time_ns
    book.judge(now_ns, 0, 0, ev.AuditClosed(0, failed=(A,)))
    book.believe(now_ns, 1)
    scores = combined([book], j.policy, j.now_s)
    assert (scores["a"].sealed_items, scores["d"].witness_items) == (0, 0)


def test_a_follower_that_cleared_somebody_keeps_what_its_own_audit_took():
    j = four().seal(0, {A: 4}).add(accused(1, A, sealed=True), ev.CaseClosed(1, "convicted"))
    book, now_ns = believing(j), j.records[-1].time_ns
    book.judge(now_ns, 0, 0, ev.AuditClosed(0, failed=(A,)))
    book.believe(now_ns, 1)
    book.convict(now_ns, "a", "case 1, replayed here", 1)
    assert combined([book], j.policy, j.now_s)["a"].audits_failed == 1.0
    book.clear(now_ns, "a", 1)
    score = combined([book], j.policy, j.now_s)["a"]
    assert (score.convicted, score.sealed_items) == ("", 0)


def test_no_event_of_a_hostile_leader_breaks_a_book():
    """Numbers of audits and cases that there aren't, stages and members that there aren't."""
    stranger = Member("stranger", 9, 9)
    j = four().add(ev.AuditClosed(99, failed=(A,)), ev.CaseClosed(99, "convicted"), ev.Appealed(99, False, ""))
    j.add(
        ev.WitnessAsked(99, A),
        ev.WitnessSaid(99, "a", ""),
        ev.Backwarded(5, 5, 5, 1, ""),
        ev.Voided(5, 5, stranger, "inputs"),
    )
    j.add(ev.Gone(stranger, "liar"), ev.AuditOpened(5, 0, 99, 1, (A, stranger), "leader", (), (3,)))
    j.add(ev.AuditClosed(5, failed=(A, stranger), unopened=(stranger,), undecided=(stranger,)))
    j.add(
        msgspec.structs.replace(accused(1, stranger, sealed=True), stage=99),
        ev.CaseClosed(1, "convicted"),
        ev.Rewound(0, 1, 7),
    )
    assert all(score.work == 0.0 for score in j.scores().values())
