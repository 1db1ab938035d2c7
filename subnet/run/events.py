"""The journal's events: past facts, one frozen struct each, one tagged union.

Whoever folds the same events (coordinator, members, followers, tools) holds the same state. What may be journaled when
is enforced by :mod:`validator.intake` and :mod:`validator.decide`; what an event does is in :mod:`subnet.run.apply`.

Q events (``QUORUM_EVENTS``) take effect outside the coordinator only when the log store has them; nothing at or after
an unacknowledged Q event leaves the coordinator.

Changing a field, a tag or an order here changes every journal: bump ``EVENTS_VERSION`` and write a reader for the old.
"""

from __future__ import annotations

from typing import Any

import msgspec

from subnet.policy.policy import SubnetPolicy
from subnet.run.audit_events import (
    Appealed,
    AuditClosed,
    AuditOpened,
    CaseClosed,
    CaseOpened,
    Rewound,
    WindowAudited,
    WindowClosed,
    WitnessAsked,
    WitnessSaid,
)
from subnet.run.config import RunConfig
from subnet.run.control_event import RunControlled
from subnet.run.event_base import Event
from subnet.run.merge_events import (
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
from subnet.run.schedule import StepScalars
from subnet.words import Cursor, GroupShape, Member, TensorSpec

EVENTS_VERSION = 1


class RunPlanned(Event, tag="RunPlanned", frozen=True):
    """First event of a run: everything that is frozen for its whole life."""

    run_id: str
    config: RunConfig
    model_config: dict[str, Any]
    unit_tensors: tuple[tuple[TensorSpec, ...], ...]
    """Tensors of embedding, each layer, head, in canonical order."""
    unit_flops_per_token: tuple[float, ...]
    tied: TensorSpec | None
    cuts: tuple[int, ...]
    groups: tuple[GroupShape, ...]
    data: str
    """Blob hash of the data manifest."""
    snapshot: str
    """Blob hash of snapshot 0's manifest (the whole model)."""
    tokenizer: str
    submitter: str


class TermStarted(Event, tag="TermStarted", frozen=True):
    """Q. A validator leads from here on; voids every lease, partial and incarnation of unsealed work."""

    number: int
    hotkey: str
    nonce: str


class HardwareClassSet(Event, tag="HardwareClassSet", frozen=True):
    """The run's hardware class: golden hashes, one per stage, reported by the operator or by two coldkeys."""

    hashes: tuple[str, ...]
    by: str


class Joined(Event, tag="Joined", frozen=True):
    """A process became a member; any older incarnation of its hotkey is dropped."""

    member: Member
    coldkey: str
    stage: int
    boot: str
    host: str
    port: int
    reachable: bool = True
    """Whether others can connect to it; what travels to or from one that isn't goes through the store."""
    registered_at_block: int = 0
    """Which registration of the hotkey this is: scores are kept by it."""


class Gone(Event, tag="Gone", frozen=True):
    """A member left: ``lost``, ``left`` (SIGTERM), ``silent``, ``liar``, ``checksum``, ``replaced``, ``accused``."""

    member: Member
    why: str


class Updated(Event, tag="Updated", frozen=True):
    """The member's state is that before update ``step``; ``root`` is its stage root there ("" before step -1)."""

    member: Member
    step: int
    root: str


class StepPlanned(Event, tag="StepPlanned", frozen=True):
    """Opens step ``step``. ``num_training`` is M, or 0 for the last, evaluating step; items M.. are hold-out items."""

    step: int
    num_training: int
    num_evaluation: int
    scalars: StepScalars | None


class Leased(Event, tag="Leased", frozen=True):
    step: int
    microbatch: int
    stage: int
    member: Member
    generation: int


class ReplayLeased(Event, tag="ReplayLeased", frozen=True):
    """The member computes the item again and serves one boundary of it; it never accumulates.

    ``backward`` False: the forward output; True: the gradient for the stage before.
    """

    step: int
    microbatch: int
    stage: int
    backward: bool
    member: Member
    generation: int


class Revoking(Event, tag="Revoking", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int


class NotAccumulated(Event, tag="NotAccumulated", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int


class Forwarded(Event, tag="Forwarded", frozen=True):
    """Receipt of a forward: ``output`` is the boundary's hash ("" at the last stage)."""

    step: int
    microbatch: int
    stage: int
    generation: int
    output: str
    loss_bits: int | None = None
    """fp32 bits of the hold-out loss (last stage of an evaluation item)."""


class Backwarded(Event, tag="Backwarded", frozen=True):
    """Receipt of a backward, sent after the gradient was added: the lease is done."""

    step: int
    microbatch: int
    stage: int
    generation: int
    output: str
    loss_bits: int | None = None
    """fp32 bits of the microbatch's mean loss (last stage only)."""
    forward: str = ""
    """Hash of the forward's output, where no :class:`Forwarded` has said it."""


class PartsMade(Event, tag="PartsMade", frozen=True):
    """Parts of a lane's boundary that go through the store are there: nobody finds them otherwise before the lane's end."""

    step: int
    microbatch: int
    stage: int
    generation: int
    backward: bool
    first: int
    """The part, from 1, that the first hash is of."""
    hashes: tuple[str, ...]


class Voided(Event, tag="Voided", frozen=True):
    """The member's partial of (step, stage) is void: its leases there are open again, its epoch is one higher."""

    step: int
    stage: int
    member: Member
    why: str


class ItemFailed(Event, tag="ItemFailed", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int
    failure: str
    """Hash of the failure, the same wherever the arithmetic is the same."""


class MicrobatchSkipped(Event, tag="MicrobatchSkipped", frozen=True):
    step: int
    microbatch: int
    stage: int
    failure: str
    confirmed: bool


class StepSealed(Event, tag="StepSealed", frozen=True):
    """Q. All groups sealed: replicas may update once the log store has this."""

    step: int
    num_counted: int
    """Microbatches in the sum (M less the skipped)."""
    norm_bits: int
    """fp64 bits of the gradient norm before clipping."""
    coefficient_bits: int
    """fp32 bits of clip / num_counted."""
    loss_bits: int
    """fp64 bits of the step's mean loss."""
    tokens: int
    evaluation: tuple[int, ...] = ()
    """fp32 bits of the hold-out losses of the state before this update, in item order."""


class SnapshotOrdered(Event, tag="SnapshotOrdered", frozen=True):
    """``member`` is to store its stage's state after ``step`` updates; the next seal waits for it."""

    step: int
    stage: int
    member: Member


class SnapshotStored(Event, tag="SnapshotStored", frozen=True):
    """A replica stored its stage's state after ``step`` updates; ``manifest`` is a blob hash.

    Verified when another coldkey's root equals ``root``.
    """

    step: int
    stage: int
    member: Member
    manifest: str
    root: str


class RunFinished(Event, tag="RunFinished", frozen=True):
    """Q. ``root`` is the run root after the last update, from the final snapshots' leaves."""

    step: int
    root: str
    evaluation: tuple[int, ...] = ()


class PolicyChanged(Event, tag="PolicyChanged", frozen=True):
    """The leader's validator counts with another policy from ``effective_s`` on (wall time; :mod:`subnet.score.timeline`). What it
    is, is the subnet owner's or the validator's own to say; it never changes the run's arithmetic."""

    policy: SubnetPolicy
    digest: str
    effective_s: float
    effective_block: int
    """Of the chain, as expected: the first of a tempo. 0: it was in force when the run began, or when the validator started."""
    by: str
    """Hotkey that had it changed."""


AuditEvent = (
    AuditOpened
    | AuditClosed
    | WindowClosed
    | WindowAudited
    | CaseOpened
    | WitnessAsked
    | WitnessSaid
    | CaseClosed
    | Appealed
    | Rewound
)

AnyEvent = (
    RunPlanned
    | TermStarted
    | HardwareClassSet
    | Joined
    | Gone
    | Updated
    | StepPlanned
    | Leased
    | ReplayLeased
    | Revoking
    | NotAccumulated
    | Forwarded
    | Backwarded
    | PartsMade
    | Voided
    | ItemFailed
    | MicrobatchSkipped
    | Frozen
    | Committed
    | ReduceOrdered
    | StoreRouted
    | OwnerFailed
    | PartitionMerged
    | SeedRevealed
    | Fingerprinted
    | Checked
    | TraceStarted
    | StageSealed
    | StepSealed
    | SnapshotOrdered
    | SnapshotStored
    | RunFinished
    | AuditEvent
    | RunControlled
    | PolicyChanged
)

QUORUM_EVENTS = (TermStarted, StageSealed, StepSealed, RunFinished, WindowClosed, Rewound)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One line of the journal: its number (from 0), the wall time it was stamped with, the event."""

    number: int
    time_ns: int
    event: AnyEvent


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What the directive stream carries: consecutive records, the head hash after them, the leader's signature over it.

    ``head``: chain value after the last record (:mod:`subnet.run.chain_hash`). ``cursor``: (term, next number).
    """

    cursor: Cursor
    first_number: int
    records: tuple[msgspec.Raw, ...]
    head: str
    signature: bytes
