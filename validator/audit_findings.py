"""What findings say, read: of whom a replay says something, who is wrong by it, and where it says nothing of anybody. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from loguru import logger

from subnet.audit import build
from subnet.audit.case import Case, Findings, false_roots
from subnet.errors import Corrupt
from subnet.words import Member, Want, short
from validator.decision import Accused, AuditResult


class Untrusted(Corrupt):
    """The replay began from a snapshot that isn't the state that was agreed on."""


def without(case: Case, missing: Sequence[Want]) -> Case | None:
    """The case less the partials that an input is missing of; None if none is left."""
    lost = {want.hash for want in missing}
    if not lost:
        return case
    whole = [
        partial.member
        for partial in case.partials
        if not any(item.x in lost or item.gradient in lost for item in partial.items)
    ]
    return build.narrow(case, whole) if whole else None


def check_trusted(case: Case, findings: Findings) -> None:
    """Raises :class:`Untrusted` where the replay says nothing of anybody.

    Behind the snapshot the log leads to one state: whoever computed from another is wrong, however many agreed on it.
    """
    for step, why in findings.wrong_roots:
        if step <= case.state.version:
            raise Untrusted(f"the snapshot of stage {case.stage} after {step} updates isn't the agreed state: {why}")


def is_wrong(case: Case, findings: Findings, member: Member) -> bool:
    """Whether the replay contradicts what the member claims: of its partial, a partition that it merged, or its state's root."""
    if any(partial.wrong for partial in findings.partials if partial.member == member):
        return True
    if member in false_roots(case, findings):
        return True
    if findings.merge is None or case.merge is None:
        return False
    lied = {partition for partition, _ in findings.merge.wrong}
    return any(part.partition in lied for part in case.merge.merged if part.owner == member)


def says_all(result: AuditResult) -> bool:
    """Whether nobody's work is left out of it."""
    return not result.missing and result.findings is not None and bool(result.findings.partials)


# --- on a machine of another hardware class -------------------------------------------------------------------------


def too_far(findings: Findings) -> tuple[Member, ...]:
    """Whose claims lie further from what this machine of another class computes than its tolerance."""
    other = findings.other_class
    if other is None:
        return ()
    return tuple(sorted({one.member for one in other.distances if one.member is not None and not one.within}))


def comparable(findings: Findings) -> Findings:
    """Without the partials where something differs that couldn't be compared: of them it says nothing."""
    other = findings.other_class
    if other is None or not other.not_compared:
        return findings
    return msgspec.structs.replace(findings, partials=(), merge=None)


def why_not_comparable(findings: Findings) -> str:
    """In words; empty where all could be compared."""
    other = findings.other_class
    if other is None or not other.not_compared:
        return ""
    return (
        f"{other.not_compared} claims differ from what this machine computes, whose hardware class is {short(other.ours)}; "
        f"the run's is {short(other.theirs)}, and the claimed bytes aren't here"
    )


# --- for the operator -----------------------------------------------------------------------------------------------


def lacking(want: Want) -> str:
    """An input that isn't there."""
    what = "gradient" if want.backward else "output"
    return f"the {what} of microbatch {want.microbatch} at stage {want.stage} isn't in the store"


def log_audit(audit: int, case: Case, findings: Findings, accused: Sequence[Accused]) -> None:
    """One line an audit; what is wrong as a warning."""
    for step, why in findings.wrong_roots:
        logger.warning("audit {}: the state of stage {} at step {}: {}", audit, case.stage, step, why)
    if accused:
        names = ", ".join(f"{one.member} ({one.charge})" for one in accused)
        words = "; ".join(line for partial in findings.partials for line in partial.wrong[:3])
        logger.warning("audit {} of step {} stage {}: wrong is {}: {}", audit, case.step, case.stage, names, words)
        return
    if words := why_not_comparable(findings):
        logger.warning("audit {} of step {} stage {} says nothing: {}", audit, case.step, case.stage, words)
        return
    logger.debug(
        "audit {} of step {} stage {}: {} partials right, {:.2f} s of work, {:.2f} s of state",
        audit,
        case.step,
        case.stage,
        sum(not partial.wrong for partial in findings.partials),
        findings.compute_s,
        findings.state_s,
    )
