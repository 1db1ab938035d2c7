"""docs/scores.md says what the code does: its example is a book's, its table is the policy's, its output is the command's."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest
from score_cases import Journal, member

from iota.score_tables import print_detail
from subnet.errors import Refusal
from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.run.state import RunState, new_state
from subnet.score.policy import BOUNDS, ScorePolicy
from subnet.timing import ManualClock
from validator.refusals import Refusals
from validator.score_api import ScoreDesk
from validator.scoring import ScoreBook

DOC = Path(__file__).parent.parent / "docs" / "scores.md"
BEGAN_S = 1_700_000_000.0
ITEM = 1e12
"""FLOPs of an item of the example."""


class Example(Journal):
    """The journal of the example: alice and bob serve one stage, two steps are sealed an hour apart."""

    def __init__(self) -> None:
        super().__init__(ScorePolicy(), AuditSection(rate=0.02, before_seal="probation"))
        self.now_s = BEGAN_S
        plan = self.records[0].event
        assert isinstance(plan, ev.RunPlanned)
        flops = tuple(ITEM / 1024 for _ in plan.unit_flops_per_token)
        self.add(msgspec.structs.replace(plan, run_id="tiny-1", unit_flops_per_token=flops))
        alice, bob, later = member("alice"), member("bob"), member("bob", 2)
        self.join("alice", block=100).join("bob", block=120)
        self.wait(600).seal(0, {alice: 48, bob: 48}).add(ev.Gone(bob, "lost"))
        self.wait(600).join("bob", number=2, block=120)
        self.wait(3000)
        for m in range(3):
            self.add(ev.Leased(1, 900 + m, 0, alice, 1), ev.Revoking(1, 900 + m, 0, 1))
        self.seal(1, {alice: 48, later: 24}).audit(1, passed=(alice,))


class Session:
    run_name = "tiny"

    def __init__(self) -> None:
        self.audit_state: RunState = new_state()

    def back_off_left(self, hotkey: str) -> float:
        return 0.0

    def waiting_for(self) -> str:
        return ""


def by_hand() -> dict[str, float]:
    """The arithmetic of the example in the order of the page, without a book."""
    half, second = 3600.0, 3600 / math.log(2)

    def between(begin: float, end: float) -> float:
        """Seconds from ``begin`` to ``end``, faded to 4200."""
        return second * (2 ** (-(4200 - end) / half) - 2 ** (-(4200 - begin) / half))

    alice_work, bob_work = (48 / 2 + 48) * ITEM, (48 / 2 + 24) * ITEM
    alice_rate, bob_rate = (work * math.log(2) / half for work in (alice_work, bob_work))
    alice_deadlines = (72 - 3) / (72 + 16)
    present, absent = between(0, 600) + between(1200, 4200), between(600, 1200)
    bob_uptime, bob_deadlines = (present + 900) / (present + absent + 900), 48 / (48 + 16)
    alice_worth, bob_worth = alice_rate * alice_deadlines, bob_rate * bob_uptime * bob_deadlines
    return {
        "alice work": alice_work,
        "alice rate": alice_rate,
        "alice deadlines": alice_deadlines,
        "alice worth": alice_worth,
        "bob work": bob_work,
        "bob rate": bob_rate,
        "bob present": present,
        "bob absent": absent,
        "bob uptime": bob_uptime,
        "bob deadlines": bob_deadlines,
        "bob worth": bob_worth,
        "whole": alice_worth + bob_worth,
        "alice score": alice_worth / (alice_worth + bob_worth),
        "bob score": bob_worth / (alice_worth + bob_worth),
    }


def test_the_example_is_what_a_book_gives():
    scores, hand = Example().scores(), by_hand()
    alice, bob = scores["alice"], scores["bob"]
    book = {
        "alice work": alice.work,
        "alice rate": alice.rate,
        "alice deadlines": alice.deadlines,
        "alice worth": alice.worth,
        "bob work": bob.work,
        "bob rate": bob.rate,
        "bob present": bob.present_s,
        "bob absent": bob.absent_s,
        "bob uptime": bob.uptime,
        "bob deadlines": bob.deadlines,
        "bob worth": bob.worth,
        "whole": alice.worth + bob.worth,
        "alice score": alice.total,
        "bob score": bob.total,
    }
    assert book == pytest.approx(hand, rel=1e-9)
    assert (alice.uptime, alice.audits, bob.audits) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", sorted(by_hand()))
def test_the_page_has_the_numbers_of_the_example(name: str):
    assert f"{by_hand()[name]:.5g}" in DOC.read_text(encoding="utf-8"), name


def test_the_page_has_the_policys_defaults_and_bounds():
    text, policy = DOC.read_text(encoding="utf-8"), ScorePolicy()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(ScorePolicy.__struct_fields__)
    for name, _, default, bounds in rows:
        low, high = BOUNDS[name]
        assert default.strip() == f"{getattr(policy, name):g}", name
        assert bounds.strip() == f"{low:g} to {high:g}", name


def explained(capsys: pytest.CaptureFixture[str]) -> str:
    example, clock, refusals = Example(), ManualClock(wall_ns=round((BEGAN_S + 4200) * 1e9)), Refusals()
    book, session = ScoreBook(), Session()
    for record in example.records:
        book.run("tiny-1").note(record)
    plan = example.records[0].event
    assert isinstance(plan, ev.RunPlanned)
    session.audit_state.run = plan
    session.audit_state.audits.clean["alice"] = 10
    refusals.note("alice", Refusal("back_off", "gone silently 1 times", 2.0), BEGAN_S + 4199)
    desk = ScoreDesk(book, lambda: session, refusals, clock, registrations=lambda: {"alice": 100, "bob": 120})
    print_detail(desk.detail("alice"))
    return "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_the_page_shows_what_iota_score_explain_prints(capsys: pytest.CaptureFixture[str]):
    block = re.search(
        r"^    \$ iota score explain alice\n(.*?)^(?=\S)", DOC.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert block is not None
    shown = "\n".join(line.removeprefix("    ").rstrip() for line in block[1].rstrip().splitlines())
    assert shown == explained(capsys)
