"""Items that processes die of: said aloud, and dealt again ever more slowly, so that no item kills a fleet one by one.

A lost process never makes a microbatch skipped: who died must not change the result, and a site that loses power takes with
it whatever it held. So an item that several hotkeys were lost with is only *suspect*: it goes first to who hasn't tried it,
waits longer each time, and is named in what the run waits for. All else of the step goes on meanwhile.
"""

from __future__ import annotations

from subnet.run import state as st
from subnet.run.state import RunState, StepWork
from subnet.words import Member
from validator.policy import Policy
from validator.watch import Watch

MAX_DOUBLINGS = 16


def note_lost(now_s: float, state: RunState, watch: Watch, member: Member) -> None:
    """A process is gone without a word: what it may have been computing is remembered until its step is sealed."""
    info = state.members.get(member)
    if info is None:
        return
    for work in st.works(state):
        for m in work.held.get(member, ()):
            if may_have_run(work, info.stage, m):
                watch.lost_with.setdefault((work.step, m, info.stage), {})[member] = now_s


def may_have_run(work: StepWork, stage: int, m: int) -> bool:
    """Whether a lease is unfinished and had its input: else its holder can't have died of it."""
    found = work.items[stage][m]
    if found.status not in (st.LIVE, st.REVOKING):
        return False
    return stage == 0 or found.forwarded or work.items[stage - 1][m].forwarded


def died_of(watch: Watch, step: int, m: int, stage: int) -> set[str]:
    """Hotkeys that were lost while they had the item."""
    return {member.hotkey for member in watch.lost_with.get((step, m, stage), {})}


def is_suspect(watch: Watch, policy: Policy, step: int, m: int, stage: int) -> bool:
    """Several hotkeys were lost with it; or fewer, where there is nobody else, twice as often."""
    num_losses = len(watch.lost_with.get((step, m, stage), {}))
    return len(died_of(watch, step, m, stage)) >= policy.suspect_deaths or num_losses >= 2 * policy.suspect_deaths


def wait_left_s(now_s: float, watch: Watch, policy: Policy, step: int, m: int, stage: int) -> float:
    """Seconds until a suspect item may be dealt again: twice as long after each death."""
    if not is_suspect(watch, policy, step, m, stage):
        return 0.0
    lost = watch.lost_with[step, m, stage]
    doublings = min(len(lost) - policy.suspect_deaths, MAX_DOUBLINGS)
    wait_s = min(policy.suspect_wait_s * 2**doublings, policy.suspect_wait_max_s)
    return max(0.0, max(lost.values()) + wait_s - now_s)


def waiting_for_suspect(state: RunState, watch: Watch, policy: Policy) -> str:
    """The unfinished item that most processes died of, in words; empty if there is none."""
    open_items = [
        (step, m, stage)
        for step, m, stage in watch.lost_with
        if (work := st.work_at(state, step)) is not None
        and (m in work.live[stage] or m in work.undealt[stage])
        and is_suspect(watch, policy, step, m, stage)
    ]
    if not open_items:
        return ""
    step, m, stage = max(open_items, key=lambda key: (-key[0], len(watch.lost_with[key]), key))
    lost = watch.lost_with[step, m, stage]
    names = ", ".join(sorted(died_of(watch, step, m, stage)))
    return (
        f"microbatch {m} of step {step} at stage {stage}: {len(lost)} processes were lost while they had it ({names})"
    )
