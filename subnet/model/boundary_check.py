"""Whether bytes are a boundary that an honest maker can have sent: numpy alone, nothing is computed with them."""

from __future__ import annotations

import numpy as np

from subnet.errors import HashMismatch, InputError
from subnet.model.memory import boundary_bytes, routing_bytes
from subnet.model.plan import ModelPlan
from subnet.numerics.codes import decode
from subnet.protocol.wire import Buffer, blob_hash


def is_unusable(plan: ModelPlan, hash_: str, data: Buffer) -> bool:
    """Whether they don't decode to finite numbers. Raises :class:`HashMismatch` unless they are those of ``hash_``."""
    if blob_hash(data) != hash_:
        raise HashMismatch(f"what the store has of boundary {hash_[:16]} isn't what its hash says")
    pipeline = plan.config.pipeline
    tokens = pipeline.microbatch_rows * plan.config.data.sequence_length
    values, whole = np.empty((tokens, plan.hidden_size), dtype=np.float32), memoryview(data).cast("B")
    if len(whole) != boundary_bytes(plan):
        return True
    end = len(whole) - routing_bytes(plan)
    try:
        decode(pipeline.boundary_code, whole[:end], values, pipeline.chunks, what="boundary")
    except InputError:
        return True
    return not bool(np.isfinite(np.frombuffer(whole[end:], dtype="<f4")).all())
