"""Who does what by rendezvous hashing: one that goes moves only its own work."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from subnet.numerics.layout import Partition, rendezvous_owners
from subnet.words import GroupShape, Member


def rendezvous(purpose: str, step: int, index: int, candidates: Sequence[Member]) -> Member:
    """The candidate with the highest hash of purpose, step, index and member; there must be one."""

    def rank(member: Member) -> tuple[bytes, Member]:
        text = f"{purpose}/{step}/{index}/{member.hotkey}/{member.term}/{member.number}"
        return blake3(text.encode()).digest(), member

    return max(candidates, key=rank)


def choose_owners(
    shape: GroupShape, candidates: dict[int, list[Member]], *, step: int, group: int
) -> tuple[Member, ...] | None:
    """An owner for each partition of a group, from the live replicas by stage; None where nobody holds one."""
    partitions = [Partition(p, p, 0, 0, 0, 0) for p in range(len(shape.partitions))]
    holders = {
        p: [member for stage in stages for member in candidates.get(stage, [])]
        for p, stages in enumerate(shape.partitions)
    }
    if not all(holders.values()):
        return None
    owners = rendezvous_owners(partitions, holders, step=step, group=group)
    return tuple(owners[p] for p in range(len(partitions)))
