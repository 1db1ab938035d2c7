"""What the maker of a boundary signs when it sends it, so that whoever gets something else than is receipted can prove it.

The signature is over the lease and the hash of the bytes. Under one lease a maker has one value of a boundary: two, one sent
and one receipted, are its lie, whoever shows them. Nothing here is signed where a run has no audits.
"""

from __future__ import annotations

import msgspec

from subnet.protocol import wire
from subnet.protocol.messages import BoundaryFrame
from subnet.protocol.signing import Signer, sign_statement, verify_statement
from subnet.words import Member

PURPOSE_SENT = "boundary/1"


class SentBoundary(msgspec.Struct, frozen=True, array_like=True):
    """The statement: ``sender`` has sent bytes of this hash as this boundary, under its lease of this generation."""

    run: str
    sender: Member
    step: int
    microbatch: int
    stage: int
    backward: bool
    generation: int
    hash: str
    part: int = 0


def sent_by(frame: BoundaryFrame) -> SentBoundary:
    key = (frame.step, frame.microbatch, frame.stage, frame.backward)
    return SentBoundary(frame.run, frame.sender, *key, frame.generation, frame.hash, frame.part)


def sign_sent(signer: Signer, frame: BoundaryFrame) -> BoundaryFrame:
    """The frame with its sender's signature."""
    signature = sign_statement(signer, PURPOSE_SENT, wire.encode(sent_by(frame)))
    return msgspec.structs.replace(frame, signature=signature)


def is_sent(sent: SentBoundary, signature: bytes) -> bool:
    """Whether its sender's hotkey has signed it."""
    return verify_statement(sent.sender.hotkey, PURPOSE_SENT, wire.encode(sent), signature)
