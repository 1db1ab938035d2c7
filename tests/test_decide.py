"""Decisions and intake one by one: joins and their refusals, roots, windows, deadlines, owners, and plain words."""

from __future__ import annotations

import random

import pytest
import schedule_toy as toy

from subnet.errors import ConfigError, Refusal
from subnet.numerics.owners import choose_owners
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.run.invariants import check
from subnet.words import Cursor, Member
from validator.decide import decide, waiting_for
from validator.decide_leases import window
from validator.decision import FinishRun
from validator.intake import Ignored, admit, admit_join
from validator.policy import Policy
from validator.watch import Watch

POLICY = Policy()


class Desk:
    """A coordinator without journal, network or clock."""

    def __init__(self, num_stages: int = 2, num_microbatches: int = 4, **options: object) -> None:
        self.state, self.watch, self.now = st.new_state(), Watch(), 0.0
        self.rng = random.Random(0)
        self.events: list[ev.AnyEvent] = []
        self.actions: list[object] = []
        self.emit(toy.plan_run(num_stages, num_microbatches, 1, **options))  # type: ignore[arg-type]
        self.emit(ev.TermStarted(1, "validator", "nonce"))
        self.emit(ev.HardwareClassSet(("golden",), "operator"))

    def emit(self, event: ev.AnyEvent) -> None:
        apply(self.state, event)
        check(self.state)
        self.events.append(event)

    def join(self, hotkey: str, *, coldkey: str = "", boot: str = "", hashes: tuple[str, ...] = ("golden",)) -> object:
        request = msg.JoinRequest(1, "toy", boot or f"boot-{hotkey}", "127.0.0.1", 1, hashes, Cursor(1, 0))
        joined = admit_join(self.state, request, hotkey, coldkey or f"cold-{hotkey}", self.now, self.watch, POLICY)
        if isinstance(joined, ev.Joined):
            self.emit(joined)
            return joined.member
        return joined

    def member(self, hotkey: str, **options: str) -> Member:
        joined = self.join(hotkey, **options)  # type: ignore[arg-type]
        assert isinstance(joined, Member)
        return joined

    def say(self, member: Member, claim: msg.AnyClaim) -> object:
        self.watch.heard(member, self.now)
        events = admit(self.state, member, claim, self.watch)
        if not isinstance(events, Ignored):
            for event in events:
                self.emit(event)
        return events

    def settle(self) -> list[tuple[object, str]]:
        said: list[tuple[object, str]] = []
        for member in self.state.members:
            self.watch.heard(member, self.now)
        while decisions := decide(self.now, self.state, self.watch, POLICY, self.rng):
            for decision in decisions:
                said.append((decision.what, decision.reason.code))
                if isinstance(decision.what, FinishRun):
                    self.actions.append(decision.what)
                else:
                    self.emit(decision.what)  # type: ignore[arg-type]
        return said


def refusal(answer: object) -> Refusal:
    assert isinstance(answer, Refusal)
    return answer


def test_a_join_goes_to_the_stage_that_limits_throughput() -> None:
    desk = Desk(3)
    stages = [desk.state.members[desk.member(f"hot{i}")].stage for i in range(6)]
    assert sorted(stages[:3]) == [0, 1, 2]
    assert sorted(stages[3:5]) == [0, 2], "with embedding and head they cost twice as much"


def test_every_refusal_of_a_join_has_its_own_code() -> None:
    desk = Desk()
    first = desk.member("hot0")
    assert refusal(desk.join("hot0")).code == "boot_seen"
    wrong = refusal(desk.join("hot1", hashes=("brass",)))
    assert wrong.code == "hardware_class"
    assert "brass" in wrong.reason
    assert "golden" in wrong.reason
    assert wrong.retry_after is None
    desk.emit(ev.Gone(first, "silent"))
    waits = refusal(desk.join("hot0", boot="second"))
    assert waits.code == "back_off"
    assert waits.retry_after == pytest.approx(POLICY.back_off_s)
    desk.now += POLICY.back_off_s
    second = desk.member("hot0", boot="second")
    desk.emit(ev.Gone(second, "silent"))
    assert refusal(desk.join("hot0", boot="third")).retry_after == pytest.approx(2 * POLICY.back_off_s)
    desk.now += 100
    desk.emit(ev.Gone(desk.member("hot0", boot="fourth"), "liar"))
    assert refusal(desk.join("hot0", boot="fifth")).code == "convicted"
    request = msg.JoinRequest(1, "other", "b", "h", 1, ("golden",), Cursor(1, 0))
    answer = admit_join(desk.state, request, "hot9", "cold9", 0.0, desk.watch, POLICY)
    assert refusal(answer).code == "run_mismatch"
    desk.state.finished = "root"
    over = refusal(desk.join("hot9"))
    assert (over.code, over.retry_after) == ("run_finished", None)


def test_two_coldkeys_make_the_hardware_class() -> None:
    desk = Desk()
    desk.state.hardware_class = None
    assert refusal(desk.join("hot0", coldkey="cold0")).code == "class_open"
    assert refusal(desk.join("hot1", coldkey="cold0", hashes=("golden",))).code == "class_open"
    assert not any(isinstance(what, ev.HardwareClassSet) for what, _ in desk.settle())
    assert refusal(desk.join("hot2", coldkey="cold2")).code == "class_open"
    assert any(isinstance(what, ev.HardwareClassSet) for what, _ in desk.settle())
    assert isinstance(desk.join("hot2", coldkey="cold2"), Member)


def test_claims_of_no_member_and_claims_twice_are_ignored() -> None:
    desk = Desk(1)
    stranger = Member("stranger", 1, 99)
    assert isinstance(desk.say(stranger, msg.UpdatedClaim(-1, "")), Ignored)
    member = desk.member("hot0")
    assert desk.say(member, msg.UpdatedClaim(-1, "")) == [ev.Updated(member, -1, "")]
    assert desk.say(member, msg.UpdatedClaim(-1, "")) == Ignored("known")
    desk.settle()
    item = desk.state.work.items[0][0]  # type: ignore[union-attr]
    claim = msg.BackwardReceipt(-1, 0, 0, item.generation, "", "out", 0.1, loss_bits=0)
    assert isinstance(desk.say(member, claim), list)
    assert isinstance(desk.say(member, claim), Ignored)


def test_the_last_stage_owes_the_loss() -> None:
    desk = Desk(1)
    member = desk.member("hot0")
    desk.say(member, msg.UpdatedClaim(-1, ""))
    desk.settle()
    answer = desk.say(member, msg.BackwardReceipt(-1, 0, 0, 1, "", "out", 0.1))
    assert answer == Ignored("the receipt lacks the loss")


def test_the_root_of_more_coldkeys_wins() -> None:
    desk = Desk(1)
    liar, honest, other = (desk.member(f"hot{i}") for i in range(3))
    desk.say(liar, msg.UpdatedClaim(-1, "false"))
    desk.say(honest, msg.UpdatedClaim(-1, "true"))
    assert st.up_to_date(desk.state, 0) == [liar]
    desk.settle()
    assert {liar, honest} <= set(desk.state.members), "nobody goes while it is one against one"
    desk.say(other, msg.UpdatedClaim(-1, "true"))
    desk.settle()
    assert st.up_to_date(desk.state, 0) == [honest, other]
    assert liar not in desk.state.members
    assert desk.state.absences["hot0"] == 1


def test_paths_are_dealt_in_a_window_to_who_finishes_first() -> None:
    desk = Desk(2, 64)
    fast, slow = desk.member("hot0", coldkey="a"), desk.member("hot2", coldkey="b")
    last = desk.member("hot1")
    for member in (fast, slow, last):
        stage = desk.state.members[member].stage
        desk.watch.computed(member, 0.1 if member != slow else 0.4, backward=False)
        desk.watch.computed(member, 0.1 if member != slow else 0.4, backward=True)
        assert stage == desk.state.members[member].stage
        desk.say(member, msg.UpdatedClaim(-1, ""))
    said = desk.settle()
    leases = [what for what, _ in said if isinstance(what, ev.Leased)]
    first = desk.state.members[fast].stage
    mine = [lease for lease in leases if lease.member == fast]
    theirs = [lease for lease in leases if lease.member == slow]
    if desk.state.members[slow].stage == first == 0:
        assert len(mine) > len(theirs)
    in_flight = {lease.microbatch for lease in leases if lease.stage == 0}
    assert in_flight == set(range(len(in_flight))), "lowest microbatches first"
    assert {lease.microbatch for lease in leases if lease.stage == 1} == in_flight, "whole paths"
    assert len(in_flight) < 64


def test_the_window_grows_with_speed_and_depth() -> None:
    assert window(POLICY, 3, 10.0) == 3 + POLICY.window_extra
    assert window(POLICY, 3, 0.05) == 3 + POLICY.window_extra + 10
    assert window(POLICY, 3, 1e-9) == POLICY.window_max
    assert window(POLICY, 3, 0.5, by_store=True) == 3 + POLICY.window_extra + 5  # 0.5 s, and 4 hops of 0.5 s


def test_a_lease_is_late_only_while_its_input_is_there() -> None:
    desk = Desk(2, 1)
    first, last = desk.member("hot0"), desk.member("hot1")
    for member in (first, last):
        desk.say(member, msg.UpdatedClaim(-1, ""))
    desk.settle()
    desk.now = 10 * POLICY.lease_unknown_s
    revoked = [what for what, _ in desk.settle() if isinstance(what, ev.Revoking)]
    assert [event.stage for event in revoked] == [0]


def test_an_item_that_fails_waits_for_who_has_not_tried_it() -> None:
    """Both members are busy; the failed item isn't dealt to the one that failed, round after round."""
    desk = Desk(1, 64)
    one, two = desk.member("hot0"), desk.member("hot1")
    for member in (one, two):
        desk.say(member, msg.UpdatedClaim(-1, ""))
    desk.settle()
    work = desk.state.work
    assert work is not None
    m = next(m for m in sorted(work.live[0]) if work.items[0][m].member == one)
    desk.say(one, msg.FailedClaim(-1, m, 0, 1, "nan", "not finite"))
    desk.settle()
    found = work.items[0][m]
    assert found.status == st.OPEN or found.member == two


def test_owners_hold_what_they_own() -> None:
    run = toy.plan_run(3, 4, 1, tied=True)
    members = {0: [Member("a", 1, 1), Member("b", 1, 2)], 2: [Member("c", 1, 3)]}
    owners = choose_owners(run.groups[0], members, step=0, group=0)
    assert owners is not None
    assert owners[0] in members[0]
    assert owners[2] in members[2]
    assert owners[1] in [*members[0], *members[2]]
    assert choose_owners(run.groups[0], {0: members[0], 2: []}, step=0, group=0) is None


def test_what_is_waited_for_is_said_in_plain_words() -> None:
    desk = Desk(2)
    assert waiting_for(st.new_state(), Watch(), 0.0) == "a run to be submitted"
    assert waiting_for(desk.state, desk.watch, 0.0) == "a miner for stages 0, 1"
    member = desk.member("hot0")
    assert waiting_for(desk.state, desk.watch, 0.0) == "a miner for stage 1"
    other = desk.member("hot1")
    desk.settle()
    assert "to have the state of step -1" in waiting_for(desk.state, desk.watch, 0.0)
    for joined in (member, other):
        desk.say(joined, msg.UpdatedClaim(-1, ""))
    desk.settle()
    assert waiting_for(desk.state, desk.watch, 0.0).startswith("4 items of stage 0 at step -1 by hot0")


def test_a_policy_checks_itself() -> None:
    with pytest.raises(ConfigError, match="silence_s"):
        Policy(silence_s=-1)
    with pytest.raises(ConfigError, match="rebalance_factor"):
        Policy(rebalance_factor=1.0)
