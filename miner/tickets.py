"""Whether a peer's frame names a lease that entitles it to be taken: pure, from the fold alone, before its body is touched.

A frame may be due now, or early (its lease isn't folded yet). Else it is refused with a code. What an honest member may send as
well, because it has folded less than we have, counts little against it; what none would send counts in full.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from miner.local_view import BoundaryKey
from miner.owed_boundaries import is_part, sources_of
from miner.ways import receipted_hash
from subnet.errors import InputError, IotaError
from subnet.protocol.messages import AnyPeerFrame, BoundaryFrame
from subnet.run.state import RunState, num_parts
from subnet.words import Member


class WrongRun(IotaError):
    """The frame is of another run than ours."""

    code = "wrong_run"


class StaleLease(IotaError):
    """The lease that the frame names has ended: another generation is leased."""

    code = "stale_lease"


class NotLeased(IotaError):
    """The sender doesn't have the lease that the frame names."""

    code = "not_leased"


class WrongStage(IotaError):
    """The frame is for another stage than ours."""

    code = "wrong_stage"


class ForeignSender(InputError):
    """The frame names another sender than the hotkey that proved itself on this connection."""

    code = "foreign_sender"


class OtherBytes(IotaError):
    """Made again, it isn't what was receipted: whoever receipted it may have lied, and not who made it again."""

    code = "other_bytes"


class NotFinite(InputError):
    """A boundary with an infinite element or one that is no number: its maker should have said that the item fails."""

    code = "not_finite"


class UnsignedBoundary(InputError):
    """A boundary without its sender's signature, which whoever audits wants to see: no honest member sends one."""

    code = "unsigned_boundary"


class Ticket(Enum):
    DUE = "due"
    EARLY = "early"
    PAST = "past"
    """Nobody needs it any more; late is no offence."""


def check_sender(frame: AnyPeerFrame, run_id: str, peer: str) -> None:
    """Of every frame: it is of our run, and names who sent it."""
    if frame.run != run_id:
        raise WrongRun(f"a frame of run {frame.run[:16]}, this is {run_id[:16]}")
    if frame.sender.hotkey != peer:
        raise ForeignSender(f"a frame of {frame.sender} came from {peer}")


def check_ticket(state: RunState, me: Member | None, frame: BoundaryFrame) -> Ticket:
    """Whether a boundary is due; raises what refuses it."""
    work = state.work
    if frame.step < state.next_step:
        return Ticket.PAST
    if me is None or work is None or work.step < frame.step or me not in state.members:
        return Ticket.EARLY
    info = state.members[me]
    wanted = info.stage + 1 if frame.backward else info.stage - 1
    if frame.stage != wanted or not 0 <= wanted < len(work.items):
        raise WrongStage(f"a boundary of stage {frame.stage}, ours is {info.stage}")
    made, mine = work.items[wanted].get(frame.microbatch), work.items[info.stage].get(frame.microbatch)
    if made is None or mine is None:
        raise InputError(f"a boundary of microbatch {frame.microbatch}, which step {work.step} doesn't have")
    if not is_part(state, frame.microbatch, frame.part):
        raise InputError(
            f"part {frame.part} of microbatch {frame.microbatch}, which has {num_parts(state, frame.microbatch)}"
        )
    if frame.generation > made.generation:
        return Ticket.EARLY
    if frame.generation < made.generation:
        raise StaleLease(f"a boundary of generation {frame.generation}, leased is {made.generation}")
    if frame.sender not in state.members:
        return Ticket.EARLY
    key = BoundaryKey(frame.step, frame.microbatch, frame.stage, frame.backward, frame.part)
    if frame.sender not in sources_of(work, key):
        raise NotLeased(f"{frame.sender} doesn't have the lease of {key.microbatch} at stage {key.stage}")
    receipted = receipted_hash(work, key)
    if receipted not in ("", frame.hash):
        if frame.sender != made.member:
            raise OtherBytes("a boundary that was made again, with another hash than its receipt has")
        raise InputError("a boundary with another hash than its receipt has")
    return Ticket.DUE


def check_raw_finite(data: memoryview) -> None:
    """Of a boundary as fp32: an honest maker reports an item whose output isn't finite, and sends nothing."""
    values: NDArray[np.float32] = np.frombuffer(data, dtype="<f4")
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise NotFinite("a boundary is not finite")
