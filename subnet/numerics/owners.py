"""Who owns which partition of a group: a pure function of the step and its live replicas, so that members can foresee it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from subnet.numerics.layout import Partition, rendezvous_owners
from subnet.run import state as st
from subnet.run.state import Merge, RunState
from subnet.words import GroupShape, Member


def choose_owners(
    shape: GroupShape, candidates: Mapping[int, Sequence[Member]], *, step: int, group: int
) -> tuple[Member, ...] | None:
    """An owner for each partition of a group, from the live replicas by stage; None where nobody holds one."""
    given = tuple((stage, tuple(candidates.get(stage, ()))) for stage in shape.stages)
    return _chosen(shape, given, step, group)


@lru_cache(maxsize=64)
def _chosen(
    shape: GroupShape, candidates: tuple[tuple[int, tuple[Member, ...]], ...], step: int, group: int
) -> tuple[Member, ...] | None:
    members_of = dict(candidates)
    partitions = [Partition(p, p, 0, 0, 0, 0) for p in range(len(shape.partitions))]
    holders = {
        p: [member for stage in stages for member in members_of.get(stage, ())]
        for p, stages in enumerate(shape.partitions)
    }
    if not all(holders.values()):
        return None
    owners = rendezvous_owners(partitions, holders, step=step, group=group)
    return tuple(owners[p] for p in range(len(partitions)))


def choose_seconds(
    shape: GroupShape,
    candidates: Mapping[int, Sequence[Member]],
    owners: tuple[Member, ...],
    *,
    step: int,
    group: int,
) -> tuple[Member, ...]:
    """Another owner for each partition: the owner itself where nobody else holds it; none at all where that is so of all."""
    given = {
        p: [k for stage in stages for k in candidates.get(stage, ()) if k != owners[p]] or [owners[p]]
        for p, stages in enumerate(shape.partitions)
    }
    partitions = [Partition(p, p, 0, 0, 0, 0) for p in range(len(shape.partitions))]
    found = rendezvous_owners(partitions, given, step=step, group=group)
    seconds = tuple(found[p] for p in range(len(partitions)))
    return () if seconds == owners else seconds


def owners_of(merge: Merge, partition: int) -> tuple[Member, ...]:
    """Who reduces a partition under the present manifest: one member, or two."""
    return pair(merge.owners, merge.seconds, partition)


def pair(owners: Sequence[Member], seconds: Sequence[Member], partition: int) -> tuple[Member, ...]:
    """A partition's owners, each once."""
    first = owners[partition]
    return (first,) if not seconds or seconds[partition] == first else (first, seconds[partition])


def owner_candidates(
    state: RunState, group: int, merge: Merge, *, without: Sequence[str] = ()
) -> dict[int, list[Member]]:
    """By stage, live replicas that may own partitions now; those that failed only where nobody else is."""
    bad = {*merge.failed_owners, *without}
    candidates: dict[int, list[Member]] = {}
    for stage in st.group_shape(state, group).stages:
        replicas = [k for k in st.ready(state, stage) if k.hotkey not in without]
        candidates[stage] = [k for k in replicas if k.hotkey not in bad] or replicas
    return candidates


def foreseen_seconds(state: RunState, group: int, owners: tuple[Member, ...]) -> tuple[Member, ...]:
    """The same of the second owners; none where the run has no second owners."""
    work = state.work
    if work is None or st.config(state).merge.owners == 1:
        return ()
    candidates = owner_candidates(state, group, work.merges[group])
    return choose_seconds(st.group_shape(state, group), candidates, owners, step=work.step, group=group)


def foreseen_owners(state: RunState, group: int) -> tuple[Member, ...] | None:
    """The owners of the open step's next manifest, if nobody comes or goes before it."""
    work = state.work
    if work is None:
        return None
    candidates = owner_candidates(state, group, work.merges[group])
    return choose_owners(st.group_shape(state, group), candidates, step=work.step, group=group)
