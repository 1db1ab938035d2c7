"""The state at a step that has no snapshot: the newest one before it and the log of merged gradients, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from subnet.audit.case import LIMIT_CASE_BYTES, StateRef
from subnet.audit.shadow import ShadowPool
from subnet.errors import HashMismatch, InputError
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import SnapshotManifest
from subnet.protocol.wire import decode
from subnet.store.disk import atomic_write
from subnet.words import BlobHash

_NO_LIMIT = 1 << 60


def replayed_snapshots(
    plan: ModelPlan,
    step: int,
    states: tuple[bytes, ...],
    blobs: Callable[[str], bytes],
    directory: Path,
    say: Callable[[str], None],
) -> list[SnapshotManifest]:
    """A snapshot of each stage after ``step`` updates, its chunks as files of ``directory``; one state is in memory at a time."""
    if len(states) != plan.num_stages:
        raise InputError(f"the validator describes {len(states)} stages, the run has {plan.num_stages}")

    def put(blob: BlobHash, data: memoryview) -> None:
        atomic_write(directory / blob, data, durable=False)

    found: list[SnapshotManifest] = []
    for stage, data in enumerate(states):
        ref = decode(data, StateRef, limit_bytes=LIMIT_CASE_BYTES, what="the state of a stage")
        say(f"stage {stage}: {len(ref.log)} updates from state {max(ref.version, 0)}")
        pool = ShadowPool(plan, budget_bytes=_NO_LIMIT)
        shadow = pool.at(stage, ref, blobs)
        if shadow.wrong_roots:
            raise HashMismatch(f"stage {stage}: {shadow.wrong_roots[0][1]}", hint="export another step")
        if shadow.state.next_step != step:
            raise InputError(f"stage {stage}: the log leads to state {shadow.state.next_step}, not {step}")
        found.append(shadow.state.snapshot(put))
    return found
