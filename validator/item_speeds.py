"""How long an item takes a member: as measured, else as its stage's others; each looked up once a round of dealing."""

from __future__ import annotations

from subnet.run import state as st
from subnet.run.state import RunState
from subnet.words import Member
from validator.policy import Policy
from validator.watch import Watch


def item_s(state: RunState, watch: Watch, policy: Policy, stage: int, member: Member) -> float:
    """Seconds of one item, forward and backward, of this member; of its stage's others where it is unknown."""
    own = watch.item_s(member)
    if own is not None:
        return own
    others = st.members_of(state, stage) if watch.index is None else watch.index.sync(state).by_stage[stage]
    known = [s for k in others if (s := watch.item_s(k)) is not None]
    return sum(known) / len(known) if known else policy.lease_unknown_s


class Speeds:
    """Seconds of an item by member, each looked up once a round."""

    def __init__(self, state: RunState, watch: Watch, policy: Policy) -> None:
        self._state, self._watch, self._policy = state, watch, policy
        self._known: dict[Member, float] = {}

    def of(self, member: Member, stage: int) -> float:
        known = self._known.get(member)
        if known is None:
            known = self._known[member] = item_s(self._state, self._watch, self._policy, stage, member)
        return known
