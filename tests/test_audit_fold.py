"""What each event about audits does to the fold, and every order of them that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from audit_fold_cases import ALL, OFF, PROBATION, WANT, A, B, C, D, Fold, refused

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.audit_folds import MOST_UNPROVEN
from subnet.run.config import AuditSection
from subnet.run.work import MOST_CONTRADICTIONS


def at_manifest(audit: AuditSection = ALL) -> tuple[Fold, int]:
    """The first step, computed and merged, with nothing redone."""
    run = Fold(audit)
    step = run.plan()
    run.update()
    run.work(step)
    run.merged(step)
    return run, step


# --- before the seal -----------------------------------------------------------------------------------------------


def test_a_seal_waits_for_the_audit_of_every_partial_that_must_be_redone():
    run, step = at_manifest()
    assert run.state.work is not None
    assert not au.is_audited(run.state, run.state.work)
    sealed = ev.StageSealed(step, 0, 1, run.state.work.merges[0].entries, ("h-1.0.0", "h-1.0.1"), (), "2")
    refused(run, sealed, "before .* passed their audit")
    first = run.open(step, 0, (A, B), number=1)
    run.emit(ev.AuditClosed(first, passed=(A,), undecided=(B,)))
    refused(run, sealed, "passed their audit")
    again = run.open(step, 0, (A, B), number=1)
    run.emit(ev.AuditClosed(again, passed=(A, B)))
    assert not au.is_audited(run.state, run.state.work), "the other stage's may be what its neighbours were given"
    run.emit(ev.AuditClosed(run.open(step, 1, (C, D), number=1), passed=(C, D)))
    assert au.is_audited(run.state, run.state.work)
    run.seal_step(step)
    assert run.state.next_step == step + 1


def test_nobody_is_redone_before_the_seal_once_enough_of_its_work_was_right():
    run = Fold(PROBATION)
    for step in (-1, 0):
        assert all(au.must_audit(run.state, member.hotkey) for member in (A, B, C, D)), step
        assert run.whole_step() == step
    assert run.state.audits.clean == {"a": 2, "b": 2, "c": 2, "d": 2}
    assert not any(au.must_audit(run.state, member.hotkey) for member in (A, B, C, D))
    run.audit_windows()
    step = run.plan()
    run.update()
    run.work(step)
    run.merged(step)
    run.seal_step(step)
    assert run.state.audits.clean == {"a": 2, "b": 2, "c": 2, "d": 2}, "nothing was redone"


def test_a_void_partial_ends_its_freeze_and_what_was_redone_of_it_counts_for_no_seal():
    run, step = at_manifest()
    audit = run.open(step, 0, (A, B), number=1)
    run.emit(ev.Voided(step, 0, A, "silent"))
    run.emit(ev.AuditClosed(audit, passed=(A, B)))
    assert run.state.audits.clean == {"a": 1, "b": 1}, "right is right"
    assert run.state.work is not None
    assert run.state.work.merges[0].passed == set()


def test_a_new_manifest_is_redone_anew():
    """Fingerprints and merged sums are others."""
    run, step = at_manifest()
    run.emit(ev.AuditClosed(run.open(step, 0, (A, B), number=1), passed=(A, B)))
    assert run.state.work is not None
    assert run.state.work.merges[0].passed == {A, B}
    run.reduce(step, 0)
    assert run.state.work.merges[0].passed == set()


OPENINGS: dict[str, tuple[Callable[[Fold], ev.AnyEvent], str]] = {
    "another freeze": (lambda run: ev.AuditOpened(1, -1, 0, 2, (A, B), "leader", (), (1, 1)), "freeze 2"),
    "another step": (lambda run: ev.AuditOpened(1, 0, 0, 1, (A, B), "leader", (), (1, 1)), "before its seal"),
    "who contributes nothing": (lambda run: ev.AuditOpened(1, -1, 0, 1, (C,), "leader", (), (1,)), "contributors"),
    "other counts": (lambda run: ev.AuditOpened(1, -1, 0, 1, (A, B), "leader", (), (1, 2)), "contributors"),
    "fewer counts": (lambda run: ev.AuditOpened(1, -1, 0, 0, (A, B), "leader", (), (1,)), "counts items"),
    "nobody": (lambda run: ev.AuditOpened(1, -1, 0, 0, (), "leader", (), ()), "nobody"),
    "twice the same": (lambda run: ev.AuditOpened(1, -1, 0, 0, (A, A), "leader", (), (1, 1)), "twice"),
    "a number that is taken": (lambda run: ev.AuditOpened(2, -1, 0, 0, (A,), "leader", (), (1,)), "follows 0"),
    "no such stage": (lambda run: ev.AuditOpened(1, -1, 2, 0, (A,), "leader", (), (1,)), "stage 2"),
    "a step to come": (lambda run: ev.AuditOpened(1, 1, 0, 0, (A,), "leader", (), (1,)), "step 1"),
}


@pytest.mark.parametrize("what", sorted(OPENINGS))
def test_an_audit_that_is_refused(what: str):
    run, _ = at_manifest()
    event, match = OPENINGS[what]
    refused(run, event(run), match)


def test_no_audit_of_what_has_no_manifest_yet():
    run = Fold(ALL)
    step = run.plan()
    run.update()
    run.work(step)
    run.freeze(step, 0)
    refused(run, ev.AuditOpened(1, step, 0, 1, (A, B), "leader", (), (1, 1)), "group that is frozen")


def test_an_audit_is_closed_once_and_for_whom_it_was_opened():
    run, step = at_manifest()
    audit = run.open(step, 0, (A, B), number=1)
    assert run.state.audits.open[audit].wants == (WANT,)
    for event in (
        ev.AuditClosed(audit, passed=(A,)),
        ev.AuditClosed(audit, passed=(A, B, C)),
        ev.AuditClosed(audit, passed=(A, B), failed=(B,)),
    ):
        refused(run, event, "closed for others")
    refused(run, ev.AuditClosed(audit + 1, passed=(A, B)), "isn't open")
    run.emit(ev.AuditClosed(audit, passed=(A, B)))
    refused(run, ev.AuditClosed(audit, passed=(A, B)), "isn't open")


def test_what_another_validator_redoes_counts_for_nobody_here():
    run = Fold(PROBATION)
    step = run.whole_step()
    before = dict(run.state.audits.clean)
    run.emit(ev.AuditClosed(run.open(step, 0, (A, B), by="follower"), passed=(A,), undecided=(B,), unopened=(B,)))
    assert run.state.audits.clean == before
    assert run.state.audits.unopened == {"b": 1}, "evidence is owed to every validator"


def test_refused_and_lost_evidence_is_counted_once_an_audit():
    run = Fold(PROBATION)
    step = run.whole_step()
    run.emit(ev.AuditClosed(run.open(step, 0, (A,)), undecided=(A,), unopened=(C, D), lost=(B,)))
    run.emit(ev.AuditClosed(run.open(step, 0, (B,)), undecided=(B,), unopened=(C,)))
    assert (run.state.audits.unopened, run.state.audits.lost) == ({"c": 2, "d": 1}, {"b": 1})


def test_whose_evidence_is_kept_back_again_and_again_is_on_probation():
    """Only a row of them, and only where somebody who was there kept it back; one that passes ends the row."""
    run = Fold(PROBATION)
    for _ in range(2):
        step = run.whole_step()
    audits = run.state.audits
    for _ in range(MOST_UNPROVEN + 1):
        run.emit(ev.AuditClosed(run.open(step, 0, (A,)), undecided=(A,)))
    assert audits.unproven == {}, "its maker was gone: nobody's fault"
    for _ in range(MOST_UNPROVEN - 1):
        run.emit(ev.AuditClosed(run.open(step, 0, (A,)), undecided=(A,), lost=(C,)))
    run.emit(ev.AuditClosed(run.open(step, 0, (A,)), passed=(A,)))
    assert audits.unproven == {}
    assert not au.in_probation(run.state, "a")
    for _ in range(MOST_UNPROVEN):
        assert not au.in_probation(run.state, "a")
        run.emit(ev.AuditClosed(run.open(step, 0, (A,)), undecided=(A,), unopened=(C,)))
    assert au.in_probation(run.state, "a")
    assert not au.in_probation(run.state, "c"), "what it did itself is another count"
    assert audits.unproven == {}


def test_a_run_without_audits_has_none_of_it():
    run = Fold(OFF)
    step = run.whole_step()
    for event in (
        ev.AuditOpened(1, step, 0, 0, (A,), "leader", (), (1,)),
        ev.WindowClosed(0, -1, 0, 1),
        ev.CaseOpened(1, "a", A, 0, 0, "partial", "bundle", "digest", False),
    ):
        refused(run, event, "without audits")
    refused(run, ev.Rewound(-1, 1, 0), "without rewinds")
    assert run.state.audits == st.AuditState()


# --- windows -------------------------------------------------------------------------------------------------------


def test_windows_close_in_order_when_their_steps_are_sealed_and_the_next_steps_wait_for_their_audits():
    run = Fold(PROBATION)
    run.whole_step()
    refused(run, ev.WindowClosed(0, -1, 0, 1), "before its last step is sealed")
    run.whole_step()
    refused(run, ev.WindowClosed(1, 1, 1, 1), "where 0 is due")
    refused(run, ev.WindowClosed(0, 0, 0, 1), "has steps")
    refused(run, ev.WindowClosed(0, -1, 0, -1), "waits for block -1")
    assert au.may_plan(run.state, 1)
    run.update()
    step = run.plan()
    run.work(step)
    run.merged(step)
    run.seal_step(step)
    assert not au.may_plan(run.state, 2), "two windows behind, one may be"
    refused(run, ev.StepPlanned(2, 2, 0, None), "audits have kept up")
    run.emit(ev.WindowClosed(0, -1, 0, 1), ev.WindowClosed(1, 1, 1, 1))
    refused(run, ev.WindowAudited(1), "isn't the next to end")
    audit = run.open(0, 0, (A,))
    refused(run, ev.WindowAudited(0), "while audits .* are open")
    run.emit(ev.AuditClosed(audit, passed=(A,)))
    run.open(0, 0, (A,), by="follower")  # that one isn't waited for
    run.emit(ev.WindowAudited(0))
    assert run.state.audits.audited_to == 1
    assert au.may_plan(run.state, 2)
    refused(run, ev.WindowAudited(0), "isn't the next to end")


def test_the_run_ends_when_its_last_window_is_audited_and_nobody_stands_accused():
    run = Fold(ALL)
    for _ in range(5):
        run.whole_step()
    run.update()
    finished = ev.RunFinished(4, "root", ())
    refused(run, finished, "before it is audited")
    run.audit_windows()
    case = run.accuse(A)
    refused(run, finished, "before it is audited")
    run.witness(case, C, "true")
    run.emit(ev.CaseClosed(case, "convicted"), finished)
    run.emit(ev.Appealed(case, upheld=False, digest="claim"), ev.Gone(B, "left"))
    assert run.state.convicted == set()


# --- inputs that are made again ----------------------------------------------------------------------------------------


def with_item(output: str = "f-1.0.0") -> tuple[Fold, int]:
    run = Fold(ALL)
    step = run.plan()
    run.update()
    run.work(step)
    run.emit(ev.Voided(step, 0, A, "silent"), ev.Leased(step, 0, 0, B, 2), ev.Forwarded(step, 0, 0, 2, output))
    return run, step


def test_whoever_computed_from_what_is_said_otherwise_now_has_to_do_it_again():
    run, step = with_item()
    assert run.state.work is not None
    assert run.state.work.stale == set(), "the same bits"
    run, step = with_item("other")
    assert run.state.work is not None
    assert run.state.work.stale == {(1, 0)}
    assert not au.is_audited(run.state, run.state.work)
    run.emit(ev.Voided(step, 1, C, "inputs"))
    found = st.item(run.state, step, 0, 1)
    assert found is not None
    assert (run.state.work.stale, found.status, found.again, found.member) == (set(), st.OPEN, True, C)
    run.emit(ev.Leased(step, 0, 1, C, 2))
    assert not found.again


def test_who_contradicts_itself_again_and_again_is_known():
    """Of the same inputs it says another output each time: with it the step comes to no end."""
    run, step = with_item()
    work = run.state.work
    assert work is not None
    for turn in range(MOST_CONTRADICTIONS):
        assert work.fickle == set()
        run.emit(ev.Backwarded(step, 0, 0, 2 + turn, ""), ev.Voided(step, 0, B, "silent"))
        run.emit(ev.Leased(step, 0, 0, B, 3 + turn), ev.Forwarded(step, 0, 0, 3 + turn, f"turn {turn}"))
    assert work.fickle == {"b"}


def test_who_was_given_something_else_contradicts_nothing():
    run, step = with_item()
    work = run.state.work
    assert work is not None
    holder = B
    for turn in range(MOST_CONTRADICTIONS + 2):
        run.emit(ev.Voided(step, 0, holder, "silent"))
        holder = A if holder == B else B
        run.emit(ev.Leased(step, 0, 0, holder, 3 + turn), ev.Forwarded(step, 0, 0, 3 + turn, f"input {turn}"))
        run.emit(ev.Voided(step, 1, C, "inputs"), ev.Leased(step, 0, 1, C, 2 + turn))
        run.emit(ev.Backwarded(step, 0, 1, 2 + turn, f"output {turn}", 1))
    assert work.items[1][0].contradictions == 0
    assert work.fickle == set()
