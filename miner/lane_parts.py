"""How a lane's parts become one item: progress noted part by part, and at the end the lists that its receipt names. Pure."""

from __future__ import annotations

from miner.local_view import BoundaryKey, LaneLocally, LocalView, MadeFrom
from miner.owes import Compute
from subnet.protocol.parts import encode_parts, parts_hash


def is_next(local: LocalView, owe: Compute) -> bool:
    """Whether the part is the one that the lane is at, under the lease it is done under."""
    lane = local.lanes.get((owe.step, owe.microbatch))
    if lane is None:
        return owe.part == 1
    if lane.generation != (owe.generation or 0):
        return False
    return owe.part == (lane.backwards if owe.backward else lane.forwards) + 1


def note_part(local: LocalView, owe: Compute) -> None:
    """The part is computed."""
    key = (owe.step, owe.microbatch)
    lane = local.lanes.get(key) or LaneLocally(owe.generation or 0)
    forwards, backwards = lane.forwards, lane.backwards
    if owe.backward:
        backwards = owe.part
    local.lanes[key] = LaneLocally(lane.generation, max(forwards, owe.part), backwards)


def add_seconds(local: LocalView, owe: Compute, compute_s: float) -> None:
    """What the item's receipt says that it took, its parts together."""
    key = BoundaryKey(owe.step, owe.microbatch, owe.stage, owe.backward)
    local.compute_s[key] = compute_s + (local.compute_s.get(key, 0.0) if owe.part > 1 else 0.0)


def finish_lane(
    local: LocalView, owe: Compute, num_parts: int, num_stages: int
) -> list[tuple[BoundaryKey, bytes, bool]]:
    """The lane's last part is back: what its receipt names is known from now on.

    Returns the lists to keep, (boundary, bytes, whether it is mine).
    """
    step, m, stage, last = owe.step, owe.microbatch, owe.stage, owe.stage == num_stages - 1
    made = [local.made_from[BoundaryKey(step, m, stage, True, part)] for part in range(1, num_parts + 1)]
    x, gradient = [one.x for one in made], [one.gradient for one in made]
    used = MadeFrom(
        x=parts_hash(x) if stage else "",
        gradient="" if last else parts_hash(gradient),
        generation=owe.generation or 0,
    )
    lists = [(BoundaryKey(step, m, stage - 1, False), x, False)] if stage else []
    if not last:
        lists.append((BoundaryKey(step, m, stage + 1, True), gradient, False))
    for key, there in ((BoundaryKey(step, m, stage, False), not last), (BoundaryKey(step, m, stage, True), stage > 0)):
        local.made_from[key] = MadeFrom(x=used.x, generation=used.generation) if not key.backward else used
        if there:
            lists.append((key, [local.boundaries[key.of(part)] for part in range(1, num_parts + 1)], True))
    local.lanes.pop((step, m), None)
    kept: list[tuple[BoundaryKey, bytes, bool]] = []
    for key, hashes, own in lists:
        local.boundaries[key] = parts_hash(hashes)
        kept.append((key, encode_parts(hashes), own))
    return kept
