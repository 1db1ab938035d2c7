"""What is decided about audits: which partials are redone and when, what a result means, and what a restart changes (nothing)."""

from __future__ import annotations

from audit_desk_cases import AUDITS, Desk, with_rate
from audit_fold_cases import ALL, PROBATION, A, B, C, D

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import Member, Want
from validator.audit_watch import AuditRequest
from validator.decide_audits import decide_stale
from validator.decision import AuditResult, RunAudit

# --- before the seal -----------------------------------------------------------------------------------------------


def test_before_the_seal_one_audit_a_stage_of_all_who_must_be_and_they_run_one_after_the_other():
    desk = Desk(ALL)
    step = desk.to_manifests()
    opened = [what for what, code in desk.settle() if code == "before_seal"]
    assert [(e.step, e.stage, e.number, e.members, e.num_items) for e in opened if isinstance(e, ev.AuditOpened)] == [
        (step, 0, 1, (A, B), (1, 1)),
        (step, 1, 1, (C, D), (1, 1)),
    ]
    assert desk.runs == [1]
    assert desk.found(1)[0][1] == "redone"
    assert desk.runs == [1, 2]
    desk.found(2)
    work = desk.state.work
    assert work is not None
    assert au.is_audited(desk.state, work)
    assert desk.settle() == []
    desk.seal_step(step)


def test_an_audit_is_opened_with_the_manifest_and_run_once_all_fingerprints_are_in():
    """So that evidence is on its way meanwhile."""
    desk = Desk(ALL)
    step = desk.plan()
    desk.update()
    desk.work(step)
    desk.freeze(step, 0)
    version = desk.reduce(step, 0)
    assert desk.kinds() == ["AuditOpened"]
    desk.reveal(step, 0, version)
    assert desk.kinds() == ["RunAudit"]


def test_only_who_is_on_probation_is_redone_before_the_seal():
    desk = Desk(PROBATION)
    for _ in range(2):
        desk.whole_step()
    desk.state.audits.clean.pop("b")
    step = desk.to_manifests()
    opened = [what for what, _ in desk.settle() if isinstance(what, ev.AuditOpened)]
    assert [(e.stage, e.members) for e in opened] == [(0, (B,))]
    desk.found(opened[0].audit)
    desk.seal_step(step)


def test_what_was_redone_for_one_manifest_says_nothing_of_the_next():
    desk = Desk(ALL)
    step = desk.to_manifests()
    desk.settle()
    desk.reveal(step, 0, desk.reduce(step, 0))
    assert desk.found(1) == [(RunAudit(1), "redo")], "the result is dropped, and it is run again"
    desk.found(1)
    work = desk.state.work
    assert work is not None
    assert work.merges[0].passed == {A, B}


def test_an_audit_of_a_merge_that_began_anew_ends_undecided():
    desk = Desk(ALL)
    desk.to_manifests()
    desk.settle()
    desk.emit(ev.Gone(A, "lost"))
    said = desk.settle()
    assert (ev.AuditClosed(1, undecided=(A, B)), "merge_began_anew") in said
    assert 1 not in desk.watch.audits.results
    assert desk.state.audits.clean == {}


def test_an_owner_that_dies_while_a_seal_waits_for_audits_holds_up_nothing():
    desk = Desk(ALL)
    third = desk.join(Member("e", 1, 5), 0)
    desk.audit_windows()
    step = desk.plan()
    desk.update()
    desk.work(step)
    for group in (0, 1):
        desk.freeze(step, group)
        work = desk.state.work
        assert work is not None
        merge = work.merges[group]
        entries = tuple(merge.commitments[member] for member in sorted(merge.commitments))
        owners = (third, entries[0].member) if group == 0 else (entries[0].member, entries[0].member)
        desk.emit(ev.ReduceOrdered(step, group, 1, entries, owners))
        desk.reveal(step, group, 1)
    desk.settle()
    desk.emit(ev.Gone(third, "lost"))
    desk.found(1)
    desk.found(2)
    desk.seal_step(step)


def test_inputs_that_are_missing_before_a_seal_are_made_again():
    desk = Desk(ALL)
    step = desk.to_manifests()
    desk.settle()
    want = Want(1, 0, True, f"b{step}.0.1")
    assert desk.found(1, missing=[want], lacking=[A]) == [(RunAudit(2), "redo")], "the other stage's goes on meanwhile"
    assert list(desk.watch.missing) == [(step, 0, 1, True)]
    assert 1 in desk.state.audits.open
    desk.found(2)
    desk.now += AUDITS.again_s
    assert desk.codes() == ["redo"]


def test_where_our_own_runs_differ_nobody_is_accused_and_it_is_tried_again():
    desk = Desk(ALL)
    desk.to_manifests()
    desk.settle()
    said = desk.found(1, wrong=[A, B], repeated=False)
    assert [type(what).__name__ for what, _ in said] == ["RunAudit"]
    assert desk.state.audits.num_cases == 0
    desk.found(2)
    assert desk.settle() == [], "after a pause"
    desk.now += AUDITS.again_s
    assert desk.settle() == [(RunAudit(1), "redo")]
    said = desk.found(1, wrong=[A], repeated=False)
    assert said[0][0] == ev.AuditClosed(1, passed=(B,), undecided=(A,)), "who is right is right"


def test_an_audit_that_can_not_be_done_before_a_seal_is_tried_until_it_can():
    desk = Desk(ALL)
    desk.to_manifests()
    desk.settle()
    desk.finish(AuditResult(1, None, trouble="no room"))
    assert desk.settle() == [(RunAudit(2), "redo")]
    desk.now += AUDITS.again_s
    desk.watch.done(RunAudit(2))
    assert (RunAudit(1), "redo") in desk.settle()


def test_a_restart_between_any_two_events_runs_open_audits_again():
    desk = Desk(ALL)
    step = desk.to_manifests()
    for _ in range(2):
        desk.settle()
        desk.restart()
    desk.settle()
    assert desk.runs == [1]
    desk.found(1)
    desk.restart()
    desk.settle()
    assert desk.runs == [2]
    desk.found(2)
    desk.restart()
    assert desk.settle() == []
    desk.seal_step(step)


# --- after the seal ------------------------------------------------------------------------------------------------


def sealed_run(rate: float = 1.0, steps: int = 3) -> Desk:
    """Steps whose members' probation is over from step 1 on."""
    desk = Desk(with_rate(rate, window_steps=2, open_windows=4))
    for _ in range(steps):
        step = desk.plan()
        desk.update()
        desk.work(step)
        desk.merged(step)
        if step < 1:
            desk.pass_all(step)
        desk.seal_step(step)
    return desk


def test_a_window_is_closed_when_its_steps_are_sealed_and_a_block_is_known_and_drawn_from_a_later_one():
    desk = sealed_run()
    assert desk.settle() == [], "no chain"
    desk.watch.audits.block = 7
    assert desk.settle() == [(ev.WindowClosed(0, -1, 1, 9), "window_sealed")]
    desk.blocks(8)
    assert desk.settle() == [], "its block isn't there"
    desk.blocks(9)
    opened = [what for what, code in desk.settle() if code == "drawn"]
    assert [(e.step, e.stage, e.number, e.members) for e in opened if isinstance(e, ev.AuditOpened)] == [
        (1, 0, 0, (A, B)),
        (1, 1, 0, (C, D)),
    ], "what was redone before its seal isn't drawn"
    assert desk.runs == [opened[0].audit]  # type: ignore[attr-defined]
    desk.found(5)
    assert (ev.WindowAudited(0), "window_audited") in desk.found(6)
    assert desk.state.audits.audited_to == 2


def test_windows_of_a_run_that_redoes_everything_before_its_seal_need_no_draw():
    desk = Desk(ALL)
    for _ in range(2):
        desk.audit_windows()
        step = desk.plan()
        desk.update()
        desk.work(step)
        desk.merged(step)
        desk.pass_all(step)
        desk.seal_step(step)
    desk.watch.audits.block = 7
    assert desk.codes() == ["window_sealed", "window_audited"]


def test_not_more_audits_are_open_than_may_be_and_those_a_seal_waits_for_run_first():
    desk = sealed_run(steps=4)
    desk.watch.audits.block = 7
    desk.settle()
    desk.blocks(9)
    desk.state.audits.clean.clear()
    step = desk.to_manifests()
    said = desk.settle()
    drawn = [what for what, code in said if code == "drawn"]
    assert len(drawn) == AUDITS.at_once
    waited = [what for what, code in said if code == "before_seal"]
    assert len(waited) == 2
    assert desk.runs == [waited[0].audit]  # type: ignore[attr-defined]
    assert isinstance(waited[0], ev.AuditOpened)
    assert waited[0].step == step


def test_draws_are_the_same_after_a_restart_and_what_is_done_is_not_done_again():
    desk = sealed_run()
    desk.blocks(9)
    desk.watch.audits.block = 7
    desk.settle()
    desk.found(5)
    desk.restart()
    assert desk.codes() == ["redo"], "of the audit that is open"
    assert desk.runs == [6]
    desk.found(6)
    desk.restart()
    assert desk.settle() == []
    assert desk.state.audits.audited_to == 2


def test_the_marked_are_drawn_four_times_as_often():
    desk = sealed_run(rate=0.25)
    desk.state.audits.marks["a"] = 1
    desk.blocks(9)
    desk.watch.audits.block = 7
    opened = [what for what, code in desk.settle() if code == "drawn"]
    assert any(isinstance(e, ev.AuditOpened) and A in e.members for e in opened)


def test_what_another_validator_asks_for_is_opened_for_it_and_closed_when_it_had_its_time():
    desk = sealed_run()
    desk.watch.audits.requests.append(AuditRequest("follower", 0, 1, 0, ("a", "nobody")))
    desk.watch.audits.requests.append(AuditRequest("follower", 0, 1, 1, ("c",)))
    said = desk.settle()
    assert [code for _, code in said] == ["asked_for"], "one at a time, and it isn't ours to run"
    opened = said[0][0]
    assert isinstance(opened, ev.AuditOpened)
    assert (opened.by, opened.members, opened.number) == ("follower", (A,), 0)
    desk.now += AUDITS.follower_s
    assert desk.codes() == ["evidence_had_its_time", "asked_for"]
    assert desk.state.audits.clean == {"a": 2, "b": 2, "c": 2, "d": 2}
    desk.watch.audits.requests.append(AuditRequest("follower", 0, 3, 0, ("a",)))
    desk.now += AUDITS.follower_s
    assert desk.codes() == ["evidence_had_its_time"], "nothing is known of that step"


# --- evidence that doesn't come --------------------------------------------------------------------------------------


def drawn_without(missing: Want) -> Desk:
    """The audit of stage 1 at step 1, of which an input is missing."""
    desk = sealed_run()
    desk.blocks(9)
    desk.watch.audits.block = 7
    desk.settle()
    desk.found(5)
    assert desk.runs == [5, 6]
    assert desk.found(6, missing=[missing], lacking=[C]) == [(RunAudit(6), "redo")], "once more"
    return desk


INPUT = Want(0, 0, False, "f1.0.0")
"""Microbatch 0's boundary of step 1, made by A."""


def test_a_maker_that_was_there_and_opens_nothing_is_named():
    desk = drawn_without(INPUT)
    said = desk.found(6, missing=[INPUT], lacking=[C])
    assert said[0][0] == ev.AuditClosed(6, passed=(D,), undecided=(C,), unopened=(A,))


def test_a_maker_that_says_it_lost_it_is_named_as_that_and_nobody_waits():
    desk = drawn_without(INPUT)
    desk.watch.audits.not_held.add((6, INPUT))
    desk.watch.audits.not_held_by.add((6, INPUT, "a"))
    said = desk.found(6, missing=[INPUT], lacking=[C])
    assert said[0][0] == ev.AuditClosed(6, passed=(D,), undecided=(C,), lost=(A,))


def test_a_maker_that_is_gone_or_is_another_process_owes_nothing():
    desk = drawn_without(INPUT)
    desk.emit(ev.Gone(A, "lost"))
    desk.join(Member("a", 1, 9), 0)
    said = desk.found(6, missing=[INPUT], lacking=[C])
    assert said[0][0] == ev.AuditClosed(6, passed=(D,), undecided=(C,))


def test_who_has_not_made_it_owes_nothing():
    """What the seal names isn't what is missing: somebody else's word."""
    other = Want(0, 0, False, "other")
    desk = drawn_without(other)
    said = desk.found(6, missing=[other], lacking=[C])
    assert said[0][0] == ev.AuditClosed(6, passed=(D,), undecided=(C,))


# --- sums that can't stand -------------------------------------------------------------------------------------------


def test_who_computed_from_what_is_said_otherwise_now_is_void_and_who_contradicts_itself_is_gone():
    desk = Desk(ALL)
    step = desk.plan()
    desk.update()
    desk.work(step)
    assert decide_stale(desk.state) == []
    work = desk.state.work
    assert work is not None
    work.stale.add((1, 0))
    assert [d.what for d in decide_stale(desk.state)] == [ev.Voided(step, 1, C, "inputs")]
    work.fickle.add("b")
    assert [d.what for d in decide_stale(desk.state)] == [ev.Gone(B, "contradicts")]
    work.fickle.clear()
    desk.state.seals[1] = st.GroupSeal((), (), "")
    assert decide_stale(desk.state) == [], "what is sealed is sealed"
