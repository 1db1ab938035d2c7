"""What members say to the coordinator and to each other: msgspec structs, versioned, decoding is validating.

Every claim carries the member (incarnation) that makes it; its request is signed by the member's hotkey.
A claim is repeated until the fold shows its event: the event is the acknowledgement.
"""

from __future__ import annotations

import msgspec

from subnet.errors import Refusal
from subnet.protocol.peer_frames import LIMIT_PIECE_BYTES as LIMIT_PIECE_BYTES
from subnet.protocol.peer_frames import AnyPeerFrame as AnyPeerFrame
from subnet.protocol.peer_frames import BlobPieceFrame as BlobPieceFrame
from subnet.protocol.peer_frames import BoundaryFrame as BoundaryFrame
from subnet.protocol.peer_frames import NeedFrame as NeedFrame
from subnet.protocol.peer_frames import NeedSliceFrame as NeedSliceFrame
from subnet.protocol.peer_frames import NoBlobFrame as NoBlobFrame
from subnet.protocol.peer_frames import PeerFrame as PeerFrame
from subnet.protocol.peer_frames import SliceFrame as SliceFrame
from subnet.protocol.peer_frames import WantBlobFrame as WantBlobFrame
from subnet.words import Commitment, Cursor, Member, Want

LIMIT_REPORT_BYTES = 4 << 20
LIMIT_JOIN_BYTES = 64 << 10
LIMIT_SUBMISSION_BYTES = 32 << 20
LIMIT_GRANTS = 1024


class Hello(msgspec.Struct, frozen=True):
    """Answer of ``GET /v1/hello`` (public)."""

    protocol_min: int
    protocol_max: int
    time_ns: int
    hotkey: str
    term: int
    head_number: int
    run: str | None
    """Name of the active run."""
    waiting_for: str = ""


class JoinRequest(msgspec.Struct, frozen=True):
    """``POST /v1/join``; idempotent by ``boot``."""

    version: int
    run: str
    boot: str
    host: str
    port: int
    hardware_class: tuple[str, ...]
    seen: Cursor
    """Highest (term, head) this process has seen."""
    reachable: bool = True
    """Whether others can connect to ``host:port``, as this process found out."""


class JoinAnswer(msgspec.Struct, frozen=True):
    """``accepted``: watch the stream for ``Joined`` with your boot id. Else ``refusal`` says why and when to retry."""

    accepted: bool
    refusal: Refusal | None = None


class Claim(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of what a member reports."""


class ForwardReceipt(Claim, tag="F", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int
    input: str
    output: str
    compute_s: float
    loss_bits: int | None = None


class BackwardReceipt(Claim, tag="B", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int
    input: str
    output: str
    compute_s: float
    loss_bits: int | None = None
    forward: str = ""
    """Output of the item's forward, where that has no receipt of its own."""


class NotAccumulatedClaim(Claim, tag="N", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int


class FailedClaim(Claim, tag="X", frozen=True):
    step: int
    microbatch: int
    stage: int
    generation: int
    failure: str
    reason: str


class LaneClaim(Claim, tag="Q", frozen=True):
    """How far I have come with a lane: parts forward and back. Nothing is journaled of it; it says who waits for whom."""

    step: int
    microbatch: int
    stage: int
    generation: int
    forwards: int
    backwards: int


class PartsClaim(Claim, tag="O", frozen=True):
    """Parts of my lane's boundary are in the store, the first of these hashes being part ``first``."""

    step: int
    microbatch: int
    stage: int
    generation: int
    backward: bool
    first: int
    hashes: tuple[str, ...]


class MissingClaim(Claim, tag="M", frozen=True):
    """``microbatch``'s boundary into ``stage`` can't be had: the forward one (``backward`` False) or the gradient."""

    step: int
    microbatch: int
    stage: int
    backward: bool


class UpdatedClaim(Claim, tag="U", frozen=True):
    step: int
    root: str


class CommitClaim(Claim, tag="C", frozen=True):
    step: int
    group: int
    number: int
    commitment: Commitment


class MergedClaim(Claim, tag="G", frozen=True):
    step: int
    group: int
    version: int
    partition: int
    hash: str
    blob: str
    size_bytes: int
    squares: str


class FingerprintClaim(Claim, tag="P", frozen=True):
    step: int
    group: int
    version: int
    stage: int
    values: tuple[tuple[int, tuple[int, ...]], ...]


class CheckClaim(Claim, tag="K", frozen=True):
    step: int
    group: int
    version: int
    ok: bool


class SnapshotClaim(Claim, tag="S", frozen=True):
    step: int
    stage: int
    manifest: str
    root: str


class LeavingClaim(Claim, tag="L", frozen=True):
    """SIGTERM: hands everything back."""


class MismatchClaim(Claim, tag="D", frozen=True):
    """The boundary into ``stage`` that I computed ``microbatch`` with isn't the one its maker has receipted: my sum can't stand."""

    step: int
    microbatch: int
    stage: int
    backward: bool
    used: str
    """Hash of what I computed with."""
    generation: int = 0
    """Of the lease that its maker has sent it under; 0: without a proof, which accuses nobody."""
    signature: bytes = b""
    """The maker's over what it has sent (:mod:`subnet.protocol.sent`)."""


class UnusableClaim(Claim, tag="E", frozen=True):
    """The bytes of ``microbatch``'s boundary into ``stage``, as its maker has receipted it, are no numbers to compute with;
    I have put them into the store."""

    step: int
    microbatch: int
    stage: int
    backward: bool
    hash: str


class NotHeldClaim(Claim, tag="H", frozen=True):
    """I don't hold any more what this audit wants of me (a restart took it)."""

    audit: int
    wants: tuple[Want, ...]


class WitnessClaim(Claim, tag="W", frozen=True):
    """What my run of a case's bundle gave; an empty ``digest``: I can't run it, for this ``reason``, so ask somebody else."""

    case: int
    digest: str
    reason: str = ""


AnyClaim = (
    ForwardReceipt
    | BackwardReceipt
    | NotAccumulatedClaim
    | FailedClaim
    | MissingClaim
    | UpdatedClaim
    | CommitClaim
    | MergedClaim
    | FingerprintClaim
    | CheckClaim
    | SnapshotClaim
    | LeavingClaim
    | MismatchClaim
    | NotHeldClaim
    | WitnessClaim
    | UnusableClaim
    | LaneClaim
    | PartsClaim
)


SIGNED_CLAIMS = (ForwardReceipt, BackwardReceipt, CommitClaim, FingerprintClaim, MergedClaim)
"""What a member signs for good: the claims that an audit compares with."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """``POST /v1/reports``: claims of one member, in order.

    ``receipts_root`` is the Merkle root over the encoded receipts, commitments, fingerprints and merged claims of this batch
    (:data:`SIGNED_CLAIMS`, in order) and ``receipts_signature`` the hotkey's signature over it, so that one of them can be
    proven later without the others.
    """

    version: int
    run: str
    member: Member
    cursor: Cursor
    claims: tuple[AnyClaim, ...]
    receipts_root: bytes = b""
    receipts_signature: bytes = b""
    process: str = ""
    used: StoreUse | None = None
    """What ``process`` has asked of the store for this run so far, where that has changed since it last said so."""


class ReportAnswer(msgspec.Struct, frozen=True):
    """``known`` False: this incarnation is void; join again with a new boot id."""

    known: bool
    head_number: int


class Heartbeat(msgspec.Struct, frozen=True):
    """``POST /v1/heartbeat``, from a process without torch; ``ticks`` counts turns of the main process's event loop."""

    version: int
    boot: str
    ticks: int
    suspect: str = ""
    peak_flops_per_s: float = 0.0
    """What the sender says its device could do, in the run's precision; shown, never counted on."""


class StoreUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests to an object store, by kind (HEAD counts as a get), and the bytes of their bodies."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def plus(self, other: StoreUse) -> StoreUse:
        return StoreUse(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def minus(self, other: StoreUse) -> StoreUse:
        return StoreUse(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))

    def at_least(self, other: StoreUse) -> StoreUse:
        return StoreUse(*(max(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__))


class GrantRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """``POST /v1/grants``: presigned URLs for blobs, in order. A size is required to put; 0 to get: the store says it."""

    version: int
    run: str
    put: bool
    blobs: tuple[tuple[str, int], ...]
    retention: str = "log"
    sha256: tuple[tuple[str, ...], ...] = ()
    """To put, after a refusal ``needs_sha256``: SHA-256 (hex) of each part of each blob."""
    parts: tuple[int, ...] = ()
    """To put the one blob named, which goes up in parts: a grant for each of these parts, signed now."""
    complete: bool = False
    """To put the one blob named: its parts are there; ``parts`` of the one grant answered are those that aren't."""
    damaged: bool = False
    """To get: what came under these hashes was something else; the validator looks, and removes what is wrong."""
    process: str = ""
    used: StoreUse | None = None
    """What ``process`` has asked of the store for this run so far, all in all: for the run's report of costs."""


class UnitReport(msgspec.Struct, frozen=True):
    """Cost of the model's units on the submitter's machine, in seconds, or FLOPs per token where not measured."""

    costs: tuple[float, ...]
    measured: bool
