"""A lane's parts in toy arithmetic: the production's order and lists, and inner weights that depend on all before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import schedule_toy as toy

from miner import owed as owing
from miner.lane_parts import finish_lane, is_next, note_part
from miner.local_view import BoundaryKey, MadeFrom
from miner.owes import Compute
from subnet.run import state as st
from subnet.words import Member

if TYPE_CHECKING:
    from schedule_miner import Miner


def compute_part(miner: Miner, me: Member, owe: Compute, w: int) -> None:
    """One part forward or back, of the inner weights that the parts before have led to."""
    local, state, key = miner.local, miner.state, (owe.step, owe.microbatch)
    if not is_next(local, owe):
        return
    last = owe.stage == st.num_stages(state) - 1
    entry = BoundaryKey(owe.step, owe.microbatch, owe.stage - 1, False, owe.part)
    gradient = BoundaryKey(owe.step, owe.microbatch, owe.stage + 1, True, owe.part)
    missing = (owe.stage and entry not in miner.values) or (owe.backward and not last and gradient not in miner.values)
    if missing:
        return
    if (*key, owe.stage, owe.backward) == miner.sim.poison and owe.generation is not None:
        local.failures[(*key, owe.generation)] = ("not finite", "the gradient isn't finite")
        return
    if key not in local.lanes:
        miner.lanes[key] = (toy.lane_start(w), [])
    at, gained = miner.lanes[key]
    x = miner.values[entry] if owe.stage else toy.token(*key, st.num_microbatches(state), owe.part)
    made = BoundaryKey(owe.step, owe.microbatch, owe.stage, owe.backward, owe.part)
    used = local.boundaries.get(entry, "")
    if not owe.backward:
        local.made_from[made] = MadeFrom(used, "", owe.generation or 0)
        miner.have(made, toy.forward(at, x, owe.stage))
        note_part(local, owe)
        return
    g = toy.loss_gradient(at, x) if last else miner.values[gradient]
    above = "" if last else local.boundaries.get(gradient, "")
    local.made_from[made] = MadeFrom(used, above, owe.generation or 0)
    miner.have(made, toy.backward(at, x, g, owe.stage))
    if last:
        local.losses[key] = toy.loss_bits(at, x)
    gained.append(toy.lane_gradient(at, x, g))
    if len(gained) == st.config(state).pipeline.microbatches:
        at, gained = toy.lane_part(at, gained), []
    miner.lanes[key] = (at, gained)
    note_part(local, owe)
    if owe.part == st.num_parts(state, owe.microbatch):
        _finish(miner, me, owe, at, x, g)


def _finish(miner: Miner, me: Member, owe: Compute, at: int, x: int, g: int) -> None:
    local, state = miner.local, miner.state
    for key, _, _ in finish_lane(local, owe, owe.part, st.num_stages(state)):
        local.kept[key] = local.boundaries[key]
    del miner.lanes[owe.step, owe.microbatch]
    if not owing.may_add(state, me, local, owe):
        return
    sums = miner.sums.setdefault((owe.step, owe.epoch), {})
    for p in st.partitions_of(state, st.group_of(state, owe.stage), owe.stage):
        values = toy.gradient(at, x, g, owe.stage, p)
        sums[p] = toy.accumulate(owe.step, sums.get(p), values)
    assert owe.generation is not None
    local.added[owe.step, owe.microbatch, owe.epoch] = owe.generation
