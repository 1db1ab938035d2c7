"""A case: all that is needed to do a stage's work of one step again and to compare, as plain data; an audit *is* its replay.

A case names its blobs by hash; a *bundle* is a directory with ``case.msgpack`` and those blobs, which anyone can replay
anywhere (:mod:`subnet.audit.bundle`, :mod:`subnet.audit.redo`). Validators, witnesses and whoever doubts them run the same code.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from subnet.protocol.wire import MerkleProof
from subnet.run.events import RunPlanned
from subnet.run.schedule import StepScalars, Terms
from subnet.words import Commitment, Member

CASE_VERSION = 1
LIMIT_CASE_BYTES = 64 << 20
_DIGEST = b"iota/audit/digest/1\0"
_ROOT_DIGEST = b"iota/audit/root/1\0"

FingerprintValues = tuple[tuple[int, tuple[int, ...]], ...]
"""(partition, numbers) of each partition that a member contributes to."""


class ItemCase(msgspec.Struct, frozen=True, array_like=True):
    """One microbatch of a partial: what goes in, and what its member said came out. Hashes are of coded boundary bytes."""

    microbatch: int
    x: str
    """The forward's input; "" at the first stage."""
    gradient: str
    """The backward's input; "" at the last stage."""
    forward: str
    """Claimed output of the forward; "" at the last stage, or where it was never said."""
    backward: str
    """Claimed output of the backward; "" at the first stage."""
    loss_bits: int | None = None
    """Claimed fp32 bits of the loss, at the last stage."""


class PartialCase(msgspec.Struct, frozen=True, array_like=True):
    """One member's sum of the step: its items, the commitment to its slices, its fingerprints once the seed was known."""

    member: Member
    commitment: Commitment
    items: tuple[ItemCase, ...]
    """In the order of the commitment's m-set."""
    fingerprints: FingerprintValues = ()
    """Empty where the seed isn't revealed yet."""


class MergedCase(msgspec.Struct, frozen=True, array_like=True):
    """A merged partition as its owner published it."""

    partition: int
    owner: Member | None
    hash: str
    blob: str
    size_bytes: int
    squares: str


class MergeCase(msgspec.Struct, frozen=True, array_like=True):
    """The group's merge, as far as the stage's own partitions go. ``whole``: every partial of it is in the case, so that
    the merged partitions can be compared, not only the partials."""

    group: int
    version: int
    seed: str
    """"" while it isn't revealed."""
    total_items: int
    merged: tuple[MergedCase, ...]
    whole: bool


class LogStep(msgspec.Struct, frozen=True, array_like=True):
    """One sealed update: what turns the state after ``step`` updates into the one after ``step + 1``."""

    step: int
    scalars: StepScalars | None
    num_counted: int
    coefficient_bits: int
    partitions: tuple[tuple[int, str, str, int], ...]
    """(index in the group, hash, blob, bytes) of each of the stage's partitions."""
    root: str = ""
    """The stage root that its replicas agreed on after this update; "" where it isn't known (any more)."""


class StateRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the stage's state is to be had: a snapshot (of the ``whole`` model, or of the stage) and the log behind it."""

    version: int
    """Of the snapshot; -1: the run's first, before calibration."""
    manifest: str
    whole: bool
    root: str
    """The agreed stage root of the snapshot; "" for the run's first."""
    log: tuple[LogStep, ...]
    """Updates ``version`` up to the one before the state that is needed."""


class SignedClaim(msgspec.Struct, frozen=True, array_like=True):
    """A claim of the accused, under its own signature (``receipts/1`` over the Merkle root of a report)."""

    claim: bytes
    root: bytes
    proof: MerkleProof
    signature: bytes


class Case(msgspec.Struct, frozen=True):
    """Frozen evidence. Boundaries, tokens and state are named by hash and lie beside it in a bundle."""

    version: int
    planned: RunPlanned
    branch: int
    step: int
    stage: int
    state: StateRef
    """Brings the stage to the state that the step's gradients are of (:meth:`RunConfig.version_of`)."""
    partials: tuple[PartialCase, ...]
    merge: MergeCase | None = None
    """None before the manifest is there."""
    update: LogStep | None = None
    """After the seal: the step's own update, to compare the stage root after it as well. Needs ``merge.whole``."""
    skipped: tuple[int, ...] = ()
    hardware_class: tuple[str, ...] = ()
    claims: tuple[SignedClaim, ...] = ()
    roots: tuple[tuple[Member, str], ...] = ()
    """(member, stage root it reported after the step's update). Such a case has no partials: only the state is made."""
    terms: tuple[Terms, ...] = ()
    """What the run's owner had changed of steps up to this one (:mod:`subnet.run.control`)."""


class RedoneItem(msgspec.Struct, frozen=True, array_like=True):
    microbatch: int
    forward: str
    backward: str
    loss_bits: int | None
    failure: str = ""
    """Why it can't be computed (the hash of the failure), else ""."""


class RedonePartial(msgspec.Struct, frozen=True, array_like=True):
    """What the work of a partial really gives; ``wrong`` in words, empty if all that was claimed is right."""

    member: Member
    items: tuple[RedoneItem, ...]
    slices: tuple[tuple[int, str], ...]
    """(partition, hash) of the true slices."""
    fingerprints: FingerprintValues
    wrong: tuple[str, ...]


class RedoneMerge(msgspec.Struct, frozen=True, array_like=True):
    """``wrong``: (partition, why) of merged partitions that aren't the sum of the true slices."""

    hashes: tuple[tuple[int, str], ...]
    wrong: tuple[tuple[int, str], ...]


class Distance(msgspec.Struct, frozen=True):
    """How far what is claimed lies from what this machine computes, relative to the latter (L2), and how far it may lie."""

    member: Member | None
    """Whose claim it is; None for a merged partition without an owner."""
    what: str
    distance: float
    limit: float

    @property
    def within(self) -> bool:
        return self.distance <= self.limit


class OtherClass(msgspec.Struct, frozen=True):
    """What a machine of another hardware class can say: how near the claims are. It never says that one is wrong."""

    ours: str
    """Golden hash of the stage on this machine."""
    theirs: str
    distances: tuple[Distance, ...] = ()
    not_compared: int = 0
    """Claims that differ from what this machine computes and whose bytes aren't in the bundle."""

    @property
    def within(self) -> bool:
        """Whether all that could be compared is within its tolerance."""
        return all(one.within for one in self.distances)


class Findings(msgspec.Struct, frozen=True):
    """The result of a replay. ``digest`` depends on nothing but the work: two honest runs of one class give the same."""

    digest: str
    """"" from a machine of another class."""
    partials: tuple[RedonePartial, ...]
    merge: RedoneMerge | None
    wrong_roots: tuple[tuple[int, str], ...]
    """(step, why): states after that many updates that aren't what the replicas agreed on, the snapshot's own included."""
    compute_s: float
    """Time of the items' forwards and backwards: what the audit costs beside the work it checks."""
    state_s: float
    """Time to bring the stage to the state."""
    read_bytes: int
    root: str = ""
    """Of a case about roots: the one that snapshot and log lead to."""
    other_class: OtherClass | None = None
    """Set by a replay on another class of hardware that was asked for anyway: then nothing above says that a claim is wrong."""


def digest(partials: tuple[RedonePartial, ...]) -> str:
    """BLAKE3 over what was computed, whoever claimed what and in whichever order: the answer that runs are compared by."""
    found = [(sorted(p.items, key=lambda item: item.microbatch), p.slices) for p in partials]
    computed = sorted(found, key=lambda of: of[0][0].microbatch if of[0] else -1)
    return blake3(_DIGEST + msgspec.msgpack.encode(computed)).hexdigest()


def root_digest(root: str) -> str:
    """The same of a case about roots: state roots are exact on every machine."""
    return blake3(_ROOT_DIGEST + root.encode()).hexdigest()


def false_roots(case: Case, findings: Findings) -> tuple[Member, ...]:
    """Whoever reported another root than the one that was found."""
    return tuple(member for member, root in case.roots if root != findings.root)
