"""The merge work of one member: slices, sums of slices, checks and the merged gradient, as bytes with their hashes.

Everything is a pure function of its arguments and the scales of its step, so it may run beside the compute thread, as
long as the partial it reads is frozen. Foreign bytes are checked before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from subnet.engine.stage_executor import StagePartial
from subnet.engine.stage_state import MergedSection
from subnet.errors import HashMismatch, InputError
from subnet.model.plan import ModelPlan
from subnet.numerics.examine import Examined, accept_slice, examine_merged
from subnet.numerics.fingerprint import merged_fingerprint, num_passes, slice_fingerprint
from subnet.numerics.fixed_point import PartialSum, host_exponents, load_merged
from subnet.numerics.layout import Partition, RunLayout, Section
from subnet.numerics.packing import pack_slice, packed_size, unpack_slice
from subnet.numerics.slices import Buffer, merge_slices, parse_slice, slice_size, sum_bits

Fingerprint = tuple[int, ...]
_ALIGNED = 64


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


class HasLayout(Protocol):
    """A model plan, as far as merging goes."""

    @property
    def layout(self) -> RunLayout: ...


class Scales(Protocol):
    """A stage's state, as far as merging goes: the step that updates it, and the block exponents of that step's sums."""

    device: torch.device

    @property
    def next_step(self) -> int: ...

    def exponents(self, section: int, step: int | None = None) -> Tensor | None: ...


class StageMerge:
    """Merge work for the partitions that the stage holds; scales are those in force when it is made: one per step.

    What was found out about a merged partition is remembered by its hash, and its sums are kept where the update reads them.
    """

    def __init__(self, plan: ModelPlan | HasLayout, stage: int, state: Scales) -> None:
        layout = plan.layout
        group = layout.groups[layout.group_of_stage[stage]]
        held = set(layout.stage_sections[stage])
        self.step = state.next_step
        self.group = group.index
        self.partitions: dict[int, Partition] = {p.index: p for p in group.partitions if p.section in held}
        self._sections: dict[int, Section] = {index: layout.sections[index] for index in held}
        self._device = state.device
        self._exponents: dict[int, NDArray[np.int16] | None] = {}
        self._examined: dict[tuple[int, str, bytes], Examined] = {}
        self._own_squares: dict[tuple[int, str], int] = {}
        """By (partition, hash) of what was summed here."""
        self._sums: dict[int, MergedSection] = {}
        self._loaded: dict[int, str] = {}
        """By partition: the hash of what lies in ``_sums``."""
        for index in held:
            scales = state.exponents(index, self.step)
            self._exponents[index] = None if scales is None else host_exponents(scales)

    @property
    def calibration(self) -> bool:
        """Whether slices carry maxima only."""
        return all(scales is None for scales in self._exponents.values())

    def _width(self, section: Section, total_items: int) -> int:
        return sum_bits(total_items, section.item_bound)

    def slices(self, partial: StagePartial, indices: Sequence[int] | None = None) -> dict[int, HashedSlice]:
        """The partial's slices, of all partitions held or of these."""
        encoder = SliceEncoder(self, partial)
        return {index: encoder.make(index) for index in (self.partitions if indices is None else indices)}

    def find(self, index: int) -> tuple[Partition, Section]:
        """A partition that the stage holds, and its section."""
        partition = self.partitions.get(index)
        if partition is None:
            raise InputError(f"partition {index} of group {self.group} is not held by this stage")
        return partition, self._sections[partition.section]

    def check_slice(self, index: int, data: Buffer, num_items: int, hash: str) -> None:
        """Raises unless the bytes are a slice over ``num_items`` microbatches with this hash."""
        self.accept_slice(index, data, num_items, hash, packed=False)

    def accept_slice(self, index: int, body: Buffer, num_items: int, hash: str, *, packed: bool) -> memoryview:
        """The canonical bytes of a slice that came from somebody else; raises unless it is one, with this hash."""
        partition, section = self.find(index)
        bound = section.item_bound // len(section.stages)
        return accept_slice(
            section,
            partition,
            body,
            num_items,
            hash=hash,
            packed=packed,
            item_bound=bound,
            calibration=self.calibration,
        )

    def slice_bytes(self, index: int, num_items: int, *, packed: bool) -> int:
        """Bytes that such a slice has on its way."""
        partition, section = self.find(index)
        if self.calibration or not packed:
            return slice_size(section, partition, num_items, calibration=self.calibration)
        return packed_size(partition.num_elements, sum_bits(num_items, section.item_bound)) + 4 * partition.num_blocks

    def pack(self, index: int, data: Buffer, num_items: int) -> memoryview:
        """A canonical slice as it travels on slow links; maxima alone stay as they are."""
        if self.calibration:
            return memoryview(data)
        partition, section = self.find(index)
        return pack_slice(section, partition, data, num_items)

    def unpack(self, index: int, body: Buffer, num_items: int) -> memoryview:
        """The way back, of bytes that are still to be checked."""
        if self.calibration:
            return memoryview(body)
        partition, section = self.find(index)
        return unpack_slice(section, partition, body, num_items)

    def merge_partition(self, index: int, slices: Sequence[tuple[Buffer, int]], *, total_items: int) -> MergedPartition:
        """The owner's work: the sum of (bytes, number of microbatches), whose order doesn't matter."""
        partition, section = self.find(index)
        data, squares, hash_ = merge_slices(
            section, partition, slices, total_items=total_items, exponents=self._exponents[section.index]
        )
        self._own_squares[index, hash_] = squares
        return MergedPartition(data, hash_, squares)

    def partial_fingerprints(self, partial: StagePartial, seed: bytes, *, total_items: int) -> dict[int, Fingerprint]:
        """The contributor's fingerprints by partition; empty ones while calibrating."""
        found: dict[int, Fingerprint] = {}
        for index in self.partitions:
            partition, section = self.find(index)
            if self.calibration:
                found[index] = ()
                continue
            sums = partial.sums[section.index]
            width = self._width(section, total_items)
            found[index] = slice_fingerprint(sums.integers(partition), _maxima(sums, partition), seed, width, index)
        return found

    def slice_fingerprint(
        self, index: int, data: Buffer, num_items: int, seed: bytes, *, total_items: int
    ) -> Fingerprint:
        """The fingerprint of a slice's bytes: what its contributor must have reported."""
        partition, section = self.find(index)
        bound = section.item_bound // len(section.stages)  # where two stages hold the section each has its share
        integers, maxima = parse_slice(
            section, partition, data, num_items, calibration=self.calibration, item_bound=bound
        )
        if integers is None:
            return ()
        return slice_fingerprint(integers, maxima, seed, self._width(section, total_items), index)

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
        hash_known: bool = False,
    ) -> str | None:
        """None if the merged bytes are the sum of what was reported, else what is wrong (hash, form, sum, squares).

        With the own ``partial``, its block maxima must be covered too: all that can be checked while calibrating.
        ``hash_known``: the bytes were checked against the hash as they came.
        """
        partition, section = self.find(index)
        try:
            if not hash_known:
                _check_hash(index, data, hash)
            found = self.examine(index, data, hash=hash, seed=seed, total_items=total_items)
        except InputError as error:
            return str(error)
        if partial is not None and bool((_maxima(partial.sums[section.index], partition) > found.maxima).any()):
            return f"partition {index}: a block maximum is below this member's own"
        if self.calibration:
            return None if squares == 0 else f"partition {index}: squares without sums"
        expected = len(found.fingerprint)
        if not contributions or any(len(fp) != expected for fp in contributions):
            return f"partition {index}: a fingerprint is missing or has not {expected} numbers"
        width = self._width(section, total_items)
        reported, passes = merged_fingerprint(contributions, width), num_passes(width)
        if found.fingerprint[:passes] != reported[:passes]:
            return f"partition {index}: the merged sum is not the sum of the contributions"
        if found.fingerprint != reported:
            return f"partition {index}: a block maximum is not the largest of the contributions'"
        if found.squares != squares:
            return f"partition {index}: wrong square-sum"
        return None

    def examine(self, index: int, data: Buffer, *, hash: str, seed: bytes, total_items: int) -> Examined:
        """What merged bytes, which have this hash, are under this seed; bytes that can't be a sum are refused.

        Once found out it is remembered, and the sums wait where the update reads them.
        """
        found = self._examined.get((index, hash, seed))
        if found is not None:
            return found
        partition, section = self.find(index)
        exponents = self._exponents[section.index]
        if exponents is None:
            _, maxima = parse_slice(section, partition, data, total_items, calibration=True)
            return Examined((), 0, maxima)
        target = self._target(section)
        self._loaded.pop(index, None)
        values = None if target.values is None else target.values[partition.element_start : partition.element_end]
        found = examine_merged(
            section,
            partition,
            data,
            total_items,
            exponents=exponents,
            seed=seed,
            width_bits=self._width(section, total_items),
            values=values.numpy() if values is not None and values.device.type == "cpu" else None,
            squares=self._own_squares.get((index, hash)),
        )
        if target.maxima.device.type == "cpu":
            target.maxima[partition.block_start : partition.block_end] = torch.from_numpy(found.maxima.copy())
            self._loaded[index] = hash
        self._examined[index, hash, seed] = found
        return found

    def _target(self, section: Section) -> MergedSection:
        """Where the update reads the section's sums."""
        found = self._sums.get(section.index)
        if found is None:
            maxima = torch.zeros(section.num_blocks, dtype=torch.float32, device=self._device)
            values = None
            if not self.calibration:
                # numpy asks for large pages: the first touch of so much memory costs more than all the arithmetic
                values = torch.from_numpy(np.empty(section.num_elements, dtype=np.float32)).to(self._device)
            found = self._sums[section.index] = MergedSection(values, maxima)
        return found

    def merged_sections(
        self, merged: Mapping[int, Buffer], *, total_items: int, hashes: Mapping[int, str] | None = None
    ) -> dict[int, MergedSection]:
        """The sealed bytes of every partition held, put together for :meth:`StageState.apply_step`, which takes them.

        Of partitions that were examined with these ``hashes`` the sums are there already.
        """
        missing = [index for index in self.partitions if index not in merged]
        if missing:
            raise InputError(f"partitions {missing} of group {self.group} are missing")
        for index, partition in self.partitions.items():
            target = self._target(self._sections[partition.section])
            if hashes is None or self._loaded.get(index) != hashes[index]:
                section = self._sections[partition.section]
                load_merged(section, partition, merged[index], total_items, target.values, target.maxima)
        found, self._sums, self._loaded = self._sums, {}, {}
        self._examined.clear()
        return found


class SliceEncoder:
    """Slices of one sum, one after the other, side by side in one buffer: it is one large piece of memory for all."""

    def __init__(self, merge: StageMerge, partial: StagePartial) -> None:
        self._merge, self._partial = merge, partial
        self._places: dict[int, tuple[int, int]] = {}
        size = 0
        for index in merge.partitions:
            length = merge.slice_bytes(index, len(partial.microbatches), packed=False)
            self._places[index] = (size, size + length)
            size += -(-length // _ALIGNED) * _ALIGNED
        self._buffer = np.empty(size, dtype=np.uint8)

    def make(self, index: int) -> HashedSlice:
        partition, section = self._merge.find(index)
        first, end = self._places[index]
        data, hash_ = self._partial.sums[section.index].encode_hashed(partition, self._buffer[first:end])
        return HashedSlice(data, hash_, len(self._partial.microbatches))


def _maxima(sums: PartialSum, partition: Partition) -> NDArray[np.float32]:
    return sums.maxima[partition.block_start : partition.block_end].cpu().numpy()


def _check_hash(index: int, data: Buffer, hash: str) -> None:
    if blake3(data).hexdigest() != hash:
        raise HashMismatch(f"partition {index}: the bytes are not those of hash {hash[:10]}")
