"""Cases in the fold: who stands accused, who is asked, what their words come to, and what it means for whom."""

from __future__ import annotations

import pytest
from audit_fold_cases import PROBATION, A, B, C, D, Fold, refused

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run.audit_parts import CaseState
from subnet.words import Member


def test_who_stands_accused_cannot_join_and_may_again_when_it_is_cleared():
    run = Fold(PROBATION)
    case = run.accuse(A)
    assert run.state.audits.cases[case].coldkey == "cold-a"
    again = Member("a", 1, 9)
    refused(run, ev.Joined(again, "cold-a", 0, "boot", "h", 1), "stands accused")
    refused(run, ev.CaseOpened(2, "a", A, 0, 0, "partial", "bundle", "d", False), "stands accused already")
    run.witness(case, C, "claim")
    assert au.verdict(run.state.audits.cases[case]) == "", "one may be its friend"
    run.witness(case, D, "claim")
    assert au.verdict(run.state.audits.cases[case]) == "cleared"
    run.emit(ev.CaseClosed(case, "cleared"))
    run.join(again, 0)
    assert run.state.audits.marks == {"a": 1}


CASES: dict[str, tuple[ev.AnyEvent, str]] = {
    "another number": (ev.CaseOpened(2, "a", A, 0, 0, "partial", "b", "d", False), "follows 0"),
    "another's member": (ev.CaseOpened(1, "b", A, 0, 0, "partial", "b", "d", False), "but against b"),
    "an unknown charge": (ev.CaseOpened(1, "a", A, 0, 0, "rudeness", "b", "d", False), "about rudeness"),
    "no such stage": (ev.CaseOpened(1, "a", A, 0, 7, "partial", "b", "d", False), "stage 7"),
    "a case that isn't there": (ev.WitnessSaid(1, "c", "d"), "case 1 isn't open"),
}


@pytest.mark.parametrize("what", sorted(CASES))
def test_a_case_that_is_refused(what: str):
    event, match = CASES[what]
    refused(Fold(PROBATION), event, match)


def test_witnesses_are_others_of_other_coldkeys_and_are_heard_once():
    run = Fold(PROBATION)
    run.join(friend := Member("e", 1, 5), 1, coldkey="cold-a")
    run.join(twin := Member("f", 1, 6), 1, coldkey="cold-c")
    case = run.accuse(A)
    refused(run, ev.WitnessAsked(case, A), "without being there")
    refused(run, ev.WitnessAsked(case, friend), "one of its own coldkey")
    run.emit(ev.WitnessAsked(case, C))
    refused(run, ev.WitnessAsked(case, C), "coldkey was asked before")
    refused(run, ev.WitnessAsked(case, twin), "coldkey was asked before")
    assert au.witness_wanted(run.state, C) == [(case, "bundle")]
    run.emit(ev.WitnessSaid(case, "c", "true"))
    assert au.witness_wanted(run.state, C) == []
    refused(run, ev.WitnessSaid(case, "c", "true"), "speaks twice")
    refused(run, ev.WitnessSaid(case, "a", "claim"), "speaks for itself")
    run.emit(ev.CaseClosed(case, "convicted"))
    refused(run, ev.WitnessSaid(case, "d", "true"), "isn't open")
    refused(run, ev.CaseClosed(case, "cleared"), "isn't open")


VOTES = {
    "nobody": ({}, ""),
    "one agrees": ({"c": "true"}, "convicted"),
    "a friend and one that agrees": ({"d": "claim", "c": "true"}, "convicted"),
    "a friend alone": ({"d": "claim"}, ""),
    "two that back the accused": ({"d": "claim", "c": "claim"}, "cleared"),
    "two friends against one": ({"d": "claim", "e": "claim", "c": "true"}, ""),
    "who can't run it": ({"d": "", "c": ""}, ""),
    "a voice apart": ({"d": "else", "c": "else"}, ""),
    "twins are one": ({"c": "claim", "f": "claim"}, ""),
}


@pytest.mark.parametrize("what", sorted(VOTES))
def test_the_verdict_by_coldkeys(what: str):
    said, verdict = VOTES[what]
    run = Fold(PROBATION)
    case = run.state.audits.cases.setdefault(
        1, CaseState("a", A, "cold-a", 0, 0, "partial", "bundle", "true", False, 0, claimed="claim")
    )
    case.coldkeys = {hotkey: f"cold-{hotkey}" for hotkey in "cde"} | {"f": "cold-c"}
    case.said = dict(said)
    assert au.verdict(case) == verdict


def test_without_the_leaders_own_run_two_have_to_agree():
    """Its machine is of another class: it has no digest to go by."""
    case = CaseState("a", A, "", 0, 0, "partial", "bundle", "", False, 0, claimed="claim")
    case.said = {"c": "true"}
    assert au.verdict(case) == ""
    case.said = {"c": "true", "d": "claim", "e": "true"}
    assert au.verdict(case) == "convicted"
    case.said = {"c": "", "d": ""}
    assert au.verdict(case) == ""


def test_a_lie_that_shows_only_behind_the_sum_is_confirmed_by_who_finds_the_same_sum():
    case = CaseState("a", A, "", 0, 0, "partial", "bundle", "same", False, 0, claimed="same")
    case.said = {"c": "same", "d": "same"}
    assert au.verdict(case) == "convicted"


def test_a_conviction_needs_a_third_party_and_the_convicted_gone():
    run = Fold(PROBATION)
    case = run.accuse(A)
    refused(run, ev.CaseClosed(case, "convicted"), "no third party confirms")
    refused(run, ev.CaseClosed(case, "hanged"), "ends hanged")
    other = Fold(PROBATION)
    refused(other, ev.CaseClosed(other.accuse(A, charge="root"), "convicted"), "no third party confirms")
    refused(other, ev.CaseOpened(2, "b", B, 0, 0, "gossip", "", "", False), "is about gossip")
    run.witness(case, C, "true")
    run.emit(ev.CaseClosed(case, "convicted"))
    assert run.state.convicted == {"a"}
    refused(run, ev.Joined(Member("a", 1, 9), "cold-a", 0, "boot", "h", 1), "is convicted")
    refused(run, ev.CaseOpened(2, "a", A, 0, 0, "partial", "b", "d", False), "is convicted already")
    present = Fold(PROBATION)
    present.emit(ev.CaseOpened(1, "b", B, 0, 0, "unopened", "", "", False))
    refused(present, ev.CaseClosed(1, "convicted"), "still a member")


@pytest.mark.parametrize("charge", ["unopened", "equivocation", "unusable"])
def test_what_a_signature_or_silence_shows_needs_none(charge: str):
    run = Fold(PROBATION)
    case = run.accuse(A, charge=charge, digest="", claimed="")
    assert au.witness_wanted(run.state, C) == []
    run.emit(ev.CaseClosed(case, "convicted"))
    assert run.state.convicted == {"a"}


@pytest.mark.parametrize("outcome", ["fault", "unconfirmed", "cleared"])
def test_who_is_not_convicted_is_looked_at_more_closely(outcome: str):
    run = Fold(PROBATION)
    for _ in range(2):
        run.whole_step()
    case = run.accuse(A)
    if outcome == "fault":
        run.witness(case, C, "true")
    run.emit(ev.CaseClosed(case, outcome))
    assert run.state.audits.marks == {"a": 1}
    assert au.in_probation(run.state, "a") == (outcome != "cleared")
    assert run.state.audits.quarantined == {}
    assert run.state.convicted == set()


@pytest.mark.parametrize("outcome", ["convicted", "fault"])
def test_who_backed_a_guilty_one_is_on_probation_too(outcome: str):
    run = Fold(PROBATION)
    for _ in range(2):
        run.whole_step()
    case = run.accuse(A)
    run.witness(case, D, "claim")
    run.witness(case, C, "true")
    run.emit(ev.CaseClosed(case, outcome))
    assert au.in_probation(run.state, "d")
    assert run.state.audits.marks.get("d") == 1
    assert not au.in_probation(run.state, "c")


def test_an_appeal_that_isnt_upheld_ends_the_penalty():
    run = Fold(PROBATION)
    case = run.convict(A, C)
    refused(run, ev.Appealed(case + 1, upheld=False, digest="claim"), "isn't closed")
    run.emit(ev.Appealed(case, upheld=True, digest="true"))
    assert run.state.convicted == {"a"}
    run.emit(ev.Appealed(case, upheld=False, digest="claim"))
    assert run.state.convicted == set()
    assert not run.state.audits.cases[case].upheld
    run.join(Member("a", 1, 9), 0)
    fault = run.accuse(B)
    refused(run, ev.Appealed(fault, upheld=False, digest="claim"), "isn't closed")
    run.emit(ev.CaseClosed(fault, "unconfirmed"))
    assert run.state.audits.marks == {"b": 1}
    run.emit(ev.Appealed(fault, upheld=False, digest="claim"), ev.Appealed(fault, upheld=False, digest="claim"))
    assert run.state.audits.marks == {}
