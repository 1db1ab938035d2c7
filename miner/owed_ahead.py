"""``owed_ahead``: what a member may do of its group's merge before it is asked to; pure, and none of it is needed.

A sum to which nothing more can come is hashed, and its slices go to those who will own them, while others still compute;
merged partitions are fetched as they come, and fingerprinted as soon as there is a seed. Nothing is applied ahead. Where a
death changes who adds what, the head start is lost, and what is owed is done as if it had never been.
"""

from __future__ import annotations

from miner.local_view import LocalView
from miner.owed_merges import sum_is
from miner.owes import Commit, Examine, FetchMerged, Owe, SendSlice, StoreSlice
from miner.ways import by_store, stores_all
from subnet.numerics.owners import foreseen_owners, foreseen_seconds, pair
from subnet.run import state as st
from subnet.run.state import Merge, RunState, StepWork
from subnet.words import CALIBRATION_STEP, Member


def owed_ahead(state: RunState, me: Member | None, local: LocalView) -> list[Owe]:
    """Everything of it that isn't done or under way."""
    info, work = state.members.get(me) if me is not None else None, state.work
    if info is None or me is None or work is None or not work.num_training or state.finished is not None:
        return []
    if local.version != state.next_step or local.restored_stage != info.stage:
        return []
    group = st.group_of(state, info.stage)
    merge = work.merges[group]
    owes: list[Owe] = []
    if merge.phase in (st.GATHERING, st.FROZEN):
        microbatches = final_set(state, work, me, info.stage, local)
        if microbatches:
            _commit_and_send(state, work, me, group, microbatches, local, owes)
    elif merge.phase in (st.REDUCING, st.REVEALED):
        _look_at_merged(state, work, me, info.stage, group, merge, local, owes)
    return [owe for owe in owes if owe not in local.jobs]


def final_set(state: RunState, work: StepWork, me: Member, stage: int, local: LocalView) -> tuple[int, ...]:
    """My microbatches of the step, if all are in my sum and no other waits for somebody: as things are, no more will come."""
    if any(m < work.num_training for m in work.undealt[stage]):
        return ()
    mine = tuple(sorted(m for m in work.held.get(me, ()) if m < work.num_training))
    items, epoch = work.items[stage], st.epoch(state, me)
    for m in mine:
        if items[m].status == st.REVOKING or local.added.get((work.step, m, epoch)) != items[m].generation:
            return ()
    return mine if sum_is(mine, work, local, epoch) else ()


def _commit_and_send(
    state: RunState,
    work: StepWork,
    me: Member,
    group: int,
    microbatches: tuple[int, ...],
    local: LocalView,
    owes: list[Owe],
) -> None:
    """A slice goes as soon as it is hashed; at calibration all are in the store before anybody is told of them."""
    epoch = st.epoch(state, me)
    key = (work.step, epoch, microbatches)
    if key not in local.commitments:
        owes.append(Commit(work.step, group, epoch, microbatches))
    made = local.made.get(key)
    if not made or work.step == CALIBRATION_STEP:
        return
    if stores_all(state, me):
        unstored = [(p, value) for p, value in sorted(made.items()) if value not in local.stored]
        owes.extend(StoreSlice(work.step, group, p, value) for p, value in unstored)
        return
    owners = foreseen_owners(state, group)
    if owners is None:
        return
    seconds = foreseen_seconds(state, group, owners)
    for partition, value, owner in (
        (p, hash_, k) for p, hash_ in sorted(made.items()) for k in pair(owners, seconds, p)
    ):
        if owner != me and (value, owner) not in local.sent and not by_store(state, me, owner):
            owes.append(SendSlice(work.step, group, partition, value, owner))


def _look_at_merged(
    state: RunState,
    work: StepWork,
    me: Member,
    stage: int,
    group: int,
    merge: Merge,
    local: LocalView,
    owes: list[Owe],
) -> None:
    """Whatever is merged and isn't here; once all is here and there is a seed, what it is."""
    held = st.partitions_of(state, group, stage)
    for partition in held:
        told = merge.merged.get(partition)
        if told is not None and told.hash not in local.fetched:
            owes.append(FetchMerged(work.step, group, merge.version, partition, told.hash, told.blob, told.size_bytes))
    key = (work.step, group, merge.version)
    if merge.phase != st.REVEALED or owes or work.step == CALIBRATION_STEP or me in merge.checks:
        return
    fingerprinted = me in merge.fingerprints or (key, merge.seed) in local.fingerprints
    contributes = any(entry.member == me for entry in merge.entries)
    if (fingerprinted or not contributes) and (key, merge.seed) not in local.examined and key not in local.checks:
        owes.append(Examine(work.step, group, merge.version, merge.seed, held))
