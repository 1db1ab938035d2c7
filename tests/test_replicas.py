"""Joiners go where measured throughput is least; members move after the need for it has held, land there, and stay."""

from __future__ import annotations

import msgspec
import pytest
from test_decide import POLICY, Desk

from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import Cursor, Member
from validator.decide import decide, waiting_for
from validator.intake import admit_join
from validator.replicas import choose_stage, decide_moves, replicas
from validator.watch import Watch


def takes(desk: Desk, member: Member, seconds: float) -> None:
    for _ in range(20):  # the old measurements fade
        desk.watch.computed(member, seconds / 3, backward=False)
        desk.watch.computed(member, seconds * 2 / 3, backward=True)


def staged(desk: Desk, *stages: int) -> list[Member]:
    """Members at these stages, all of them at the run's state."""
    found: list[Member] = []
    for number, stage in enumerate(stages):
        member = Member(f"hot{number}", 1, desk.state.num_joined + 1)
        desk.emit(ev.Joined(member, f"cold{number}", stage, f"boot-{member.number}", "127.0.0.1", 1))
        found.append(member)
    catch_up(desk)
    return found


def catch_up(desk: Desk) -> None:
    for member, info in list(desk.state.members.items()):
        if info.version != desk.state.next_step:
            desk.say(member, msg.UpdatedClaim(desk.state.next_step, ""))


def between_steps(desk: Desk, step: int) -> None:
    """The moment between the seal of the step before and the next one's plan; members were at the state before."""
    desk.state.work, desk.state.next_step = None, step
    for info in desk.state.members.values():
        info.version = step - 1
    desk.watch.at_step(step)
    desk.now += 10.0


def moved(desk: Desk) -> list[tuple[Member, str]]:
    found = decide_moves(desk.now, desk.state, desk.watch, POLICY)
    return [(d.what.member, d.reason.code) for d in found if isinstance(d.what, ev.Gone) and d.what.why == "replaced"]


def rejoin(desk: Desk, member: Member) -> int:
    """It is gone, and says hello with a new boot id."""
    desk.emit(ev.Gone(member, "replaced"))
    again = desk.member(member.hotkey, boot=f"{member.hotkey} again {desk.now}")
    return desk.state.members[again].stage


def test_a_measured_slow_stage_gets_the_joiner() -> None:
    """Both stages have one; by cost they are equal, by measurement the second is slower."""
    desk = Desk(2)
    fast, slow = staged(desk, 0, 1)
    assert choose_stage(desk.state, "new", desk.watch).stage == 0
    takes(desk, fast, 0.1)
    takes(desk, slow, 0.4)
    placed = choose_stage(desk.state, "new", desk.watch)
    assert (placed.stage, placed.reason.code) == (1, "limits_throughput")
    assert placed.reason.numbers["microbatches_per_s"] == pytest.approx(2.5)


def test_unmeasured_members_count_as_their_stage_does_or_as_it_costs() -> None:
    desk = Desk(2)
    measured, _, other = staged(desk, 0, 0, 1)
    takes(desk, measured, 0.2)
    rates = [[replica.rate for replica in here] for here in replicas(desk.state, desk.watch)]
    assert rates[0] == pytest.approx([5.0, 5.0])
    assert rates[1] == pytest.approx([5.0]), "equal costs"
    takes(desk, other, 0.1)
    assert replicas(desk.state, desk.watch)[1][0].rate == pytest.approx(10.0)


def test_the_last_one_with_the_state_is_not_free() -> None:
    desk = Desk(2)
    settled, _ = staged(desk, 0, 1)
    newcomer = Member("new", 1, 9)
    desk.emit(ev.Joined(newcomer, "coldnew", 0, "boot-new", "127.0.0.1", 1))
    free = {replica.name: replica.free for replica in replicas(desk.state, desk.watch)[0]}
    assert free == {settled: False, newcomer: True}


def test_a_move_waits_until_the_need_has_held_for_long_and_for_steps() -> None:
    desk = Desk(2)
    desk.state.run = with_steps(desk.state.run, 1000)
    members = staged(desk, 0, 0, 0, 1)
    for member in members:
        takes(desk, member, 0.1)
    waited: list[float] = []
    for step in range(100):
        between_steps(desk, step)
        found = moved(desk)
        assert moved(desk) == [], "once between two steps"
        if found:
            break
        waited.append(desk.now)
    assert found == [(members[2], "stage_starves")], "the newest of the rich stage"
    assert len(waited) * 10.0 >= POLICY.rebalance_s
    assert len(waited) >= POLICY.rebalance_steps
    assert rejoin(desk, members[2]) == 1
    for step in range(200, 300):
        between_steps(desk, step)
        assert moved(desk) == [], "two and two: nobody moves back"


def with_steps(run: ev.RunPlanned | None, steps: int) -> ev.RunPlanned:
    assert run is not None
    config = msgspec.structs.replace(run.config, run=msgspec.structs.replace(run.config.run, steps=steps))
    return msgspec.structs.replace(run, config=config)


def test_a_need_that_passes_moves_nobody() -> None:
    """Every fifth step the stages look even: the clock starts anew."""
    desk = Desk(2)
    desk.state.run = with_steps(desk.state.run, 1000)
    members = staged(desk, 0, 0, 0, 1)
    for step in range(60):
        for member in members:
            takes(desk, member, 0.1 if step % 5 or member != members[3] else 0.03)
        between_steps(desk, step)
        assert moved(desk) == []


def test_nobody_moves_near_the_end_or_within_a_step() -> None:
    desk = Desk(2)
    desk.state.run = with_steps(desk.state.run, 100)
    staged(desk, 0, 0, 0, 1)
    desk.settle()
    assert desk.state.work is not None
    desk.now += 1e6
    assert moved(desk) == []
    for step in (97, 98, 99, 100):
        between_steps(desk, step)
        desk.now += 1e6
        assert moved(desk) == []


def test_who_is_asked_to_move_is_let_in_at_once() -> None:
    """Absences of long ago don't delay it, even where this coordinator has just been started."""
    desk = Desk(2)
    staged(desk, 0, 0, 1)
    desk.state.absences["hot1"] = 5
    desk.watch = Watch()
    desk.settle()
    lone = st.members_of(desk.state, 1)[0]
    desk.emit(ev.Gone(lone, "lost"))
    desk.settle()
    assert waiting_for(desk.state, desk.watch, desk.now) == "a miner for stage 1"
    desk.now += POLICY.empty_stage_s
    gone = [what for what, code in desk.settle() if code == "stage_is_empty"]
    assert [event.member.hotkey for event in gone] == ["hot1"]  # type: ignore[attr-defined]
    again = desk.member("hot1", boot="again")
    assert desk.state.members[again].stage == 1
    other = msg.JoinRequest(1, "toy", "b", "h", 1, ("golden",), Cursor(1, 0))
    desk.state.absences["hot7"] = 5
    refused = admit_join(desk.state, other, "hot7", "cold7", desk.now, desk.watch, POLICY)
    assert isinstance(refused, Refusal)
    assert refused.code == "back_off", "others wait as ever"


def test_without_a_second_replica_anywhere_the_run_waits_and_goes_on_when_one_joins() -> None:
    desk = Desk(2)
    first, lone = staged(desk, 0, 1)
    desk.settle()
    desk.emit(ev.Gone(lone, "lost"))
    for _ in range(5):
        desk.now += 10 * POLICY.empty_stage_s
        assert not [what for what, _ in desk.settle() if isinstance(what, ev.Gone)], "the last replica stays"
        assert waiting_for(desk.state, desk.watch, desk.now) == "a miner for stage 1"
    assert first in desk.state.members
    joined = desk.member("hot5")
    assert desk.state.members[joined].stage == 1
    desk.say(joined, msg.UpdatedClaim(desk.state.next_step, ""))
    desk.settle()
    assert "a miner" not in waiting_for(desk.state, desk.watch, desk.now)
    assert any(item.member == joined for item in desk.state.work.items[1].values())  # type: ignore[union-attr]
    assert not decide(desk.now, desk.state, desk.watch, POLICY, desk.rng)
