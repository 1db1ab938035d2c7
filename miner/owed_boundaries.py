"""What a member owes for boundaries: to get those that its items need, to give its own to whose items need them.

Straight, its maker pushes a boundary and whoever lacks it asks. Through the store (:mod:`miner.ways`) its maker puts it there
before it is receipted, and whoever needs it fetches what was receipted; before that there is nothing to wait for.
"""

from __future__ import annotations

from miner.local_view import BoundaryKey, LocalView
from miner.owed_mismatch import is_sound
from miner.owes import Fetch, FetchStored, Owe, Push, Report, StoreBoundary, StoreUnusable
from miner.ways import all_by_store, by_store, puts_into_store, receipted_hash, uses_store
from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.run.state import Item, RunState, StepWork
from subnet.words import Member


def owed_wanted(
    state: RunState, work: StepWork, me: Member, key: BoundaryKey, local: LocalView, owes: list[Owe]
) -> None:
    """Gets a boundary that my stage needs; where that failed for long enough, says that it is missing, and where what is
    receipted is no numbers shows it."""
    stage = state.members[me].stage
    value = receipted_hash(work, key)
    if value and local.unusable.get(key) == value:  # nothing else is to be had under this receipt
        claim = msg.UnusableClaim(key.step, key.microbatch, stage, key.backward, value)
        owes.append(Report(claim) if value in local.denounced else StoreUnusable(key, value))
        return
    if key in local.unavailable:
        owes.append(Report(msg.MissingClaim(key.step, key.microbatch, stage, key.backward)))
    makers = sources_of(work, key)
    present = [k for k in makers if k in state.members and k != me]
    straight = [k for k in present if not by_store(state, me, k)]
    if straight or not uses_store(state):
        owes.append(Fetch(key, tuple(straight or makers)))
        return
    if value:
        owes.append(FetchStored(key, value))
    elif not present and not all_by_store(state):
        owes.append(Fetch(key, ()))


def sources_of(work: StepWork, key: BoundaryKey) -> list[Member]:
    """Who makes or made the boundary: the holder of its lease, then whoever replays it."""
    found = work.items[key.stage].get(key.microbatch)
    replay = work.replays.get((key.stage, key.microbatch, key.backward))
    sources = [found.member] if found is not None and found.member is not None and found.status != st.OPEN else []
    if replay is not None and replay.member not in sources:
        sources.append(replay.member)
    return sources


def owed_given(state: RunState, work: StepWork, me: Member, stage: int, local: LocalView, owes: list[Owe]) -> None:
    """My products: into the store where they go through it, else to the members that hold the leases they are for."""
    stores = uses_store(state)
    if stores:
        _owed_stores(state, work, me, stage, local, owes)
    for to_stage, backward in ((stage + 1, False), (stage - 1, True)):
        if not 0 <= to_stage < len(work.items):
            continue
        for m in sorted(work.live[to_stage]):
            if st.num_parts(state, m):
                continue  # part by part: miner.owed_lanes
            holder = work.items[to_stage][m].member
            key = BoundaryKey(work.step, m, stage, backward)
            if holder is None or key not in local.boundaries or (key, holder) in local.pushed:
                continue
            straight = me in sources_of(work, key) and not (stores and by_store(state, me, holder))
            found = work.items[stage].get(m)
            mine = found is not None and found.member == me and st.config(state).audit.on
            if mine and found is not None and not is_of_lease(found, key, local.boundaries[key], local):
                continue  # it is made anew, or receipted, first
            if straight and is_sound(state, work, key, local):
                owes.append(Push(key, holder))


def is_part(state: RunState, microbatch: int, part: int) -> bool:
    """Whether an item's boundary has this part: with lanes 1 and up, else 0 alone."""
    parts = st.num_parts(state, microbatch)
    return 1 <= part <= parts if parts else part == 0


def is_of_lease(found: Item, key: BoundaryKey, value: str, local: LocalView) -> bool:
    """Whether this is the one value of a boundary under my lease on its item: made under it, or receipted.

    What was made under an earlier lease, of other inputs perhaps, isn't: the item may come to something else now. A lane's
    part is receipted with the list that it is in.
    """
    made = local.made_from.get(key)
    receipted = found.backward_hash if key.backward else found.forward_hash
    named = local.boundaries.get(key.whole, "") if key.part else value
    return made is not None and (made.generation == found.generation or (named != "" and named == receipted))


def _owed_stores(state: RunState, work: StepWork, me: Member, stage: int, local: LocalView, owes: list[Owe]) -> None:
    """Each once; and once more for each replay that I am leased: then somebody didn't find it there."""
    replayed = {(m, backward) for (at, m, backward), k in work.replays.items() if at == stage and k.member == me}
    held = {(m, backward) for m in work.held.get(me, ()) for backward in (False, True)}
    for m, backward in sorted(held | replayed, key=lambda pair: (not pair[1], pair[0])):
        if st.num_parts(state, m):
            continue  # part by part: miner.owed_lanes
        key = BoundaryKey(work.step, m, stage, backward)
        value = local.boundaries.get(key, "")
        turn = replay_turn(work, me, key)
        if not value or is_stored(work, me, key, local) or not puts_into_store(state, work, me, key):
            continue
        if is_sound(state, work, key, local):
            owes.append(StoreBoundary(key, value, turn))


def replay_turn(work: StepWork, me: Member, key: BoundaryKey) -> int:
    """The generation of my replay lease on the boundary, 0 where I have none."""
    replay = work.replays.get((key.stage, key.microbatch, key.backward))
    return replay.generation if replay is not None and replay.member == me else 0


def is_stored(work: StepWork, me: Member, key: BoundaryKey, local: LocalView) -> bool:
    """Whether I have put it into the store, since it was last missed there."""
    return local.in_store.get(key, -1) >= replay_turn(work, me, key)


def may_receipt(state: RunState, work: StepWork, me: Member, key: BoundaryKey, local: LocalView) -> bool:
    """Whether I may say that this boundary is made: what goes through the store has to be there first."""
    if not local.boundaries.get(key) or key in local.in_store:
        return True
    return not puts_into_store(state, work, me, key)
