"""What a member reports names hashes: each is checked for its form before anything folds or stores it."""

from __future__ import annotations

from collections.abc import Iterable

from subnet.errors import InputError
from subnet.protocol import messages as msg
from subnet.protocol.wire import is_blob_hash


def hashes_of(claim: msg.AnyClaim) -> tuple[str, ...]:
    """Every hash that the claim must name; a boundary that isn't there ("" at the ends of the pipeline) is left out."""
    match claim:
        case msg.ForwardReceipt():
            return tuple(boundary for boundary in (claim.input, claim.output) if boundary)
        case msg.BackwardReceipt():
            return tuple(boundary for boundary in (claim.input, claim.output, claim.forward) if boundary)
        case msg.CommitClaim():
            return tuple(value for _, value in claim.commitment.hashes)
        case msg.MergedClaim():
            return claim.hash, claim.blob
        case msg.SnapshotClaim():
            return claim.manifest, claim.root
        case msg.UpdatedClaim():
            return (claim.root,)
        case msg.FailedClaim():
            return (claim.failure,)
        case _:
            return ()


def check_claims(claims: Iterable[msg.AnyClaim]) -> None:
    """Raises :class:`InputError` where one names as a hash what can't be one."""
    for claim in claims:
        for value in hashes_of(claim):
            if not is_blob_hash(value):
                what = type(claim).__name__
                raise InputError(f"{what} names {value[:80]!r} as a hash", hint="64 hexadecimal digits, lower case")
