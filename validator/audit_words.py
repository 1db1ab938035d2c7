"""What the run waits for, in words, as far as audits go."""

from __future__ import annotations

from subnet.run import audits as au
from subnet.run import state as st
from subnet.run.state import RunState
from validator.watch import Watch


def waiting_for_seal(state: RunState, stage: int) -> str:
    """Audits before the seal of the open step; of this stage first."""
    work = state.work
    if work is None or au.is_audited(state, work):
        return ""
    found = [(a.stage != stage, a.stage, a) for _, a in au.open_audits(state) if a.number]
    if not found:
        return "audits of other stages to be possible"
    _, at, audit = min(found, key=lambda entry: entry[:2])
    names = ", ".join(str(member) for member in audit.members)
    return f"the audit of step {audit.step} at stage {at} ({names})"


def waiting_for_audits(state: RunState, watch: Watch) -> str:
    """Windows that have to be audited before the next step, or the run's end."""
    run = st.config(state)
    if not run.audit.on or (au.may_plan(state, state.next_step) and state.next_step < run.run.steps):
        return ""
    audits = state.audits
    if audits.quarantined:
        return f"case {min(audits.quarantined.values())} to be closed"
    if not audits.windows:
        away = audits.next_window < au.num_windows(run) and watch.audits.block is None
        return "the chain, whose next block decides what is audited" if away else ""
    window = audits.windows[min(audits.windows)]
    num_open = sum(not a.number for a in audits.open.values())
    if not num_open and run.audit.rate and window.block not in watch.audits.block_hashes:
        return f"block {window.block}, from which the audits of window {window.window} are drawn"
    return f"{num_open} audits of window {window.window} (steps {window.first_step} to {window.last_step})"
