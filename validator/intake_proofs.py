"""Whether a maker has lied about a boundary for all to see: it signed one thing when it sent it, and receipted another."""

from __future__ import annotations

from subnet.protocol import messages as msg
from subnet.protocol.sent import SentBoundary, is_sent
from subnet.run.state import Item, RunState


def proves(state: RunState, made: Item, maker_stage: int, claim: msg.MismatchClaim) -> bool:
    """Whether the claim carries the present maker's signature, under the lease that the receipt is of, over other bytes.

    ``made`` is the boundary's item. Honest members have one value of it under one lease, whatever happens to them.
    """
    if state.run is None or made.member is None or not claim.signature or claim.generation != made.generation:
        return False
    said = made.backward_hash if claim.backward else made.forward_hash
    if not said or said == claim.used:
        return False
    key = (claim.step, claim.microbatch, maker_stage, claim.backward)
    return is_sent(SentBoundary(state.run.run_id, made.member, *key, claim.generation, claim.used), claim.signature)
