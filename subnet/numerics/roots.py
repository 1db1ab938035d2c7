"""State roots of `docs/arithmetic.md` §9: a run's state as one hash that knows of no cuts, fleet, run, branch or term.

Takes buffers (little-endian, contiguous); no torch, no layout.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

from blake3 import blake3

Buffer = bytes | bytearray | memoryview


def leaf_hash(name: str, shape: Sequence[int], weight: Buffer, *arrays: Buffer) -> bytes:
    """The leaf of one tensor: its name, shape, values, and the other arrays of its state in their order.

    Which they are, and in which order: :mod:`subnet.numerics.state_arrays`.
    """
    hasher = blake3(b"iota/leaf/1\0" + name.encode() + b"\0" + struct.pack(f"<{1 + len(shape)}Q", len(shape), *shape))
    size = 4 * math.prod(shape)
    for index, buffer in enumerate((weight, *arrays)):
        view = memoryview(buffer).cast("B")
        if index == 0 and len(view) != size:
            raise ValueError(f"the weights of {name} have {len(view)} bytes instead of {size}")
        hasher.update(struct.pack("<Q", len(view)))
        hasher.update(view)
    return hasher.digest()


def stage_root(step: int, leaves: Iterable[bytes]) -> bytes:
    """The root of a stage after ``step`` updates; leaves of its tensors in canonical order."""
    return blake3(b"iota/stage/1\0" + struct.pack("<Q", step) + b"".join(leaves)).digest()


def run_root(step: int, leaves: Iterable[bytes]) -> bytes:
    """The root of the whole run after ``step`` updates; all leaves in canonical order, tied tensors once."""
    return blake3(b"iota/root/1\0" + struct.pack("<Q", step) + b"".join(leaves)).digest()
