"""What a member can owe: small frozen facts, comparable, so that a node can keep those under way in a set."""

from __future__ import annotations

import msgspec

from miner.local_view import BoundaryKey
from subnet.protocol import messages as msg
from subnet.words import Member


class Report(msgspec.Struct, frozen=True):
    """Say this to the coordinator; again, with back-off, until it is no longer owed."""

    claim: msg.AnyClaim


class Compute(msgspec.Struct, frozen=True):
    """Forward, or backward (which at the last stage is both at once).

    ``generation`` None: a replay, whose gradient isn't added. Else a backward's gradient is added to the sum of
    (incarnation, step, ``epoch``) if :func:`miner.owed.may_add` says so at that moment, and noted in ``added`` at once.
    """

    step: int
    microbatch: int
    stage: int
    backward: bool
    generation: int | None
    epoch: int = 0
    evaluation: bool = False
    part: int = 0
    """Of a lane: which of its microbatches, from 1; the last one's backward adds what the lane has come to."""


class DropLane(msgspec.Struct, frozen=True):
    """Forget a lane's weights and moments (``LocalView.lanes``), not its boundaries."""

    step: int
    microbatch: int
    stage: int


class Refuse(msgspec.Struct, frozen=True):
    """Cancel the item; unless its gradient is added at that moment, put the lease into ``LocalView.refused``."""

    step: int
    microbatch: int
    generation: int


class Fetch(msgspec.Struct, frozen=True):
    """Ask these members in turn (an empty list: nobody is known yet) and the store for the boundary."""

    key: BoundaryKey
    sources: tuple[Member, ...]


class FetchStored(msgspec.Struct, frozen=True):
    """Get the boundary from the store, where its receipted hash is its address."""

    key: BoundaryKey
    hash: str


class StoreBoundary(msgspec.Struct, frozen=True):
    """Put a boundary of mine into the store; then note ``turn`` in ``LocalView.in_store``.

    ``turn``: 0, or the generation of the replay that asks for it once more.
    """

    key: BoundaryKey
    hash: str
    turn: int


class StoreEvidence(msgspec.Struct, frozen=True):
    """Put a boundary that an audit wants into the store; then (audit, hash) into ``LocalView.opened``.

    ``own``: I am its maker; others give their copy only where the maker's doesn't come.
    """

    audit: int
    key: BoundaryKey
    hash: str
    own: bool
    before_seal: bool


class StoreUnusable(msgspec.Struct, frozen=True):
    """Put the bytes of a boundary that can't be computed with into the store, where the validator looks at them; then its hash
    into ``LocalView.denounced``."""

    key: BoundaryKey
    hash: str


class Drop(msgspec.Struct, frozen=True):
    """``key`` isn't what its maker has receipted: forget it, and what ``stage`` made of it
    (:meth:`LocalView.drop_item`), graphs included."""

    key: BoundaryKey
    stage: int


class RunWitness(msgspec.Struct, frozen=True):
    """Run a case's bundle and put the digest into ``LocalView.witnessed``, or why it can't be run into ``unwitnessed``."""

    case: int
    bundle: str


class Push(msgspec.Struct, frozen=True):
    """Send a boundary of mine to the member whose lease it is for; then put it into ``LocalView.pushed``."""

    key: BoundaryKey
    to: Member


class Commit(msgspec.Struct, frozen=True):
    """Hash the sum's slices into a commitment for exactly these microbatches."""

    step: int
    group: int
    epoch: int
    microbatches: tuple[int, ...]


class SendSlice(msgspec.Struct, frozen=True):
    """Send a slice of my committed sum to its owner; then put it into ``LocalView.sent``."""

    step: int
    group: int
    partition: int
    hash: str
    to: Member


class StoreSlice(msgspec.Struct, frozen=True):
    """Put the canonical bytes of a slice into the store, where its hash is its address; then into ``stored``."""

    step: int
    group: int
    partition: int
    hash: str


class FetchSlice(msgspec.Struct, frozen=True):
    """Get a slice from its contributor, or (``routed``) from the store."""

    step: int
    group: int
    partition: int
    stage: int
    hash: str
    source: Member
    routed: bool


class Reduce(msgspec.Struct, frozen=True):
    """Merge the slices of a partition I own and put the result into the store; then into ``LocalView.merged``."""

    step: int
    group: int
    version: int
    partition: int
    hashes: tuple[str, ...]


class FetchMerged(msgspec.Struct, frozen=True):
    """Have the bytes of a merged partition before they are checked; then put its hash into ``LocalView.fetched``."""

    step: int
    group: int
    version: int
    partition: int
    hash: str
    blob: str
    size_bytes: int


class Examine(msgspec.Struct, frozen=True):
    """Fingerprint the merged partitions under the revealed seed, before it is known what they have to be."""

    step: int
    group: int
    version: int
    seed: str
    partitions: tuple[int, ...]


class Fingerprint(msgspec.Struct, frozen=True):
    """Fingerprints of my committed slices under the revealed seed."""

    step: int
    group: int
    version: int
    seed: str
    partitions: tuple[int, ...]


class Check(msgspec.Struct, frozen=True):
    """Are the merged partitions of my stage what the fingerprints say, and their squares right?"""

    step: int
    group: int
    version: int
    partitions: tuple[int, ...]


class ApplySeal(msgspec.Struct, frozen=True):
    """Update the state with the sealed gradient of ``step``; then ``LocalView.version`` is ``step + 1``."""

    step: int


class Restore(msgspec.Struct, frozen=True):
    """Load the state of ``version`` from this manifest (``whole``: of the whole model)."""

    stage: int
    version: int
    manifest: str
    whole: bool


class MakeSnapshot(msgspec.Struct, frozen=True):
    """Put the state of ``step`` updates into the store; then into ``LocalView.snapshots``."""

    step: int
    stage: int


Owe = (
    Report
    | Compute
    | DropLane
    | Refuse
    | Fetch
    | FetchStored
    | StoreBoundary
    | StoreEvidence
    | StoreUnusable
    | Drop
    | RunWitness
    | Push
    | Commit
    | SendSlice
    | StoreSlice
    | FetchSlice
    | Reduce
    | FetchMerged
    | Fingerprint
    | Examine
    | Check
    | ApplySeal
    | Restore
    | MakeSnapshot
)

_RANK: dict[type, int] = {
    Refuse: 0,
    Drop: 0,
    DropLane: 0,
    Report: 1,
    StoreUnusable: 1,
    Restore: 2,
    ApplySeal: 3,
    Check: 4,
    Fingerprint: 5,
    Examine: 5,
    Reduce: 6,
    FetchMerged: 10,
    Commit: 7,
    SendSlice: 8,
    StoreSlice: 9,
    FetchSlice: 10,
    StoreBoundary: 11,
    Push: 11,
    FetchStored: 12,
    Fetch: 12,
    Compute: 13,
    MakeSnapshot: 14,
    StoreEvidence: 15,
    RunWitness: 16,
}


def urgency(owe: Owe) -> tuple[int, int, int, int]:
    """Order of doing: answers first; of compute, backwards before forwards before replays, lowest part and microbatch first."""
    if isinstance(owe, Compute):
        kind = 3 if owe.generation is None else 2 if owe.evaluation else 0 if owe.backward else 1
        return (_RANK[Compute], kind, owe.step, owe.microbatch + owe.part * (1 << 20))
    if isinstance(owe, StoreEvidence):  # a seal waits for it, or nothing does
        return (_RANK[Fetch if owe.before_seal else StoreEvidence], 0, owe.audit, owe.key.microbatch)
    return (_RANK[type(owe)], 0, 0, 0)
