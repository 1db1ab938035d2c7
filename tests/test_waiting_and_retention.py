"""A miner's reason to wait and a store's reason to keep are functions of the fold."""

from __future__ import annotations

from schedule_toy import plan_run

from miner.local_view import LocalView
from miner.waiting import why_waiting
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.state import RunState, new_state
from subnet.words import Member
from validator.retention import AUDIT_WINDOW_STEPS, expiries, hold_horizon

ME = Member("me", 1, 1)


def _joined() -> RunState:
    state = new_state()
    for event in (
        plan_run(num_stages=2, num_microbatches=2, num_steps=40),
        ev.TermStarted(1, "validator", "n"),
        ev.HardwareClassSet(("a", "b"), "operator"),
        ev.Joined(ME, "cold", 0, "boot", "127.0.0.1", 1),
        ev.Joined(Member("other", 1, 2), "cold-2", 1, "boot", "127.0.0.1", 1),
    ):
        apply(state, event)
    return state


def test_each_reason_in_its_turn() -> None:
    local = LocalView()
    assert why_waiting(new_state(), None, local) == "the run's first record"
    state = _joined()
    assert why_waiting(state, None, local) == "being let in by the validator"
    assert "to be restored" in why_waiting(state, ME, local)
    local.version, local.restored_stage = -1, 0
    assert "to take note" in why_waiting(state, ME, local)
    apply(state, ev.Updated(ME, -1, ""))
    assert why_waiting(state, ME, local) == "step -1 to begin"
    apply(state, ev.StepPlanned(-1, 2, 0, None))
    assert why_waiting(state, ME, local) == "a lease: 2 items of stage 0 at step -1 are not dealt yet"
    apply(state, ev.Leased(-1, 0, 0, ME, 1))
    assert "input of 1 leased items" in why_waiting(state, ME, local)
    local.version = -2
    assert why_waiting(state, ME, local) == "the merged gradient of step -2"


def test_evidence_goes_after_the_window_and_logs_only_behind_a_verified_snapshot() -> None:
    state = _joined()
    assert expiries(state) == {}
    state.next_step = AUDIT_WINDOW_STEPS + 4
    assert expiries(state) == {"evidence": 5}, "no snapshot is verified: the log stays from the first step on"
    assert hold_horizon(-1) == 0
    assert hold_horizon(4) >= expiries(state)["evidence"], "what step 4 stored is within the window"
