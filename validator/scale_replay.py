"""Block exponents of the sums of the open step, derived from what is sealed as every replica derives them, to the bit.

`docs/arithmetic.md` §6 in numpy, over the block maxima that each sealed step's merged partitions end with. It starts
from calibration, or from a verified snapshot whose tensors are first hashed against the agreed state root: whoever
stored it can't make another's square-sum look wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from subnet.errors import Corrupt, NotFound
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import ChunkRef, TensorEntry, array_bytes, check_manifest, decode_manifest, kinds_of
from subnet.numerics.layout import Partition, Section, TensorSpan, adapter_pairs
from subnet.numerics.roots import leaf_hash, stage_root
from subnet.run import state as st
from subnet.run.state import RestorePoint, RunState
from subnet.store.base import OwnerStore
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import CALIBRATION_STEP, BlobHash

T = TypeVar("T")
Fp32 = NDArray[np.float32]
Exponents = NDArray[np.int16]
Tail = tuple[Partition, str, int]
"""A merged partition of a sealed step: where its maxima go, its address in the store, its bytes there."""

DECAY = np.float32(0.9)
TENSOR_SHARE = np.float32(0.25)
HEADROOM = np.float32(2.0)
FLOOR = np.float32(2.0**-60)
LIMIT_SHRINK, LIMIT_GROWTH = np.float32(0.5), np.float32(8.0)
UNSEEN_SHARE = np.float32(2.0**-4)
CEILING = np.float32(2.0**120)
"""The scale rule's constants: those of ``subnet.numerics.fixed_point``; a test holds them equal."""


def update_scales(section: Section, decayed: Fp32, limit: Fp32, maxima: Fp32, *, first: bool) -> tuple[Fp32, Fp32]:
    """The scale state after a step with these block maxima; ``first``: after the calibration step."""
    new = maxima.copy() if first else np.maximum(decayed * DECAY, maxima)
    share = np.empty_like(new)
    for span in section.tensors:
        blocks = slice(span.block_start, span.block_start + span.num_blocks)
        share[blocks] = new[blocks].max() * TENSOR_SHARE
    wanted = target = np.maximum(np.maximum(new, share) * HEADROOM, FLOOR)
    if not first:
        target = np.minimum(np.maximum(target, limit * LIMIT_SHRINK), limit * LIMIT_GROWTH)
    for a, b in adapter_pairs(section):
        blocks = slice(a.block_start, a.block_start + a.num_blocks)
        if not new[blocks].any():
            largest = target[b.block_start : b.block_start + b.num_blocks].max() * UNSEEN_SHARE
            target[blocks] = np.maximum(largest, FLOOR)
        elif not first and not decayed[blocks].any():
            target[blocks] = wanted[blocks]
    return new, np.minimum(target, CEILING)


def exponents(limit: Fp32, leaf_qmax: int) -> Exponents:
    """Per block the smallest k with limit <= leaf_qmax * 2^k, exactly."""
    fraction, exponent = np.frexp(limit)
    fraction_q, exponent_q = np.frexp(np.float32(leaf_qmax))
    return (exponent - exponent_q + (fraction > fraction_q)).astype(np.int16)


@dataclass(frozen=True)
class Scales:
    """Scale state of a section before update ``version``."""

    version: int
    decayed: Fp32
    limit: Fp32


class ScaleReplay:
    """Exponents by section; what was derived is kept, so that the next step costs one step's maxima."""

    def __init__(self, plan: ModelPlan, store: OwnerStore) -> None:
        self._plan, self._store = plan, store
        self._known: dict[int, Scales] = {}
        self._lock = asyncio.Lock()

    async def exponents(self, section: Section, step: int, state: RunState, *, deadline: Deadline) -> Exponents | None:
        """Those of the state that ``step``, the open one, is computed from; None while it calibrates.

        ``state`` may go on meanwhile.
        """
        if step == CALIBRATION_STEP:
            return None
        async with deadline.limit(f"the scales of {section.name}"), self._lock:
            return await self._exponents(section, self._plan.config.version_of(step), state, deadline)

    async def _exponents(self, section: Section, version: int, state: RunState, deadline: Deadline) -> Exponents:
        first, point, stage = self._start(section, version, state)
        steps = [(step, self._tails(section, state, step)) for step in range(first, version)]
        if point is not None:
            root = st.stored_snapshot(state, stage, point.version)
            self._known[section.index] = await self._restored(
                section, stage, point, root.root if root else "", deadline
            )
        for step, tails in steps:
            await self._fold(section, step, tails, deadline)
        return exponents(self._known[section.index].limit, section.leaf_qmax)

    def _start(self, section: Section, version: int, state: RunState) -> tuple[int, RestorePoint | None, int]:
        """The first step to fold in, and the snapshot (of which stage) to begin with where that must be read."""
        known = self._known.get(section.index)
        reaches = known is not None and known.version <= version
        if known is not None and reaches and all(step in state.sealed for step in range(known.version, version)):
            return known.version, None, 0
        points = [(st.restore_point(state, stage), stage) for stage in section.stages]
        point, stage = max(points, key=lambda found: found[0].version)
        self._known.pop(section.index, None)
        return point.version, None if point.whole else point, stage

    def _tails(self, section: Section, state: RunState, step: int) -> list[Tail]:
        log = state.sealed.get(step)
        if log is None:
            raise NotFound(f"the seal of step {step}, of which the scales of {section.name} are made, isn't kept")
        layout = self._plan.layout
        group = layout.groups[layout.group_of_stage[section.stages[0]]]
        blobs = log.groups[group.index].blobs
        return [(p, *blobs[p.index]) for p in group.partitions if p.section == section.index]

    async def _fold(self, section: Section, step: int, tails: Sequence[Tail], deadline: Deadline) -> None:
        maxima = np.zeros(section.num_blocks, dtype=np.float32)
        parts = await all_of([self._maxima(*tail, deadline) for tail in tails])
        for (partition, _, _), part in zip(tails, parts, strict=True):
            maxima[partition.block_start : partition.block_end] = part
        known = self._known.get(section.index)
        if step == CALIBRATION_STEP or known is None:
            empty = np.zeros(section.num_blocks, dtype=np.float32)
            decayed, limit = update_scales(section, empty, empty, maxima, first=True)
        else:
            decayed, limit = update_scales(section, known.decayed, known.limit, maxima, first=False)
        self._known[section.index] = Scales(step + 1, decayed, limit)

    async def _maxima(self, partition: Partition, blob: str, size_bytes: int, deadline: Deadline) -> Fp32:
        """The end of a merged partition, whatever form its integers are stored in."""
        wanted = 4 * partition.num_blocks
        limit = deadline.sooner(TIMEOUTS.store_request_s)
        start = size_bytes - wanted
        data = await self._store.get_range(BlobHash(blob), size_bytes, start, wanted, deadline=limit)
        maxima = np.frombuffer(data, dtype="<f4").astype(np.float32)
        if not bool(np.isfinite(maxima).all()) or bool(np.signbit(maxima).any()):
            raise Corrupt(f"sealed partition {blob[:16]} ends with no block maxima")
        return maxima

    # --- from a snapshot ---------------------------------------------------------------------------------------

    async def _restored(
        self, section: Section, stage: int, point: RestorePoint, root: str, deadline: Deadline
    ) -> Scales:
        """The snapshot's scale state, every tensor of the section read once, one at a time, to check its leaf."""
        blob = BlobHash(point.manifest)
        limit = deadline.sooner(TIMEOUTS.store_request_s)
        size = (await self._store.sizes([blob], deadline=limit)).get(blob)
        if size is None:
            raise NotFound(f"snapshot manifest {blob[:16]} is not in the store")
        manifest = decode_manifest(memoryview(await self._store.get_blob(blob, size, deadline=limit)))
        entries = check_manifest(manifest, self._plan.stage_tensors[stage])
        leaves = [entry.leaf for entry in manifest.entries]
        if manifest.step != point.version or stage_root(manifest.step, leaves).hex() != root:
            raise Corrupt(f"snapshot manifest {blob[:16]} is not of the state that was agreed on")
        decayed, limits = (np.zeros(section.num_blocks, dtype=np.float32) for _ in range(2))
        for span in section.tensors:
            await self._restore_tensor(span, entries[span.spec.name], decayed, limits, deadline)
        return Scales(point.version, decayed, limits)

    async def _restore_tensor(
        self, span: TensorSpan, entry: TensorEntry, decayed: Fp32, limit: Fp32, deadline: Deadline
    ) -> None:
        kinds = kinds_of(entry)
        arrays = [await self._array(span, kind, entry.arrays[kind], deadline) for kind in kinds]
        leaf = await asyncio.to_thread(leaf_hash, span.spec.name, span.spec.shape, *arrays)
        if leaf != entry.leaf:
            raise Corrupt(f"the snapshot's arrays of {span.spec.name} don't give its leaf")
        blocks = slice(span.block_start, span.block_start + span.num_blocks)
        decayed[blocks] = np.frombuffer(arrays[kinds.index("decayed")], dtype="<f4")
        limit[blocks] = np.frombuffer(arrays[kinds.index("limit")], dtype="<f4")

    async def _array(self, span: TensorSpan, kind: str, refs: Sequence[ChunkRef], deadline: Deadline) -> bytearray:
        whole, start = bytearray(array_bytes(span.spec, kind)), 0
        for ref in refs:
            limit = deadline.sooner(TIMEOUTS.store_request_s)
            whole[start : start + ref.size_bytes] = await self._store.get_blob(ref.hash, ref.size_bytes, deadline=limit)
            start += ref.size_bytes
        return whole


async def all_of(tries: Sequence[Awaitable[T]]) -> list[T]:
    """All at once; the first error, in order, once all have ended."""
    done = await asyncio.gather(*tries, return_exceptions=True)
    results: list[T] = []
    for result in done:
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
