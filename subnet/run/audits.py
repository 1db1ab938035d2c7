"""What everybody asks of a state about audits: whose work is redone, how long evidence and log are kept, what waits for whom.

Windows are stretches of ``audit.window_steps`` steps; the calibrating step belongs to the first, the last ends with the run. With
audits off nothing here asks anything of anybody.
"""

from __future__ import annotations

from collections import Counter

from subnet.run.audit_parts import CLEARED as CLEARED
from subnet.run.audit_parts import CONVICTED as CONVICTED
from subnet.run.audit_parts import EQUIVOCATION as EQUIVOCATION
from subnet.run.audit_parts import FAULT as FAULT
from subnet.run.audit_parts import MERGE as MERGE
from subnet.run.audit_parts import PARTIAL as PARTIAL
from subnet.run.audit_parts import ROOT as ROOT
from subnet.run.audit_parts import UNCONFIRMED as UNCONFIRMED
from subnet.run.audit_parts import UNOPENED as UNOPENED
from subnet.run.audit_parts import UNUSABLE as UNUSABLE
from subnet.run.audit_parts import AuditState as AuditState
from subnet.run.audit_parts import CaseState as CaseState
from subnet.run.audit_parts import OpenAudit as OpenAudit
from subnet.run.config import RunConfig
from subnet.run.state import (
    FROZEN,
    GATHERING,
    SEALED,
    Merge,
    RunState,
    StepWork,
    config,
    end_step,
    holders,
    num_stages,
    oldest_needed,
    update_delay,
)
from subnet.words import CALIBRATION_STEP, Member

STEPS_WITHOUT_AUDITS = 8
"""Steps whose boundaries are kept where nobody audits."""


def branch(state: RunState) -> int:
    """How often the run was rewound."""
    return state.audits.branch


# --- windows -----------------------------------------------------------------------------------------------------


def window_of(config: RunConfig, step: int) -> int:
    """The window that a step belongs to."""
    return max(step, 0) // config.audit.window_steps


def num_windows(config: RunConfig, end: int | None = None) -> int:
    """``end``: updates of a run that ends early (:func:`subnet.run.state.end_step`)."""
    return window_of(config, (config.run.steps if end is None else end) - 1) + 1


def first_of(config: RunConfig, window: int) -> int:
    """The first step of a window."""
    return CALIBRATION_STEP if window <= 0 else window * config.audit.window_steps


def last_of(config: RunConfig, window: int, end: int | None = None) -> int:
    return min((window + 1) * config.audit.window_steps, config.run.steps if end is None else end) - 1


def windows_behind(state: RunState, step: int) -> int:
    """How many windows before that of ``step`` aren't audited yet."""
    run = config(state)
    return max(0, window_of(run, step) - window_of(run, state.audits.audited_to))


def may_plan(state: RunState, step: int) -> bool:
    """Whether the audits have kept up enough for ``step`` to begin; only evaluating needs none."""
    run = config(state)
    if not run.audit.on or step >= end_step(state):
        return True
    return windows_behind(state, step) <= run.audit.open_windows


def all_audited(state: RunState) -> bool:
    """Whether the run may end: its last window is audited, and nobody stands accused."""
    run = config(state)
    if not run.audit.on:
        return True
    return state.audits.audited_to >= end_step(state) and not state.audits.quarantined


# --- who is audited ----------------------------------------------------------------------------------------------


def in_probation(state: RunState, hotkey: str) -> bool:
    """Whether too little of its work was redone yet for its word to be taken."""
    return state.audits.clean.get(hotkey, 0) < config(state).audit.probation_items


def must_audit(state: RunState, hotkey: str) -> bool:
    """Whether its partials are redone before their seal."""
    before = config(state).audit.before_seal
    return before == "all" or (before == "probation" and in_probation(state, hotkey))


def open_audits(state: RunState) -> list[tuple[int, OpenAudit]]:
    """By number, the oldest first."""
    return sorted(state.audits.open.items())


def is_audited(state: RunState, work: StepWork) -> bool:
    """Whether every partial of the step that must be redone before its seal has passed, at *all* stages.

    A lie at one stage is an input of its neighbours: no group is sealed before it is known that there is none.
    """
    if not config(state).audit.on:
        return True
    if work.stale:
        return False
    for group, merge in enumerate(work.merges):
        if merge.phase == SEALED:
            continue
        members = _holders(state, group, merge)
        if any(member not in merge.passed and must_audit(state, member.hotkey) for member in members):
            return False
    return True


def _holders(state: RunState, group: int, merge: Merge) -> set[Member]:
    if merge.phase in (GATHERING, FROZEN):
        return holders(state, group)
    return {entry.member for entry in merge.entries}


def inputs_said(state: RunState, work: StepWork, stage: int) -> bool:
    """Whether the makers of all that this stage computes from have said what it is.

    Whoever commits has seen it then, and doesn't commit to a sum of anything else.
    """
    if not config(state).audit.on:
        return True
    below = work.items[stage - 1] if stage > 0 else None
    above = work.items[stage + 1] if stage < num_stages(state) - 1 else None
    return all(
        (below is None or below[m].forward_hash != "") and (above is None or above[m].backward_hash != "")
        for m in range(work.num_training)
        if m not in work.skipped
    )


# --- how far back ------------------------------------------------------------------------------------------------


def evidence_from(state: RunState) -> int:
    """The first step whose boundaries members keep: one window more than the leader needs, for other validators."""
    run = config(state)
    if not run.audit.on:
        return state.next_step - STEPS_WITHOUT_AUDITS
    first = first_of(run, window_of(run, state.audits.audited_to) - 1)
    return min([first, *(audit.step for audit in state.audits.open.values())])


def evidence_steps(config: RunConfig) -> tuple[int, int]:
    """Steps whose boundaries a member keeps: while audits keep up (the window that is open, the one that is audited, one
    more), and at most, when no step may begin before they have caught up."""
    if not config.audit.on:
        return STEPS_WITHOUT_AUDITS, STEPS_WITHOUT_AUDITS
    return 3 * config.audit.window_steps, (config.audit.open_windows + 2) * config.audit.window_steps


def log_from(state: RunState) -> int:
    """The oldest state that must stay one that can be rebuilt: for joiners, for audits, and to rewind to."""
    run, needed = config(state), oldest_needed(state)
    if run.snapshot.keep_steps:
        needed = max(CALIBRATION_STEP, min(needed, state.next_step - run.snapshot.keep_steps))
    if not run.audit.on:
        return needed
    needed = min(needed, run.version_of(evidence_from(state)))
    if run.audit.rewind:
        needed = min(needed, state.next_step - run.audit.horizon_steps)
    return max(needed, CALIBRATION_STEP)


def oldest_restorable(state: RunState) -> int:
    """The oldest step that the run can be rewound to: every stage's state there can be rebuilt from a snapshot and the log."""
    first_log = min(state.sealed, default=state.next_step)
    if first_log == CALIBRATION_STEP:
        return CALIBRATION_STEP
    bases: list[int] = []
    for stage in range(num_stages(state)):
        kept = [s.step for s in state.snapshots.get(stage, []) if s.verified and s.step >= first_log]
        if not kept:
            return state.next_step
        bases.append(min(kept))
    return min(max(bases) + update_delay(state), state.next_step)


# --- cases -------------------------------------------------------------------------------------------------------


def open_cases(state: RunState) -> list[tuple[int, CaseState]]:
    """By number, the oldest first."""
    cases = state.audits.cases
    return [(number, cases[number]) for number in sorted(state.audits.quarantined.values())]


def votes(case: CaseState) -> tuple[int, int]:
    """Coldkeys that found what the leader's runs gave, and coldkeys that found what the accused claims; each has one voice.

    Where the leader's machine couldn't run it (no digest of its own): the most that agree on something else than the claim.
    """
    voices: dict[str, str] = {}
    for hotkey, digest in case.said.items():
        if digest:
            voices.setdefault(case.coldkeys.get(hotkey, hotkey), digest)
    counts = Counter(voices.values())
    if case.digest and case.digest == case.claimed:  # only what follows from the right sum is a lie: a fingerprint
        return counts[case.digest], 0
    claim = counts.pop(case.claimed, 0) if case.claimed else 0
    return (counts[case.digest] if case.digest else max(counts.values(), default=0)), claim


def verdict(case: CaseState) -> str:
    """``convicted`` or ``cleared`` where the third parties have decided it; empty as long as others are to be asked.

    The leader's two runs are one voice, so one that agrees is enough, unless more back the accused. One alone clears nobody:
    it may be the accused's friend.
    """
    agree, claim = votes(case)
    if agree >= (1 if case.digest else 2) and agree >= claim:
        return CONVICTED
    return CLEARED if claim >= 2 and not agree else ""


def witness_wanted(state: RunState, me: Member) -> list[tuple[int, str]]:
    """(case, bundle) of the open cases that this member was asked about and hasn't answered."""
    return [
        (number, case.bundle)
        for number, case in open_cases(state)
        if me in case.asked and me.hotkey not in case.said and case.bundle
    ]
