"""What a follower found out itself against what its leader says: pay, convictions, and what is said of the leader."""

from __future__ import annotations

import msgspec
import pytest

from subnet.protocol.follow_api import CaseVerdict, OwnAudit
from subnet.run import events as ev
from subnet.run.state import new_state
from subnet.score.book import RunBook
from subnet.words import Member
from validator.follow_checks import WRONG
from validator.follow_judging import REFUSED_MAX, UNTRUSTED_MAX, Judging

LIAR, OTHER = Member("liar", 1, 1), Member("other", 1, 2)


class Book(RunBook):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(leader_audits=False)
        self.failed: list[tuple[int, int, Member]] = []
        self.guilty: dict[tuple[str, int], str] = {}
        self.believed: list[int] = []

    def judge(self, time_ns: int, step: int, stage: int, outcome: ev.AuditClosed) -> None:
        self.failed += [(step, stage, member) for member in outcome.failed]

    def convict(self, time_ns: int, hotkey: str, why: str, case: int = 0) -> None:
        self.guilty[hotkey, case] = why

    def believe(self, time_ns: int, case: int) -> None:
        self.believed.append(case)

    def clear(self, time_ns: int, hotkey: str, case: int = 0) -> None:
        self.guilty.pop((hotkey, case), None)


class World:
    def __init__(self) -> None:
        self.book, self.number, self.said = Book(), 0, list[str]()
        self.audits, self.verdicts = list[OwnAudit](), list[CaseVerdict]()
        self.judging = Judging(self.book, self.audits, self.verdicts)

    def restart(self) -> None:
        """From a copy."""
        data = self.judging.dump()
        self.judging = Judging(self.book, self.audits, self.verdicts)
        self.judging.load(data)

    def event(self, event: ev.AnyEvent) -> None:
        self.judging.look(new_state(), event)
        self.number += 1
        self.reach()

    def reach(self) -> None:
        self.said += [found.code for found in self.judging.reach(self.number, self.number)]

    def audit(self, step: int = 0, **outcome: object) -> None:
        self.audits.append(OwnAudit("run", 0, 0, step, 1, self.number, 5, **outcome))  # type: ignore[arg-type]
        self.reach()

    def opened(self, case: int = 1, step: int = 0) -> None:
        self.event(ev.CaseOpened(case, LIAR.hotkey, LIAR, step, 1, "partial", "ab" * 32, "right", True))

    def verdict(self, gave: str, case: int = 1) -> None:
        """``wrong``, ``right``, ``foreign`` or "" (couldn't be replayed)."""
        digest = "right" if gave == "wrong" else "claimed" if gave == "right" else ""
        confirmed, foreign = gave == "wrong", gave == "foreign"
        verdict = CaseVerdict("run", case, LIAR.hotkey, digest, confirmed, self.number, 5, foreign=foreign)
        self.verdicts.append(verdict)
        self.reach()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("late", [False, True], ids=["verdict first", "outcome first"])
@pytest.mark.parametrize(
    ("gave", "outcome", "guilty", "unpaid", "said"),
    [
        ("wrong", "convicted", True, "believed", []),
        ("wrong", "fault", False, "believed", []),
        ("wrong", "unconfirmed", False, "judged", []),
        ("wrong", "cleared", False, "judged", ["cleared"]),
        ("right", "convicted", False, "", ["framed"]),
        ("right", "cleared", False, "", []),
        ("foreign", "convicted", False, "", ["framed"]),
        ("foreign", "cleared", False, "", []),
        ("", "convicted", False, "", []),
    ],
)
def test_the_leaders_word_against_the_replay_here(
    gave: str, outcome: str, guilty: bool, unpaid: str, said: list[str], late: bool, restarts: bool
) -> None:
    world = World()
    world.opened()
    steps = [lambda: world.verdict(gave), lambda: world.event(ev.CaseClosed(1, outcome))]
    for step in reversed(steps) if late else steps:
        step()
        if restarts:
            world.restart()
            world.reach()
    assert world.book.guilty == ({(LIAR.hotkey, 1): "case 1, replayed here"} if guilty else {})
    assert world.book.failed == ([(0, 1, LIAR)] if unpaid == "judged" else [])
    assert world.book.believed == ([1] if unpaid == "believed" else [])
    assert world.said == said


def test_an_appeal_that_overturns_what_is_wrong_is_said_and_ends_the_conviction_alone() -> None:
    world = World()
    world.opened()
    world.verdict("wrong")
    world.event(ev.CaseClosed(1, "convicted"))
    assert set(world.book.guilty) == {(LIAR.hotkey, 1)}
    world.event(ev.Appealed(1, True, "right"))
    assert world.said == []
    world.event(ev.Appealed(1, False, "claimed"))
    assert world.said == ["cleared"]
    assert world.book.guilty == {}
    assert world.book.failed == [(0, 1, LIAR)]  # unpaid it stays


def test_whoever_is_cleared_again_and_again_is_convicted_here() -> None:
    world = World()
    for case in (1, 2):
        world.opened(case, step=case)
        world.verdict("wrong", case)
        world.event(ev.CaseClosed(case, "cleared"))
    assert world.said == ["cleared", "cleared"]
    assert set(world.book.guilty) == {(LIAR.hotkey, 0)}


def test_one_lie_that_is_found_twice_is_one_failure() -> None:
    world = World()
    world.opened()
    world.verdict("wrong")
    world.event(ev.CaseClosed(1, "unconfirmed"))
    world.audit(failed=(LIAR,))
    assert world.book.failed == [(0, 1, LIAR)]
    assert world.book.guilty == {}
    world.audit(step=1, failed=(LIAR,))
    assert set(world.book.guilty) == {(LIAR.hotkey, 0)}


def test_what_the_leader_passed_and_is_wrong_is_said() -> None:
    world = World()
    world.audit(failed=(LIAR,), vouched=(LIAR,), passed=(OTHER,))
    assert world.said == ["vouched"]


def test_a_leader_that_opens_nothing_makes_the_run_worth_nothing() -> None:
    world = World()
    for step in range(REFUSED_MAX):
        world.audit(step=step, refused=(OTHER,), why="not_allowed")
    assert world.said == ["refused"] * REFUSED_MAX
    world.restart()
    world.audit(step=9, refused=(OTHER, LIAR), why="not_allowed")
    world.audit(step=10, refused=(OTHER,), why="not_allowed")
    assert world.said[REFUSED_MAX:] == ["refused", "unverifiable", "refused"]
    assert "unverifiable" in WRONG
    assert "refused" not in WRONG


def test_a_state_that_the_log_does_not_lead_to_counts_once_it_is_seen_twice() -> None:
    world = World()
    world.audit(undecided=(OTHER,), untrusted="the snapshot isn't the agreed state")
    assert world.said == ["state"]
    for step in range(1, UNTRUSTED_MAX + 1):
        world.audit(step=step, undecided=(OTHER,), untrusted="the snapshot isn't the agreed state")
    assert world.said == ["state", "state", "unverifiable", "state"]


def test_whoever_merged_wrongly_has_its_own_sum_paid() -> None:
    world = World()
    for case in (1, 2):
        world.event(ev.CaseOpened(case, LIAR.hotkey, LIAR, case, 1, "merge", "ab" * 32, "right", True))
        world.verdict("wrong", case)
        world.event(ev.CaseClosed(case, "unconfirmed"))
    assert world.book.failed == []
    assert set(world.book.guilty) == {(LIAR.hotkey, 0)}


def test_facts_enter_at_their_number_and_not_before() -> None:
    world = World()
    world.audits.append(OwnAudit("run", 0, 0, 0, 1, 3, 5, failed=(LIAR,)))
    world.event(ev.Gone(OTHER, "lost"))
    world.event(ev.Gone(OTHER, "lost"))
    assert world.book.failed == []
    world.event(ev.Gone(OTHER, "lost"))
    assert world.book.failed == [(0, 1, LIAR)]


def test_an_older_copy_is_no_copy() -> None:
    """Of another layout: the reader starts again at segment 0."""
    with pytest.raises(msgspec.ValidationError):
        World().judging.load(msgspec.msgpack.encode({"failures": {"liar": [[1, 2]]}}))
