"""How a group's partials become one sealed sum: freeze, manifest, owners, seed, fingerprints, checks, trace, seal.

Nobody is waited for without a deadline; what is said about one version counts for no other; and a seal needs the word
of every live replica, and every microbatch of the step done or skipped at every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from subnet.numerics.owners import choose_owners, choose_seconds, owner_candidates, owners_of
from subnet.run import audits
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Merge, RunState, StepWork
from subnet.words import Commitment, Member
from validator.decide_members import silent_outcome
from validator.decision import Action, Decision, ProbeSlices, Reason, TraceVerdict, because
from validator.policy import Policy
from validator.randomness import Randomness
from validator.watch import Watch

SEED_BITS = 256
MERGES_LOOK_S = 0.1
"""With an index, a merge in which nothing has happened is looked at this often: some wait in it may be over."""
TRACE_TRIES = 8
"""How often the store is read for missing slices before their contributors are void."""


def decide_merges(now_s: float, state: RunState, watch: Watch, policy: Policy, rng: Randomness) -> list[Decision]:
    """Groups don't touch each other, except that one member may be late in one only: it serves one stage."""
    work = state.work
    if work is None or not work.num_training:
        return []
    decided: list[Decision] = []
    for group in _to_look_at(now_s, state, work, watch):
        merge = work.merges[group]
        if merge.phase == st.GATHERING:
            decided += _freeze(state, work, group, merge)
        elif merge.phase == st.FROZEN:
            decided += _commitments(now_s, state, work, group, merge, watch, policy)
        elif merge.phase == st.REDUCING:
            decided += _reducing(now_s, state, work, group, merge, watch, policy, rng)
        elif merge.phase == st.REVEALED:
            decided += _revealed(now_s, state, work, group, merge, watch, policy)
    return decided


def _to_look_at(now_s: float, state: RunState, work: StepWork, watch: Watch) -> Iterable[int]:
    """Groups in whose merge something happened, and all of them when some wait may be over."""
    if watch.index is None:
        return range(len(work.merges))
    index = watch.index.sync(state)
    groups = sorted(index.merges_dirty)
    index.merges_dirty.clear()
    if now_s < index.merges_look_s:
        return groups
    index.merges_look_s = now_s + MERGES_LOOK_S
    return range(len(work.merges))


def _freeze(state: RunState, work: StepWork, group: int, merge: Merge) -> list[Decision]:
    stages = st.group_shape(state, group).stages
    if not all(st.stage_settled(work, stage) and audits.inputs_said(state, work, stage) for stage in stages):
        return []
    return [Decision(ev.Frozen(work.step, group, merge.number + 1), because("all_items_done"))]


def _commitments(
    now_s: float, state: RunState, work: StepWork, group: int, merge: Merge, watch: Watch, policy: Policy
) -> list[Decision]:
    holders = st.holders(state, group) if watch.index is None else watch.index.sync(state).holders(state, group)
    missing = holders - set(merge.commitments)
    if not missing:
        entries = tuple(merge.commitments[member] for member in sorted(merge.commitments))
        return order_reduce(state, work, group, merge, entries, "all_committed")
    keys = {member: ("commit", work.step, group, merge.number, member) for member in missing}
    limit_s = watch.waits.commit_s(state, policy, work.step, group)
    return _first_silent(now_s, state, keys, watch, limit_s, "no_commitment")


def _first_silent(
    now_s: float,
    state: RunState,
    keys: Mapping[Member, tuple[object, ...]],
    watch: Watch,
    limit_s: float,
    code: str,
) -> list[Decision]:
    """Starts everybody's clock; the first that is late is void (which ends what the others were asked for)."""
    ages = {member: watch.age(key, now_s) for member, key in sorted(keys.items())}
    for member, age_s in ages.items():
        if age_s >= limit_s:
            return [silent_outcome(state, state.members[member].stage, member, code, age_s)]
    return []


def order_reduce(
    state: RunState,
    work: StepWork,
    group: int,
    merge: Merge,
    entries: tuple[Commitment, ...],
    code: str,
    *,
    without: Iterable[str] = (),
) -> list[Decision]:
    """The next version of the manifest, with owners among live replicas; those that failed only if nobody else is."""
    candidates = owner_candidates(state, group, merge, without=tuple(without))
    shape = st.group_shape(state, group)
    owners = choose_owners(shape, candidates, step=work.step, group=group)
    if owners is None:
        return []
    second = st.config(state).merge.owners == 2
    seconds = choose_seconds(shape, candidates, owners, step=work.step, group=group) if second else ()
    event = ev.ReduceOrdered(work.step, group, merge.version + 1, entries, owners, seconds)
    return [Decision(event, because(code, num_entries=len(entries)))]


# --- reducing ----------------------------------------------------------------------------------------------------


def _reducing(
    now_s: float,
    state: RunState,
    work: StepWork,
    group: int,
    merge: Merge,
    watch: Watch,
    policy: Policy,
    rng: Randomness,
) -> list[Decision]:
    step, version = work.step, merge.version
    if len(merge.merged) == len(merge.owners):
        return [Decision(ev.SeedRevealed(step, group, version, fresh_seed(rng, step, group)), because("all_merged"))]
    waiting = [owners_of(merge, p) for p in range(len(merge.owners)) if p not in merge.merged]
    if any(all(owner not in state.members for owner in owners) for owners in waiting):
        return order_reduce(state, work, group, merge, merge.entries, "owner_gone")
    if not merge.routed:
        age_s = watch.age(("owner", step, group, version), now_s)
        if age_s < watch.waits.owner_s(state, policy, step, group, merge) or not routes_through_store():
            return []
        return [Decision(ev.StoreRouted(step, group, version), because("owner_late", age_s=age_s))]
    age_s = watch.age(("routed", step, group, version), now_s)
    late = age_s >= watch.waits.routed_s(state, policy, step, group, merge)
    return _routed_late(age_s, state, work, group, merge, watch) if late else []


def fresh_seed(rng: Randomness, step: int, group: int) -> str:
    """Unpredictable and never used before: whoever knows a seed can make a wrong sum that passes its check."""
    return f"{rng.getrandbits(SEED_BITS):0{SEED_BITS // 4}x}"


def routes_through_store() -> bool:
    """Slices that can't be had straight are put into the store, so that it shows who withholds them."""
    return True


def slice_hashes(entries: Iterable[Commitment]) -> tuple[str, ...]:
    return tuple(value for entry in entries for _, value in entry.hashes)


def _routed_late(
    age_s: float, state: RunState, work: StepWork, group: int, merge: Merge, watch: Watch
) -> list[Decision]:
    """Late although every slice may be in the store: a contributor whose slice isn't there is void, else the owner."""
    hashes = slice_hashes(merge.entries)
    probe = ProbeSlices(work.step, group, merge.version, hashes)
    if probe not in watch.probed:
        return _start(probe, watch, because("owner_late_again", age_s=age_s))
    for entry in merge.entries:
        if any(value not in watch.blobs for value in slice_hashes([entry])):
            return [silent_outcome(state, entry.stage, entry.member, "slices_withheld", age_s)]
    waiting = [owners_of(merge, p) for p in range(len(merge.owners)) if p not in merge.merged]
    late = {owner for owners in waiting for owner in owners if owner in state.members}
    decided = [
        Decision(ev.OwnerFailed(work.step, group, owner), because("owner_failed", age_s=age_s))
        for owner in sorted(late)
    ]
    names = [owner.hotkey for owner in late]
    again = order_reduce(state, work, group, merge, merge.entries, "owner_replaced", without=names)
    return decided + (again or order_reduce(state, work, group, merge, merge.entries, "owner_tries_again"))


def _start(action: Action, watch: Watch, reason: Reason) -> list[Decision]:
    if action in watch.started:
        return []
    watch.started.add(action)
    return [Decision(action, reason)]


# --- revealed ----------------------------------------------------------------------------------------------------


def _revealed(
    now_s: float, state: RunState, work: StepWork, group: int, merge: Merge, watch: Watch, policy: Policy
) -> list[Decision]:
    step, version = work.step, merge.version
    if accused := _accused_owners(state, merge):
        return order_reduce(state, work, group, merge, merge.entries, "owner_accused", without=accused)
    owing = [entry.member for entry in merge.entries if entry.member not in merge.fingerprints]
    if owing:
        keys = {member: ("fingerprint", step, group, version, member) for member in owing}
        return _first_silent(now_s, state, keys, watch, policy.fingerprint_s, "no_fingerprint")
    if merge.tracing:
        return _trace(now_s, work, group, merge, watch, watch.waits.trace_s(state, policy, step, group))
    if not all(merge.checks.values()):
        return [Decision(ev.TraceStarted(step, group, version), because("check_failed"))]
    unchecked = [k for k in must_check(state, group, watch) if k not in merge.checks]
    keys = {member: ("check", step, group, version, member) for member in unchecked}
    limit_s = watch.waits.check_s(state, policy, step, group) if keys else 0.0
    for member, key in sorted(keys.items()):
        age_s = watch.age(key, now_s)
        if age_s >= limit_s:
            return [Decision(ev.Gone(member, "silent"), because("no_check", age_s=age_s))]
    if unchecked or not checked_everywhere(state, group, merge) or not every_item_settled(state, work):
        return []
    if not audits.is_audited(state, work):
        return []
    return [Decision(stage_sealed(state, work, group, merge), because("checked_by_all", version=version))]


def _accused_owners(state: RunState, merge: Merge) -> list[str]:
    """Owners that stand accused or were convicted since: what they merged isn't taken on the word of their friends."""
    if not st.config(state).audit.on:
        return []
    names = {owner.hotkey for owner in merge.owners}
    return sorted(names & (state.audits.quarantined.keys() | state.convicted))


def must_check(state: RunState, group: int, watch: Watch) -> list[Member]:
    """Every live replica of the group's stages that has the step's state."""
    stages = st.group_shape(state, group).stages
    if watch.index is not None:
        index = watch.index.sync(state)
        return [member for stage in stages for member in index.ready(state, stage)]
    return [member for stage in stages for member in st.ready(state, stage)]


def checked_everywhere(state: RunState, group: int, merge: Merge) -> bool:
    """At least one live replica of each stage of the group has checked."""
    stages = st.group_shape(state, group).stages
    return all(any(state.members[k].stage == s for k in merge.checks if k in state.members) for s in stages)


def every_item_settled(state: RunState, work: StepWork) -> bool:
    """A microbatch that may still be skipped must not be in any sealed sum."""
    return all(st.stage_settled(work, stage) for stage in range(st.num_stages(state)))


def stage_sealed(state: RunState, work: StepWork, group: int, merge: Merge) -> ev.StageSealed:
    parts = [merge.merged[p] for p in range(len(merge.owners))]
    return ev.StageSealed(
        step=work.step,
        group=group,
        version=merge.version,
        entries=merge.entries,
        hashes=tuple(part.hash for part in parts),
        blobs=tuple((part.blob, part.size_bytes) for part in parts),
        squares=f"{sum(int(part.squares, 16) for part in parts):x}",
        unchecked_stages=unchecked_stages(state, group),
    )


def unchecked_stages(state: RunState, group: int) -> tuple[int, ...]:
    """Stages of the group that nobody of a second coldkey has checked."""
    stages = st.group_shape(state, group).stages
    return tuple(s for s in stages if len({state.members[k].coldkey for k in st.ready(state, s)}) < 2)


def _trace(now_s: float, work: StepWork, group: int, merge: Merge, watch: Watch, limit_s: float) -> list[Decision]:
    age_s = watch.age(("trace", work.step, group, merge.version), now_s)
    patient = age_s < limit_s
    if any(TraceVerdict(work.step, group, merge.version, other) in watch.started for other in (True, False)):
        return []
    tries = ("trace_try", work.step, group, merge.version)
    if watch.is_timed(tries) and watch.age(tries, now_s) < limit_s / TRACE_TRIES:
        return []
    watch.restart_clock(tries, now_s)
    return _start(TraceVerdict(work.step, group, merge.version, patient), watch, because("tracing", age_s=age_s))
