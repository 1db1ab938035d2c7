"""Why a miner that computes nothing computes nothing, in plain words and from the fold alone."""

from __future__ import annotations

from miner.local_view import LocalView
from subnet.run import state as st
from subnet.run.audits import all_audited, may_plan
from subnet.run.state import RunState
from subnet.words import Member


def why_waiting(state: RunState, me: Member | None, local: LocalView) -> str:
    """One line for the operator; "" when there is nothing left to do."""
    if state.run is None:
        return "the run's first record"
    if state.finished is not None:
        return ""
    if me is None or me not in state.members:
        return "being let in by the validator"
    stage = state.members[me].stage
    if local.version is None or local.restored_stage != stage:
        return f"the state of stage {stage} to be restored"
    if local.version != state.next_step:
        return f"the merged gradient of step {local.version}"
    if state.members[me].version != local.version:
        return f"the validator to take note of this stage's state at step {local.version}"
    work = state.work
    if work is None or work.step != state.next_step:
        return _why_no_step(state)
    if me not in st.ready(state, stage):
        return f"another replica's state of stage {stage} to agree with this one's"
    merge = work.merges[st.group_of(state, stage)]
    if merge.phase != st.GATHERING or st.is_sealed(state, stage):
        phase = "sealed" if st.is_sealed(state, stage) else merge.phase
        return f"the merge of stage {stage} at step {work.step} ({phase}) and the other stages"
    held = [m for m in sorted(work.held.get(me, ())) if work.items[stage][m].status != st.DONE]
    if held:
        return f"input of {len(held)} leased items of stage {stage} at step {work.step} (microbatches {held[:8]})"
    return f"a lease: {len(work.undealt[stage])} items of stage {stage} at step {work.step} are not dealt yet"


def _why_no_step(state: RunState) -> str:
    """Between two steps: the audits may be behind, else the next one is about to begin."""
    at_end = state.next_step >= st.end_step(state)
    if (at_end and not all_audited(state)) or not may_plan(state, state.next_step):
        steps = [f"{closed.first_step} to {closed.last_step}" for _, closed in sorted(state.audits.windows.items())]
        return f"the validator to finish its audits ({len(state.audits.open)} open; steps {', '.join(steps) or 'none'})"
    return "the run's owner to let it go on" if state.paused else f"step {state.next_step} to begin"
