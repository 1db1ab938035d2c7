"""Slices: merging depends on nothing but the microbatches, and foreign bytes are checked."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_cases import QMAX, SHAPES, layout_of, plain_blocks, plain_quantise, random_grads, some_exponents, square_sum
from torch import Tensor

from subnet.errors import InputError
from subnet.numerics.fixed_point import (
    PartialSum,
    host_exponents,
    load_merged,
)
from subnet.numerics.layout import RunLayout, TensorSpec, block_lengths, build_layout
from subnet.numerics.packing import pack_bits, pack_slice, packed_size, unpack_bits, unpack_slice
from subnet.numerics.slices import (
    byte_width,
    merge_slices,
    parse_slice,
    slice_size,
    slice_width,
    sum_bits,
)
from subnet.run.schedule import SQUARES_BIAS


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def merge_all(
    layout: RunLayout, items: list[list[tuple[int, Tensor]]], groups: list[list[int]], ks: Tensor | None, pack: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Contributors with the given microbatches, their slices merged partition by partition, decoded."""
    section = layout.sections[0]
    partials = [PartialSum(section, ks) for _ in groups]
    for partial, members in zip(partials, groups, strict=True):
        for m in members:
            partial.add_item(items[m])
    values = None if ks is None else torch.full((section.num_elements,), math.nan)
    maxima, squares = torch.full((section.num_blocks,), math.nan), 0
    for partition in layout.groups[0].partitions:
        slices = [(partial.encode(partition), partial.num_items) for partial in partials]
        for buffer, n in slices:
            assert len(buffer) == slice_size(section, partition, n, calibration=ks is None)
        if pack and ks is not None:
            packed = [(pack_slice(section, partition, buffer, n), n) for buffer, n in slices]
            slices = [(unpack_slice(section, partition, buffer, n), n) for buffer, n in packed]
        host = None if ks is None else host_exponents(ks)
        merged, part, _ = merge_slices(section, partition, slices, total_items=len(items), exponents=host)
        load_merged(section, partition, merged, len(items), values, maxima)
        squares += part
    return (np.empty(0) if values is None else values.numpy()), maxima.numpy(), squares


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 7), st.booleans(), st.booleans())
def test_grouping_order_owners_and_partitions_do_not_show(
    seed: int, num_items: int, partitions: int, pack: bool, calibration: bool
) -> None:
    rng, shuffler = np.random.default_rng(seed), random.Random(seed)
    shapes = [SHAPES[i] for i in sorted(shuffler.sample(range(len(SHAPES)), 3))]
    items = [random_grads(shapes, rng) for _ in range(num_items)]
    whole = layout_of(shapes)
    section = whole.sections[0]
    ks = None if calibration else some_exponents(section.num_blocks, rng)
    expected = merge_all(whole, items, [list(range(num_items))], ks, False)
    order = shuffler.sample(range(num_items), num_items)
    cuts = sorted(shuffler.choices(range(num_items + 1), k=3))
    bounds = [0, *cuts, num_items]
    groups = [order[a:b] for a, b in itertools.pairwise(bounds)]
    values, maxima, squares = merge_all(layout_of(shapes, partitions), items, groups, ks, pack)
    assert np.array_equal(values, expected[0])
    assert np.array_equal(maxima, expected[1])
    assert squares == expected[2]
    if ks is None:
        assert squares == 0
        return
    lengths = block_lengths(section)
    sums = sum(plain_quantise(plain_blocks(whole, item), lengths, ks.numpy(), QMAX) for item in items)
    assert np.array_equal(values, sums)
    per_element = np.repeat(ks.numpy(), lengths)
    exact = sum(
        Fraction(int(q)) ** 2 * Fraction(4) ** int(k) for q, k in zip(np.asarray(sums), per_element, strict=True)
    )
    assert squares == exact * 4**SQUARES_BIAS


@pytest.mark.parametrize("tied", [False, True])
def test_cuts_of_the_model_do_not_show(tied: bool) -> None:
    """The same microbatches through 1 to 3 stages: equal sums, maxima and squares per tensor, and exact norm."""
    rng = np.random.default_rng(3)
    embed, head = TensorSpec("embed", (10, 128), True), TensorSpec("head", (10, 128), True)
    layers = [TensorSpec(f"layer{i}", (33, 70), False) for i in range(3)]
    names = [embed.name, *(layer.name for layer in layers), head.name]
    shapes = {spec.name: spec.shape for spec in (embed, *layers, head)}
    items = [
        {name: torch.from_numpy((rng.standard_normal(shapes[name]) * 1e-3).astype(np.float32)) for name in names}
        for _ in range(5)
    ]
    ks = {name: -18 + i for i, name in enumerate(names)}
    ks["head"] = ks["embed"] if tied else ks["head"]
    results = []
    for num_stages in (1, 2, 3):
        per_stage: list[list[TensorSpec]] = [[] for _ in range(num_stages)]
        for i, layer in enumerate(layers):
            per_stage[i * num_stages // 3].append(layer)
        if not tied:
            per_stage[0].insert(0, embed)
            per_stage[-1].append(head)
        layout = build_layout(per_stage, tied=embed if tied else None, qmax=QMAX, min_partition_elements=700)
        found: dict[str, bytes] = {}
        squares = 0
        for section in layout.sections:
            held = torch.cat([torch.full((s.num_blocks,), ks[s.spec.name]) for s in section.tensors]).to(torch.int16)
            partials = []
            for stage in section.stages:
                partials.append(PartialSum(section, held))
                for item in items:
                    grads = [(i, item[s.spec.name]) for i, s in enumerate(section.tensors)]
                    if section.name == "tied":
                        leaves = [item["embed"]] * (stage == 0) + [item["head"]] * (stage == num_stages - 1)
                        grads = [(0, leaf) for leaf in leaves]
                    partials[-1].add_item(grads)
            values, maxima = torch.empty(section.num_elements), torch.empty(section.num_blocks)
            for group in layout.groups:
                for partition in group.partitions:
                    if partition.section != section.index:
                        continue
                    slices = [(p.encode(partition), p.num_items) for p in partials]
                    host = host_exponents(held)
                    merged, part, _ = merge_slices(section, partition, slices, total_items=5, exponents=host)
                    load_merged(section, partition, merged, 5, values, maxima)
                    squares += part
            for span in section.tensors:
                v = values[span.element_start : span.element_start + span.num_elements]
                x = maxima[span.block_start : span.block_start + span.num_blocks]
                found[span.spec.name] = v.numpy().tobytes() + x.numpy().tobytes()
        results.append((dict(sorted(found.items())), squares))
    assert results[0] == results[1] == results[2]
    if tied:
        total = sum(
            np.clip(np.rint(item[leaf].numpy().astype(np.float64) * 2.0 ** -ks["embed"]), -511, 511)
            for item in items
            for leaf in ("embed", "head")
        )
        assert results[0][0]["embed"].startswith(np.asarray(total).astype(np.float32).tobytes())


def test_sums_stay_exact_at_the_limits() -> None:
    num_items, layout = 1 << 14, layout_of([((1500,), False)])
    section, partition = layout.sections[0], layout.groups[0].partitions[0]
    ks = torch.tensor([0, -60], dtype=torch.int16)
    partial = PartialSum(section, ks)
    grad = torch.full((1500,), 1e30)
    grad[1::2] = -1e30
    partial.add_item([(0, grad)])
    assert partial.values[:2].tolist() == [1023.0, -1023.0]
    half = num_items // 2
    partial.values.mul_(float(half - 1))
    partial.num_items = half - 1
    partial.add_item([(0, grad)])
    assert partial.values[:2].tolist() == [half * 1023.0, -half * 1023.0]
    slices = [(partial.encode(partition), half)] * 2
    merged, squares, hash_ = merge_slices(
        section, partition, slices, total_items=num_items, exponents=host_exponents(ks)
    )
    assert hash_ == blake3(merged).hexdigest()
    values, maxima = torch.empty(1500), torch.empty(2)
    load_merged(section, partition, merged, num_items, values, maxima)
    top = num_items * QMAX
    assert values[:2].tolist() == [float(top), float(-top)]
    assert squares == 1024 * top**2 * 4**SQUARES_BIAS + 476 * top**2 * 4 ** (SQUARES_BIAS - 60)
    # the next microbatch would still be exact, but the limit of the run file is M * qmax < 2^24
    assert top < 2**24


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1 << 10, 1 << 21, (1 << 21) + 1, (1 << 24) - 1]))
def test_squares_are_exact_for_wide_sums(seed: int, bound: int) -> None:
    rng = np.random.default_rng(seed)
    layout = layout_of(SHAPES)
    section, partition = layout.sections[0], layout.groups[0].partitions[0]
    values = rng.integers(-bound, bound + 1, section.num_elements)
    values[rng.random(len(values)) < 0.3] = rng.choice([bound, -bound])
    ks = some_exponents(section.num_blocks, rng).numpy()
    per_element = np.repeat(ks, block_lengths(section)).tolist()
    exact = sum(v * v << 2 * (k + SQUARES_BIAS) for v, k in zip(values.tolist(), per_element, strict=True))
    for form in (values.astype(np.int32), values.astype(np.float32)):
        assert square_sum(section, partition, form, ks, bound) == exact


def test_slices_that_cannot_be_right_are_refused() -> None:
    layout = layout_of([((40, 60), False)], partitions=2)
    section, partition = layout.sections[0], layout.groups[0].partitions[1]
    ks = torch.full((section.num_blocks,), -9, dtype=torch.int16)
    partial = PartialSum(section, ks)
    partial.add_item([(0, torch.randn(40, 60, generator=torch.Generator().manual_seed(0)))])
    good = bytes(partial.encode(partition))
    integers = partition.num_elements * 2
    bad: dict[str, bytes] = {"short": good[:-1], "long": good + b"\0", "empty": b""}
    for at in (0, integers - 2):
        for value in (1024, -1024, 32767, -32768):
            bad[f"{value} at {at}"] = good[:at] + value.to_bytes(2, "little", signed=True) + good[at + 2 :]
    for value in (math.nan, math.inf, -1.0, -0.0):
        bad[f"maximum {value}"] = good[:-4] + np.float32(value).tobytes()
    host = host_exponents(ks)
    assert merge_slices(section, partition, [(good, 1)], total_items=1, exponents=host)[0] == good
    values, maxima = torch.full((2400,), 7.0), torch.full((3,), 7.0)
    for name, buffer in bad.items():
        with pytest.raises(InputError):
            merge_slices(section, partition, [(good, 1), (buffer, 1)], total_items=2, exponents=host)
        with pytest.raises(InputError):
            load_merged(section, partition, buffer, 1, values, maxima)
        assert values.eq(7.0).all(), name
        assert maxima.eq(7.0).all(), name
    for slices in ([(good, 1)], [(good, 1)] * 3, [(good, 1), (good, 2), (good, -1)]):
        with pytest.raises(InputError):
            merge_slices(section, partition, slices, total_items=2, exponents=host)
    with pytest.raises(InputError):
        parse_slice(section, partition, good, 1, calibration=True)


def test_a_leaf_of_a_tied_tensor_keeps_to_its_half() -> None:
    embed = TensorSpec("embed", (2, 8), True)
    stages = [[TensorSpec("a", (3,), False)], [TensorSpec("b", (3,), False)]]
    layout = build_layout(stages, tied=embed, qmax=QMAX)
    section = layout.sections[2]
    (partition,) = [p for p in layout.groups[0].partitions if p.section == 2]
    ks = torch.zeros(2, dtype=torch.int16)
    partial = PartialSum(section, ks)
    assert partial.add_item([(0, torch.full((2, 8), 600.0))]).num_clipped == 16
    good = bytes(partial.encode(partition))
    merged, _, _ = merge_slices(section, partition, [(good, 1)] * 2, total_items=1, exponents=host_exponents(ks))
    values, maxima = torch.empty(16), torch.empty(2)
    load_merged(section, partition, merged, 1, values, maxima)
    assert values.tolist() == [1022.0] * 16
    greedy = (512).to_bytes(2, "little") + good[2:]
    with pytest.raises(InputError):
        merge_slices(section, partition, [(good, 1), (greedy, 1)], total_items=1, exponents=host_exponents(ks))


# Widths and packing


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1 << 14), st.integers(1, 1023))
def test_widths_hold_every_sum_and_no_bit_more(num_items: int, bound: int) -> None:
    bits = sum_bits(num_items, bound)
    assert bits == 1 + math.ceil(math.log2(num_items * bound + 1))
    assert num_items * bound <= 2 ** (bits - 1) - 1
    assert num_items * bound > 2 ** (bits - 2) - 1
    assert byte_width(bits) == min(w for w in (1, 2, 4) if 8 * w >= bits)
    assert slice_width(layout_of([((1,), False)]).sections[0], 33) == 4


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 32), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_packing_is_the_bit_string_it_says(bits: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), count).astype(np.int32)
    packed = pack_bits(values, bits)
    number = sum((int(v) % (1 << bits)) << (bits * i) for i, v in enumerate(values))
    assert packed == number.to_bytes(packed_size(count, bits), "little")
    assert np.array_equal(unpack_bits(packed, count, bits, np.dtype(np.int32)), values)


def test_packing_over_many_tiles_and_bad_bits() -> None:
    values = np.random.default_rng(0).integers(-(1 << 16), 1 << 16, (1 << 18) + 77).astype(np.int32)
    packed = pack_bits(values, 17)
    assert np.array_equal(unpack_bits(packed, len(values), 17, np.dtype(np.int32)), values)
    dtype = np.dtype(np.int32)
    for buffer, count in ((packed[:-1], len(values)), (packed, len(values) + 1), (packed[:-1] + b"\xff", len(values))):
        with pytest.raises(InputError):
            unpack_bits(buffer, count, 17, dtype)
    layout = layout_of([((9,), False)])
    for size in (0, 5, 100):
        with pytest.raises(InputError):
            unpack_slice(layout.sections[0], layout.groups[0].partitions[0], bytes(size), 3)
    with pytest.raises(InputError):
        pack_bits(values, 33)
