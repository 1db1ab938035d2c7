"""The journal's events about merges: a group's partials become one sealed sum, or are found not to be what was said.

Part of the one union in :mod:`subnet.run.events`, from where they are imported.
"""

from __future__ import annotations

from subnet.run.event_base import Event
from subnet.words import Commitment, Member


class Frozen(Event, tag="Frozen", frozen=True):
    """All leases of the group at this step are done; holders are asked for commitments."""

    step: int
    group: int
    number: int


class Committed(Event, tag="Committed", frozen=True):
    step: int
    group: int
    number: int
    commitment: Commitment


class ReduceOrdered(Event, tag="ReduceOrdered", frozen=True):
    """The manifest: m-sets disjoint, their union every counted microbatch; ``owners[p]`` reduces partition p."""

    step: int
    group: int
    version: int
    entries: tuple[Commitment, ...]
    owners: tuple[Member, ...]
    seconds: tuple[Member, ...] = ()
    """With ``merge.owners`` 2: who reduces each partition too; the first of both that is done counts."""


class StoreRouted(Event, tag="StoreRouted", frozen=True):
    """An owner is late: contributors put missing slices into the store."""

    step: int
    group: int
    version: int


class OwnerFailed(Event, tag="OwnerFailed", frozen=True):
    """This member won't own partitions of (step, group) again."""

    step: int
    group: int
    member: Member


class PartitionMerged(Event, tag="PartitionMerged", frozen=True):
    """``hash`` is that of the canonical bytes, ``blob`` the store's address of what was stored (equal if unpacked)."""

    step: int
    group: int
    version: int
    partition: int
    hash: str
    blob: str
    size_bytes: int
    squares: str
    """Exact sum of squares in units of 4^-128, hexadecimal."""
    second: bool = False
    """Published by the partition's second owner, who takes the first one's place."""


class SeedRevealed(Event, tag="SeedRevealed", frozen=True):
    step: int
    group: int
    version: int
    seed: str


class Fingerprinted(Event, tag="Fingerprinted", frozen=True):
    """Fingerprints of the member's slices: (partition, values) for each partition it contributes to."""

    step: int
    group: int
    version: int
    member: Member
    stage: int
    values: tuple[tuple[int, tuple[int, ...]], ...]


class Checked(Event, tag="Checked", frozen=True):
    step: int
    group: int
    version: int
    member: Member
    ok: bool


class TraceStarted(Event, tag="TraceStarted", frozen=True):
    step: int
    group: int
    version: int


class StageSealed(Event, tag="StageSealed", frozen=True):
    """Q. The merged gradient of the group at this step is final; ``blobs`` in partition order."""

    step: int
    group: int
    version: int
    entries: tuple[Commitment, ...]
    hashes: tuple[str, ...]
    blobs: tuple[tuple[str, int], ...]
    """(store address, bytes) of each partition."""
    squares: str
    unchecked_stages: tuple[int, ...] = ()
    """Stages whose live replicas all belong to one coldkey: nobody else has checked them."""
