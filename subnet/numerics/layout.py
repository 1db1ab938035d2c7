"""Canonical blocks, sections, groups and partitions: the same cut of the gradient for everyone, from shapes alone.

A *section* is one contiguous buffer of elements (and one of blocks) that the same stages hold: the tensors of a
stage, or the tied embedding, which two stages hold. A *group* is what one manifest and one seal cover. A *partition*
is a run of whole blocks of one section: the unit that one owner merges. Blocks depend only on tensors, never on cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from subnet.run.trainable import LORA_A, LORA_B
from subnet.words import BLOCK, Member, TensorSpec

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray


class TensorSpan(msgspec.Struct, frozen=True):
    """Where a tensor lies in its section."""

    spec: TensorSpec
    element_start: int
    num_elements: int
    block_start: int
    num_blocks: int


class Strip(msgspec.Struct, frozen=True):
    """``count`` blocks of equal length, evenly spaced: a 2-D view of a section's buffers.

    Block i of the strip is block ``block_start + i * block_stride`` and starts at element
    ``element_start + i * element_stride``; ``tensor`` is the index of its tensor in the section.
    """

    tensor: int
    element_start: int
    element_stride: int
    length: int
    block_start: int
    block_stride: int
    count: int


class Section(msgspec.Struct, frozen=True):
    """One flat buffer; ``stages`` hold it, and ``num_leaves`` gradients within +-``leaf_qmax`` add to an element."""

    index: int
    name: str
    stages: tuple[int, ...]
    tensors: tuple[TensorSpan, ...]
    num_elements: int
    num_blocks: int
    leaf_qmax: int
    num_leaves: int

    @property
    def item_bound(self) -> int:
        """The most that one microbatch can add to an element."""
        return self.leaf_qmax * self.num_leaves


class Partition(msgspec.Struct, frozen=True):
    """What one owner merges; ``index`` counts through the group, ranges are relative to the section."""

    index: int
    section: int
    block_start: int
    block_end: int
    element_start: int
    element_end: int

    @property
    def num_elements(self) -> int:
        return self.element_end - self.element_start

    @property
    def num_blocks(self) -> int:
        return self.block_end - self.block_start


class Group(msgspec.Struct, frozen=True):
    """What one manifest and one seal cover: a stage, or first and last stage together where embeddings are tied."""

    index: int
    stages: tuple[int, ...]
    sections: tuple[int, ...]
    partitions: tuple[Partition, ...]


class RunLayout(msgspec.Struct, frozen=True):
    """The whole model: section indices by stage and by group, and the group of each stage."""

    sections: tuple[Section, ...]
    groups: tuple[Group, ...]
    stage_sections: tuple[tuple[int, ...], ...]
    group_of_stage: tuple[int, ...]


class Location(msgspec.Struct, frozen=True):
    """Where a tensor of the whole model lies: tensor ``tensor`` of section ``section``."""

    section: int
    tensor: int
    span: TensorSpan


def build_layout(
    stage_tensors: Sequence[Sequence[TensorSpec]],
    *,
    tied: TensorSpec | None,
    qmax: int,
    target_partitions: int = 16,
    min_partition_elements: int = 65536,
) -> RunLayout:
    """Lay out a model cut into stages; ``tied`` is the embedding of first and last stage, in no stage's list."""
    num_stages = len(stage_tensors)
    if not num_stages:
        raise ValueError("a layout needs at least one stage")
    _check_names([*([tied] if tied else []), *(spec for specs in stage_tensors for spec in specs)])
    last = num_stages - 1
    sections = [_section(s, f"stage{s}", (s,), specs, qmax, 1) for s, specs in enumerate(stage_tensors)]
    stage_sections = [[s] for s in range(num_stages)]
    members = [[s] for s in range(num_stages)]
    if tied is not None:
        ends = (0, last) if last else (0,)
        sections.append(_section(num_stages, "tied", ends, [tied], qmax // 2, 2))
        for stage in ends:
            stage_sections[stage].append(num_stages)
        members = [list(ends), *([s] for s in range(1, last))]
    groups: list[Group] = []
    group_of_stage = [0] * num_stages
    for index, stages in enumerate(members):
        held = _unique(section for stage in stages for section in stage_sections[stage])
        partitions: list[Partition] = []
        for section in held:
            partitions += _cut(sections[section], len(partitions), target_partitions, min_partition_elements)
        groups.append(Group(index, tuple(stages), held, tuple(partitions)))
        for stage in stages:
            group_of_stage[stage] = index
    return RunLayout(
        tuple(sections), tuple(groups), tuple(tuple(held) for held in stage_sections), tuple(group_of_stage)
    )


def _check_names(specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError("a tensor is listed twice in the layout")
    for spec in specs:
        if not spec.num_elements or (spec.row_blocked and len(spec.shape) != 2):
            raise ValueError(f"tensor {spec.name} has a shape that can't be laid out: {spec.shape}")


def _unique(values: Iterator[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _section(
    index: int, name: str, stages: tuple[int, ...], specs: Sequence[TensorSpec], leaf_qmax: int, num_leaves: int
) -> Section:
    spans: list[TensorSpan] = []
    elements = blocks = 0
    for spec in specs:
        spans.append(TensorSpan(spec, elements, spec.num_elements, blocks, spec.num_blocks))
        elements += spec.num_elements
        blocks += spec.num_blocks
    return Section(index, name, stages, tuple(spans), elements, blocks, leaf_qmax, num_leaves)


def _cut(section: Section, first_index: int, target: int, min_elements: int) -> list[Partition]:
    """At most ``target`` partitions of nearly equal size, none empty, cut at blocks."""
    if not section.num_elements:
        return []
    import numpy as np

    starts = block_starts(section)
    count = max(1, min(target, section.num_elements // max(1, min_elements), section.num_blocks))
    wanted = [section.num_elements * i // count for i in range(count)]
    cuts = [*_unique(int(block) for block in np.searchsorted(starts[:-1], wanted)), section.num_blocks]
    return [
        Partition(first_index + i, section.index, lo, hi, int(starts[lo]), int(starts[hi]))
        for i, (lo, hi) in enumerate((lo, hi) for lo, hi in itertools.pairwise(cuts) if lo < hi)
    ]


def block_lengths(section: Section) -> NDArray[numpy.int32]:
    """Elements of each block of the section, in order."""
    import numpy as np

    lengths = np.full(section.num_blocks, BLOCK, dtype=np.int32)
    for span in section.tensors:
        tail = span.spec.row_length % BLOCK
        if tail:
            per_row = span.spec.blocks_per_row
            lengths[span.block_start + per_row - 1 : span.block_start + span.num_blocks : per_row] = tail
    return lengths


def block_starts(section: Section) -> NDArray[numpy.int64]:
    """First element of each block, and the section's end: ``num_blocks + 1`` numbers."""
    import numpy as np

    starts = np.zeros(section.num_blocks + 1, dtype=np.int64)
    np.cumsum(block_lengths(section), out=starts[1:])
    return starts


def strips(section: Section, block_start: int = 0, block_end: int | None = None) -> tuple[Strip, ...]:
    """The blocks of a range as few strips, each block in exactly one."""
    end = section.num_blocks if block_end is None else block_end
    found: list[Strip] = []
    for index, span in enumerate(section.tensors):
        low = max(block_start, span.block_start) - span.block_start
        high = min(end, span.block_start + span.num_blocks) - span.block_start
        if low < high:
            found.extend(_tensor_strips(index, span, low, high))
    return tuple(found)


def _tensor_strips(tensor: int, span: TensorSpan, low: int, high: int) -> Iterator[Strip]:
    spec = span.spec
    per_row, length = spec.blocks_per_row, spec.row_length
    tail = length % BLOCK

    def strip(row: int, column: int, count: int, size: int, element_stride: int, block_stride: int) -> Strip:
        element = span.element_start + row * length + column * BLOCK
        block = span.block_start + row * per_row + column
        return Strip(tensor, element, element_stride, size, block, block_stride, count)

    def part_of_row(row: int, first: int, last: int) -> Iterator[Strip]:
        full = min(last, per_row - 1 if tail else per_row)
        if first < full:
            yield strip(row, first, full - first, BLOCK, BLOCK, 1)
        if full < last:
            yield strip(row, full, 1, tail, tail, 1)

    if not tail or per_row == 1:
        size = tail or BLOCK
        yield strip(0, low, high - low, size, size, 1) if per_row > 1 else strip(low, 0, high - low, size, size, 1)
        return
    first_row, last_row = -(-low // per_row), high // per_row
    if first_row > last_row:
        yield from part_of_row(last_row, low % per_row, high % per_row)
        return
    if low % per_row:
        yield from part_of_row(first_row - 1, low % per_row, per_row)
    if last_row - first_row < per_row:
        for row in range(first_row, last_row):
            yield from part_of_row(row, 0, per_row)
    elif first_row < last_row:
        for column in range(per_row):
            size = tail if column == per_row - 1 else BLOCK
            yield strip(first_row, column, last_row - first_row, size, length, per_row)
    if high % per_row:
        yield from part_of_row(last_row, 0, high % per_row)


def tiles(parts: Sequence[Strip], max_elements: int) -> Iterator[Strip]:
    """The same strips cut into pieces of at most about ``max_elements`` (at least one block)."""
    for part in parts:
        step = max(1, max_elements // part.length)
        for first in range(0, part.count, step):
            yield msgspec.structs.replace(
                part,
                element_start=part.element_start + first * part.element_stride,
                block_start=part.block_start + first * part.block_stride,
                count=min(step, part.count - first),
            )


@lru_cache(maxsize=64)
def section_tiles(section: Section, max_elements: int) -> tuple[Strip, ...]:
    """All blocks of a section as tiles, kept for the next call."""
    return tuple(tiles(strips(section), max_elements))


@lru_cache(maxsize=64)
def adapter_pairs(section: Section) -> tuple[tuple[TensorSpan, TensorSpan], ...]:
    """The two matrices, A and B, of each adapter in a section."""
    by_name = {span.spec.name: span for span in section.tensors}
    firsts = [name for name in by_name if name.endswith(LORA_A)]
    return tuple((by_name[name], by_name[name.removesuffix(LORA_A) + LORA_B]) for name in firsts)


def canonical_locations(layout: RunLayout) -> dict[str, Location]:
    """Every tensor of the model by name, in canonical order, whatever the cuts: the tied embedding comes first."""
    order = sorted(layout.sections, key=lambda section: (section.name != "tied", section.index))
    return {
        span.spec.name: Location(section.index, tensor, span)
        for section in order
        for tensor, span in enumerate(section.tensors)
    }


def stage_names(layout: RunLayout, stage: int) -> tuple[str, ...]:
    """The tensors that a stage holds, in canonical order."""
    held = layout.stage_sections[stage]
    return tuple(name for name, where in canonical_locations(layout).items() if where.section in held)


def holders(section: Section, members_of_stage: Mapping[int, Sequence[Member]]) -> tuple[Member, ...]:
    """The members at any stage that holds the section, without doubles, sorted."""
    return tuple(sorted({member for stage in section.stages for member in members_of_stage.get(stage, ())}))


def rendezvous_owners(
    partitions: Sequence[Partition], candidates: Mapping[int, Sequence[Member]], *, step: int, group: int
) -> dict[int, Member]:
    """Partition index to owner: the candidate (by section) with the highest hash of step, group, partition and member.

    Independent of the order of candidates; one that goes moves only its own partitions.
    """
    owners: dict[int, Member] = {}
    for partition in partitions:
        members = candidates.get(partition.section, ())
        if not members:
            raise ValueError(f"no live member holds section {partition.section}: nobody can own its partitions")
        head = b"".join(int(n).to_bytes(8, "little", signed=True) for n in (step, group, partition.index))
        owners[partition.index] = max(members, key=lambda member, head=head: (_rank(head, member), member))
    return owners


def _rank(head: bytes, member: Member) -> bytes:
    numbers = b"".join(int(n).to_bytes(8, "little", signed=True) for n in (member.term, member.number))
    return blake3(b"iota/owner/1\0" + head + numbers + member.hotkey.encode()).digest()
