"""What an accused has signed: its claims about the work of a case, each with a proof that it lies under its signature.

A report is kept whole as it came (:meth:`validator.journal_store.JournalStore.receipts_between`); a bundle takes of it only
the claims that the case is about. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from subnet.audit.case import Case, SignedClaim
from subnet.protocol import wire
from subnet.protocol.messages import (
    LIMIT_REPORT_BYTES,
    SIGNED_CLAIMS,
    AnyClaim,
    BackwardReceipt,
    CommitClaim,
    FingerprintClaim,
    ForwardReceipt,
    MergedClaim,
    Report,
)
from subnet.words import Member

STEPS_AROUND = 1
"""Reports about a step are kept under the step that was open when they came: this one, the one before (``update_delay``) or
the one behind (what came as it was sealed)."""


def steps_of_reports(step: int) -> tuple[int, int]:
    """[first, end) of the steps under which reports about ``step`` are kept."""
    return step - STEPS_AROUND, step + STEPS_AROUND + 1


def signed_claims(reports: Iterable[bytes], case: Case, member: Member) -> tuple[SignedClaim, ...]:
    """Every claim of the member that the case is about, once, in order of the reports."""
    found: dict[bytes, SignedClaim] = {}
    for data in reports:
        report = wire.decode(data, Report, limit_bytes=LIMIT_REPORT_BYTES, what="a kept report")
        if report.member != member or not report.receipts_root:
            continue
        for claim in _proven(report, case, member):
            found.setdefault(claim.claim, claim)
    return tuple(found.values())


def _proven(report: Report, case: Case, member: Member) -> Iterator[SignedClaim]:
    signed = [claim for claim in report.claims if isinstance(claim, SIGNED_CLAIMS)]
    leaves = [wire.encode(claim) for claim in signed]
    for index, claim in enumerate(signed):
        if _concerns(claim, case, member):
            proof = wire.merkle_proof(leaves, index)
            yield SignedClaim(leaves[index], report.receipts_root, proof, report.receipts_signature)


def _concerns(claim: AnyClaim, case: Case, member: Member) -> bool:
    match claim:
        case ForwardReceipt() | BackwardReceipt():
            items = {item.microbatch for partial in case.partials if partial.member == member for item in partial.items}
            return (claim.step, claim.stage) == (case.step, case.stage) and claim.microbatch in items
        case CommitClaim():
            return (claim.step, claim.commitment.stage) == (case.step, case.stage)
        case FingerprintClaim():
            return (claim.step, claim.stage) == (case.step, case.stage)
        case MergedClaim():
            return case.merge is not None and (claim.step, claim.group) == (case.step, case.merge.group)
        case _:
            return False
