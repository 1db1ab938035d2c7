"""A miner's reason to wait and a store's reason to keep are functions of the fold."""

from __future__ import annotations

import msgspec
from schedule_toy import plan_run

from miner.local_view import LocalView
from miner.waiting import why_waiting
from subnet.run import audits
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.config import AuditSection
from subnet.run.state import RunState, StepLog, StoredSnapshot, new_state
from subnet.words import Member
from validator.retention import AUDIT_WINDOW_STEPS, expiries, hold_horizon, receipts_from

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


def test_with_audits_evidence_waits_for_its_window_and_the_log_for_what_audits_begin_from() -> None:
    state = _joined()
    assert state.run is not None
    audit = AuditSection(rate=0.1, before_seal="probation", window_steps=4)
    config = msgspec.structs.replace(state.run.config, audit=audit)
    state.run = msgspec.structs.replace(state.run, config=config)
    state.next_step = 30
    assert "evidence" not in expiries(state), "no window is audited yet"
    assert receipts_from(state) < 0, "nor may what was signed go"
    state.audits.audited_to = 16
    assert audits.evidence_from(state) == 12, "a window more, for other validators"
    assert expiries(state)["evidence"] == hold_horizon(12)
    assert receipts_from(state) < 12
    state.sealed = {step: StepLog(None, 1, 0, ()) for step in range(8, 30)}
    for stage in (0, 1):
        stored = [a_snapshot(8), a_snapshot(28)]
        state.snapshots[stage] = stored
    assert expiries(state)["log"] == expiries(state)["snapshot"] == hold_horizon(8), "an audit of step 12 begins there"


def a_snapshot(step: int) -> StoredSnapshot:
    return StoredSnapshot(step, "manifest", "root", "hotkey", "coldkey", verified=True)
