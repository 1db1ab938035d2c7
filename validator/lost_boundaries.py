"""Boundaries that somebody needs and can't get: made again, and whose receipt names what the store never had is void.

A reported boundary is made again by its producer if that one lives, then by others. Where it had to be in the store before it
was receipted, and two replays haven't helped, the store is asked: nobody's word alone makes an honest partial void.
"""

from __future__ import annotations

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Replay, RunState, StepWork
from subnet.words import Member
from validator.decide_members import silent_outcome
from validator.decision import Decision, ProbeSlices, because
from validator.intake import replay_allowed
from validator.policy import Policy
from validator.randomness import Randomness
from validator.watch import Watch

Missing = tuple[int, int, int, bool]
"""(step, microbatch, producing stage, backward)."""
TRIED = 2
"""Replays of a boundary before its receipt is doubted."""
TRIED_STRAIGHT = 4
"""And, with audits, where it doesn't go through the store: a receipt may name what was never made."""


def decide_replays(
    now_s: float, state: RunState, work: StepWork, watch: Watch, policy: Policy, rng: Randomness
) -> list[Decision]:
    """A reported missing boundary whose producer is receipted is made again, by its producer if that one lives."""
    decided: list[Decision] = []
    for key in [key for key in watch.missing if key[0] == work.step]:
        del watch.missing[key]
        if not replay_allowed(state, key):
            continue
        step, m, stage, backward = key
        replicas = st.ready(state, stage)
        old = work.replays.get((stage, m, backward))
        if not replicas:
            continue
        clock = ("replay", key, old.generation if old else 0)
        if old is not None and old.member in replicas and watch.age(clock, now_s) < policy.replay_s:
            continue
        doubted = _evaluated_again(state, work, key, old, replicas, rng)
        if doubted is None:
            doubted = _doubted(now_s, state, work, watch, key, old)
        if doubted:
            return decided + doubted  # what else is missing may be otherwise then
        if doubted is not None:
            continue
        producer = work.items[stage][m].member
        member = producer if old is None and producer in replicas and producer else rng.choice(replicas)
        generation = (old.generation if old else 0) + 1
        watch.restart_clock(("replay", key, generation), now_s)
        event = ev.ReplayLeased(step, m, stage, backward, member, generation)
        decided.append(Decision(event, because("boundary_lost", stage=stage, backward=int(backward))))
    return decided


def _doubted(
    now_s: float, state: RunState, work: StepWork, watch: Watch, key: Missing, old: Replay | None
) -> list[Decision] | None:
    """What is done about a receipt that may be false; None where it isn't doubted, or the store has what it names."""
    step, m, stage, backward = key
    found = work.items[stage][m]
    value = found.backward_hash if backward else found.forward_hash
    info = state.members.get(found.member) if found.member is not None else None
    if old is None or old.generation < TRIED or info is None or found.member is None or not value:
        return None
    by_store = st.config(state).pipeline.boundaries == "store" or not info.reachable
    if m >= work.num_training or st.is_sealed(state, stage, work):
        return None
    if not by_store:
        return _doubted_straight(now_s, state, work, watch, key, old)
    probe = ProbeSlices(step, st.group_of(state, stage), -old.generation, (value,))
    if probe not in watch.probed:
        watch.missing[key] = None
        if probe in watch.started:
            return []
        watch.started.add(probe)
        return [Decision(probe, because("boundary_not_found", stage=stage, replays=old.generation))]
    if value in watch.blobs:
        return None
    age_s = watch.age(("replay", key, old.generation), now_s)
    return [silent_outcome(state, stage, found.member, "receipt_without_bytes", age_s, step)]


def _evaluated_again(
    state: RunState, work: StepWork, key: Missing, old: Replay | None, replicas: list[Member], rng: Randomness
) -> list[Decision] | None:
    """A hold-out item whose receipt may be false is dealt once more: nothing is added for it, and no void opens it again."""
    step, m, stage, backward = key
    if m < work.num_training or backward or old is None or old.generation % TRIED_STRAIGHT:
        return None
    found, at = work.items[stage][m], stage + 1
    asked = at < len(work.items) and not work.items[at][m].forwarded
    if not st.config(state).audit.on or found.status != st.DONE or not asked:
        return None
    others = [k for k in replicas if found.member is None or k.hotkey != found.member.hotkey]
    event = ev.Leased(step, m, stage, rng.choice(others or replicas), found.generation + 1)
    return [Decision(event, because("receipt_without_bytes", stage=stage, replays=old.generation))]


def _doubted_straight(
    now_s: float, state: RunState, work: StepWork, watch: Watch, key: Missing, old: Replay
) -> list[Decision] | None:
    """Nobody can look: either the receipt is false, or whoever reports it missing lies, or can't be reached.

    The first time its maker's sum is void, at nobody's cost but work. From then on, in any step, one of the two is gone, with a
    longer wait each time: who has differed with more coldkeys; of two that have differed with as many by turns, first the maker.
    """
    step, m, stage, backward = key
    at = stage - 1 if backward else stage + 1
    maker, reporter = work.items[stage][m].member, work.items[at][m].member if 0 <= at < len(work.items) else None
    if not st.config(state).audit.on or maker not in state.members or reporter not in state.members:
        return None
    pair = (maker.hotkey, reporter.hotkey)
    if old.generation < (TRIED if watch.audits.differences(pair) else TRIED_STRAIGHT):
        return None
    age_s = watch.age(("replay", key, old.generation), now_s)
    coldkeys = (state.members[maker].coldkey, state.members[reporter].coldkey)
    before, (against_maker, against_reporter) = watch.audits.differ(pair, coldkeys)
    if not before:
        reason = because("receipt_without_bytes", stage=stage, replays=old.generation)
        return [Decision(ev.Voided(step, stage, maker, "doubted"), reason)]
    blames_reporter = against_reporter > against_maker or (against_reporter == against_maker and before % 2 == 0)
    if blames_reporter and not st.is_sealed(state, at, work):
        return [Decision(ev.Gone(reporter, "silent"), because("finds_nothing", stage=at, age_s=age_s))]
    return [Decision(ev.Gone(maker, "silent"), because("receipt_without_bytes", stage=stage, age_s=age_s))]
