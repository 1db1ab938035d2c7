"""What a run's store must still hold, from the fold alone: everything a joiner, an audit or an export may ask for.

Holds carry the step they were granted at (plus one, so that the calibrating step counts as 0). Boundary blobs and partials
(``evidence``) are kept for the audit window; merged partitions (``log``) from the oldest state a joiner would restore;
``snapshot`` chunks from the oldest snapshot that somebody may restore or export. Where there are audits, evidence is kept until
its window is audited and one window more, for other validators, and the log as far back as an audit or a rewind may begin;
bundles of cases (``case``) outlast the run (:mod:`validator.finished_runs`).
"""

from __future__ import annotations

from subnet.run.audits import evidence_from
from subnet.run.state import RunState, config, num_stages, restore_point, update_delay
from subnet.words import CALIBRATION_STEP

AUDIT_WINDOW_STEPS = 8
_WINDOWS = ((1 / 2, AUDIT_WINDOW_STEPS), (3 / 4, 4), (7 / 8, 2))
"""Up to which share of the store's budget in use the evidence of how many steps is kept; beyond, of one."""


def audit_window(used_bytes: int, budget_bytes: int) -> int:
    """Steps whose evidence is kept: fewer where the store fills up (a budget of 0 is none), for a full one stops the run."""
    if budget_bytes <= 0:
        return AUDIT_WINDOW_STEPS
    return next((steps for share, steps in _WINDOWS if used_bytes <= share * budget_bytes), 1)


def hold_horizon(step: int) -> int:
    """The horizon of what is stored while ``step`` is open."""
    return max(0, step + 1)


def expiries(state: RunState, window: int = AUDIT_WINDOW_STEPS) -> dict[str, int]:
    """By retention class: holds with a horizon below this may end.

    ``window``: of evidence, in steps (:func:`audit_window`), where there are no audits. Of the rest nothing ends before there
    is a verified snapshot.
    """
    if state.run is None:
        return {}
    oldest = min(restore_point(state, stage).version for stage in range(num_stages(state)))
    below = {"evidence": max(0, hold_horizon(state.next_step) - window)}
    if config(state).audit.on:
        # what a step ahead of the open one puts there is held by the open one's number
        below["evidence"] = hold_horizon(evidence_from(state) - update_delay(state))
        oldest = min(oldest, min(state.sealed, default=oldest))
    if oldest > CALIBRATION_STEP:
        below["log"] = below["snapshot"] = hold_horizon(oldest)
    return {retention: bound for retention, bound in below.items() if bound > 0}


def receipts_from(state: RunState) -> int:
    """Signed receipts of steps before this one have nothing to prove any more."""
    horizon = state.next_step - AUDIT_WINDOW_STEPS
    if state.run is not None and config(state).audit.on:
        # a report is kept under the step that was open when it came
        horizon = min(horizon, evidence_from(state) - 1 - update_delay(state))
    return horizon
