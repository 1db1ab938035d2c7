"""Blocks, sections, groups, partitions and owners: every block once, whatever the cuts, and nobody depends on order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.numerics.layout import (
    BLOCK,
    RunLayout,
    TensorSpec,
    block_lengths,
    block_starts,
    build_layout,
    canonical_locations,
    holders,
    rendezvous_owners,
    stage_names,
    strips,
    tiles,
)
from subnet.words import Member


def spec(name: str, shape: tuple[int, ...], row_blocked: bool = False) -> TensorSpec:
    return TensorSpec(name, shape, row_blocked)


SHAPES = st.one_of(
    st.tuples(st.tuples(st.integers(1, 5000)), st.just(False)),
    st.tuples(st.tuples(st.integers(1, 40), st.sampled_from([1, 7, 128, 1000, 1024, 1536, 2048, 2500])), st.booleans()),
    st.tuples(st.tuples(st.integers(1, 5), st.integers(1, 60), st.sampled_from([1, 33, 64])), st.just(False)),
)
SECTIONS = st.lists(SHAPES, min_size=1, max_size=6)


def expected_blocks(tensors: list[TensorSpec]) -> list[int]:
    """Block lengths written out from the definition, one row at a time."""
    lengths: list[int] = []
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.row_blocked or len(tensor.shape) == 3 else 1
        for _ in range(rows):
            left = int(np.prod(tensor.shape)) // rows
            while left:
                lengths.append(min(left, 1024))
                left -= lengths[-1]
    return lengths


@settings(max_examples=50, deadline=None)
@given(SECTIONS, st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 4000))
def test_blocks_partitions_and_strips_cover_everything_once(
    shapes: list[tuple[tuple[int, ...], bool]], rng: random.Random, target: int, least: int
) -> None:
    tensors = [spec(f"t{i}", shape, rows) for i, (shape, rows) in enumerate(shapes)]
    layout = build_layout([tensors], tied=None, qmax=1023, target_partitions=target, min_partition_elements=least)
    section = layout.sections[0]
    lengths = expected_blocks(tensors)
    assert block_lengths(section).tolist() == lengths
    assert section.num_blocks == len(lengths)
    assert section.num_elements == sum(lengths)
    starts = block_starts(section)
    partitions = layout.groups[0].partitions
    assert 1 <= len(partitions) <= target
    assert [p.index for p in partitions] == list(range(len(partitions)))
    assert [p.block_start for p in partitions] == [0, *(p.block_end for p in partitions[:-1])]
    assert partitions[-1].block_end == section.num_blocks
    assert all((p.element_start, p.element_end) == (starts[p.block_start], starts[p.block_end]) for p in partitions)
    low = rng.randrange(section.num_blocks)
    high = rng.randrange(low, section.num_blocks) + 1
    for part_list in (strips(section, low, high), tuple(tiles(strips(section, low, high), 3000))):
        seen: list[int] = []
        for strip in part_list:
            for i in range(strip.count):
                block = strip.block_start + i * strip.block_stride
                assert strip.length == lengths[block]
                assert strip.element_start + i * strip.element_stride == starts[block]
                span = section.tensors[strip.tensor]
                assert span.block_start <= block < span.block_start + span.num_blocks
                seen.append(block)
        assert sorted(seen) == list(range(low, high))


def test_partitions_are_even_and_large_enough() -> None:
    tensors = [spec(f"w{i}", (1024, 1024)) for i in range(4)]
    partitions = build_layout([tensors], tied=None, qmax=1023).groups[0].partitions
    assert [p.num_elements for p in partitions] == [4 * 1024 * 1024 // 16] * 16
    small = build_layout([[spec("w", (100, 1024))]], tied=None, qmax=1023).groups[0].partitions
    assert [p.num_elements for p in small] == [100 * 1024]


EMBED = spec("model.embed_tokens.weight", (50, 128), True)
LAYERS = [spec(f"model.layers.{i}.mlp.up_proj.weight", (64, 128)) for i in range(4)]
NORM = spec("model.norm.weight", (128,))
HEAD = spec("lm_head.weight", (50, 128), True)


def cut(num_stages: int, tied: bool) -> RunLayout:
    per_stage: list[list[TensorSpec]] = [[] for _ in range(num_stages)]
    for i, layer in enumerate(LAYERS):
        per_stage[i * num_stages // len(LAYERS)].append(layer)
    if not tied:
        per_stage[0].insert(0, EMBED)
    per_stage[-1].append(NORM)
    if not tied:
        per_stage[-1].append(HEAD)
    return build_layout(per_stage, tied=EMBED if tied else None, qmax=1023, min_partition_elements=2000)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_canonical_order_does_not_depend_on_cuts(num_stages: int, tied: bool) -> None:
    layout = cut(num_stages, tied)
    order = [EMBED.name, *(layer.name for layer in LAYERS), NORM.name, *([] if tied else [HEAD.name])]
    locations = canonical_locations(layout)
    assert list(locations) == order
    for name, where in locations.items():
        assert layout.sections[where.section].tensors[where.tensor] == where.span
        assert where.span.spec.name == name
    names = [stage_names(layout, stage) for stage in range(num_stages)]
    assert set().union(*map(set, names)) == set(order)
    assert all(list(held) == sorted(held, key=order.index) for held in names)


def test_tied_ends_form_one_group() -> None:
    layout = cut(4, True)
    assert [s.name for s in layout.sections] == ["stage0", "stage1", "stage2", "stage3", "tied"]
    assert [(g.stages, g.sections) for g in layout.groups] == [((0, 3), (0, 4, 3)), ((1,), (1,)), ((2,), (2,))]
    assert layout.group_of_stage == (0, 1, 2, 0)
    assert layout.stage_sections == ((0, 4), (1,), (2,), (3, 4))
    tied = layout.sections[4]
    assert (tied.stages, tied.leaf_qmax, tied.num_leaves, tied.item_bound) == ((0, 3), 511, 2, 1022)
    assert (layout.sections[0].leaf_qmax, layout.sections[0].num_leaves) == (1023, 1)
    assert EMBED.name in stage_names(layout, 0)
    assert EMBED.name in stage_names(layout, 3)
    held = [p.section for p in layout.groups[0].partitions]
    assert held == sorted(held, key=(0, 4, 3).index)
    alone = cut(1, True)
    assert [(g.stages, g.sections) for g in alone.groups] == [((0,), (0, 1))]
    assert alone.sections[1].stages == (0,)
    assert [(g.stages, g.sections) for g in cut(3, False).groups] == [((s,), (s,)) for s in range(3)]


def test_impossible_layouts_raise() -> None:
    for stages in ([], [[NORM], [NORM]], [[spec("w", (0, 3))]], [[spec("w", (3,), True)]]):
        with pytest.raises(ValueError):
            build_layout(stages, tied=None, qmax=1023)


MEMBERS = [Member(f"5F{i:044d}", 1, i) for i in range(7)]


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 1000))
def test_owners_do_not_depend_on_order_and_move_only_when_they_go(rng: random.Random, step: int) -> None:
    partitions = (
        build_layout(
            [[spec("w", (64, 1024))]], tied=None, qmax=1023, target_partitions=32, min_partition_elements=BLOCK
        )
        .groups[0]
        .partitions
    )
    owners = rendezvous_owners(partitions, {0: MEMBERS}, step=step, group=0)
    assert set(owners) == set(range(32))
    shuffled = rng.sample(MEMBERS, len(MEMBERS))
    assert rendezvous_owners(partitions[::-1], {0: shuffled}, step=step, group=0) == owners
    gone = rng.choice(MEMBERS)
    rest = [member for member in MEMBERS if member != gone]
    after = rendezvous_owners(partitions, {0: rest}, step=step, group=0)
    assert all(after[p] == owner for p, owner in owners.items() if owner != gone)
    assert gone not in after.values()


def test_owners_are_spread_and_fresh_each_step() -> None:
    partitions = (
        build_layout(
            [[spec("w", (512, 1024))]], tied=None, qmax=1023, target_partitions=512, min_partition_elements=BLOCK
        )
        .groups[0]
        .partitions
    )
    first, second = (rendezvous_owners(partitions, {0: MEMBERS}, step=t, group=0) for t in (0, 1))
    counts = [list(first.values()).count(member) for member in MEMBERS]
    assert min(counts) > 512 / 7 / 2
    assert first != second
    assert first != rendezvous_owners(partitions, {0: MEMBERS}, step=0, group=1)


def test_candidates_are_the_holders_of_the_section() -> None:
    layout = cut(3, True)
    tied, first = layout.sections[3], layout.sections[0]
    by_stage = {0: MEMBERS[:2], 1: MEMBERS[2:4], 2: MEMBERS[4:6]}
    assert holders(tied, by_stage) == (*MEMBERS[:2], *MEMBERS[4:6])
    candidates = {section.index: holders(section, by_stage) for section in layout.sections}
    owners = rendezvous_owners(layout.groups[0].partitions, candidates, step=3, group=0)
    for partition in layout.groups[0].partitions:
        assert owners[partition.index] in candidates[partition.section]
    with pytest.raises(ValueError):
        rendezvous_owners(layout.groups[0].partitions, {first.index: MEMBERS}, step=3, group=0)
