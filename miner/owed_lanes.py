"""What a member owes for the lanes it has leases on, part by part: pure, and level-triggered like all of ``owed``.

A lane's stage is computed alone by its holder: part after part as inputs arrive, backwards first, at most ``lane_flight`` parts
forward and not yet back, and none of an inner step before the one behind it is back whole. Its inputs are recorded
boundaries, so it doesn't matter whether their makers still are at it or were done long ago: that is how a lost lane is made up.
Of the lanes that a member holds the lowest come first, as many as fit into memory; as everybody does it in this order the
lowest lane that isn't done is at work at every stage, and no two members wait for each other.
"""

from __future__ import annotations

from miner.local_view import BoundaryKey, LocalView
from miner.owed_boundaries import is_of_lease, owed_wanted, replay_turn, sources_of
from miner.owed_mismatch import is_computing, is_sound
from miner.owes import Compute, DropLane, Owe, Push, Report, StoreBoundary
from miner.ways import by_store, puts_into_store, uses_store
from subnet.protocol.messages import LaneClaim, PartsClaim
from subnet.run import state as st
from subnet.run.state import RunState, StepWork
from subnet.words import Member

Lanes = dict[int, int | None]
"""Lanes at work, with the generation of their lease; None where they are replayed."""
STORED_AT_ONCE = 16
PUSHED_AT_ONCE = 8
"""Parts of one lane on their way to one receiver."""


def lanes_at_work(state: RunState, work: StepWork, me: Member, stage: int, local: LocalView) -> Lanes:
    """Lanes of mine that aren't done, the lowest first, as many as there is room for: each with its lease's generation,
    None where it is replayed."""
    if not st.num_parts(state, 0):
        return {}
    wanted: Lanes = {}
    for m in sorted(work.held.get(me, ())):
        found = work.items[stage][m]
        if m < work.num_training and found.status in (st.LIVE, st.REVOKING) and _is_open(state, work, me, m, local):
            wanted[m] = found.generation
    for (at, m, backward), replay in sorted(work.replays.items()):
        made = BoundaryKey(work.step, m, stage, backward) in local.boundaries
        if at == stage and replay.member == me and m < work.num_training and not made:
            wanted.setdefault(m, None)
    return {m: wanted[m] for m in sorted(wanted)[: max(1, local.lane_slots)]}


def _is_open(state: RunState, work: StepWork, me: Member, m: int, local: LocalView) -> bool:
    """Whether anything is left to compute under my lease on it."""
    stage = state.members[me].stage
    generation = work.items[stage][m].generation
    key = (work.step, m, generation)
    if key in local.refused or key in local.failures:
        return False
    return local.added.get((work.step, m, st.epoch(state, me, work.step))) != generation


def owed_rooms(work: StepWork, stage: int, at_work: Lanes, local: LocalView, owes: list[Owe]) -> None:
    """Lanes that are nobody's, or in the way of a lower one: their boundaries stay, their weights and moments go."""
    for (step, m), lane in sorted(local.lanes.items()):
        if step != work.step or is_computing(local, step, m):
            continue
        generation = at_work.get(m, -1)
        goes_on = m in at_work and lane.generation == (generation or 0)
        if not goes_on:
            owes.append(DropLane(step, m, stage))


def owed_lane(
    state: RunState,
    work: StepWork,
    me: Member,
    stage: int,
    m: int,
    generation: int | None,
    local: LocalView,
    owes: list[Owe],
) -> None:
    """The next part forward, the next part back, or the boundaries they wait for; of a lane at work."""
    step, n, last = work.step, st.num_parts(state, m), stage == len(work.items) - 1
    lane = local.lanes.get((step, m))
    if DropLane(step, m, stage) in local.jobs or (lane is not None and lane.generation != (generation or 0)):
        return
    forwards, backwards = (lane.forwards, lane.backwards) if lane is not None else (0, 0)
    epoch = st.epoch(state, me, step) if generation is not None else 0
    if last:
        entry = BoundaryKey(step, m, stage - 1, False, backwards + 1)
        if backwards == n:
            return
        if stage and entry not in local.boundaries:
            owed_wanted(state, work, me, entry, local, owes)
        else:
            owes.append(Compute(step, m, stage, True, generation, epoch, part=backwards + 1))
        return
    if may_go_forward(state, stage, forwards, backwards, local):
        entry = BoundaryKey(step, m, stage - 1, False, forwards + 1)
        if stage and entry not in local.boundaries:
            owed_wanted(state, work, me, entry, local, owes)
        else:
            owes.append(Compute(step, m, stage, False, generation, part=forwards + 1))
    if backwards < forwards:
        gradient = BoundaryKey(step, m, stage + 1, True, backwards + 1)
        if gradient not in local.boundaries:
            owed_wanted(state, work, me, gradient, local, owes)
        else:
            owes.append(Compute(step, m, stage, True, generation, epoch, part=backwards + 1))


def owed_progress(work: StepWork, stage: int, m: int, generation: int, local: LocalView, owes: list[Owe]) -> None:
    """How far it has come: who waits for whom is told by that, for nothing is receipted before a lane's end."""
    lane = local.lanes.get((work.step, m))
    if lane is not None and lane.generation == generation:
        owes.append(Report(LaneClaim(work.step, m, stage, generation, lane.forwards, lane.backwards)))


def may_go_forward(state: RunState, stage: int, forwards: int, backwards: int, local: LocalView) -> bool:
    """Of the inner step that is under way alone, and not too far ahead of its gradients."""
    config = st.config(state)
    each = config.pipeline.microbatches
    flight = local.lane_flight or st.num_stages(state) - stage + 1
    left = forwards < config.parts_per_item and forwards // each == backwards // each
    return left and forwards - backwards < flight


def owed_parts_given(
    state: RunState, work: StepWork, me: Member, stage: int, local: LocalView, owes: list[Owe]
) -> None:
    """Parts that are made go to the members that work at the lane before and after, in order, leased or replaying."""
    stores, audited = uses_store(state), st.config(state).audit.on
    if stores:
        _owed_parts_stored(state, work, me, stage, local, owes)
    for m, key, holder in _receivers(work, stage):
        if holder == me or me not in sources_of(work, key) or (stores and by_store(state, me, holder)):
            continue
        found = work.items[stage][m]
        mine = found.member == me and audited
        first = local.push_from.get((key, holder), 1)
        sound: bool | None = None
        for part in range(first, min(first + PUSHED_AT_ONCE, st.num_parts(state, m) + 1)):
            made = key.of(part)
            value = local.boundaries.get(made)
            if value is None or (mine and not is_of_lease(found, made, value, local)):
                break
            if (made, holder) in local.pushed:
                continue
            sound = is_sound(state, work, key, local) if sound is None else sound
            if not sound:
                break
            owes.append(Push(made, holder))


def _owed_parts_stored(
    state: RunState, work: StepWork, me: Member, stage: int, local: LocalView, owes: list[Owe]
) -> None:
    """What goes through the store is put there part by part, and said as soon as it is there: it is found by its hash alone."""
    last = len(work.items) - 1
    replayed = {m for (at, m, _), k in work.replays.items() if at == stage and k.member == me}
    for m in sorted({m for m in work.held.get(me, ()) if m < work.num_training} | replayed):
        found = work.items[stage][m]
        for backward in (True, False):
            whole = BoundaryKey(work.step, m, stage, backward)
            if (stage == 0 if backward else stage == last) or not puts_into_store(state, work, me, whole):
                continue
            said = found.backward_parts if backward else found.forward_parts
            ready: list[str] = []
            turn = replay_turn(work, me, whole)
            first = 1 if turn else len(said) + 1
            for part in range(first, st.num_parts(state, m) + 1):
                key = whole.of(part)
                value = local.boundaries.get(key)
                if value is None or (found.member == me and not is_of_lease(found, key, value, local)):
                    break
                if local.in_store.get(key, -1) < turn:
                    if part - first - len(ready) < STORED_AT_ONCE:
                        owes.append(StoreBoundary(key, value, turn))
                elif part == len(said) + len(ready) + 1:
                    ready.append(value)
            stored = all(local.in_store.get(whole.of(p), -1) >= turn for p in range(1, st.num_parts(state, m) + 1))
            if whole in local.boundaries and stored and local.in_store.get(whole, -1) < turn:
                owes.append(StoreBoundary(whole, local.boundaries[whole], turn))
            if ready and found.member == me and found.status != st.OPEN:
                claim = PartsClaim(work.step, m, stage, found.generation, backward, len(said) + 1, tuple(ready))
                owes.append(Report(claim))


def _receivers(work: StepWork, stage: int) -> list[tuple[int, BoundaryKey, Member]]:
    """(lane, what of mine it is for, who works at it)."""
    found: list[tuple[int, BoundaryKey, Member]] = []
    for to_stage, backward in ((stage - 1, True), (stage + 1, False)):
        if not 0 <= to_stage < len(work.items):
            continue
        lanes = {m: work.items[to_stage][m].member for m in work.live[to_stage] if m < work.num_training}
        holders = {(m, member) for m, member in lanes.items() if member is not None}
        holders |= {(m, r.member) for (at, m, _), r in work.replays.items() if at == to_stage and m < work.num_training}
        found += [(m, BoundaryKey(work.step, m, stage, backward), member) for m, member in sorted(holders)]
    return found
