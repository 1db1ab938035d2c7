"""An item that kills every process that computes it: not skipped, said aloud, dealt ever more slowly, and the run goes on."""

from __future__ import annotations

from typing import Any

import pytest
from fault_effects import Effect
from fault_sim import Cell, FaultMiner, FaultSim
from test_decide import POLICY, Desk

from miner.owes import Compute
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import Member
from validator.decide import waiting_for
from validator.suspects import is_suspect, wait_left_s

DEADLY = (0, 2, 1)
"""Step, microbatch, stage."""
HEALED_AT = 60.0


class DeadlyMiner(FaultMiner):
    sim: DeadlySim

    def compute(self, me: Member, owe: Compute, w: int) -> None:
        if owe.backward and (owe.step, owe.microbatch, owe.stage) == DEADLY and self.sim.now < HEALED_AT:
            self.dead = True
            self.sim.deaths.append(self.hotkey)
            return
        super().compute(me, owe, w)


class DeadlySim(FaultSim):
    """Everybody's process dies of one item and is started again, until somebody repairs what they die of."""

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.said: set[str] = set()
        super().__init__(Cell("middle", "backward", "slow"))
        self.effect, self.fired = Effect(self), True
        self.effect.hits = 1

    def new_miner(self, hotkey: str) -> Any:
        return DeadlyMiner(self, hotkey)

    def judge_gone(self, event: ev.Gone) -> None:
        assert event.why == "lost", event

    def _pass_time(self) -> bool:
        for index, miner in enumerate(self.miners):
            if miner.dead:
                self.miners[index] = self.new_miner(miner.hotkey)
        self.said.add(waiting_for(self.coordinator.state, self.coordinator.watch, self.now))
        return super()._pass_time()


def test_an_item_that_kills_is_named_and_the_fleet_lives() -> None:
    sim = DeadlySim()
    sim.run()
    assert len(set(sim.deaths)) == 2, "both replicas of the stage have tried"
    named = [text for text in sim.said if "processes were lost while they had it" in text]
    assert any("microbatch 2 of step 0 at stage 1" in text for text in named)
    assert not sim.skipped
    assert len(sim.deaths) <= 8, "deaths become rarer"


def test_without_the_pause_the_fleet_dies_and_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    careful = DeadlySim()
    careful.run()
    monkeypatch.setattr("validator.decide_leases.wait_left_s", lambda *_: 0.0)
    careless = DeadlySim()
    careless.run()
    assert len(careless.deaths) > 2 * len(careful.deaths)


def killed_with(desk: Desk, m: int, hotkey: str) -> None:
    """The member dies while it has the item, and comes back with an empty process."""
    work = desk.state.work
    assert work is not None
    member = next(k for k in desk.state.members if k.hotkey == hotkey)
    assert work.items[0][m].member == member
    desk.join(hotkey, boot=f"boot{desk.state.num_joined}")
    desk.say(next(k for k in desk.state.members if k.hotkey == hotkey), msg.UpdatedClaim(-1, ""))


def test_deaths_of_two_hotkeys_make_an_item_suspect_and_a_third_gets_it() -> None:
    desk = Desk(1, 1)
    for i in range(3):
        desk.say(desk.member(f"hot{i}"), msg.UpdatedClaim(-1, ""))
    tried: list[str] = []
    for _ in range(2):
        desk.settle()
        holder = desk.state.work.items[0][0].member  # type: ignore[union-attr]
        assert holder is not None
        tried.append(holder.hotkey)
        killed_with(desk, 0, holder.hotkey)
    assert len(set(tried)) == 2
    assert is_suspect(desk.watch, POLICY, -1, 0, 0)
    desk.settle()
    assert desk.state.work.items[0][0].status == st.OPEN, "it rests"  # type: ignore[union-attr]
    assert "lost while they had it" in waiting_for(desk.state, desk.watch, desk.now)
    desk.now += POLICY.suspect_wait_s
    desk.settle()
    third = desk.state.work.items[0][0].member  # type: ignore[union-attr]
    assert third is not None
    assert third.hotkey not in tried
    killed_with(desk, 0, third.hotkey)
    assert wait_left_s(desk.now, desk.watch, POLICY, -1, 0, 0) == pytest.approx(2 * POLICY.suspect_wait_s)


def test_where_there_is_nobody_else_it_takes_twice_as_many_deaths() -> None:
    """A machine with too little memory, or an operator who restarts: nobody else died of it."""
    desk = Desk(1, 1)
    desk.say(desk.member("hot0"), msg.UpdatedClaim(-1, ""))
    for _ in range(2 * POLICY.suspect_deaths):
        assert not is_suspect(desk.watch, POLICY, -1, 0, 0)
        desk.settle()
        assert desk.state.work.items[0][0].status == st.LIVE  # type: ignore[union-attr]
        killed_with(desk, 0, "hot0")
    assert is_suspect(desk.watch, POLICY, -1, 0, 0)


def test_who_had_no_input_yet_did_not_die_of_the_item() -> None:
    desk = Desk(2, 1)
    for i in range(2):
        desk.say(desk.member(f"hot{i}"), msg.UpdatedClaim(-1, ""))
    desk.settle()
    last = st.members_of(desk.state, 1)[0]
    desk.join(last.hotkey, boot="again")
    assert (-1, 0, 1) not in desk.watch.lost_with


def test_a_sealed_step_forgets_who_died() -> None:
    desk = Desk(1, 1)
    desk.watch.at_step(-1)
    desk.watch.lost_with[-1, 0, 0] = {Member("hot0", 1, 1): 0.0}
    desk.watch.at_step(0)
    assert not desk.watch.lost_with
