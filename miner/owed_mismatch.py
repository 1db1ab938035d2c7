"""What a member owes where a boundary it has isn't what its maker has receipted: pure, by the fold's hashes alone.

What it computed with such a boundary under its lease can't stand: it says so instead of committing, with what the maker
signed when it sent it, and is dealt the item again. What it made of it before, or only holds, it drops; then it fetches what
the receipt names. So under one lease nobody ever gives away two values of a boundary. The same bytes made again, by whomever,
are no mismatch. Where nobody audits, nobody compares: work goes on with what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from miner.local_view import BoundaryKey, LocalView
from miner.owes import Compute, Drop, Owe, Report
from miner.ways import last_said_hash, receipted_hash
from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.run.state import Item, StepWork


def owed_mismatch(
    state: st.RunState, work: StepWork, stage: int, m: int, found: Item, local: LocalView, owes: list[Owe]
) -> bool:
    """Of a leased item: whether an input of it is wrong; then nothing else is owed for it."""
    key = wrong_input(state, work, stage, m, local)
    if key is None or found.status == st.REVOKING:
        return False
    if is_computing(local, work.step, m):
        return True  # what comes of it is looked at then
    used = _used(work, key, stage, m, local)
    bound = found.forwarded or found.status == st.DONE or found.generation in _generations(work, stage, m, local)
    if used and bound and not st.is_evaluation(state, m):
        claim = msg.MismatchClaim(work.step, m, stage, key.backward, used)
        sent = local.sent_to_me.get(key)
        if sent is not None and sent.hash == used:
            claim = msgspec.structs.replace(claim, generation=sent.generation, signature=sent.signature)
        owes.append(Report(claim))
    else:
        owes.append(Drop(key, stage))
    return True


def wrong_input(state: st.RunState, work: StepWork, stage: int, m: int, local: LocalView) -> BoundaryKey | None:
    """The input of an item that is, or that an output of mine was made with, another than the receipted one."""
    if not st.config(state).audit.on:
        return None
    for key in inputs_of(work, stage, m):
        said = receipted_hash(work, key)
        if said and (local.boundaries.get(key, said) != said or _used(work, key, stage, m, local)):
            return key
    return None


def owed_before_commitment(
    state: st.RunState, work: StepWork, stage: int, done: Iterable[int], local: LocalView
) -> msg.MismatchClaim | None:
    """Of a sum that is asked for: what to say instead, where an input was other than what was said of it last.

    Its maker may be gone and its item open, so that nothing is receipted now; an auditor holds the sum against what was said.
    """
    if not st.config(state).audit.on:
        return None
    for m in done:
        for key in inputs_of(work, stage, m):
            said = last_said_hash(work, key)
            used = _used_but(said, work, key, stage, m, local) if said else ""
            if used:
                return msg.MismatchClaim(work.step, m, stage, key.backward, used)
    return None


def is_sound(state: st.RunState, work: StepWork, key: BoundaryKey, local: LocalView) -> bool:
    """Whether an output of mine may be given to anybody: it wasn't made with what is known to be wrong.

    What is sealed is given as it was receipted.
    """
    training = key.microbatch < work.num_training
    sealed = training and st.is_sealed(state, key.stage, work)
    return sealed or wrong_input(state, work, key.stage, key.microbatch, local) is None


def inputs_of(work: StepWork, stage: int, m: int) -> list[BoundaryKey]:
    """Of an item: the forward's input, and its gradient; ends of the pipeline have but one."""
    keys = [BoundaryKey(work.step, m, stage - 1, False)] if stage > 0 else []
    return [*keys, BoundaryKey(work.step, m, stage + 1, True)] if stage < len(work.items) - 1 else keys


def is_computing(local: LocalView, step: int, m: int) -> bool:
    return any(isinstance(job, Compute) and (job.step, job.microbatch) == (step, m) for job in local.jobs)


def _used(work: StepWork, key: BoundaryKey, stage: int, m: int, local: LocalView) -> str:
    """The hash of this input that an output of mine was made with, if it is another than the receipted one; else ""."""
    return _used_but(receipted_hash(work, key), work, key, stage, m, local)


def _used_but(said: str, work: StepWork, key: BoundaryKey, stage: int, m: int, local: LocalView) -> str:
    for backward in (False, True):
        made = local.made_from.get(BoundaryKey(work.step, m, stage, backward))
        if made is not None:
            used = made.gradient if key.backward else made.x
            if used and used != said:
                return used
    return ""


def _generations(work: StepWork, stage: int, m: int, local: LocalView) -> set[int]:
    """Leases under which something of the item was computed."""
    outputs = (BoundaryKey(work.step, m, stage, backward) for backward in (False, True))
    return {made.generation for key in outputs if (made := local.made_from.get(key)) is not None}
