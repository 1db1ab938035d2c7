"""Who works on what: paths dealt in a rolling window by measured speed, late leases revoked, lost boundaries replayed.

A lease is only taken back by its holder's word that the gradient isn't added, or with the holder's whole partial. Its
clock runs only while its input is receipted, and leaves out what the input and those before it on its link take over the
slowest link that a run waits for: nobody is late for somebody else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Item, RunState, StepWork
from subnet.words import Member
from validator.decide_members import silent_outcome
from validator.decision import Decision, because
from validator.item_speeds import Speeds, item_s
from validator.lane_clocks import late_lanes
from validator.lost_boundaries import decide_replays
from validator.policy import Policy
from validator.randomness import Randomness
from validator.suspects import died_of, wait_left_s
from validator.watch import Watch

if TYPE_CHECKING:
    from validator.index import RunIndex

MAX_DOUBLINGS = 5
LEASES_AT_ONCE = 400
"""With an index, so many leases are dealt in one go at most, but for a few: a step of a large fleet opens bit by bit."""


def decide_leases(now_s: float, state: RunState, watch: Watch, policy: Policy, rng: Randomness) -> list[Decision]:
    """Of two open steps the older comes first in everything: the other can't be sealed before it."""
    works = st.works(state)
    for work in works:
        decided = _late(now_s, state, work, watch, policy) or _skips(state, work, watch)
        if not decided and st.num_parts(state, 0):
            decided = late_lanes(now_s, state, work, watch, policy)
        if decided:
            return decided
    decided = _deals(now_s, state, watch, policy)
    for work in works:
        decided = decided or decide_replays(now_s, state, work, watch, policy, rng)
    return decided


# --- clocks ------------------------------------------------------------------------------------------------------


def _late(now_s: float, state: RunState, work: StepWork, watch: Watch, policy: Policy) -> list[Decision]:
    """Leases past their deadline are revoked; holders that don't answer a revocation are void."""
    decided: list[Decision] = []
    silent: set[Member] = set()
    index = watch.index.sync(state) if watch.index is not None else None
    if index is not None:
        _start_clocks(now_s, work, watch, policy, index)
    work_s = watch.store.work_s(now_s)
    for stage, live in enumerate(work.live):
        if index is not None and work_s < index.late_look_s[stage]:
            continue
        look_s = inf
        if index is None:
            revoking, running = sorted(live), [m for m in sorted(live) if clock_runs(work, stage, m)]
        else:
            revoking = sorted(index.revoking[stage])
            running, soonest_s = _quiet_leases(now_s, watch, policy, index, stage)
            look_s = work_s + soonest_s
        load = Counter(work.items[stage][m].member for m in running if work.items[stage][m].status == st.LIVE)
        sends = Counter(sender for m in running if (sender := _sender(work, stage, m)) is not None)
        for other in st.works(state):
            if other is not work:
                load.update(other.items[stage][m].member for m in other.live[stage] if clock_runs(other, stage, m))
        for m in revoking:
            found = work.items[stage][m]
            if found.status == st.REVOKING and found.member is not None and m < work.num_training:
                age_s = watch.age(("revoking", work.step, m, stage, found.generation), now_s)
                look_s = min(look_s, work_s + policy.answer_s - age_s)
                if age_s >= policy.answer_s and found.member not in silent:
                    silent.add(found.member)
                    outcome = silent_outcome(state, stage, found.member, "no_answer_to_revoking", age_s, step=work.step)
                    decided.append(outcome)
        for m in running:
            found = work.items[stage][m]
            if found.status != st.LIVE or found.member is None or found.member in silent or st.num_parts(state, m):
                continue
            age_s = watch.age(("lease", work.step, m, stage, found.generation, found.forwarded), now_s)
            # A queue is worked off one by one: each item finished gives those behind it their time anew.
            age_s = min(age_s, watch.since_progress_s(found.member, now_s))
            soonest_s = _soonest_s(watch, policy, found)
            look_s = min(look_s, work_s + soonest_s - age_s)
            if age_s < soonest_s:
                continue
            deadline_s = lease_deadline_s(state, watch, policy, stage, found, load[found.member])
            if (sender := _sender(work, stage, m)) is not None:
                deadline_s += watch.waits.boundaries_s(state, max(load[found.member], sends[sender]))
            if age_s >= deadline_s:
                event = ev.Revoking(work.step, m, stage, found.generation)
                decided.append(Decision(event, because("lease_late", age_s=age_s, deadline_s=deadline_s)))
        if index is not None:
            index.late_look_s[stage] = look_s
    return decided


def _quiet_leases(now_s: float, watch: Watch, policy: Policy, index: RunIndex, stage: int) -> tuple[list[int], float]:
    """Running leases of members that finished nothing for so long that one may be late; and in how long others may be."""
    running, soonest_s = list[int](), inf
    for member in index.by_stage[stage]:
        quiet_s = watch.since_progress_s(member, now_s)
        if quiet_s < policy.lease_min_s:
            soonest_s = min(soonest_s, policy.lease_min_s - quiet_s)
        else:
            running += index.running(stage, member)
    return sorted(running), soonest_s


def _start_clocks(now_s: float, work: StepWork, watch: Watch, policy: Policy, index: RunIndex) -> None:
    """What was leased, forwarded or revoked since the last look is timed from now on."""
    work_s = watch.store.work_s(now_s)
    watch.forget_clocks(index.over)
    index.over.clear()
    for stage, fresh in enumerate(index.fresh):
        soonest_s = policy.lease_min_s if index.progressed[stage] else inf
        index.progressed[stage] = False
        for m in fresh:
            found = work.items[stage][m]
            if found.status == st.LIVE:
                key = ("lease", work.step, m, stage, found.generation, found.forwarded)
                soonest_s = min(soonest_s, policy.lease_min_s - watch.age(key, now_s))
            elif m < work.num_training:
                key = ("revoking", work.step, m, stage, found.generation)
                soonest_s = min(soonest_s, policy.answer_s - watch.age(key, now_s))
        fresh.clear()
        index.late_look_s[stage] = min(index.late_look_s[stage], work_s + soonest_s)


def _soonest_s(watch: Watch, policy: Policy, found: Item) -> float:
    """No deadline of this lease is earlier, whatever else its member has to do, until that one finishes something."""
    own_s = watch.item_s(found.member) if found.member is not None else None
    doublings = min(found.generation - 1, MAX_DOUBLINGS)
    least_s = policy.lease_factor * min(own_s, policy.lease_unknown_s) if own_s is not None else 0.0
    return max(policy.lease_min_s, least_s) * 2**doublings


def clock_runs(work: StepWork, stage: int, m: int) -> bool:
    """Whether the lease's input is receipted: the forward one, or after its forward the gradient."""
    found = work.items[stage][m]
    if not found.forwarded or m >= work.num_training:
        return stage == 0 or work.items[stage - 1][m].forwarded
    return stage == len(work.items) - 1 or work.items[stage + 1][m].status == st.DONE


def _sender(work: StepWork, stage: int, m: int) -> Member | None:
    """Whose link the input of a running lease comes over; None: from a store of tokens, or from its holder itself."""
    found = work.items[stage][m]
    other = stage + 1 if found.forwarded and m < work.num_training else stage - 1
    return work.items[other][m].member if 0 <= other < len(work.items) else None


def lease_deadline_s(state: RunState, watch: Watch, policy: Policy, stage: int, found: Item, num_running: int) -> float:
    """Three times what the member takes for all that it could be working on; doubles with each generation."""
    assert found.member is not None
    each_s = min(item_s(state, watch, policy, stage, found.member), policy.lease_unknown_s)
    expected_s = each_s * max(1, num_running)
    doublings = min(found.generation - 1, MAX_DOUBLINGS)
    return max(policy.lease_min_s, policy.lease_factor * expected_s) * 2**doublings


# --- skips -------------------------------------------------------------------------------------------------------


def _skips(state: RunState, work: StepWork, watch: Watch) -> list[Decision]:
    """An item that fails the same way for two members is skipped everywhere; one at a time."""
    if watch.index is not None:
        failing = sorted(watch.index.sync(state).failing)
    else:
        failing = [(stage, m) for stage, undealt in enumerate(work.undealt) for m in sorted(undealt)]
    for stage, m in failing:
        found = work.items[stage][m]
        if len(found.failures) < 2 or not may_skip(state, work, m):
            continue
        verdict = failure_agreed(state, stage, found)
        if verdict is not None:
            failure, confirmed = verdict
            event = ev.MicrobatchSkipped(work.step, m, stage, failure, confirmed)
            return [Decision(event, because("fails_everywhere", num_failures=len(found.failures)))]
    return []


def may_skip(state: RunState, work: StepWork, m: int) -> bool:
    """Never after a seal of the step, which counts it already; never the last microbatch."""
    sealed = work is state.work and state.seals
    return m >= work.num_training or (not sealed and st.num_counted(work) > 1)


def failure_agreed(state: RunState, stage: int, found: Item) -> tuple[str, bool] | None:
    """The failure that two hotkeys report (confirmed), or the only live replica twice (not)."""
    by_failure: dict[str, set[str]] = {}
    for failure in found.failures:
        by_failure.setdefault(failure.failure, set()).add(failure.hotkey)
    for failure, hotkeys in sorted(by_failure.items()):
        if len(hotkeys) > 1:
            return failure, True
    return lone_replica_failure(state, stage, found)


def lone_replica_failure(state: RunState, stage: int, found: Item) -> tuple[str, bool] | None:
    """The same failure under two generations, where there is nobody else to try."""
    if len(st.ready(state, stage)) > 1:
        return None
    count = Counter(failure.failure for failure in found.failures)
    twice = sorted(failure for failure, times in count.items() if times > 1)
    return (twice[0], False) if twice else None


# --- dealing -----------------------------------------------------------------------------------------------------


@dataclass
class _Desk:
    """One round of dealing of one step: who is ready, what they have ahead, how long each item takes them."""

    state: RunState
    work: StepWork
    replicas: list[list[Member]]
    load: Counter[Member]
    each_s: Speeds
    resting: set[tuple[int, int]]
    """Items (microbatch, stage) that several processes died of, while they may not be dealt again."""
    shunned: dict[tuple[int, int], set[str]]
    """Who was lost with an item: it goes to others first."""
    decided: list[Decision] = field(default_factory=list[Decision])
    dealt: list[set[int]] = field(default_factory=list[set[int]])
    """By stage: microbatches."""

    def undealt(self, stage: int) -> list[int]:
        """Items to deal, in order; hold-out items only of the older step: they are of the state that it updates."""
        found = sorted(self.work.undealt[stage])
        return found if self.work is self.state.work else [m for m in found if m < self.work.num_training]

    def finish_s(self, member: Member, stage: int) -> float:
        """When one more item would be finished; who was gone silently before is trusted with less."""
        doubt = 2 ** min(self.state.absences.get(member.hotkey, 0), MAX_DOUBLINGS)
        return (self.load[member] + 1) * self.each_s.of(member, stage) * doubt

    def is_dealt(self, m: int, stage: int) -> bool:
        return m in self.dealt[stage] or self.work.items[stage][m].status != st.OPEN

    def deal(self, m: int, stage: int, member: Member) -> None:
        found = self.work.items[stage][m]
        self.load[member] += 1
        self.dealt[stage].add(m)
        event = ev.Leased(self.work.step, m, stage, member, found.generation + 1)
        self.decided.append(Decision(event, because("dealt", ahead=self.load[member])))

    def choose(self, m: int, stage: int, free: list[Member] | None = None) -> Member | None:
        """Fewest silent voids first, then whoever would finish it first; not who failed at it, or had it last.

        But it goes to who had it last where that one is blameless (:attr:`Item.again`): else it could go to and fro between
        two that differ, each making the other's neighbours begin anew.

        ``free``: who has room. An item that somebody who hasn't failed at it could do waits for that one: dealing it
        again to who failed would go round and round.
        """
        found = self.work.items[stage][m]
        able = replicas = self.replicas[stage]
        if found.again and found.member in replicas:
            return found.member if free is None or found.member in free else None
        if found.failures or self.shunned:
            failed = {failure.hotkey for failure in found.failures} | self.shunned.get((m, stage), set())
            able = [k for k in replicas if k.hotkey not in failed] or replicas
        if free is not None:
            able = free if able is replicas else [k for k in able if k in free]
        if found.member is not None:
            able = [k for k in able if k != found.member] or able
        silences = self.work.silences
        return min(able, key=lambda k: (silences.get(k, 0), self.finish_s(k, stage), k), default=None)


def _deals(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Opens paths from stage 0 as far as its members' windows go, and deals again what is open further on."""
    works, stages = st.works(state), range(st.num_stages(state))
    if not any(any(work.undealt) or _revoked_evaluations(work, watch, state) for work in works):
        return []
    speeds = Speeds(state, watch, policy)
    if watch.index is not None:  # then one step is open at a time
        index = watch.index.sync(state)
        replicas = [index.ready(state, stage) for stage in stages]
        if not _has_room(state, works[0], index, replicas[0], speeds, policy):
            return []
        load = index.load.copy()
    else:
        replicas = [st.ready(state, stage) for stage in stages]
        load = Counter[Member]()
        for work in works:
            for stage in stages:
                load.update(m for m in (work.items[stage][i].member for i in work.live[stage]) if m is not None)
    decided: list[Decision] = []
    for work in works:
        lost = [key for key in watch.lost_with if key[0] == work.step]
        resting = {key[1:] for key in lost if wait_left_s(now_s, watch, policy, *key) > 0}
        shunned = {key[1:]: died_of(watch, *key) for key in lost}
        desk = _Desk(state, work, replicas, load, speeds, resting, shunned, dealt=[set() for _ in stages])
        at_once = len(work.items[0]) if watch.index is None else max(8, LEASES_AT_ONCE // len(work.items))
        _deal_step(desk, watch, policy, at_once)
        decided += desk.decided
    return decided


def _deal_step(desk: _Desk, watch: Watch, policy: Policy, at_once: int) -> None:
    _deal_first_stage(desk, policy, at_once)
    for stage in range(1, len(desk.replicas)):
        for m in _open_ahead(desk, stage, watch):
            if (m, stage) not in desk.resting:
                member = desk.choose(m, stage)
                if member is not None:
                    desk.deal(m, stage, member)
    _deal_revoked_evaluations(desk, watch)


def _has_room(
    state: RunState, work: StepWork, index: RunIndex, first: list[Member], speeds: Speeds, policy: Policy
) -> bool:
    """Whether anything could be dealt at all."""
    if any(index.ahead) or index.revoked_evaluations:
        return True
    num_stages = len(work.items)
    return bool(work.undealt[0]) and any(
        index.load[k] < window(policy, num_stages, speeds.of(k, 0), by_store=_uses_store(state)) for k in first
    )


def _open_ahead(desk: _Desk, stage: int, watch: Watch) -> list[int]:
    """Items without a lease whose item of the stage before has one, or had; in order."""
    if watch.index is not None:
        return sorted(watch.index.ahead[stage] | (desk.dealt[stage - 1] & desk.work.undealt[stage]))
    return [m for m in desk.undealt(stage) if desk.is_dealt(m, stage - 1)]


def _deal_first_stage(desk: _Desk, policy: Policy, at_once: int) -> None:
    replicas = desk.replicas[0]
    num_stages, by_store = len(desk.work.items), _uses_store(desk.state)
    windows = {k: window(policy, num_stages, desk.each_s.of(k, 0), by_store=by_store) for k in replicas}
    free = [k for k in replicas if desk.load[k] < windows[k]]
    if not free:
        return
    for m in desk.undealt(0):
        if (m, 0) in desk.resting:
            continue
        member = desk.choose(m, 0, free)
        if member is None:
            continue
        desk.deal(m, 0, member)
        if len(desk.decided) >= at_once:
            return
        if desk.load[member] >= windows[member]:
            free = [k for k in free if k != member]
            if not free:
                return


def _uses_store(state: RunState) -> bool:
    """Whether boundaries may go through the store, which takes longer."""
    if st.config(state).pipeline.boundaries == "store":
        return True
    return any(not info.reachable for info in state.members.values())


def window(policy: Policy, num_stages: int, each_s: float, *, by_store: bool = False) -> int:
    """Items that keep a member of the first stage busy while others of its items travel down the pipeline and back."""
    hops_s = policy.window_hop_s * 2 * (num_stages - 1) if by_store else 0.0
    travelling = int((policy.window_s + hops_s) / each_s) if each_s > 0 else policy.window_max
    return min(policy.window_max, num_stages + policy.window_extra + travelling)


def _revoked_evaluations(work: StepWork, watch: Watch, state: RunState) -> list[tuple[int, int]]:
    """(microbatch, stage), by stage."""
    if not work.num_evaluation:
        return []
    if watch.index is not None:
        return [(m, stage) for stage, m in sorted(watch.index.sync(state).revoked_evaluations)]
    return [
        (m, stage)
        for stage, live in enumerate(work.live)
        for m in sorted(live)
        if m >= work.num_training and work.items[stage][m].status == st.REVOKING
    ]


def _deal_revoked_evaluations(desk: _Desk, watch: Watch) -> None:
    """Nothing is added for an evaluation item, so it needs nobody's word to be dealt again."""
    for m, stage in _revoked_evaluations(desk.work, watch, desk.state):
        if st.is_evaluation(desk.state, m):
            member = desk.choose(m, stage)
            if member is not None:
                desk.deal(m, stage, member)
