"""What a member reports names hashes and numbers: each is checked for its form before anything folds or stores it."""

from __future__ import annotations

from collections.abc import Iterable

from subnet.errors import InputError
from subnet.protocol import messages as msg
from subnet.protocol.wire import is_blob_hash

LIMIT_WANTS = 1024
"""Boundaries that one claim may name; who has more to say says it in several."""
LIMIT_REASON_CHARS = 200
LIMIT_SIGNATURE_BYTES = 64
_LIMIT_NUMBER = 1 << 48


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
        case msg.MismatchClaim():
            return (claim.used,)
        case msg.UnusableClaim():
            return (claim.hash,)
        case msg.NotHeldClaim():
            return tuple(want.hash for want in claim.wants)
        case msg.WitnessClaim():
            return (claim.digest,) if claim.digest else ()
        case msg.PartsClaim():
            return claim.hashes
        case _:
            return ()


def numbers_of(claim: msg.AnyClaim) -> tuple[int, ...]:
    """Of what an audit is told: numbers that count from zero (a step from -1)."""
    match claim:
        case msg.MismatchClaim():
            return claim.step + 1, claim.microbatch, claim.stage, claim.generation
        case msg.UnusableClaim():
            return claim.step + 1, claim.microbatch, claim.stage
        case msg.NotHeldClaim():
            return claim.audit, *(number for want in claim.wants for number in (want.stage, want.microbatch))
        case msg.WitnessClaim():
            return (claim.case,)
        case msg.PartsClaim():
            return claim.step + 1, claim.microbatch, claim.stage, claim.generation, claim.first
        case msg.LaneClaim():
            return claim.step + 1, claim.microbatch, claim.stage, claim.generation, claim.forwards, claim.backwards
        case _:
            return ()


def check_claims(claims: Iterable[msg.AnyClaim]) -> None:
    """Raises :class:`InputError` where one names as a hash what can't be one, a number that counts nothing, or too much."""
    for claim in claims:
        _check_size(claim)
        if not all(0 <= number < _LIMIT_NUMBER for number in numbers_of(claim)):
            raise InputError(f"{type(claim).__name__} names a number that counts nothing")
        for value in hashes_of(claim):
            if not is_blob_hash(value):
                what = type(claim).__name__
                raise InputError(f"{what} names {value[:80]!r} as a hash", hint="64 hexadecimal digits, lower case")


def _check_size(claim: msg.AnyClaim) -> None:
    match claim:
        case msg.NotHeldClaim() if not 0 < len(claim.wants) <= LIMIT_WANTS:
            raise InputError(f"NotHeldClaim names {len(claim.wants)} boundaries", hint=f"1 to {LIMIT_WANTS}")
        case msg.WitnessClaim() if bool(claim.digest) == bool(claim.reason):
            raise InputError("WitnessClaim names a digest, or else a reason why there is none")
        case msg.WitnessClaim() if len(claim.reason) > LIMIT_REASON_CHARS:
            raise InputError(f"WitnessClaim's reason has {len(claim.reason)} characters", hint=f"{LIMIT_REASON_CHARS}")
        case msg.MismatchClaim() if len(claim.signature) > LIMIT_SIGNATURE_BYTES:
            raise InputError(f"MismatchClaim has a signature of {len(claim.signature)} bytes")
        case _:
            return
