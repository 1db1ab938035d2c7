"""What events about merges do to the state: freeze, manifest, partitions, seed, fingerprints, checks, seal."""

from __future__ import annotations

from subnet.run.audits import must_audit
from subnet.run.events import (
    Checked,
    Committed,
    Fingerprinted,
    Frozen,
    OwnerFailed,
    PartitionMerged,
    ReduceOrdered,
    SeedRevealed,
    StageSealed,
    StoreRouted,
    TraceStarted,
)
from subnet.run.invariants import check_entries, require
from subnet.run.state import (
    FROZEN,
    GATHERING,
    REDUCING,
    REVEALED,
    SEALED,
    GroupSeal,
    Merge,
    MergedPartition,
    RunState,
    group_shape,
    holders,
    stage_settled,
)
from subnet.run.work import clear_reduce, open_work


def _merge(state: RunState, step: int, group: int, *phases: str) -> Merge:
    work = open_work(state, step)
    require(work is state.work, f"step {step} is merged before the step before it is sealed")
    require(0 <= group < len(work.merges), f"group {group} isn't there")
    merge = work.merges[group]
    require(merge.phase in phases, f"group {group} is {merge.phase}, not {' or '.join(phases)}")
    return merge


def _versioned(
    state: RunState,
    event: StoreRouted | PartitionMerged | SeedRevealed | Fingerprinted | Checked | TraceStarted | StageSealed,
    phase: str,
) -> Merge:
    merge = _merge(state, event.step, event.group, phase)
    require(merge.version == event.version, f"version {event.version} of group {event.group}, not {merge.version}")
    return merge


def apply_frozen(state: RunState, event: Frozen) -> None:
    work = open_work(state, event.step)
    merge = _merge(state, event.step, event.group, GATHERING)
    require(event.number == merge.number + 1, f"freeze {event.number} follows {merge.number}")
    settled = all(stage_settled(work, stage) for stage in group_shape(state, event.group).stages)
    require(settled, f"group {event.group} is frozen with work to do")
    merge.phase, merge.number = FROZEN, event.number


def apply_committed(state: RunState, event: Committed) -> None:
    merge = _merge(state, event.step, event.group, FROZEN)
    member = event.commitment.member
    require(event.number == merge.number, f"a commitment for freeze {event.number}, not {merge.number}")
    require(member not in merge.commitments, f"{member} commits twice")
    merge.commitments[member] = event.commitment


def apply_reduce_ordered(state: RunState, event: ReduceOrdered) -> None:
    merge = _merge(state, event.step, event.group, FROZEN, REDUCING, REVEALED)
    require(event.version == merge.version + 1, f"manifest {event.version} follows {merge.version}")
    check_entries(state, event.group, event.entries)
    present = {entry.member for entry in event.entries} == holders(state, event.group)
    require(present, f"manifest {event.version} names others than the holders")
    require(len(event.owners) == len(group_shape(state, event.group).partitions), "not one owner a partition")
    require(len(event.seconds) in (0, len(event.owners)), "not one second owner a partition")
    clear_reduce(merge)
    merge.phase, merge.version = REDUCING, event.version
    merge.entries, merge.owners, merge.seconds = event.entries, event.owners, event.seconds


def apply_store_routed(state: RunState, event: StoreRouted) -> None:
    _versioned(state, event, REDUCING).routed = True


def apply_owner_failed(state: RunState, event: OwnerFailed) -> None:
    merge = _merge(state, event.step, event.group, REDUCING, REVEALED)
    merge.failed_owners.add(event.member.hotkey)


def apply_partition_merged(state: RunState, event: PartitionMerged) -> None:
    merge = _versioned(state, event, REDUCING)
    require(0 <= event.partition < len(merge.owners), f"partition {event.partition} isn't there")
    require(event.partition not in merge.merged, f"partition {event.partition} is merged twice")
    if event.second:
        p, owners, seconds = event.partition, merge.owners, merge.seconds
        require(bool(seconds) and seconds[p] != owners[p], f"partition {p} has no second owner")
        merge.owners = (*owners[:p], seconds[p], *owners[p + 1 :])
        merge.seconds = (*seconds[:p], owners[p], *seconds[p + 1 :])
    merge.merged[event.partition] = MergedPartition(event.hash, event.blob, event.size_bytes, event.squares)


def apply_seed_revealed(state: RunState, event: SeedRevealed) -> None:
    merge = _versioned(state, event, REDUCING)
    require(len(merge.merged) == len(merge.owners), "the seed is revealed before all partitions are merged")
    merge.phase, merge.seed = REVEALED, event.seed


def apply_fingerprinted(state: RunState, event: Fingerprinted) -> None:
    merge = _versioned(state, event, REVEALED)
    require(any(entry.member == event.member for entry in merge.entries), f"{event.member} contributes nothing")
    require(event.member not in merge.fingerprints, f"{event.member} has reported its fingerprint")
    merge.fingerprints[event.member] = event.values


def apply_checked(state: RunState, event: Checked) -> None:
    merge = _versioned(state, event, REVEALED)
    require(len(merge.fingerprints) == len(merge.entries), "checked before all fingerprints are in")
    require(event.member not in merge.checks, f"{event.member} has checked")
    merge.checks[event.member] = event.ok


def apply_trace_started(state: RunState, event: TraceStarted) -> None:
    _versioned(state, event, REVEALED).tracing = True


def apply_stage_sealed(state: RunState, event: StageSealed) -> None:
    merge = _versioned(state, event, REVEALED)
    unheard = [e.member for e in merge.entries if e.member not in merge.passed and must_audit(state, e.member.hotkey)]
    require(not unheard, f"group {event.group} is sealed before {unheard} passed their audit")
    require(event.entries == merge.entries, f"the seal of group {event.group} names other partials than its manifest")
    in_order = [merge.merged[p] for p in range(len(merge.owners))]
    require(event.hashes == tuple(part.hash for part in in_order), "the seal names other hashes than were merged")
    require(event.blobs == tuple((part.blob, part.size_bytes) for part in in_order), "the seal names other blobs")
    merge.phase = SEALED
    state.seals[event.group] = GroupSeal(event.hashes, event.blobs, event.squares)
