"""The words of the design as types: every other module names things with these.

Nothing here does anything; nothing here imports anything of ours.
"""

from __future__ import annotations

import math
from typing import NewType

import msgspec

Hotkey = NewType("Hotkey", str)
"""ss58 address of a hotkey: the durable identity of a miner or validator."""

BlobHash = NewType("BlobHash", str)
"""BLAKE3 of the bytes, 64 lower-case hex digits: the address of a blob in the store."""

PROTOCOL_VERSION = 1
"""Version of wire and journal structs. Changing it makes older members answer ``version_unsupported``."""
PROTOCOL_OLDEST = 1
"""The oldest that this program still speaks: a new version that can be told from the old one may leave it here."""

BLOCK = 1024
"""Elements of a block at most. Part of the arithmetic: changing it changes every scale of every run."""

CALIBRATION_STEP = -1
"""The step that merges only gradient maxima, so that step 0 has scales."""


class Member(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One incarnation of a hotkey's process; a process drops its accumulators whenever this changes."""

    hotkey: str
    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.hotkey[:8]}#{self.term}.{self.number}"


class ItemKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A work item: microbatch ``microbatch`` of ``step`` at ``stage``.

    ``microbatch`` in ``[0, M)`` trains; ``M + e`` is the e-th hold-out microbatch (forward only).
    """

    step: int
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"t{self.step}/m{self.microbatch}/s{self.stage}"


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A parameter by its whole-model name.

    ``row_blocked`` for embeddings and heads; 3-D tensors are blocked by expert, others are flat (docs/arithmetic.md, 2).
    """

    name: str
    shape: tuple[int, ...]
    row_blocked: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Pieces that no block crosses: rows, experts, or the whole tensor."""
        return self.shape[0] if self.row_blocked or len(self.shape) == 3 else 1

    @property
    def row_length(self) -> int:
        return self.num_elements // self.num_rows if self.num_rows else 0

    @property
    def blocks_per_row(self) -> int:
        return -(-self.row_length // BLOCK)

    @property
    def num_blocks(self) -> int:
        return self.num_rows * self.blocks_per_row


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """A merge group as the state machine sees it.

    ``stages``: whose gradients one manifest and one seal cover (one stage, or first and last together when embeddings
    are tied). ``partitions[p]``: the stages that hold, contribute to and may own partition p.
    """

    stages: tuple[int, ...]
    partitions: tuple[tuple[int, ...], ...]


class Commitment(msgspec.Struct, frozen=True, array_like=True):
    """What one member holds of one stage: its m-set and the hash of each partition's slice (group-wide index, hash)."""

    member: Member
    stage: int
    microbatches: tuple[int, ...]
    hashes: tuple[tuple[int, str], ...]


class Want(msgspec.Struct, frozen=True, array_like=True):
    """A boundary that an audit needs: the forward output of ``stage``, or (``backward``) its gradient for the stage before."""

    stage: int
    microbatch: int
    backward: bool
    hash: str


class Cursor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Position in a journal: all events with a number below ``number`` have been seen, the last under ``term``."""

    term: int
    number: int


def short(value: str, digits: int = 10) -> str:
    """The head of a long identifier, for logs and pages."""
    return value if len(value) <= digits else value[:digits]
