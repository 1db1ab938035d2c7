"""The parts of an open step's work: one item with its lease, one group's merge. Plain data, part of :mod:`subnet.run.state`."""

from __future__ import annotations

import msgspec

from subnet.run.schedule import StepScalars
from subnet.words import Commitment, Member

OPEN, LIVE, REVOKING, DONE = 0, 1, 2, 3
"""Status of an item's lease."""

GATHERING, FROZEN, REDUCING, REVEALED, SEALED = "gathering", "frozen", "reducing", "revealed", "sealed"
"""Phases of a group's merge."""


class Replay(msgspec.Struct, frozen=True, array_like=True):
    """Who serves a boundary again."""

    member: Member
    generation: int


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A reported failure of an item."""

    hotkey: str
    generation: int
    failure: str


class Saying(msgspec.Struct, frozen=True, array_like=True):
    """Who said an output last, and what its inputs were then as their makers had receipted them."""

    hotkey: str
    x: str
    gradient: str = ""


class Item(msgspec.Struct, array_like=True):
    """One microbatch at one stage. ``member`` is the holder of the lease, or the last one while the item is OPEN."""

    status: int = OPEN
    member: Member | None = None
    generation: int = 0
    forwarded: bool = False
    forward_hash: str = ""
    backward_hash: str = ""
    loss_bits: int | None = None
    failures: tuple[Failure, ...] = ()
    said_forward: str = ""
    """Output that was receipted last, by whomever: kept when the item is done again."""
    said_backward: str = ""
    forward_by: Saying | None = None
    backward_by: Saying | None = None
    contradictions: int = 0
    """How often a hotkey said something else than itself before, of the same inputs."""
    forward_parts: tuple[str, ...] = ()
    """Of a lane: hashes of its boundary's first parts, as far as they were said to be in the store."""
    backward_parts: tuple[str, ...] = ()
    again: bool = False
    """Open since an input was made again: for the same member first, which has said the rest of it already."""


class MergedPartition(msgspec.Struct, frozen=True, array_like=True):
    hash: str
    blob: str
    size_bytes: int
    squares: str


class Merge(msgspec.Struct):
    """The merge of one group at the open step. ``number`` and ``version`` only ever grow."""

    phase: str = GATHERING
    number: int = 0
    version: int = 0
    commitments: dict[Member, Commitment] = {}
    entries: tuple[Commitment, ...] = ()
    owners: tuple[Member, ...] = ()
    """By partition: who reduces it, or has: who published what counts."""
    seconds: tuple[Member, ...] = ()
    """With ``merge.owners`` 2, by partition: who reduces it too (the owner itself where there is nobody else), or was slower."""
    merged: dict[int, MergedPartition] = {}
    seed: str = ""
    fingerprints: dict[Member, tuple[tuple[int, tuple[int, ...]], ...]] = {}
    checks: dict[Member, bool] = {}
    routed: bool = False
    tracing: bool = False
    failed_owners: set[str] = set()
    """Hotkeys that won't own partitions of this group at this step again."""
    passed: set[Member] = set()
    """Contributors to this version whose partials were redone, and right."""


class GroupSeal(msgspec.Struct, frozen=True, array_like=True):
    """The final merged gradient of a group at a step: what a joiner needs of it."""

    hashes: tuple[str, ...]
    blobs: tuple[tuple[str, int], ...]
    squares: str


class StepLog(msgspec.Struct, frozen=True, array_like=True):
    """All that an update needs; ``groups`` in the order of the run's groups."""

    scalars: StepScalars | None
    num_counted: int
    coefficient_bits: int
    groups: tuple[GroupSeal, ...]


class StoredSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A stage's state in the store. ``verified``: a second coldkey has the same root."""

    step: int
    manifest: str
    root: str
    hotkey: str
    coldkey: str
    verified: bool
