"""Which way a tensor goes between two members: straight, or through the store; from the fold alone, so both sides agree.

Through the store goes everything where the run says so, and whatever one of the two can't be connected to. Its bytes are
there before they are receipted, so whoever knows the hash may fetch them; nobody waits for a push that can't come.
"""

from __future__ import annotations

from miner.local_view import BoundaryKey
from subnet.run import state as st
from subnet.run.state import RunState, StepWork
from subnet.words import Member

STORE = "store"


def all_by_store(state: RunState) -> bool:
    """The run's option."""
    return st.config(state).pipeline.boundaries == STORE


def uses_store(state: RunState) -> bool:
    """Whether anything may go through the store: else nobody needs to look there."""
    return all_by_store(state) or any(not info.reachable for info in state.members.values())


def is_unreachable(state: RunState, member: Member) -> bool:
    """Of a member that is there; who is gone is no way at all."""
    info = state.members.get(member)
    return info is not None and not info.reachable


def by_store(state: RunState, one: Member, other: Member) -> bool:
    """Whether what these two have for each other goes through the store."""
    return all_by_store(state) or is_unreachable(state, one) or is_unreachable(state, other)


def stores_all(state: RunState, me: Member) -> bool:
    """Whether all that is mine goes into the store, whoever it is for; slices before they are committed to, so that their
    owners find them as soon as they are named."""
    return all_by_store(state) or is_unreachable(state, me)


def puts_into_store(state: RunState, work: StepWork, me: Member, key: BoundaryKey) -> bool:
    """Whether my boundary has to be in the store before I may say that it is made.

    Where nobody has the lease that it is for, whoever gets it will fetch it from me; or I am told, and put it there then.
    """
    if stores_all(state, me):
        return True
    consumer = consumer_of(work, key)
    return consumer is not None and is_unreachable(state, consumer)


def consumer_of(work: StepWork, key: BoundaryKey) -> Member | None:
    """Who holds the lease that a boundary is for."""
    stage = key.stage - 1 if key.backward else key.stage + 1
    if not 0 <= stage < len(work.items):
        return None
    found = work.items[stage].get(key.microbatch)
    return found.member if found is not None and found.status != st.OPEN else None


def receipted_hash(work: StepWork, key: BoundaryKey) -> str:
    """What its maker has said that it is; "" before. Of a part nothing is said by itself unless it goes through the store."""
    if key.part:
        return _part_hash(work, key)
    found = work.items[key.stage].get(key.microbatch)
    if found is None:
        return ""
    return found.backward_hash if key.backward else found.forward_hash


def _part_hash(work: StepWork, key: BoundaryKey) -> str:
    found = work.items[key.stage].get(key.microbatch)
    if found is None:
        return ""
    parts = found.backward_parts if key.backward else found.forward_parts
    return parts[key.part - 1] if key.part <= len(parts) else ""


def last_said_hash(work: StepWork, key: BoundaryKey) -> str:
    """The same; of an item that is to be made again what was said of it last, which an auditor would take as well."""
    found = work.items[key.stage].get(key.microbatch)
    if found is None:
        return ""
    return (found.backward_hash or found.said_backward) if key.backward else (found.forward_hash or found.said_forward)
