"""How long each part of a merge is waited for: what its wait allows anyhow, and the bytes that the busiest link has to move.

A function of the journal alone (run file, who contributes what, who owns what), so that every validator waits equally long.
``merge.slowest_mbit`` of the run file is the link that a run waits for; who has less is late at a big stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from subnet.numerics.owners import owners_of
from subnet.numerics.slices import byte_width, sum_bits
from subnet.run.config import RunConfig
from subnet.run.events import RunPlanned
from subnet.run.state import Merge, RunState, config, group_of, plan
from subnet.run.trainable import trains
from subnet.timing import carrying_s
from subnet.words import CALIBRATION_STEP, Commitment, Member, TensorSpec
from validator.policy import Policy

BLOCK_MAXIMUM_BYTES = 4
STATE_BYTES_PER_ELEMENT = 12
"""Weight and two moments in fp32: no optimizer has more."""
_CODED_BYTES = {"raw": 4.0, "int8": 1.25, "int4": 0.75}
"""Of one number of a boundary, scales and exponents rounded up."""


@dataclass(frozen=True)
class PartitionSize:
    """Of one partition; a section's partitions are of nearly equal size."""

    num_elements: float
    num_blocks: float


def partition_sizes(run: RunPlanned) -> tuple[tuple[PartitionSize, ...], ...]:
    """By group and partition: what is trained of the stages that hold it, cut into as many pieces as they have."""
    held = _held(run)
    found: list[tuple[PartitionSize, ...]] = []
    for group in run.groups:
        pieces = Counter(group.partitions)
        found.append(tuple(_piece(held.get(stages, ()), pieces[stages]) for stages in group.partitions))
    return tuple(found)


def _held(run: RunPlanned) -> dict[tuple[int, ...], tuple[TensorSpec, ...]]:
    """Trained tensors by the stages that hold them."""
    last, num_layers = len(run.cuts) - 1, len(run.unit_tensors) - 2
    held: dict[tuple[int, ...], tuple[TensorSpec, ...]] = {}
    for unit, tensors in enumerate(run.unit_tensors):
        layer = min(max(unit - 1, 0), num_layers - 1)
        stage = max(s for s, first in enumerate(run.cuts) if first <= layer)
        for spec in tensors:
            if trains(run.config.trainable, spec.name, tied=run.tied is not None):
                stages = (0, last) if last and run.tied == spec else (stage,)
                held[stages] = (*held.get(stages, ()), spec)
    return held


def _piece(tensors: Iterable[TensorSpec], pieces: int) -> PartitionSize:
    specs = list(tensors)
    return PartitionSize(sum(s.num_elements for s in specs) / pieces, sum(s.num_blocks for s in specs) / pieces)


def slice_bytes(size: PartitionSize, config: RunConfig, num_items: int, *, calibration: bool) -> float:
    """A slice over so many microbatches as it travels: integers at the run's packing, a maximum a block."""
    maxima = BLOCK_MAXIMUM_BYTES * size.num_blocks
    if calibration:
        return maxima
    bits = sum_bits(max(1, num_items), config.qmax)
    return maxima + size.num_elements * (bits if config.merge.packing == "bits" else 8 * byte_width(bits)) / 8


@dataclass
class MergeWaits:
    """Seconds of each wait of one run, worked out once a manifest."""

    _sizes: tuple[tuple[PartitionSize, ...], ...] | None = None
    _moved: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])

    def sizes(self, state: RunState) -> tuple[tuple[PartitionSize, ...], ...]:
        if self._sizes is None:
            self._sizes = partition_sizes(plan(state))
        return self._sizes

    def commit_s(self, state: RunState, policy: Policy, step: int, group: int) -> float:
        """A holder may have to store its slices before it commits."""
        return carrying_s(policy.commit_s, self._whole(state, step, group), _slowest(state))

    def owner_s(self, state: RunState, policy: Policy, step: int, group: int, merge: Merge) -> float:
        """Slices leave their contributors, arrive at their owners, and the sums leave again."""
        return carrying_s(policy.owner_s, self._reduced(state, step, group, merge), _slowest(state))

    def routed_s(self, state: RunState, policy: Policy, step: int, group: int, merge: Merge) -> float:
        """The same by way of the store."""
        return carrying_s(policy.routed_s, self._reduced(state, step, group, merge), _slowest(state))

    def check_s(self, state: RunState, policy: Policy, step: int, group: int) -> float:
        """Everybody fetches all sums."""
        return carrying_s(policy.check_s, self._whole(state, step, group), _slowest(state))

    def trace_s(self, state: RunState, policy: Policy, step: int, group: int) -> float:
        """Contributors store all their slices."""
        return carrying_s(policy.trace_s, self._whole(state, step, group), _slowest(state))

    def snapshot_s(self, state: RunState, policy: Policy, stage: int) -> float:
        """A replica stores its state."""
        group = group_of(state, stage)
        held = zip(plan(state).groups[group].partitions, self.sizes(state)[group], strict=True)
        elements = sum(size.num_elements for stages, size in held if stage in stages)
        return carrying_s(policy.snapshot_s, STATE_BYTES_PER_ELEMENT * elements, _slowest(state))

    def boundaries_s(self, state: RunState, num_boundaries: int) -> float:
        """So many microbatches' boundaries one after the other."""
        return carrying_s(0.0, num_boundaries * boundary_bytes(plan(state)), _slowest(state))

    def _whole(self, state: RunState, step: int, group: int) -> float:
        """Bytes of the group's sum."""
        run, calibration = config(state), step == CALIBRATION_STEP
        return sum(slice_bytes(size, run, run.num_items, calibration=calibration) for size in self.sizes(state)[group])

    def _reduced(self, state: RunState, step: int, group: int, merge: Merge) -> float:
        key = (step, group, merge.version)
        moved = self._moved.get(key)
        if moved is None:
            if len(self._moved) > 4 * len(self.sizes(state)):
                self._moved.clear()
            sizes, calibration = self.sizes(state)[group], step == CALIBRATION_STEP
            owners = [owners_of(merge, p) for p in range(len(merge.owners))]
            moved = reduced_bytes(config(state), sizes, merge.entries, owners, calibration=calibration)
            self._moved[key] = moved
        return moved


def reduced_bytes(
    config: RunConfig,
    sizes: tuple[PartitionSize, ...],
    entries: tuple[Commitment, ...],
    owners: Sequence[tuple[Member, ...]],
    *,
    calibration: bool,
) -> float:
    """Bytes one after the other from the manifest to the last sum in the store: the most that one member sends, and gets."""
    sent, got = defaultdict[Member, float](float), defaultdict[Member, float](float)
    for entry in entries:
        for p, _ in entry.hashes:
            size = slice_bytes(sizes[p], config, len(entry.microbatches), calibration=calibration)
            for owner in owners[p]:
                if owner != entry.member:
                    sent[entry.member] += size
                    got[owner] += size
    for p, owner in ((p, owner) for p, each in enumerate(owners) for owner in each):
        sent[owner] += slice_bytes(sizes[p], config, config.num_items, calibration=calibration)
    return max(sent.values(), default=0) + max(got.values(), default=0)


def boundary_bytes(run: RunPlanned) -> float:
    """Of a microbatch's boundary; 0 where the run has no model."""
    if not run.unit_tensors or not run.unit_tensors[0] or not run.unit_tensors[0][0].shape:
        return 0.0
    pipeline, hidden = run.config.pipeline, run.unit_tensors[0][0].shape[-1]
    tokens = pipeline.microbatch_rows * run.config.data.sequence_length
    return tokens * hidden * _CODED_BYTES[pipeline.boundary_code]


def _slowest(state: RunState) -> float:
    return config(state).merge.slowest_mbit
