"""What becomes of who stands accused: out, a third party is asked, the case is closed; and how a run's sealed lies are undone."""

from __future__ import annotations

import pytest
from audit_desk_cases import AUDITS, Desk
from audit_fold_cases import ALL, PROBATION, REWIND, A, B, C, D

from subnet.errors import ConfigError
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.words import Cursor, Member, Want
from validator.decide import decide
from validator.decide_cases import decide_rewind
from validator.intake import Ignored, admit, admit_join
from validator.policy import AuditPolicy


def accused(*, wrong: tuple[Member, ...] = (A,)) -> Desk:
    """An audit before the seal has found A's sum wrong."""
    desk = Desk(ALL)
    desk.to_manifests()
    desk.settle()
    desk.found(1, wrong=wrong)
    return desk


def say(desk: Desk, member: Member, digest: str) -> list[tuple[object, str]]:
    claim = msg.WitnessClaim(1, digest, reason="" if digest else "no room")
    events = admit(desk.state, member, claim, desk.watch)
    assert not isinstance(events, Ignored), events.reason
    desk.emit(*events)
    return desk.settle()


def asked(desk: Desk) -> Member:
    return desk.state.audits.cases[1].asked[-1]


# --- a wrong sum ---------------------------------------------------------------------------------------------------


def test_who_is_wrong_twice_is_out_at_once_and_a_third_party_is_asked():
    desk = accused()
    case = desk.state.audits.cases[1]
    assert (case.member, case.charge, case.bundle, case.digest, case.sealed) == (
        A,
        "partial",
        "bundle-a",
        "true",
        False,
    )
    assert case.claimed == "claim"
    assert A not in desk.state.members
    assert desk.state.work is not None
    assert desk.state.work.merges[0].phase == "gathering", "its sum is void, and what was merged with it"
    assert len(case.asked) == 1
    assert asked(desk) == B, "of the same stage first"
    assert say(desk, B, "true")[0] == (ev.CaseClosed(1, "convicted"), "third_party_agrees")
    assert desk.state.convicted == {"a"}


def test_two_who_are_wrong_get_a_case_each():
    desk = accused(wrong=(A, B))
    cases = desk.state.audits.cases
    assert sorted((case.hotkey, case.digest) for case in cases.values()) == [("a", "true"), ("b", "true")]
    assert {case.asked[0].hotkey for case in cases.values()} <= {"c", "d"}


def test_a_friend_clears_nobody_alone():
    desk = accused()
    first = asked(desk)
    assert [type(what) for what, _ in say(desk, first, "claim")] == [ev.WitnessAsked]
    second = asked(desk)
    assert second.hotkey != first.hotkey
    assert say(desk, second, "true")[0][0] == ev.CaseClosed(1, "convicted")
    assert desk.state.audits.marks == {first.hotkey: 1}


def test_two_clear_it():
    desk = accused()
    say(desk, asked(desk), "claim")
    assert say(desk, asked(desk), "claim")[0] == (ev.CaseClosed(1, "cleared"), "third_parties_clear")
    assert desk.state.audits.quarantined == {}


def test_who_cannot_run_it_is_no_voice_and_the_next_is_asked_at_once():
    desk = accused()
    for _ in range(AUDITS.witnesses_max - 1):
        assert [type(what) for what, _ in say(desk, asked(desk), "")] == [ev.WitnessAsked]
    assert say(desk, asked(desk), "")[0] == (ev.CaseClosed(1, "unconfirmed"), "no_third_party")


def test_a_witness_that_is_late_or_gone_is_replaced():
    desk = accused()
    first = asked(desk)
    assert desk.settle() == []
    desk.now += AUDITS.witness_s
    assert [type(what) for what, _ in desk.settle()] == [ev.WitnessAsked]
    second = asked(desk)
    desk.emit(ev.Gone(second, "lost"))
    assert asked(desk) == second
    desk.settle()
    assert asked(desk) not in (first, second)
    assert say(desk, first, "true")[0][0] == ev.CaseClosed(1, "convicted"), "better late than never"


def test_without_anybody_to_ask_the_case_ends_unconfirmed_after_a_while():
    desk = accused()
    for member in (B, C, D):
        desk.emit(ev.Gone(member, "lost"))
    assert desk.codes() == ["merge_began_anew"]
    desk.now += AUDITS.witness_s - 0.1
    assert desk.settle() == []
    desk.now += 0.2
    assert desk.codes() == ["no_third_party"]
    assert desk.state.audits.cases[1].outcome == "unconfirmed"


def test_nobody_is_late_while_the_store_is_away():
    desk = accused()
    desk.watch.store.answered(desk.now)
    desk.watch.store.failed("away", desk.now)
    desk.now += 10 * AUDITS.witness_s
    assert desk.settle() == []
    desk.watch.store.answered(desk.now)
    desk.now += AUDITS.witness_s
    assert desk.settle() == [], "nor for a while after"
    desk.now += 100
    assert desk.kinds() == ["WitnessAsked"]


def test_a_restart_waits_for_the_witness_anew_and_decides_the_same():
    desk = accused()
    desk.now += AUDITS.witness_s - 1
    desk.restart()
    assert desk.codes() == ["redo"]
    desk.now += 2
    assert desk.settle() == []
    assert say(desk, asked(desk), "true")[0][0] == ev.CaseClosed(1, "convicted"), (
        "also what was claimed is in the journal"
    )


def test_a_first_mismatch_in_a_long_clean_record_is_a_fault_and_the_second_a_crime():
    desk = Desk(ALL)
    desk.state.audits.clean["a"] = AUDITS.fault_after_items
    desk.to_manifests()
    desk.settle()
    desk.found(1, wrong=[A])
    say(desk, asked(desk), "true")
    assert desk.state.audits.cases[1].outcome == "fault"
    assert (desk.state.audits.clean.get("a"), desk.state.audits.marks) == (None, {"a": 1})
    desk.state.audits.clean["a"] = AUDITS.fault_after_items
    case = desk.accuse(Member("a", 1, 9))
    desk.settle()
    desk.emit(ev.WitnessSaid(case, "b", "true"))
    assert desk.settle()[0][0] == ev.CaseClosed(case, "convicted")


def test_another_validators_run_is_a_voice():
    desk = accused()
    desk.watch.audits.words.append((1, "validator2", "true"))
    desk.watch.audits.words.append((1, "validator2", "true"))
    desk.watch.audits.words.append((9, "validator2", "true"))
    desk.watch.audits.words.append((1, "a", "claim"))
    assert [code for _, code in desk.settle()] == ["validator_says", "third_party_agrees"]


@pytest.mark.parametrize(
    ("member", "claim", "why"),
    [
        (C, msg.WitnessClaim(7, "true"), "no such open case"),
        (D, msg.WitnessClaim(1, "true"), "wasn't asked"),
        (B, msg.WitnessClaim(1, "true"), "known"),
    ],
)
def test_words_that_nobody_asked_for_are_ignored(member: Member, claim: msg.WitnessClaim, why: str):
    desk = accused()
    assert asked(desk) == B
    say(desk, B, "claim")
    if asked(desk) == D:
        member = C if member == D else member
    found = admit(desk.state, member, claim, desk.watch)
    assert isinstance(found, Ignored)
    assert found.reason == why


def test_who_stands_accused_is_told_so_and_when_to_come_again():
    desk = accused()
    request = msg.JoinRequest(1, "toy", "another", "127.0.0.1", 1, ("golden",), Cursor(1, 0))

    def join() -> object:
        return admit_join(desk.state, request, "a", "cold-a", desk.now, desk.watch, desk.policy)

    refusal = join()
    assert not isinstance(refusal, ev.Joined)
    assert getattr(refusal, "code", "") == "quarantined"
    assert getattr(refusal, "retry_after", None) == AUDITS.quarantine_retry_s
    assert "case 1" in str(getattr(refusal, "reason", ""))
    say(desk, asked(desk), "true")
    assert getattr(join(), "code", "") == "convicted"


# --- refused, lost, and signed twice ---------------------------------------------------------------------------------


def counted(desk: Desk, member: Member, *, lost: bool = False) -> list[str]:
    """One more audit for which the member keeps evidence back."""
    audit = desk.open(-1, 1, (C,))
    names = {"lost" if lost else "unopened": (member,)}
    desk.emit(ev.AuditClosed(audit, undecided=(C,), **names))
    return desk.codes()


def test_refusals_are_nothing_a_fault_and_a_crime():
    desk = Desk(PROBATION)
    desk.whole_step()
    assert counted(desk, A) == []
    assert counted(desk, A) == ["unopened", "case_open", "evidence_refused"]
    assert desk.state.audits.cases[1].outcome == "fault"
    assert desk.settle() == [], "it isn't charged with the same again"
    desk.join(Member("a", 1, 9), 0)
    assert counted(desk, Member("a", 1, 9)) == ["unopened", "case_open", "evidence_refused"]
    assert desk.state.audits.cases[2].outcome == "convicted"


def test_what_is_said_to_be_lost_is_a_fault_however_often():
    desk = Desk(PROBATION)
    desk.whole_step()
    member, cases = A, 0
    for turn in range(1, 9):
        if member not in desk.state.members:
            member = desk.join(Member("a", 1, 10 + turn), 0)
        cases += len(counted(desk, member, lost=True)) > 0
        assert cases == turn // AUDITS.lost_max
    assert {case.outcome for case in desk.state.audits.cases.values()} == {"fault"}
    assert desk.state.convicted == set()


def test_who_signed_two_things_is_at_fault_and_the_second_time_out():
    desk = Desk(PROBATION)
    desk.watch.audits.equivocators.add("a")
    assert desk.codes() == ["signed_two_things", "case_open", "signed_two_things"]
    assert (desk.state.audits.cases[1].charge, desk.state.audits.cases[1].outcome) == ("equivocation", "fault")
    desk.join(Member("a", 1, 9), 0)
    desk.watch.audits.equivocators.add("a")
    desk.settle()
    assert desk.state.convicted == {"a"}
    desk.watch.audits.equivocators.add("a")
    assert desk.settle() == []
    assert desk.watch.audits.equivocators == set()


def test_only_its_maker_ends_the_wait_for_a_boundary_unless_it_is_gone():
    desk = Desk(PROBATION)
    step = desk.whole_step()
    want = Want(0, 0, False, f"f{step}.0.0")
    desk.emit(ev.AuditOpened(desk.state.audits.num_opened + 1, step, 1, 0, (C,), "leader", (want,), (1,)))
    audit, known = desk.state.audits.num_opened, desk.watch.audits
    claim = msg.NotHeldClaim(audit, (want,))
    admit(desk.state, D, claim, desk.watch)
    assert known.not_held == set(), "it never had it"
    admit(desk.state, A, claim, desk.watch)
    assert (known.not_held, known.not_held_by) == ({(audit, want)}, {(audit, want, "a")})
    known.not_held.clear()
    known.not_held_by.clear()
    desk.emit(ev.Gone(A, "lost"))
    admit(desk.state, D, claim, desk.watch)
    assert (known.not_held, known.not_held_by) == ({(audit, want)}, set())
    assert isinstance(admit(desk.state, D, msg.NotHeldClaim(audit + 1, (want,)), desk.watch), Ignored)


# --- appeals -------------------------------------------------------------------------------------------------------


def test_a_closed_case_with_a_bundle_is_run_again_once_at_a_time():
    desk = Desk(PROBATION)
    case = desk.convict(A, C)
    other = desk.accuse(B, charge="unopened", digest="", claimed="")
    desk.settle()
    for number in (case, case, other, 7):
        desk.watch.audits.appeals.append(number)
    desk.settle()
    assert desk.appeals == [case], "no bundle, no case, and it is under way"


def test_appeals_are_heard_after_the_run_too():
    desk = Desk(ALL)
    for _ in range(5):
        desk.audit_windows()
        step = desk.plan()
        desk.update()
        desk.work(step)
        desk.merged(step)
        desk.pass_all(step)
        desk.seal_step(step)
    desk.audit_windows()
    case = desk.convict(A, C)
    desk.emit(ev.RunFinished(4, "root", ()))
    for member in desk.state.members:
        desk.watch.heard(member, desk.now)
    desk.watch.audits.appeals.append(case)
    found = decide(desk.now, desk.state, desk.watch, desk.policy, None)  # type: ignore[arg-type]
    assert [decision.reason.code for decision in found] == ["appealed"]


# --- rewind --------------------------------------------------------------------------------------------------------


def lied(desk: Desk, steps: int = 3) -> Desk:
    """Steps that were sealed once probation was over; then A is convicted."""
    for _ in range(steps):
        desk.audit_windows()
        step = desk.plan()
        desk.update()
        desk.work(step)
        desk.merged(step)
        if step < 1:
            desk.pass_all(step)
        desk.seal_step(step)
    desk.convict(A, C)
    return desk


def test_a_run_goes_back_to_before_the_first_unproven_work_of_the_convicted():
    desk = lied(Desk(REWIND), steps=4)
    assert desk.watch.audits.ledger.unaudited("a") == 1
    found = decide_rewind(desk.state, desk.watch)
    assert [(d.what, d.reason.code) for d in found] == [(ev.Rewound(1, 1, 1), "lie_sealed")]
    desk.emit(ev.Rewound(1, 1, 1))
    assert decide_rewind(desk.state, desk.watch) == [], "once"


def test_work_that_was_redone_is_no_reason_to_go_back():
    desk = lied(Desk(REWIND), steps=2)
    assert desk.watch.audits.ledger.unaudited("a") is None
    assert decide_rewind(desk.state, desk.watch) == []
    assert desk.watch.audits.nothing_due == {(0, "a")}


def test_a_wrongly_merged_partition_is_a_reason():
    desk = Desk(REWIND)
    for _ in range(2):
        desk.whole_step()
    case = desk.state.audits.num_cases + 1
    desk.emit(ev.CaseOpened(case, "a", A, 0, 0, "merge", "bundle", "true", True), ev.Gone(A, "accused"))
    desk.witness(case, C, "true")
    desk.emit(ev.CaseClosed(case, "convicted"))
    assert [d.what for d in decide_rewind(desk.state, desk.watch)] == [ev.Rewound(0, 1, case)]


def test_a_lie_older_than_what_can_be_restored_is_undone_as_far_as_that_goes():
    desk = lied(Desk(REWIND), steps=4)
    del desk.state.sealed[-1]
    for stage in (0, 1):
        desk.state.snapshots[stage] = []
    assert [d.what for d in decide_rewind(desk.state, desk.watch)] == [ev.Rewound(3, 1, 1)]


def test_without_rewinds_a_lie_is_recorded_and_stays():
    assert decide_rewind(lied(Desk(PROBATION)).state, Desk(PROBATION).watch) == []


def test_a_new_branch_waits_anew():
    """Steps and versions have the same numbers again: no clock of the other branch may run on."""
    desk = Desk(REWIND)
    watch = desk.watch
    watch.at_step(0, 0)
    watch.age(("owner", 0, 0, 1), 0.0)
    watch.at_step(0, 0)
    assert watch.age(("owner", 0, 0, 1), 5.0) == 5.0
    watch.at_step(0, 1)
    assert watch.age(("owner", 0, 0, 1), 6.0) == 0.0


# --- policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["witnesses_max", "evidence_tries", "unopened_max", "lost_max", "at_once", "redo_at_once"]
)
def test_a_policy_that_makes_no_sense_is_refused(name: str):
    with pytest.raises(ConfigError, match=name):
        AuditPolicy(**{name: 0})
    with pytest.raises(ConfigError, match=name):
        AuditPolicy(**{name: -1})
