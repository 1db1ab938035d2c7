"""What keeps a hotkey from work or pay, each with its reason and its end: pure, from standing, score and last refusals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from subnet.score.api import Hold, RefusalView, Standing
from subnet.score.score import Score
from validator.policy import AuditPolicy

_CHARGES = {
    "partial": "its sum isn't that of its items",
    "merge": "a partition that it merged isn't the sum",
    "unopened": "it didn't open what it had receipted",
    "root": "snapshot and log lead to another state root than it reported",
    "unusable": "a boundary that it receipted is no numbers",
    "equivocation": "it signed something else when it sent a boundary than it receipted",
}


def where_of(where: Standing | None) -> str:
    """In words: a member of what, or not."""
    if where is None:
        return "no run is active"
    if where.stage is None:
        return f"not a member of run {where.run}"
    return f"a member of run {where.run}: stage {where.stage}, {where.leases} items leased and not done"


def holds_of(
    hotkey: str,
    now_s: float,
    score: Score | None,
    where: Standing | None,
    refusals: Sequence[RefusalView],
    registrations: Mapping[str, int] | None,
    policy: AuditPolicy,
) -> tuple[Hold, ...]:
    """The worst first. ``registrations``: blocks by registered hotkey; None where the chain isn't known."""
    return (
        *_registration(hotkey, score, registrations),
        *_conviction(now_s, score, where),
        *(_of_run(where, policy) if where is not None else (Hold("no run", "no run is active", "one is submitted"),)),
        *(_refused(refusal) for refusal in reversed(refusals)),
    )


def _registration(hotkey: str, score: Score | None, registrations: Mapping[str, int] | None) -> tuple[Hold, ...]:
    if registrations is None:
        return ()
    block, earned = registrations.get(hotkey), score.registered_at_block if score is not None else None
    if block is None:
        why = "it isn't registered on the subnet: it can't join, and no weight is set for it"
        return (
            Hold("registration", why, "it registers", hint="iota chain register; what an older one earned is lost"),
        )
    if earned is None or earned == block:
        return ()
    why = f"what it earned belongs to its registration at block {earned}; now it is that of block {block}: no weight"
    return (Hold("registration", why, "it joins again, and begins at zero", hint="restart the miner"),)


def _conviction(now_s: float, score: Score | None, where: Standing | None) -> tuple[Hold, ...]:
    lines: list[Hold] = []
    if score is not None and score.convicted:
        left_s = max(0.0, score.convicted_until_s - now_s)
        why = f"{score.convicted}: its score is 0"
        ends = f"it is forgotten at {moment(score.convicted_until_s)}, or an appeal is granted"
        lines.append(Hold("convicted", why, ends, left_s, hint="iota audit replay runs the evidence anywhere"))
    if where is not None and where.convicted:
        why = f"convicted of a lie in run {where.run}: it can't join"
        lines.append(Hold("convicted", why, "the run ends, or an appeal is granted"))
    return tuple(lines)


def _of_run(where: Standing, policy: AuditPolicy) -> list[Hold]:
    lines: list[Hold] = []
    if where.quarantine is not None:
        case = next((case for case in where.cases if case.case == where.quarantine), None)
        what = f" (step {case.step}, stage {case.stage}): {_CHARGES.get(case.charge, case.charge)}" if case else ""
        witnesses = f"at most {policy.witnesses_max} third parties are asked, {policy.witness_s:g} s each"
        ends = f"case {where.quarantine} is closed: {witnesses}"
        lines.append(Hold("quarantine", f"case {where.quarantine} is open{what}", ends, hint="iota audit cases"))
    if where.back_off_s > 0:
        why = f"gone silently {where.absences} times: a join isn't heard yet"
        lines.append(Hold("back-off", why, f"in {where.back_off_s:.0f} s", where.back_off_s))
    if where.on_probation:
        left = where.items_needed - where.items_right
        before = ", each sum before its seal" if where.audited_before_seal else ""
        why = f"new or suspected: {where.items_right} of {where.items_needed} items were redone and right{before}"
        lines.append(Hold("probation", why, f"{left} more items are redone and right"))
    elif where.items_needed and where.audited_before_seal:
        lines.append(Hold("audit", "every sum of this run is redone before its seal", "the run ends"))
    if where.marks:
        why = (
            f"{where.marks} unpaid mismatches or released quarantines in its record: a sealed sum of it is redone with "
            f"probability {where.audit_rate:.3g}"
        )
        lines.append(Hold("marks", why, "the run ends, or an appeal is granted"))
    if where.unopened:
        why = (
            f"{where.unopened} times it didn't open evidence that it had receipted: unpaid, and a conviction after "
            f"{policy.unopened_max}"
        )
        lines.append(Hold("unopened", why, "the run ends"))
    for number, step, stage in where.open_audits:
        why = f"audit {number} redoes its sum of step {step}, stage {stage}"
        lines.append(
            Hold("audit", why, f"at most {policy.evidence_s:g} s after its evidence was asked for, and the redoing")
        )
    if where.waiting_for:
        lines.append(Hold("run waits", f"the run waits for {where.waiting_for}", "that is there"))
    return lines


def _refused(refusal: RefusalView) -> Hold:
    times = f", {refusal.times} times in a row" if refusal.times > 1 else ""
    why = f"{refusal.code} at {moment(refusal.time_s)}{times}: {refusal.reason}"
    if refusal.retry_after_s is None:
        ends = "a retry doesn't help"
    elif refusal.retry_after_s > 0:
        ends = f"in {refusal.retry_after_s:.0f} s it may ask again"
    else:
        ends = "it may ask again"
    return Hold("refused", why, ends, refusal.retry_after_s, refusal.hint)


def moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
