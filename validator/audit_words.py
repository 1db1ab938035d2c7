"""What the run waits for, in words, as far as audits go."""

from __future__ import annotations

from subnet.run import audits as au
from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import short
from validator.watch import Watch


def waited_audit(state: RunState, stage: int = 0) -> int | None:
    """The number of an audit that a seal waits for, of this stage first; else of one that the next step or the end waits for."""
    work, leaders = state.work, [(number, a) for number, a in au.open_audits(state) if a.by == state.leader]
    before = [(a.stage != stage, a.stage, number) for number, a in leaders if a.number]
    if before and work is not None and not au.is_audited(state, work):
        return min(before)[2]
    if not _holds_up(state):
        return None
    return min((number for number, a in leaders if not a.number), default=None)


def waiting_for_seal(state: RunState, stage: int) -> str:
    """Audits before the seal of the open step; of this stage first."""
    work = state.work
    if work is None or au.is_audited(state, work):
        return ""
    number = waited_audit(state, stage)
    audit = state.audits.open.get(number) if number is not None else None
    if audit is None or not audit.number:
        return "audits of other stages to be possible"
    names = ", ".join(str(member) for member in audit.members)
    return f"the audit of step {audit.step} at stage {audit.stage} ({names})"


def _holds_up(state: RunState) -> bool:
    """Whether audits are what the next step, or the run's end, waits for."""
    run = st.config(state)
    return run.audit.on and (not au.may_plan(state, state.next_step) or state.next_step >= st.end_step(state))


def waiting_for_audits(state: RunState, watch: Watch) -> str:
    """Windows that have to be audited before the next step, or the run's end."""
    if not _holds_up(state):
        return ""
    run, audits = st.config(state), state.audits
    if audits.quarantined:
        return _case(state, min(audits.quarantined.values()))
    if not audits.windows:
        away = audits.next_window < au.num_windows(run, st.end_step(state)) and watch.audits.block is None
        return "the chain, whose next block decides what is audited" if away else ""
    window = audits.windows[min(audits.windows)]
    num_open = sum(not a.number and a.by == state.leader for a in audits.open.values())
    if not num_open and run.audit.rate and window.block not in watch.audits.block_hashes:
        return f"block {window.block}, from which the audits of window {window.window} are drawn"
    return f"{num_open} audits of window {window.window} (steps {window.first_step} to {window.last_step})"


def _case(state: RunState, number: int) -> str:
    case = state.audits.cases[number]
    asked = ", ".join(str(member) for member in case.asked if member.hotkey not in case.said)
    waits = f"the word of {asked}" if asked else "somebody of another coldkey to run it again"
    return f"case {number} against {short(case.hotkey, 8)} to be closed: {waits}"
