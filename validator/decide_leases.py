"""Who works on what: paths dealt in a rolling window by measured speed, late leases revoked, lost boundaries replayed.

A lease is only taken back by its holder's word that the gradient isn't added, or with the holder's whole partial. Its
clock runs only while its input is receipted, so that nobody is late for somebody else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Item, RunState, StepWork
from subnet.words import Member
from validator.decide_members import silent_outcome
from validator.decision import Decision, because
from validator.intake import replay_allowed
from validator.policy import Policy
from validator.randomness import Randomness
from validator.suspects import died_of, wait_left_s
from validator.watch import Watch

MAX_DOUBLINGS = 5


def decide_leases(now_s: float, state: RunState, watch: Watch, policy: Policy, rng: Randomness) -> list[Decision]:
    """Of two open steps the older comes first in everything: the other can't be sealed before it."""
    for work in st.works(state):
        decided = _late(now_s, state, work, watch, policy) or _skips(state, work)
        if decided:
            return decided
    return _deals(now_s, state, watch, policy) or _replays(now_s, state, watch, policy, rng)


# --- clocks ------------------------------------------------------------------------------------------------------


def _late(now_s: float, state: RunState, work: StepWork, watch: Watch, policy: Policy) -> list[Decision]:
    """Leases past their deadline are revoked; holders that don't answer a revocation are void."""
    decided: list[Decision] = []
    silent: set[Member] = set()
    for stage, live in enumerate(work.live):
        running = _running(work, stage)
        ahead = [pair for other in st.works(state) if other is not work for pair in _running(other, stage)]
        load = Counter(found.member for _, found in [*running, *ahead] if found.status == st.LIVE)
        for m in sorted(live):
            found = work.items[stage][m]
            if found.status == st.REVOKING and found.member is not None and m < work.num_training:
                age_s = watch.age(("revoking", work.step, m, stage, found.generation), now_s)
                if age_s >= policy.answer_s and found.member not in silent:
                    silent.add(found.member)
                    outcome = silent_outcome(state, stage, found.member, "no_answer_to_revoking", age_s, step=work.step)
                    decided.append(outcome)
        for m, found in running:
            if found.status != st.LIVE or found.member is None or found.member in silent:
                continue
            phase = clock_phase(found)
            age_s = watch.age(("lease", work.step, m, stage, found.generation, phase), now_s)
            # A queue is worked off one by one: each item finished gives those behind it their time anew.
            age_s = min(age_s, watch.since_progress_s(found.member, now_s))
            deadline_s = lease_deadline_s(state, watch, policy, stage, found, load[found.member])
            if age_s >= deadline_s:
                event = ev.Revoking(work.step, m, stage, found.generation)
                decided.append(Decision(event, because("lease_late", age_s=age_s, deadline_s=deadline_s)))
    return decided


def _running(work: StepWork, stage: int) -> list[tuple[int, Item]]:
    """Leases of a stage whose clock runs, in order."""
    return [(m, work.items[stage][m]) for m in sorted(work.live[stage]) if clock_runs(work, stage, m)]


def clock_runs(work: StepWork, stage: int, m: int) -> bool:
    """Whether the lease's input is receipted: the forward one, or after its forward the gradient."""
    found = work.items[stage][m]
    if not found.forwarded or m >= work.num_training:
        return stage == 0 or work.items[stage - 1][m].forwarded
    return stage == len(work.items) - 1 or work.items[stage + 1][m].status == st.DONE


def clock_phase(found: Item) -> bool:
    """Forward and backward are timed apart."""
    return found.forwarded


def lease_deadline_s(state: RunState, watch: Watch, policy: Policy, stage: int, found: Item, num_running: int) -> float:
    """Three times what the member takes for all that it could be working on; doubles with each generation."""
    assert found.member is not None
    each_s = min(item_s(state, watch, policy, stage, found.member), policy.lease_unknown_s)
    expected_s = each_s * max(1, num_running)
    doublings = min(found.generation - 1, MAX_DOUBLINGS)
    return max(policy.lease_min_s, policy.lease_factor * expected_s) * 2**doublings


def item_s(state: RunState, watch: Watch, policy: Policy, stage: int, member: Member) -> float:
    """Seconds of one item, forward and backward, of this member; of its stage's others where it is unknown."""
    own = watch.item_s(member)
    if own is not None:
        return own
    known = [s for k in st.members_of(state, stage) if (s := watch.item_s(k)) is not None]
    return sum(known) / len(known) if known else policy.lease_unknown_s


# --- skips -------------------------------------------------------------------------------------------------------


def _skips(state: RunState, work: StepWork) -> list[Decision]:
    """An item that fails the same way for two members is skipped everywhere; one at a time."""
    for stage in range(st.num_stages(state)):
        for m in sorted(work.undealt[stage]):
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
    each_s: dict[Member, float]
    resting: set[tuple[int, int]]
    """Items (microbatch, stage) that several processes died of, while they may not be dealt again."""
    shunned: dict[tuple[int, int], set[str]]
    """Who was lost with an item: it goes to others first."""
    decided: list[Decision] = field(default_factory=list[Decision])
    dealt: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def undealt(self, stage: int) -> list[int]:
        """Items to deal, in order; hold-out items only of the older step: they are of the state that it updates."""
        found = sorted(self.work.undealt[stage])
        return found if self.work is self.state.work else [m for m in found if m < self.work.num_training]

    def finish_s(self, member: Member) -> float:
        """When one more item would be finished; who was gone silently before is trusted with less."""
        doubt = 2 ** min(self.state.absences.get(member.hotkey, 0), MAX_DOUBLINGS)
        return (self.load[member] + 1) * self.each_s[member] * doubt

    def is_dealt(self, m: int, stage: int) -> bool:
        return (m, stage) in self.dealt or self.work.items[stage][m].status != st.OPEN

    def deal(self, m: int, stage: int, member: Member) -> None:
        found = self.work.items[stage][m]
        self.load[member] += 1
        self.dealt.add((m, stage))
        event = ev.Leased(self.work.step, m, stage, member, found.generation + 1)
        self.decided.append(Decision(event, because("dealt", ahead=self.load[member])))

    def choose(self, m: int, stage: int, free: list[Member] | None = None) -> Member | None:
        """Fewest silent voids first, then whoever would finish it first; not who failed at it, or had it last.

        ``free``: who has room. An item that somebody who hasn't failed at it could do waits for that one: dealing it
        again to who failed would go round and round.
        """
        found = self.work.items[stage][m]
        failed = {failure.hotkey for failure in found.failures} | self.shunned.get((m, stage), set())
        replicas = self.replicas[stage]
        able = [k for k in replicas if k.hotkey not in failed] or replicas
        if free is not None:
            able = [k for k in able if k in free]
        others = [k for k in able if k != found.member] or able
        silences = self.work.silences
        return min(others, key=lambda k: (silences.get(k, 0), self.finish_s(k), k), default=None)


def _deals(now_s: float, state: RunState, watch: Watch, policy: Policy) -> list[Decision]:
    """Opens paths from stage 0 as far as its members' windows go, and deals again what is open further on."""
    works, stages = st.works(state), range(st.num_stages(state))
    if not any(any(work.undealt) or _revoked_evaluations(work) for work in works):
        return []
    replicas = [st.ready(state, stage) for stage in stages]
    load = Counter[Member]()
    for work in works:
        for stage in stages:
            load.update(m for m in (work.items[stage][i].member for i in work.live[stage]) if m is not None)
    each_s = {k: item_s(state, watch, policy, stage, k) for stage in stages for k in replicas[stage]}
    decided: list[Decision] = []
    for work in works:
        lost = [key for key in watch.lost_with if key[0] == work.step]
        resting = {key[1:] for key in lost if wait_left_s(now_s, watch, policy, *key) > 0}
        shunned = {key[1:]: died_of(watch, *key) for key in lost}
        desk = _Desk(state, work, replicas, load, each_s, resting, shunned)
        _deal_step(desk, policy)
        decided += desk.decided
    return decided


def _deal_step(desk: _Desk, policy: Policy) -> None:
    _deal_first_stage(desk, policy)
    for stage in range(1, len(desk.replicas)):
        for m in desk.undealt(stage):
            if desk.is_dealt(m, stage - 1) and (m, stage) not in desk.resting:
                member = desk.choose(m, stage)
                if member is not None:
                    desk.deal(m, stage, member)
    _deal_revoked_evaluations(desk)


def _deal_first_stage(desk: _Desk, policy: Policy) -> None:
    replicas = desk.replicas[0]
    if not replicas:
        return
    windows = {k: window(policy, len(desk.work.items), desk.each_s[k]) for k in replicas}
    for m in desk.undealt(0):
        if (m, 0) in desk.resting:
            continue
        free = [k for k in replicas if desk.load[k] < windows[k]]
        if not free:
            return
        member = desk.choose(m, 0, free)
        if member is not None:
            desk.deal(m, 0, member)


def window(policy: Policy, num_stages: int, each_s: float) -> int:
    """Items that keep a member of the first stage busy while others of its items travel down the pipeline and back."""
    travelling = int(policy.window_s / each_s) if each_s > 0 else policy.window_max
    return min(policy.window_max, num_stages + policy.window_extra + travelling)


def _revoked_evaluations(work: StepWork) -> list[tuple[int, int]]:
    if not work.num_evaluation:
        return []
    return [
        (m, stage)
        for stage, live in enumerate(work.live)
        for m in sorted(live)
        if m >= work.num_training and work.items[stage][m].status == st.REVOKING
    ]


def _deal_revoked_evaluations(desk: _Desk) -> None:
    """Nothing is added for an evaluation item, so it needs nobody's word to be dealt again."""
    for m, stage in _revoked_evaluations(desk.work):
        if st.is_evaluation(desk.state, m):
            member = desk.choose(m, stage)
            if member is not None:
                desk.deal(m, stage, member)


# --- replays -----------------------------------------------------------------------------------------------------


def _replays(now_s: float, state: RunState, watch: Watch, policy: Policy, rng: Randomness) -> list[Decision]:
    """A reported missing boundary whose producer is receipted is made again, by its producer if that one lives."""
    decided: list[Decision] = []
    for key in list(watch.missing):
        del watch.missing[key]
        step, m, stage, backward = key
        work = st.work_at(state, step)
        if work is None or not replay_allowed(state, key):
            continue
        replicas = st.ready(state, stage)
        old = work.replays.get((stage, m, backward))
        if not replicas:
            continue
        clock = ("replay", key, old.generation if old else 0)
        if old is not None and old.member in replicas and watch.age(clock, now_s) < policy.replay_s:
            continue
        producer = work.items[stage][m].member
        member = producer if old is None and producer in replicas and producer else rng.choice(replicas)
        generation = (old.generation if old else 0) + 1
        watch.restart_clock(("replay", key, generation), now_s)
        event = ev.ReplayLeased(step, m, stage, backward, member, generation)
        decided.append(Decision(event, because("boundary_lost", stage=stage, backward=int(backward))))
    return decided
