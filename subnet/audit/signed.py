"""What of a case its accused have signed themselves: every claim's proof, signature and words are checked against the case.

A claim counts only under the hotkey whose work it is about; what is about other work is left aside. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from subnet.audit.case import Case, ItemCase, PartialCase, SignedClaim
from subnet.errors import InputError
from subnet.protocol import wire
from subnet.protocol.messages import (
    LIMIT_REPORT_BYTES,
    AnyClaim,
    BackwardReceipt,
    CommitClaim,
    FingerprintClaim,
    ForwardReceipt,
    MergedClaim,
)
from subnet.words import short

PURPOSE_RECEIPTS = "receipts/1"
"""What members sign the Merkle root of their claims for."""


class SignedWords(msgspec.Struct, frozen=True):
    """``verified``: (hotkey, number of claims that hold); ``unsigned``: hotkeys whose commitment has no signed claim."""

    verified: tuple[tuple[str, int], ...]
    unsigned: tuple[str, ...]
    wrong: tuple[str, ...]
    beside: int
    """Claims about other work, or that were taken back by a later one: they prove nothing here."""


@dataclass(frozen=True)
class _Heard:
    """A claim under its hotkey's signature. ``differs``: how it says otherwise than the case; "" if it doesn't."""

    hotkey: str
    subject: tuple[str, int]
    differs: str


def verify_claims(case: Case) -> list[str]:
    """What is wrong with the case's signed claims, in words; empty if all of them hold."""
    return [*check_signed(case).wrong]


def check_signed(case: Case) -> SignedWords:
    """Every signed claim of the case, held against it.

    Work that was void and done again leaves claims behind: one that differs is wrong only where none about the same agrees.
    """
    heard: list[_Heard] = []
    wrong: list[str] = []
    beside = 0
    for number, signed in enumerate(case.claims):
        try:
            found = _heard(case, signed)
        except InputError as error:
            wrong.append(f"claim {number}: {error.reason}")
            continue
        if found is None:
            beside += 1
        else:
            heard.append(found)
    agreed = {(one.hotkey, one.subject) for one in heard if not one.differs}
    verified = Counter(one.hotkey for one in heard if not one.differs)
    for one in heard:
        if one.differs and (one.hotkey, one.subject) in agreed:
            beside += 1
        elif one.differs:
            wrong.append(f"the {one.subject[0]} of {short(one.hotkey, 16)} says otherwise: {one.differs}")
    committed = {one.hotkey for one in heard if one.subject[0] == CommitClaim.__name__ and not one.differs}
    unsigned = sorted({partial.member.hotkey for partial in case.partials} - committed)
    return SignedWords(tuple(sorted(verified.items())), tuple(unsigned), tuple(wrong), beside)


def _heard(case: Case, signed: SignedClaim) -> _Heard | None:
    """None for a claim about something else; raises :class:`InputError` where nobody it is about has signed it."""
    claim: AnyClaim = wire.decode(signed.claim, AnyClaim, limit_bytes=LIMIT_REPORT_BYTES, what="it can't be read")
    name = type(claim).__name__
    said = list(_said(case, claim))
    if not said:
        return None
    if len(signed.root) != 32 or not wire.verify_proof(signed.root, signed.claim, signed.proof):
        raise InputError(f"the {name} is not in the list that was signed")
    signers = {hotkey for hotkey, _, _ in said}
    signers = {hotkey for hotkey in sorted(signers) if _has_signed(hotkey, signed)}
    if not signers:
        raise InputError(f"the {name} is not signed by {short(said[0][0], 16)}")
    # one that may be about several sums of a hotkey is about the one that it agrees with
    hotkey, about, differs = min((one for one in said if one[0] in signers), key=lambda one: one[2] != "")
    return _Heard(hotkey, (name, about), differs)


def _has_signed(hotkey: str, signed: SignedClaim) -> bool:
    from subnet.protocol.signing import verify_statement  # heavy, and a replay without claims doesn't need it

    return verify_statement(hotkey, PURPOSE_RECEIPTS, signed.root, signed.signature)


def _said(case: Case, claim: AnyClaim) -> Iterator[tuple[str, int, str]]:
    """(hotkey whose claim it may be, what it is about, how it differs from the case, "" if it doesn't)."""
    match claim:
        case ForwardReceipt() | BackwardReceipt():
            if (claim.step, claim.stage) == (case.step, case.stage):
                for partial, item in _items(case, claim.microbatch):
                    yield partial.member.hotkey, item.microbatch, _item_difference(item, claim)
        case CommitClaim():
            for partial in case.partials:
                same = (claim.step, claim.commitment.member) == (case.step, partial.member)
                if same and claim.commitment.stage == case.stage:
                    differs = claim.commitment != partial.commitment
                    yield partial.member.hotkey, 0, "another commitment" if differs else ""
        case FingerprintClaim():
            yield from _fingerprints_said(case, claim)
        case MergedClaim():
            yield from _merged_said(case, claim)
        case _:
            return


def _items(case: Case, microbatch: int) -> Iterator[tuple[PartialCase, ItemCase]]:
    for partial in case.partials:
        for item in partial.items:
            if item.microbatch == microbatch:
                yield partial, item


def _item_difference(item: ItemCase, claim: ForwardReceipt | BackwardReceipt) -> str:
    if isinstance(claim, ForwardReceipt):
        pairs = [("input", item.x, claim.input), ("output", item.forward, claim.output)]
    else:
        pairs = [("gradient", item.gradient, claim.input), ("output", item.backward, claim.output)]
        if claim.forward:
            pairs.append(("forward output", item.forward, claim.forward))
    for what, ours, theirs in pairs:
        if ours and theirs and ours != theirs:
            return f"{what} {short(theirs)}, not {short(ours)}"
    if item.loss_bits is not None and claim.loss_bits is not None and item.loss_bits != claim.loss_bits:
        return "another loss"
    return ""


def _fingerprints_said(case: Case, claim: FingerprintClaim) -> Iterator[tuple[str, int, str]]:
    merge = case.merge
    if merge is None or (claim.step, claim.group, claim.stage) != (case.step, merge.group, case.stage):
        return
    for partial in case.partials:
        differs = ""
        if claim.version != merge.version:
            differs = f"fingerprints for manifest {claim.version}, not {merge.version}"
        elif partial.fingerprints and claim.values != partial.fingerprints:
            differs = "other fingerprints"
        yield partial.member.hotkey, 0, differs


def _merged_said(case: Case, claim: MergedClaim) -> Iterator[tuple[str, int, str]]:
    merge = case.merge
    if merge is None or (claim.step, claim.group) != (case.step, merge.group):
        return
    for one in merge.merged:
        if one.partition == claim.partition and one.owner is not None:
            ours = (merge.version, one.hash, one.blob, one.size_bytes, one.squares)
            theirs = (claim.version, claim.hash, claim.blob, claim.size_bytes, claim.squares)
            yield (
                one.owner.hotkey,
                one.partition,
                "" if ours == theirs else f"partition {one.partition} merged otherwise",
            )
