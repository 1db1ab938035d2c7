"""Whose lane is late: nothing is receipted of a lane before its end, so its clock runs by what its holders say of themselves.

A holder is waited for while the next part's input has been made before it (or the gradient behind it) and it comes on with none
of its lanes. Who says that it is further than it is makes others wait for it, and is waited for itself; it costs time, not bits.
"""

from __future__ import annotations

from collections import Counter

from subnet.protocol.messages import LaneClaim, PartsClaim
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import RunState, StepWork
from subnet.words import Member
from validator.decision import Decision, because
from validator.intake_audits import Admitted, Ignored
from validator.item_speeds import item_s
from validator.policy import Policy
from validator.watch import Lane, Watch

MAX_DOUBLINGS = 5
LOOK_EVERY_S = 0.5
DOUBTED_AFTER = 2
"""Leases on one lane's stage that have been late before its neighbours' word is doubted."""


def note_lane(state: RunState, member: Member, claim: LaneClaim, watch: Watch) -> Ignored:
    """What its holder says of a lane; makes no event."""
    found = st.item(state, claim.step, claim.microbatch, claim.stage)
    if found is None or found.member != member or found.generation != claim.generation or found.status == st.OPEN:
        return Ignored("not the present lease")
    if not 0 <= claim.backwards <= claim.forwards <= st.num_parts(state, claim.microbatch):
        return Ignored("no progress of a lane")
    watch.note_lane(member, claim)
    return Ignored("noted")


def parts_made(state: RunState, member: Member, claim: PartsClaim) -> Admitted:
    """Of a lane that is leased to it, or that it has receipted; each part once, in order."""
    found = st.item(state, claim.step, claim.microbatch, claim.stage)
    if found is None or found.member != member or found.generation != claim.generation or found.status == st.OPEN:
        return Ignored("not the present lease")
    known = found.backward_parts if claim.backward else found.forward_parts
    end = st.num_parts(state, claim.microbatch)
    if not claim.hashes or claim.first != len(known) + 1 or len(known) + len(claim.hashes) > end:
        return Ignored("known, or out of order")
    key = (claim.step, claim.microbatch, claim.stage, claim.generation, claim.backward)
    return [ev.PartsMade(*key, claim.first, claim.hashes)]


def late_lanes(now_s: float, state: RunState, work: StepWork, watch: Watch, policy: Policy) -> list[Decision]:
    """Leases on lanes that are past their deadline, to be revoked; looked for a few times a second at most."""
    if now_s < watch.lanes_look_s:
        return []
    watch.lanes_look_s = now_s + LOOK_EVERY_S
    watch.see_lanes(now_s)
    decided: dict[ev.Revoking, Decision] = {}
    for stage, live in enumerate(work.live):
        running = [m for m in sorted(live) if m < work.num_training and lane_runs(state, work, stage, m, watch)]
        load = Counter(work.items[stage][m].member for m in live if m < work.num_training)
        for m in running:
            found = work.items[stage][m]
            if found.status != st.LIVE or found.member is None:
                continue
            key = ("lane", work.step, m, stage, found.generation, watch.moves.get(found.member, 0))
            age_s = watch.age(key, now_s)
            whole_s = item_s(state, watch, policy, stage, found.member)
            part_s = min(whole_s / max(1, st.num_parts(state, m)), policy.lease_unknown_s)
            if watch.item_s(found.member) is None:
                part_s = policy.lease_unknown_s
            deadline_s = max(policy.lease_min_s, policy.lease_factor * part_s * load[found.member])
            deadline_s += watch.waits.boundaries_s(state, 2 * load[found.member])
            deadline_s *= 2 ** min(found.generation - 1, MAX_DOUBLINGS)
            if age_s >= deadline_s:
                late = because("lease_late", age_s=age_s, deadline_s=deadline_s)
                decided.update({event: Decision(event, late) for event in _revoked(work, stage, m)})
    return list(decided.values())


def _revoked(work: StepWork, stage: int, m: int) -> list[ev.Revoking]:
    """The late lease; once several have been late there, also those before and behind it: what they say that they made may
    never have come."""
    stages = [stage]
    if work.items[stage][m].generation > DOUBTED_AFTER:
        stages += [at for at in (stage - 1, stage + 1) if 0 <= at < len(work.items)]
    leases = [(at, work.items[at][m]) for at in stages]
    return [ev.Revoking(work.step, m, at, found.generation) for at, found in leases if found.status == st.LIVE]


def lane_runs(state: RunState, work: StepWork, stage: int, m: int, watch: Watch) -> bool:
    """Whether the holder of the lane at this stage could go on with it, as far as is known."""
    config, last = st.config(state), len(work.items) - 1
    each, n = config.pipeline.microbatches, config.parts_per_item
    mine = _come(work, stage, m, watch, n)
    before = _come(work, stage - 1, m, watch, n).forwards if stage else n
    if stage == last:
        return before > mine.backwards
    after = _come(work, stage + 1, m, watch, n).backwards
    ahead = mine.forwards < n and mine.forwards // each == mine.backwards // each
    flight = mine.forwards - mine.backwards < last - stage + 1
    return (mine.backwards < mine.forwards and after > mine.backwards) or (ahead and flight and before > mine.forwards)


def _come(work: StepWork, stage: int, m: int, watch: Watch, num_parts: int) -> Lane:
    found = work.items[stage][m]
    if found.status == st.DONE:
        return Lane(found.generation, num_parts, num_parts)
    told = watch.lanes.get((work.step, m, stage))
    return told if told is not None and told.generation == found.generation else Lane(found.generation, 0, 0)
