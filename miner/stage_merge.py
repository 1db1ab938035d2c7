"""The merge work of one member: slices, sums of slices, checks and the merged gradient, as bytes with their hashes.

Everything is a pure function of its arguments and the scales of its step, so it may run beside the compute thread, as
long as the partial it reads is frozen. Foreign bytes are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from miner.stage_executor import StagePartial
from miner.stage_state import MergedSection, StageState
from subnet.errors import HashMismatch, InputError
from subnet.model.plan import ModelPlan
from subnet.numerics.fingerprint import add_fingerprints, fingerprint
from subnet.numerics.fixed_point import host_exponents, load_merged
from subnet.numerics.layout import Partition, Section
from subnet.numerics.slices import Buffer, merge_slices, parse_slice, square_sum, sum_bits

Fingerprint = tuple[int, ...]


@dataclass(frozen=True)
class HashedSlice:
    """Canonical bytes of a partition's sum over ``num_items`` microbatches."""

    data: memoryview
    hash: str
    num_items: int


@dataclass(frozen=True)
class MergedPartition:
    """What an owner publishes: the sum's canonical bytes, their hash, the exact sum of squares in units of 4^-128."""

    data: memoryview
    hash: str
    squares: int

    @property
    def squares_hex(self) -> str:
        return format(self.squares, "x")


class StageMerge:
    """Merge work for the partitions that the stage holds, of the step that the state is to be updated by when it is made.

    Its sums are in the scales of the state that this step is computed from.
    """

    def __init__(self, plan: ModelPlan, stage: int, state: StageState) -> None:
        layout = plan.layout
        group = layout.groups[layout.group_of_stage[stage]]
        held = set(layout.stage_sections[stage])
        self.step = state.next_step
        self.group = group.index
        self.partitions: dict[int, Partition] = {p.index: p for p in group.partitions if p.section in held}
        self._sections: dict[int, Section] = {index: layout.sections[index] for index in held}
        self._device = state.device
        self._exponents: dict[int, NDArray[np.int16] | None] = {}
        for index in held:
            scales = state.exponents(index, self.step)
            self._exponents[index] = None if scales is None else host_exponents(scales)

    @property
    def calibration(self) -> bool:
        """Whether slices carry maxima only."""
        return all(scales is None for scales in self._exponents.values())

    def _find(self, index: int) -> tuple[Partition, Section]:
        partition = self.partitions.get(index)
        if partition is None:
            raise InputError(f"partition {index} of group {self.group} is not held by this stage")
        return partition, self._sections[partition.section]

    def _width(self, section: Section, total_items: int) -> int:
        return sum_bits(total_items, section.item_bound)

    def _parse(
        self, section: Section, partition: Partition, data: Buffer, num_items: int
    ) -> NDArray[np.signedinteger[Any]] | None:
        """The integers of one stage's slice: where two stages hold the section each has its share of the range."""
        bound = section.item_bound // len(section.stages)
        calibration = self.calibration
        return parse_slice(section, partition, data, num_items, calibration=calibration, item_bound=bound)[0]

    def slices(self, partial: StagePartial, indices: Sequence[int] | None = None) -> dict[int, HashedSlice]:
        """The partial's slices, of all partitions held or of these."""
        made: dict[int, HashedSlice] = {}
        for index in self.partitions if indices is None else indices:
            partition, section = self._find(index)
            data = partial.sums[section.index].encode(partition)
            made[index] = HashedSlice(data, blake3(data).hexdigest(), len(partial.microbatches))
        return made

    def check_slice(self, index: int, data: Buffer, num_items: int, hash: str) -> None:
        """Raises unless the bytes are a slice over ``num_items`` microbatches with this hash."""
        partition, section = self._find(index)
        _check_hash(index, data, hash)
        self._parse(section, partition, data, num_items)

    def merge_partition(self, index: int, slices: Sequence[tuple[Buffer, int]], *, total_items: int) -> MergedPartition:
        """The owner's work: the sum of (bytes, number of microbatches), whose order doesn't matter."""
        partition, section = self._find(index)
        data, squares = merge_slices(
            section, partition, slices, total_items=total_items, exponents=self._exponents[section.index]
        )
        return MergedPartition(data, blake3(data).hexdigest(), squares)

    def partial_fingerprints(self, partial: StagePartial, seed: bytes, *, total_items: int) -> dict[int, Fingerprint]:
        """The contributor's fingerprints by partition; empty ones while calibrating."""
        found: dict[int, Fingerprint] = {}
        for index in self.partitions:
            partition, section = self._find(index)
            if self.calibration:
                found[index] = ()
                continue
            values = partial.sums[section.index].integers(partition)
            found[index] = fingerprint(values, seed, self._width(section, total_items), index)
        return found

    def slice_fingerprint(
        self, index: int, data: Buffer, num_items: int, seed: bytes, *, total_items: int
    ) -> Fingerprint:
        """The fingerprint of a slice's bytes: what its contributor must have reported."""
        partition, section = self._find(index)
        integers = self._parse(section, partition, data, num_items)
        return () if integers is None else fingerprint(integers, seed, self._width(section, total_items), index)

    def check_merged(
        self,
        index: int,
        data: Buffer,
        *,
        hash: str,
        squares: int,
        total_items: int,
        seed: bytes,
        contributions: Sequence[Fingerprint],
        partial: StagePartial | None = None,
    ) -> str | None:
        """None if the merged bytes are the sum of what was reported, else what is wrong (hash, form, sum, squares).

        With the own ``partial``, its block maxima must be covered too: all that can be checked while calibrating.
        """
        partition, section = self._find(index)
        try:
            _check_hash(index, data, hash)
            integers, maxima = parse_slice(section, partition, data, total_items, calibration=self.calibration)
        except InputError as error:
            return str(error)
        if partial is not None:
            own = partial.sums[section.index].maxima[partition.block_start : partition.block_end].cpu().numpy()
            if bool((own > maxima).any()):
                return f"partition {index}: a block maximum is below this member's own"
        scales = self._exponents[section.index]
        if integers is None or scales is None:
            return None if squares == 0 else f"partition {index}: squares without sums"
        expected = len(fingerprint(integers[:0], seed, self._width(section, total_items), index))
        if not contributions or any(len(fp) != expected for fp in contributions):
            return f"partition {index}: a fingerprint is missing or has not {expected} numbers"
        if fingerprint(integers, seed, self._width(section, total_items), index) != add_fingerprints(contributions):
            return f"partition {index}: the merged sum is not the sum of the contributions"
        if square_sum(section, partition, integers, scales, total_items * section.item_bound) != squares:
            return f"partition {index}: wrong square-sum"
        return None

    def merged_sections(self, merged: Mapping[int, Buffer], *, total_items: int) -> dict[int, MergedSection]:
        """The sealed bytes of every partition held, put together for :meth:`StageState.apply_step`."""
        missing = [index for index in self.partitions if index not in merged]
        if missing:
            raise InputError(f"partitions {missing} of group {self.group} are missing")
        found: dict[int, MergedSection] = {}
        for section in self._sections.values():
            maxima = torch.zeros(section.num_blocks, dtype=torch.float32, device=self._device)
            values = None
            if not self.calibration:
                values = torch.empty(section.num_elements, dtype=torch.float32, device=self._device)
            found[section.index] = MergedSection(values, maxima)
        for index, partition in self.partitions.items():
            target = found[partition.section]
            section = self._sections[partition.section]
            load_merged(section, partition, merged[index], total_items, target.values, target.maxima)
        return found


def _check_hash(index: int, data: Buffer, hash: str) -> None:
    if blake3(data).hexdigest() != hash:
        raise HashMismatch(f"partition {index}: the bytes are not those of hash {hash[:10]}")
