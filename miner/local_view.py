"""What a member has of its own: boundaries, sums, results, jobs. The node keeps it true; :mod:`miner.owed` reads it.

Everything that belongs to an incarnation goes with it (:meth:`LocalView.new_incarnation`); everything that belongs to a
step goes with its update (:meth:`LocalView.end_step`), except what an audit may still ask for; everything of a branch that
the run has left goes at once (:meth:`LocalView.rewind`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import msgspec

from subnet.protocol.messages import BackwardReceipt, ForwardReceipt
from subnet.words import Commitment, Member


class BoundaryKey(msgspec.Struct, frozen=True, order=True):
    """A boundary by who produces it: the forward output of ``stage``, or its gradient for the stage before.

    ``part`` 0 is what a receipt names: the tensor itself, or of a lane the list of the hashes of its parts, which are 1 and up,
    in the order in which they are computed (:mod:`subnet.protocol.parts`).
    """

    step: int
    microbatch: int
    stage: int
    backward: bool
    part: int = 0

    @property
    def whole(self) -> BoundaryKey:
        """What its receipt names."""
        return self if not self.part else self.of(0)

    def of(self, part: int) -> BoundaryKey:
        return BoundaryKey(self.step, self.microbatch, self.stage, self.backward, part)


class MadeFrom(msgspec.Struct, frozen=True):
    """What an output of mine was computed with: hashes of the forward's input and of the gradient, "" where there is none."""

    x: str
    gradient: str = ""
    generation: int = 0
    """Of the lease it was made under, or was last receipted under; 0: for a replay, or under another incarnation."""


class Sent(msgspec.Struct, frozen=True):
    """What the maker of a boundary has signed when it sent it: proof of it, should it have receipted something else."""

    hash: str
    generation: int
    signature: bytes


class MergedLocally(msgspec.Struct, frozen=True):
    """A partition this member has reduced *and* put into the store."""

    hash: str
    blob: str
    size_bytes: int
    squares: str


class StoredLocally(msgspec.Struct, frozen=True):
    """A snapshot this member has put into the store."""

    manifest: str
    root: str


class LaneLocally(msgspec.Struct, frozen=True):
    """How far this process has come with a lane's stage: parts forward and back, and the lease it is done under (0: a replay)."""

    generation: int
    forwards: int = 0
    backwards: int = 0


AddedKey = tuple[int, int, int]
"""(step, microbatch, epoch): under which generation it was added."""

LeaseKey = tuple[int, int, int]
"""(step, microbatch, generation)."""

VersionKey = tuple[int, int, int]
"""(step, group, version)."""

CommitKey = tuple[int, int, tuple[int, ...]]
"""(step, epoch, m-set)."""


@dataclass
class LocalView:
    """One process's own data, by key. ``version`` is the step its state is ready for, None before it has one."""

    version: int | None = None
    version_before: int | None = None
    """The state before it, if its weights are still there: with ``update_delay`` 1 the older open step is of them."""
    root: str = ""
    restored_stage: int | None = None
    """The stage whose state it holds."""

    boundaries: dict[BoundaryKey, str] = field(default_factory=dict[BoundaryKey, str])
    """Hash of each boundary held, its own products included."""
    made_from: dict[BoundaryKey, MadeFrom] = field(default_factory=dict[BoundaryKey, MadeFrom])
    """Of each output of mine, also of those that have no bytes (the first stage's gradient, the last stage's loss)."""
    sent_to_me: dict[BoundaryKey, Sent] = field(default_factory=dict[BoundaryKey, Sent])
    """Of boundaries that came straight from their makers, where the run has audits."""
    kept: dict[BoundaryKey, str] = field(default_factory=dict[BoundaryKey, str])
    """Hash of every boundary whose bytes are still here, of steps that are over as well; the node's cache keeps it."""
    produced: dict[BoundaryKey, str] = field(default_factory=dict[BoundaryKey, str])
    """What this incarnation has receipted, held or not: it has to open it, or to say that it can't."""
    opened: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """(audit, hash) of what I have put into the store for it."""
    witnessed: dict[int, str] = field(default_factory=dict[int, str])
    """By case: what my run of its bundle gave."""
    unwitnessed: dict[int, str] = field(default_factory=dict[int, str])
    """By case: why I can't run its bundle."""
    unavailable: set[BoundaryKey] = field(default_factory=set[BoundaryKey])
    """Boundaries that couldn't be had for long enough to say so; the node removes a key to have it fetched again."""
    unusable: dict[BoundaryKey, str] = field(default_factory=dict[BoundaryKey, str])
    """Hash of what came as this boundary, and was no numbers; where it is what is receipted, its maker has to answer for it."""
    denounced: set[str] = field(default_factory=set[str])
    """Of these by hash: what I have put into the store."""
    in_store: dict[BoundaryKey, int] = field(default_factory=dict[BoundaryKey, int])
    """My boundaries that I have put into the store: for which replay lease last, 0 for none."""
    pushed: set[tuple[BoundaryKey, Member]] = field(default_factory=set[tuple[BoundaryKey, Member]])
    losses: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By (step, microbatch), at the last stage: fp32 bits."""
    push_from: dict[tuple[BoundaryKey, Member], int] = field(default_factory=dict[tuple[BoundaryKey, Member], int])
    """By a lane's boundary (part 0) and receiver: the first part that isn't in ``pushed``, where that isn't 1."""
    lanes: dict[tuple[int, int], LaneLocally] = field(default_factory=dict[tuple[int, int], LaneLocally])
    """By (step, microbatch): lanes whose weights and moments are here."""
    lane_slots: int = 1 << 30
    """So many of them fit into this machine's memory; the node knows."""
    lane_flight: int = 0
    """So many parts of a lane may be forward and not back; 0: what fills the pipeline without any latency."""
    compute_s: dict[BoundaryKey, float] = field(default_factory=dict[BoundaryKey, float])
    evaluated: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(step, microbatch) of evaluation items computed at the last stage."""
    failures: dict[tuple[int, int, int], tuple[str, str]] = field(
        default_factory=dict[tuple[int, int, int], tuple[str, str]]
    )
    """By (step, microbatch, generation): hash of the failure and the reason in words."""

    added: dict[AddedKey, int] = field(default_factory=dict[AddedKey, int])
    refused: set[LeaseKey] = field(default_factory=set[LeaseKey])
    """Leases handed back: never added under, whatever the fold shows later."""
    jobs: set[Hashable] = field(default_factory=set[Hashable])
    """What is queued or running; the node adds on start and removes at the end, done or failed."""

    commitments: dict[CommitKey, Commitment] = field(default_factory=dict[CommitKey, Commitment])
    made: dict[CommitKey, dict[int, str]] = field(default_factory=dict[CommitKey, dict[int, str]])
    """Hashes of my sum's slices by partition, as they are made; whole once the commitment is there."""
    sent: set[tuple[str, Member]] = field(default_factory=set[tuple[str, Member]])
    """Slices sent to owners, by hash."""
    stored: set[str] = field(default_factory=set[str])
    """Slices put into the store, by hash."""
    slices: set[str] = field(default_factory=set[str])
    """Slices of others that are held, by hash, unadded until a manifest names them."""
    merged: dict[tuple[VersionKey, int], MergedLocally] = field(
        default_factory=dict[tuple[VersionKey, int], MergedLocally]
    )
    fetched: set[str] = field(default_factory=set[str])
    """Merged partitions whose bytes are here, by hash."""
    examined: set[tuple[VersionKey, str]] = field(default_factory=set[tuple[VersionKey, str]])
    """Versions whose merged partitions were fingerprinted, with the seed."""
    fingerprints: dict[tuple[VersionKey, str], tuple[tuple[int, tuple[int, ...]], ...]] = field(
        default_factory=dict[tuple[VersionKey, str], tuple[tuple[int, tuple[int, ...]], ...]]
    )
    """By version and seed."""
    checks: dict[VersionKey, bool] = field(default_factory=dict[VersionKey, bool])
    snapshots: dict[int, StoredLocally] = field(default_factory=dict[int, StoredLocally])

    def computes(self, version: int) -> bool:
        """Whether the weights after so many updates are there to compute with."""
        return self.version is not None and version in (self.version, self.version_before)

    def new_incarnation(self) -> list[BoundaryKey]:
        """Drops sums and all that says something of them, and what others made: at another stage it would pass for an output
        of mine. The state and my own boundaries are nobody's in particular, and of no lease: in a new term leases are numbered from
        1 again. Returns the boundaries that have gone."""
        received = [key for key in self.boundaries if key not in self.made_from]
        for key in received:
            for held in (self.boundaries, self.kept, self.sent_to_me):
                held.pop(key, None)
        for key, made in self.made_from.items():
            self.made_from[key] = msgspec.structs.replace(made, generation=0)
        self.added.clear()
        self.refused.clear()
        self.failures.clear()
        self.pushed.clear()
        self.push_from.clear()
        self.lanes.clear()
        self.in_store.clear()
        self.produced.clear()
        self.opened.clear()
        self.commitments.clear()
        self.made.clear()
        self.fetched.clear()
        self.examined.clear()
        self.sent.clear()
        self.stored.clear()
        self.slices.clear()
        self.merged.clear()
        self.fingerprints.clear()
        self.checks.clear()
        return received

    def note_pushed(self, key: BoundaryKey, to: Member) -> None:
        """A boundary of mine has gone to ``to``."""
        self.pushed.add((key, to))
        if key.part:
            way = (key.whole, to)
            part = self.push_from.get(way, 1)
            while (key.of(part), to) in self.pushed:
                self.pushed.discard((key.of(part), to))
                part += 1
            self.push_from[way] = part

    def was_pushed(self, key: BoundaryKey, to: Member) -> bool:
        return (key, to) in self.pushed or 0 < key.part < self.push_from.get((key.whole, to), 1)

    def lose(self, key: BoundaryKey) -> None:
        """Its bytes are gone: it is had, or made, again, and what names it with it."""
        self.boundaries.pop(key, None)
        if key.part:
            self.boundaries.pop(key.whole, None)

    def bind(self, key: BoundaryKey, generation: int) -> None:
        """An output of mine is receipted under this lease: there is no other one under it ever."""
        made = self.made_from.get(key)
        if made is not None and made.generation != generation:
            self.made_from[key] = msgspec.structs.replace(made, generation=generation)

    def note_receipt(self, claim: ForwardReceipt | BackwardReceipt) -> None:
        """What I say that I have made, whenever I made it, an audit may ask of me."""
        forward = claim.output if isinstance(claim, ForwardReceipt) else claim.forward
        backward = "" if isinstance(claim, ForwardReceipt) else claim.output
        for is_backward, hash_ in ((False, forward), (True, backward)):
            key = BoundaryKey(claim.step, claim.microbatch, claim.stage, is_backward)
            if hash_:
                self.produced[key] = hash_
                self.bind(key, claim.generation)

    def drop_item(self, key: BoundaryKey, stage: int) -> list[BoundaryKey]:
        """A boundary isn't what its maker says: it goes, with all that ``stage`` made of it. Returns what has gone."""
        step, m = key.step, key.microbatch
        wholes = {key.whole, BoundaryKey(step, m, stage, False), BoundaryKey(step, m, stage, True)}
        parts = {found for held in (self.boundaries, self.made_from) for found in held if found.part}
        gone = [*wholes, *(found for found in parts if found.whole in wholes)]
        self.lanes.pop((step, m), None)
        for found in gone:
            for held in (self.boundaries, self.kept, self.made_from, self.produced, self.compute_s, self.in_store):
                held.pop(found, None)
            self.sent_to_me.pop(found, None)
        self.unavailable.discard(key)
        self.pushed = {entry for entry in self.pushed if entry[0] not in gone}
        self.push_from = {entry: part for entry, part in self.push_from.items() if entry[0] not in wholes}
        self.losses.pop((step, m), None)
        self.evaluated.discard((step, m))
        self.failures = {at: why for at, why in self.failures.items() if at[:2] != (step, m)}
        return gone

    def rewind(self, step: int) -> None:
        """The run goes on from the state after ``step`` updates, on another branch: what is of later ones never was."""
        for held in (
            *(self.boundaries, self.made_from, self.produced, self.kept, self.compute_s),
            *(self.in_store, self.sent_to_me),
        ):
            for key in [key for key in held if key.step >= step]:
                del held[key]
        self.unavailable.clear()
        self.unusable.clear()
        self.losses.clear()
        self.evaluated.clear()
        self.snapshots.clear()
        self.new_incarnation()
        self.version = self.version_before = None

    def end_step(self, step: int, evidence_from: int | None = None) -> None:
        """After the update of ``step``: nothing of it, nor of steps before, is needed from here.

        ``evidence_from``: the first step of which an audit may want boundaries (None: of none). ``kept`` is the cache's.
        """
        first = step + 1 if evidence_from is None else min(step + 1, evidence_from)
        self.produced = {key: hash_ for key, hash_ in self.produced.items() if key.step >= first}
        for held in (self.boundaries, self.made_from, self.compute_s, self.in_store, self.sent_to_me):
            for key in [key for key in held if key.step <= step]:
                del held[key]
        self.unavailable = {key for key in self.unavailable if key.step > step}
        self.unusable = {key: hash_ for key, hash_ in self.unusable.items() if key.step > step}
        self.pushed = {entry for entry in self.pushed if entry[0].step > step}
        self.push_from = {entry: part for entry, part in self.push_from.items() if entry[0].step > step}
        self.lanes = {key: lane for key, lane in self.lanes.items() if key[0] > step}
        self.losses = {key: bits for key, bits in self.losses.items() if key[0] > step}
        self.evaluated = {key for key in self.evaluated if key[0] > step}
        self.failures = {key: why for key, why in self.failures.items() if key[0] > step}
        self.added = {key: generation for key, generation in self.added.items() if key[0] > step}
        self.refused = {key for key in self.refused if key[0] > step}
        self.commitments = {key: value for key, value in self.commitments.items() if key[0] > step}
        self.made = {key: value for key, value in self.made.items() if key[0] > step}
        self.examined = {key for key in self.examined if key[0][0] > step}
        self.merged = {key: value for key, value in self.merged.items() if key[0][0] > step}
        self.fingerprints = {key: value for key, value in self.fingerprints.items() if key[0][0] > step}
        self.checks = {key: ok for key, ok in self.checks.items() if key[0] > step}
        self.snapshots = {key: value for key, value in self.snapshots.items() if key >= step}
        self.sent.clear()
        self.stored.clear()
        self.slices.clear()
        self.fetched.clear()
