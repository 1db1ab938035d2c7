"""Whose lane is late: who could go on by what its neighbours have made, and doesn't; pure, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import schedule_toy as toy

from subnet.protocol import messages as msg
from subnet.run import apply as folding
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import Member
from validator.intake import admit
from validator.intake_audits import Ignored
from validator.lane_clocks import lane_runs, late_lanes
from validator.policy import Policy
from validator.watch import Watch
from validator.watchdog import stall

FIRST, LAST = Member("first", 1, 1), Member("last", 1, 2)
POLICY = Policy(lease_min_s=5.0, lease_unknown_s=10.0)
LATE_S = 60.0


def folded() -> RunState:
    """Two stages, two lanes of 2 x 2 parts, all leased: stage 0 to ``FIRST``, stage 1 to ``LAST``."""
    events: list[ev.AnyEvent] = [
        toy.plan_run(2, 2, 3, lanes=2, inner_steps=2),
        ev.TermStarted(1, "validator", "nonce"),
        ev.HardwareClassSet(("golden",), "operator"),
        ev.Joined(FIRST, "cold0", 0, "b0", "127.0.0.1", 1),
        ev.Joined(LAST, "cold1", 1, "b1", "127.0.0.1", 2),
        ev.Updated(FIRST, -1, ""),
        ev.Updated(LAST, -1, ""),
        ev.StepPlanned(-1, 2, 0, None),
        *(ev.Leased(-1, m, stage, member, 1) for m in (0, 1) for stage, member in ((0, FIRST), (1, LAST))),
    ]
    return folding.fold([ev.Record(number, 0, event) for number, event in enumerate(events)])


def say(state: RunState, watch: Watch, member: Member, m: int, forwards: int, backwards: int) -> Any:
    stage = state.members[member].stage
    return admit(state, member, msg.LaneClaim(-1, m, stage, 1, forwards, backwards), watch)


def late(state: RunState, watch: Watch, at_s: float) -> list[tuple[int, int]]:
    """(stage, lane) of leases revoked at this time."""
    assert state.work is not None
    found = [decision.what for decision in late_lanes(at_s, state, state.work, watch, POLICY)]
    return sorted((event.stage, event.microbatch) for event in found if isinstance(event, ev.Revoking))


@pytest.mark.parametrize(
    ("first", "last", "runs"),
    [
        ((0, 0), (0, 0), (True, False)),  # the tokens are there
        ((2, 0), (0, 0), (False, True)),  # an inner step's parts are forward, and none is back
        ((2, 0), (1, 1), (True, True)),
        ((2, 1), (2, 2), (True, False)),
        ((2, 2), (2, 2), (True, False)),  # the next inner step
        ((4, 3), (4, 4), (True, False)),
        ((4, 4), (4, 4), (False, False)),
    ],
)
def test_a_clock_runs_only_while_the_next_input_is_there(
    first: tuple[int, int], last: tuple[int, int], runs: tuple[bool, bool]
) -> None:
    state, watch = folded(), Watch()
    say(state, watch, FIRST, 0, *first)
    say(state, watch, LAST, 0, *last)
    assert state.work is not None
    assert tuple(lane_runs(state, state.work, stage, 0, watch) for stage in (0, 1)) == runs


def test_who_is_waited_for_loses_the_lease_and_nobody_else() -> None:
    state, watch = folded(), Watch()
    for m in (0, 1):
        say(state, watch, FIRST, m, 2, 0)
    assert late(state, watch, 0.0) == []
    assert late(state, watch, LATE_S - 1) == []
    assert late(state, watch, LATE_S + 1) == [(1, 0), (1, 1)]


def test_coming_on_with_any_lane_starts_the_clock_anew() -> None:
    state, watch = folded(), Watch()
    for m in (0, 1):
        say(state, watch, FIRST, m, 2, 0)
    assert late(state, watch, 0.0) == []
    say(state, watch, LAST, 0, 1, 1)
    assert all(stage != 1 for stage, _ in late(state, watch, LATE_S + 1))


def test_what_was_said_is_of_a_lease_and_within_the_lane() -> None:
    state, watch = folded(), Watch()
    assert say(state, watch, FIRST, 0, 5, 0) == Ignored("no progress of a lane")
    assert say(state, watch, FIRST, 0, 1, 2) == Ignored("no progress of a lane")
    claim = msg.LaneClaim(-1, 0, 0, 1, 1, 0)
    assert admit(state, LAST, claim, watch) == Ignored("not the present lease")
    assert not watch.lanes


def test_parts_in_the_store_are_named_once_and_in_order() -> None:
    state, watch = folded(), Watch()
    names = tuple(f"{i:064x}" for i in range(5))
    (event,) = admit(state, FIRST, msg.PartsClaim(-1, 0, 0, 1, False, 1, names[:2]), watch)  # type: ignore[misc]
    folding.apply(state, event)
    found = st.item(state, -1, 0, 0)
    assert found is not None
    assert found.forward_parts == names[:2]
    for first, hashes in ((1, names[:2]), (2, names[1:3]), (4, names[3:4]), (3, names[2:5]), (3, ())):
        assert isinstance(admit(state, FIRST, msg.PartsClaim(-1, 0, 0, 1, False, first, hashes), watch), Ignored)
    folding.apply(state, ev.Revoking(-1, 0, 0, 1))
    folding.apply(state, ev.NotAccumulated(-1, 0, 0, 1))
    assert found.forward_parts == (), "another holder may make something else"


def test_a_round_is_not_stalled_while_lanes_come_on() -> None:
    state, watch = folded(), Watch()
    late(state, watch, 0.0)
    assert stall(500.0, 0.0, [], state, watch) is not None
    say(state, watch, FIRST, 0, 1, 0)
    late(state, watch, 450.0)
    assert stall(500.0, 0.0, [], state, watch) is None
    assert stall(600.0, 0.0, [], state, watch) is not None
