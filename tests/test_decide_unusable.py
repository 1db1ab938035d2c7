"""Boundaries that are no numbers: who receipted them answers for it, or who says so falsely. Who differs again is gone."""

from __future__ import annotations

from random import Random
from typing import Any

from audit_desk_cases import Desk
from audit_fold_cases import PROBATION, A, B, C, D

from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import Member
from validator.audit_watch import AuditWatch
from validator.decide_unusable import decide_unusable
from validator.decision import JudgeBoundary
from validator.intake import Ignored, admit, blobs_to_confirm
from validator.lost_boundaries import TRIED, TRIED_STRAIGHT, decide_replays

SAID = "f-1.0.0"


def at_work() -> Desk:
    """The calibrating step; microbatch 0 goes from A to C."""
    desk = Desk(PROBATION)
    step = desk.plan()
    desk.update()
    for stage, members in enumerate(((A, B), (C, D))):
        for m, member in enumerate(members):
            desk.emit(ev.Leased(step, m, stage, member, 1))
            if stage == 0:
                desk.emit(ev.Forwarded(step, m, stage, 1, f"f{step}.{m}.{stage}"))
    return desk


def says(desk: Desk, member: Member, hash_: str = SAID, microbatch: int = 0, stage: int = 1) -> Any:
    claim = msg.UnusableClaim(-1, microbatch, stage, False, hash_)
    assert blobs_to_confirm(claim) == (hash_,)
    return admit(desk.state, member, claim, desk.watch)


def decided(desk: Desk) -> list[Any]:
    found = [decision.what for decision in decide_unusable(desk.state, desk.watch)]
    for what in found:
        if not isinstance(what, JudgeBoundary):
            desk.emit(what)  # type: ignore[arg-type]
    return found


def judged(desk: Desk, unusable: bool) -> list[Any]:
    assert decided(desk) == [JudgeBoundary(SAID)]
    assert decided(desk) == [], "it is being looked at"
    desk.watch.audits.take(JudgeBoundary(SAID), unusable)
    desk.watch.done(JudgeBoundary(SAID))
    return decided(desk)


def test_who_receipted_no_numbers_is_out_at_once_and_convicted_the_second_time() -> None:
    desk = at_work()
    desk.watch.blob_confirmed(SAID)
    assert says(desk, C) == Ignored("noted")
    (opened,) = judged(desk, unusable=True)
    assert (opened.charge, opened.member, opened.stage, opened.digest) == ("unusable", A, 0, SAID)
    desk.settle()
    assert A not in desk.state.members
    assert desk.state.audits.cases[1].outcome == "fault"
    again = desk.join(Member("a", 1, 9), 0)
    desk.emit(ev.Updated(again, -1, ""), ev.Leased(-1, 0, 0, again, 2), ev.Forwarded(-1, 0, 0, 2, SAID))
    says(desk, C)
    judged(desk, unusable=True)
    desk.settle()
    assert desk.state.convicted == {"a"}


def test_who_calls_numbers_unusable_is_void_and_the_second_time_gone() -> None:
    desk = at_work()
    desk.watch.blob_confirmed(SAID)
    says(desk, C)
    assert judged(desk, unusable=False) == [ev.Voided(-1, 1, C, "silent")]
    says(desk, C)
    assert judged(desk, unusable=False) == [ev.Gone(C, "silent")]
    assert A in desk.state.members
    assert desk.state.audits.cases == {}


def test_only_what_is_receipted_and_in_the_store_is_looked_at() -> None:
    desk = at_work()
    assert says(desk, C) == Ignored("the store doesn't have it yet")
    desk.watch.blob_confirmed(SAID)
    assert says(desk, C, "other") == Ignored("not what is receipted")
    assert says(desk, A, stage=0) == Ignored("no such item in an open step")
    assert says(desk, A) == Ignored("no input of its stage"), "of another stage"
    assert says(desk, C, microbatch=7) == Ignored("no such item in an open step")
    assert desk.watch.audits.unusable == {}


def test_what_nobody_could_look_at_is_forgotten_with_the_step() -> None:
    desk = at_work()
    desk.watch.blob_confirmed(SAID)
    says(desk, C)
    desk.state.work = None
    assert decided(desk) == []
    assert desk.watch.audits.unusable == {}


# --- nobody can look ------------------------------------------------------------------------------------------------


def missing(desk: Desk, m: int, generation: int, maker: Member, reporter: Member) -> list[Any]:
    """Microbatch m's boundary from stage 0 was made again so often, and is missing again. What is decided happens."""
    work = st.work_at(desk.state, -1)
    assert work is not None
    for stage, member in ((0, maker), (1, reporter)):
        found = work.items[stage][m]
        if found.status == st.OPEN:
            desk.emit(ev.Leased(-1, m, stage, member, found.generation + 1))
        if stage == 0 and not found.forwarded:
            desk.emit(ev.Forwarded(-1, m, 0, found.generation, f"f-1.{m}.0"))
    old = work.replays.get((0, m, False))
    for number in range(old.generation + 1 if old is not None else 1, generation + 1):
        desk.emit(ev.ReplayLeased(-1, m, 0, False, maker, number))
    found = []
    for now_s in (desk.now, desk.now + desk.policy.replay_s):  # the first look starts its clock
        desk.now, desk.watch.missing[-1, m, 0, False] = now_s, None
        found = found or decide_replays(now_s, desk.state, work, desk.watch, desk.policy, Random(0))
    for decision in found:
        desk.emit(decision.what)  # type: ignore[arg-type]
    return [decision.what for decision in found]


def test_a_pair_that_differs_again_is_not_believed_by_turns() -> None:
    desk = at_work()
    assert isinstance(missing(desk, 0, TRIED, A, C)[0], ev.ReplayLeased)
    assert missing(desk, 0, TRIED_STRAIGHT, A, C) == [ev.Voided(-1, 0, A, "doubted")]
    assert missing(desk, 0, TRIED, A, C) == [ev.Gone(A, "silent")], "the second time sooner, its maker first"
    again = desk.join(Member("a", 1, 9), 0)
    desk.emit(ev.Updated(again, -1, ""))
    assert missing(desk, 0, TRIED, again, C) == [ev.Gone(C, "silent")]
    assert desk.state.audits.cases == {}, "which of them lies nobody knows"


def test_who_differs_with_two_coldkeys_is_the_one() -> None:
    """C lies about what two others made: they differ with nobody but C."""
    desk = at_work()
    desk.emit(ev.Gone(D, "lost"))
    assert missing(desk, 0, TRIED_STRAIGHT, A, C) == [ev.Voided(-1, 0, A, "doubted")]
    assert missing(desk, 1, TRIED_STRAIGHT, B, C) == [ev.Voided(-1, 0, B, "doubted")]
    assert missing(desk, 0, TRIED, A, C) == [ev.Gone(C, "silent")]


def test_differences_are_kept_over_steps_and_bounded(monkeypatch: Any) -> None:
    watch = AuditWatch()
    assert watch.differ(("a", "c"), ("ca", "cc")) == (0, (1, 1))
    assert watch.differ(("a", "d"), ("ca", "cd")) == (0, (2, 1))
    assert watch.differ(("a", "e"), ("ca", "cd")) == (0, (2, 1)), "one coldkey has one voice"
    assert watch.differences(("a", "c")) == 1
    monkeypatch.setattr("validator.audit_watch.MAX_QUEUED", 2)
    watch.differ(("x", "y"), ("cx", "cy"))
    assert watch.differences(("a", "c")) == 0
