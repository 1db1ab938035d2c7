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
from validator.audit_words import waited_audit, waiting_for_audits, waiting_for_seal
from validator.retention import AUDIT_WINDOW_STEPS, expiries, hold_horizon, receipts_from
from validator.watch import Watch
from validator.watchdog import waits

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


def test_what_the_end_waits_for_is_named_with_the_case_and_whose_word_is_missing() -> None:
    state, watch = _joined(), Watch()
    assert state.run is not None
    audit = AuditSection(rate=0.1, before_seal="probation", window_steps=4, open_windows=2)
    state.run = msgspec.structs.replace(state.run, config=msgspec.structs.replace(state.run.config, audit=audit))
    drawn = audits.OpenAudit(5, 1, 0, (ME,), "validator")
    state.audits.open = {7: msgspec.structs.replace(drawn, by="another"), 8: drawn}
    state.audits.windows = {1: ev.WindowClosed(1, 4, 7, 30)}
    state.next_step = 8
    assert (waited_audit(state), waiting_for_audits(state, watch)) == (None, ""), "the audits have kept up"
    state.next_step = 12
    assert waited_audit(state) == 8, "another validator's audit holds nobody up"
    assert waiting_for_audits(state, watch) == "1 audits of window 1 (steps 4 to 7)"
    state.audits.open = {}
    assert waiting_for_audits(state, watch) == "block 30, from which the audits of window 1 are drawn"
    apply(state, ev.CaseOpened(1, "liar", Member("liar", 1, 3), 5, 1, "partial", "b" * 64, "d" * 64, True))
    assert waiting_for_audits(state, watch).startswith("case 1 against liar to be closed: somebody of another coldkey")
    apply(state, ev.WitnessAsked(1, ME))
    assert waiting_for_audits(state, watch) == f"case 1 against liar to be closed: the word of {ME}"
    assert ("audits", waiting_for_audits(state, watch)) in [(w.who, w.what) for w in waits(9.0, 0.0, state, watch)]


def test_a_seal_waits_for_the_audit_of_its_own_stage_first() -> None:
    state = _joined()
    assert state.run is not None
    audit = AuditSection(rate=0.0, before_seal="all")
    state.run = msgspec.structs.replace(state.run, config=msgspec.structs.replace(state.run.config, audit=audit))
    for member, stage in ((ME, 0), (Member("other", 1, 2), 1)):
        apply(state, ev.Updated(member, -1, ""))
        assert state.members[member].stage == stage
    apply(state, ev.StepPlanned(-1, 2, 0, None))
    assert waiting_for_seal(state, 0) == "", "nobody holds a sum that must be done again"
    for m in range(2):
        apply(state, ev.Leased(-1, m, 0, ME, 1))
        apply(state, ev.Forwarded(-1, m, 0, 1, "f" * 64, None))
        apply(state, ev.Backwarded(-1, m, 0, 1, "", None, ""))
    assert waiting_for_seal(state, 0) == "audits of other stages to be possible"
    opened = {1: audits.OpenAudit(-1, 1, 3, (Member("other", 1, 2),), "validator")}
    state.audits.open = opened
    assert waiting_for_seal(state, 0).startswith("the audit of step -1 at stage 1 (")
    state.audits.open = {**opened, 2: audits.OpenAudit(-1, 0, 3, (ME,), "validator")}
    assert waiting_for_seal(state, 0).startswith("the audit of step -1 at stage 0 (")
    assert (waited_audit(state, 0), waited_audit(state, 1)) == (2, 1)
    assert ("this validator", waiting_for_seal(state, 0)) in [(w.who, w.what) for w in waits(9.0, 0.0, state, Watch())]


def a_snapshot(step: int) -> StoredSnapshot:
    return StoredSnapshot(step, "manifest", "root", "hotkey", "coldkey", verified=True)
