"""What miners say to each other: a small header, and the bytes of a tensor or a blob behind it."""

from __future__ import annotations

import msgspec

from subnet.words import Member


class PeerFrame(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of peer headers; the body is the raw buffer."""


class BoundaryFrame(PeerFrame, tag="b", frozen=True):
    """A boundary tensor in the run's code: forward output of ``stage`` (``backward`` False) or its input gradient.

    ``hash`` is of the coded bytes, whatever the link does to them: ``packing`` is ``none`` or ``planes``
    (:mod:`subnet.numerics.planes`). ``signature``: the sender's, where the run has audits (:mod:`subnet.protocol.sent`).
    ``part``: of a lane's boundary, from 1 (:mod:`subnet.protocol.parts`); else 0.
    """

    run: str
    step: int
    microbatch: int
    stage: int
    backward: bool
    sender: Member
    generation: int
    hash: str
    packing: str = "none"
    signature: bytes = b""
    part: int = 0


class NeedFrame(PeerFrame, tag="n", frozen=True):
    """Please send the boundary that ``stage`` produced."""

    run: str
    step: int
    microbatch: int
    stage: int
    backward: bool
    sender: Member
    part: int = 0


class SliceFrame(PeerFrame, tag="s", frozen=True):
    """A packed slice of a partial, for its owner; ``hash`` is of the canonical bytes."""

    run: str
    step: int
    group: int
    partition: int
    stage: int
    sender: Member
    hash: str
    num_items: int
    packing: str


class NeedSliceFrame(PeerFrame, tag="q", frozen=True):
    run: str
    step: int
    group: int
    partition: int
    stage: int
    hash: str
    sender: Member


class WantBlobFrame(PeerFrame, tag="w", frozen=True):
    """Please send ``num_bytes`` of a blob of the run's snapshots or log, from ``offset`` on (fewer where it ends)."""

    run: str
    request: int
    hash: str
    offset: int
    num_bytes: int
    sender: Member


class BlobPieceFrame(PeerFrame, tag="p", frozen=True):
    """Bytes of a blob from ``offset`` on, in answer to ``request``; ``size_bytes`` is that of the whole blob."""

    run: str
    request: int
    hash: str
    offset: int
    size_bytes: int
    sender: Member


class NoBlobFrame(PeerFrame, tag="x", frozen=True):
    """The answer to ``request`` without bytes. ``code``: ``not_held``, ``busy`` or ``not_served``."""

    run: str
    request: int
    hash: str
    code: str
    sender: Member


LIMIT_PIECE_BYTES = 4 << 20

AnyPeerFrame = BoundaryFrame | NeedFrame | SliceFrame | NeedSliceFrame | WantBlobFrame | BlobPieceFrame | NoBlobFrame
