"""Replicas that differ about a root: none is agreed on, the log is asked, who reported another one stands accused."""

from __future__ import annotations

from typing import Any

import pytest
from audit_desk_cases import Desk
from audit_fold_cases import OFF, PROBATION, A, B, C

from subnet.protocol import messages as msg
from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.config import AuditSection
from subnet.run.state_codec import dump_state, load_state
from subnet.words import Member
from validator.decide_roots import decide_roots
from validator.decision import Accused, RootResult, RunRoots
from validator.intake import admit

E = Member("e", 1, 9)


def split(audit: AuditSection = PROBATION, **roots: str) -> Desk:
    """The state after one update: A says ``a``'s root, B ``b``'s; the others of stage 1 agree."""
    desk = Desk(audit)
    desk.whole_step()
    said = {A: roots.get("a", "true"), B: roots.get("b", "lie")}
    for member, root in said.items():
        desk.emit(ev.Updated(member, 0, root))
    return desk


def decided(desk: Desk) -> list[Any]:
    return [decision.what for decision in decide_roots(desk.now, desk.state, desk.watch, desk.policy)]


def told(desk: Desk, root: str, *wrong: Member) -> list[Any]:
    accused = tuple(Accused(member, "root", f"bundle-{member.hotkey}", root, "claim") for member in wrong)
    desk.watch.audits.take(RunRoots(0, 0), RootResult(0, 0, root, accused))
    desk.watch.done(RunRoots(0, 0))
    return decided(desk)


def test_without_audits_the_first_of_equals_goes_on() -> None:
    desk = split(OFF)
    assert st.agreed_root(desk.state, 0) == "true"
    assert decided(desk) == []


def test_nobody_works_at_a_stage_whose_replicas_differ_and_the_log_is_asked_once() -> None:
    desk = split()
    assert st.agreed_root(desk.state, 0) is None
    assert st.up_to_date(desk.state, 0) == []
    assert decided(desk) == [RunRoots(0, 0)]
    assert decided(desk) == [], "it is under way"


def test_who_reported_another_root_is_out_at_once_and_the_other_goes_on() -> None:
    desk = split()
    decided(desk)
    (opened,) = told(desk, "true", B)
    assert (opened.charge, opened.member, opened.step, opened.bundle) == (au.ROOT, B, -1, "bundle-b")
    desk.emit(opened)
    assert desk.codes()[0] == "case_open"
    assert B not in desk.state.members
    assert st.agreed_root(desk.state, 0) == "true"
    assert load_state(dump_state(desk.state)).audits == desk.state.audits


def test_the_first_time_is_a_fault_and_the_second_a_conviction() -> None:
    desk = split()
    for turn in (1, 2):
        decided(desk)
        (opened,) = told(desk, "true", next(k for k in desk.state.members if k.hotkey == "b"))
        desk.emit(opened)
        desk.settle()
        witness = desk.state.audits.cases[turn].asked[-1]
        desk.emit(ev.WitnessSaid(turn, witness.hotkey, "true"))
        desk.settle()
        assert desk.state.audits.cases[turn].outcome == ("fault", "convicted")[turn - 1]
        if turn == 1:
            again = desk.join(Member("b", 1, 8), 0)
            desk.emit(ev.Updated(again, 0, "lie"))
    assert desk.state.convicted == {"b"}


def test_a_third_replica_is_waited_for_a_little_and_makes_a_majority() -> None:
    desk = split()
    desk.join(E, 0)
    assert decided(desk) == []
    desk.now += desk.policy.audit.roots_s
    assert decided(desk) == [RunRoots(0, 0)]
    desk.emit(ev.Updated(E, 0, "true"))
    assert st.agreed_root(desk.state, 0) == "true"
    assert told(desk, "true", B) == [], "it is put out like any minority, without a case"


def test_of_a_root_whose_reporters_are_gone_nobody_is_asked() -> None:
    desk = split()
    desk.emit(ev.Gone(B, "lost"))
    assert st.agreed_root(desk.state, 0) == "true"
    assert decided(desk) == []


def test_where_it_cant_be_told_all_that_differ_restore_their_state() -> None:
    desk = split()
    decided(desk)
    assert told(desk, "") == [ev.Gone(A, "checksum"), ev.Gone(B, "checksum")]


def test_two_runs_that_differ_accuse_nobody_and_it_is_tried_again_after_a_pause() -> None:
    desk = split()
    decided(desk)
    assert told(desk, "true") == []
    assert decided(desk) == []
    desk.now += desk.policy.audit.again_s
    assert decided(desk) == [RunRoots(0, 0)]


def test_what_was_found_of_an_earlier_state_is_forgotten() -> None:
    desk = split()
    desk.watch.audits.roots[-1, 0] = RootResult(-1, 0, "true", (Accused(A, "root", "x", "y"),))
    assert decided(desk) == [RunRoots(0, 0)]
    assert desk.watch.audits.roots == {}


@pytest.mark.parametrize("root", ["true", "other"])
def test_who_stores_another_state_than_it_reported_is_out(root: str) -> None:
    desk = Desk(PROBATION)
    desk.whole_step()
    desk.update()
    desk.work(desk.plan())
    desk.merged(0)
    desk.pass_all(0)
    desk.seal_step(0)
    for member in (A, B):
        desk.emit(ev.Updated(member, 1, "true"))
    desk.emit(ev.SnapshotOrdered(1, 0, A))
    desk.watch.blob_confirmed("manifest")
    events = admit(desk.state, A, msg.SnapshotClaim(1, 0, "manifest", root), desk.watch)
    stored = ev.SnapshotStored(1, 0, A, "manifest", root)
    assert events == [stored if root == "true" else ev.Gone(A, "checksum")]
    assert C in desk.state.members
