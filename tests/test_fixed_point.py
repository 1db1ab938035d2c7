"""Quantising, sums and scales, against a plain numpy transcription of the arithmetic."""

from __future__ import annotations

import math
import shutil
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_cases import QMAX, SHAPES, layout_of, plain_blocks, plain_maxima, plain_quantise, random_grads, some_exponents

from subnet.errors import InputError
from subnet.numerics.fixed_point import (
    NonFiniteGradient,
    PartialSum,
    add_item_to_sections,
    exponents,
    exponents_from_bytes,
    power_of_two,
    scale_bytes,
    update_scales,
)
from subnet.numerics.layout import block_lengths, block_starts


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_quantised_sum_equals_the_transcription(seed: int, items: int) -> None:
    rng = np.random.default_rng(seed)
    layout = layout_of(SHAPES)
    section = layout.sections[0]
    ks = some_exponents(section.num_blocks, rng)
    partial = PartialSum(section, ks)
    lengths, starts = block_lengths(section), block_starts(section)
    total, maxima, clipped = np.zeros(section.num_elements, np.int64), np.zeros(section.num_blocks, np.float32), 0
    for _ in range(items):
        grads = random_grads(SHAPES, rng)
        stats = partial.add_item(grads)
        flat = plain_blocks(layout, grads)
        total += plain_quantise(flat, lengths, ks.numpy(), QMAX)
        wide = plain_quantise(flat, lengths, ks.numpy(), 1 << 50)
        clipped = int((np.abs(wide) > QMAX).sum())
        assert stats.num_clipped == clipped
        maxima = np.maximum(maxima, plain_maxima(flat, starts))
    assert partial.num_items == items
    assert np.array_equal(partial.values.numpy(), total)
    assert np.array_equal(partial.maxima.numpy(), maxima)


def test_half_way_values_go_to_even_and_clip_counts_after_rounding() -> None:
    layout = layout_of([((8,), False)])
    partial = PartialSum(layout.sections[0], torch.tensor([-1], dtype=torch.int16))
    grads = torch.tensor([0.25, 0.75, -0.25, -0.75, 511.5, 511.7, 511.75, -600.0])
    assert partial.add_item([(0, grads)]).num_clipped == 2
    assert partial.values.tolist() == [0.0, 2.0, 0.0, -2.0, 1023.0, 1023.0, 1023.0, -1023.0]


def test_non_contiguous_gradients_and_reset() -> None:
    layout = layout_of([((64, 48), False)])
    section = layout.sections[0]
    ks = torch.full((section.num_blocks,), -9, dtype=torch.int16)
    grad = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).t()
    one, two = PartialSum(section, ks), PartialSum(section, None)
    one.add_item([(0, grad)])
    two.add_item([(0, grad)])
    assert torch.equal(one.maxima, two.maxima)
    two.reset(ks)
    two.add_item([(0, grad.contiguous())])
    assert torch.equal(one.values, two.values)
    assert torch.equal(one.maxima, two.maxima)
    assert (two.num_items, two.calibration) == (1, False)


def test_wrong_gradients_raise_before_anything_is_added() -> None:
    layout = layout_of([((4,), False), ((6,), False)])
    partial = PartialSum(layout.sections[0], torch.zeros(2, dtype=torch.int16))
    four, six = torch.ones(4), torch.ones(6)
    for grads in ([(0, four)], [(0, four), (0, four), (1, six)], [(0, six), (1, six)], [(0, four.double()), (1, six)]):
        with pytest.raises(ValueError):
            partial.add_item(grads)
    assert not partial.values.any()
    assert partial.num_items == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("calibration", [False, True])
def test_a_non_finite_element_anywhere_leaves_every_section_as_it_was(poison: float, calibration: bool) -> None:
    rng = np.random.default_rng(5)
    partials = []
    for _ in range(2):
        section = layout_of(SHAPES).sections[0]
        partials.append(PartialSum(section, None if calibration else some_exponents(section.num_blocks, rng)))
    add_item_to_sections([(partial, random_grads(SHAPES, rng)) for partial in partials])
    before = [(p.values.clone(), p.maxima.clone(), p.num_items) for p in partials]
    for target in range(2):
        for tensor in range(len(SHAPES)):
            items = [(partial, random_grads(SHAPES, rng)) for partial in partials]
            flat = items[target][1][tensor][1].view(-1)
            flat[int(rng.integers(len(flat)))] = poison
            with pytest.raises(NonFiniteGradient, match=f"t{tensor}"):
                add_item_to_sections(items)
    for partial, (values, maxima, count) in zip(partials, before, strict=True):
        assert torch.equal(partial.values, values)
        assert torch.equal(partial.maxima, maxima)
        assert partial.num_items == count


def test_an_interrupted_addition_is_never_used() -> None:
    section = layout_of([((8,), False)]).sections[0]
    partial = PartialSum(section, torch.zeros(1, dtype=torch.int16))
    partial._work = torch.empty(8, dtype=torch.float32)
    real, partial._inverse = partial._inverse, torch.zeros(1, dtype=torch.complex64)
    with pytest.raises(RuntimeError):
        partial.add_item([(0, torch.ones(8))])
    partial._inverse = real
    partition = layout_of([((8,), False)]).groups[0].partitions[0]
    for use in (lambda: partial.encode(partition), lambda: partial.add_item([(0, torch.ones(8))])):
        with pytest.raises(RuntimeError, match="void"):
            use()
    partial.reset(torch.zeros(1, dtype=torch.int16))
    partial.add_item([(0, torch.ones(8))])
    assert partial.values.tolist() == [1.0] * 8


def test_lost_energy_is_measured() -> None:
    section = layout_of([((3,), False)]).sections[0]
    partial = PartialSum(section, torch.tensor([0], dtype=torch.int16))
    (lost,) = partial.add_item([(0, torch.tensor([0.25, 2000.0, 3.0]))], measure=True).lost
    assert (lost.name, lost.energy, lost.lost) == ("t0", 0.0625 + 4e6 + 9, 0.0625 + 977.0**2)
    assert partial.add_item([(0, torch.zeros(3))]).lost == ()


def plain_scales(shapes: list[int], decayed: list[Any], limit: list[Any], x: list[Any], first: bool) -> tuple[Any, Any]:
    """§6 scalar by scalar in numpy's fp32; ``shapes`` are blocks per tensor."""
    f = np.float32
    new = [b if first else max(f(a * f(0.9)), b) for a, b in zip(decayed, x, strict=True)]
    limits, at = [], 0
    for blocks in shapes:
        top = max(new[at : at + blocks])
        for i in range(at, at + blocks):
            target = max(f(max(new[i], f(top * f(0.25))) * f(2)), f(2.0**-60))
            limits.append(target if first else min(max(target, f(limit[i] * f(0.5))), f(limit[i] * f(8))))
        at += blocks
    return new, limits


def plain_exponent(limit: float, qmax: int) -> int:
    """The smallest k with limit <= qmax * 2^k, by search in rationals."""
    k = math.frexp(limit)[1] - 14
    assert Fraction(limit) > qmax * Fraction(2) ** k
    while Fraction(limit) > qmax * Fraction(2) ** k:
        k += 1
    return k


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1023, 511, 3, 1]))
def test_scale_rule_equals_the_transcription(seed: int, qmax: int) -> None:
    rng = np.random.default_rng(seed)
    layout = layout_of(SHAPES)
    section = layout.sections[0]
    blocks = [span.num_blocks for span in section.tensors]
    decayed = limit = torch.zeros(section.num_blocks)
    for step in range(4):
        x = (10.0 ** rng.uniform(-25, 5, section.num_blocks) * (rng.random(section.num_blocks) > 0.3)).astype(
            np.float32
        )
        wanted = plain_scales(blocks, list(decayed.numpy()), list(limit.numpy()), list(x), step == 0)
        decayed, limit = update_scales(section, decayed, limit, torch.from_numpy(x), first=step == 0)
        assert np.array_equal(decayed.numpy(), np.array(wanted[0], np.float32))
        assert np.array_equal(limit.numpy(), np.array(wanted[1], np.float32))
        ks = exponents(limit, qmax)
        assert ks.tolist() == [plain_exponent(float(v), qmax) for v in limit]
        assert torch.equal(exponents_from_bytes(scale_bytes(ks)), ks)
        assert list(scale_bytes(ks)) == [k + 128 for k in ks.tolist()]


@pytest.mark.parametrize("qmax", [1023, 511, 512, 1, 3])
def test_exponents_are_exact_around_powers_of_two(qmax: int) -> None:
    edges = [np.float32(qmax * 2.0**k) for k in range(-65, 100, 5)] + [np.float32(2.0**k) for k in range(-60, 121, 7)]
    around = [v for e in edges for v in (np.nextafter(e, np.float32(0)), e, np.nextafter(e, np.float32(np.inf)))]
    around = [v for v in around if 2.0**-60 <= v <= 2.0**120]
    assert exponents(torch.tensor(around), qmax).tolist() == [plain_exponent(float(v), qmax) for v in around]


def test_powers_of_two_are_exact_and_foreign_scale_bytes_checked() -> None:
    ks = torch.arange(-126, 121, dtype=torch.int16)
    assert power_of_two(ks).double().tolist() == [2.0**k for k in range(-126, 121)]
    for byte in (0, 1, 249, 255):
        with pytest.raises(InputError):
            exponents_from_bytes(bytes([byte]))


def test_an_all_zero_run_has_no_nan_and_huge_gradients_recover() -> None:
    section = layout_of([((2000,), False)]).sections[0]
    partial = PartialSum(section, None)
    partial.add_item([(0, torch.zeros(2000))])
    decayed, limit = update_scales(section, torch.empty(0), torch.empty(0), partial.maxima, first=True)
    assert limit.tolist() == [2.0**-60] * 2
    partial.reset(exponents(limit, QMAX))
    partial.add_item([(0, torch.zeros(2000))])
    assert not partial.values.any()
    huge = torch.full((2,), torch.finfo(torch.float32).max)
    decayed, limit = update_scales(section, decayed, limit, huge, first=True)
    assert limit.tolist() == [2.0**120] * 2
    assert exponents_from_bytes(scale_bytes(exponents(limit, 1))).tolist() == [120, 120]
    for _ in range(1000):
        decayed, limit = update_scales(section, decayed, limit, torch.zeros(2), first=False)
    assert limit.max() < 2.0**-20


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here, so nothing can be compiled")
@pytest.mark.filterwarnings("ignore")
def test_compiled_and_eager_agree_to_the_bit() -> None:
    rng = np.random.default_rng(11)
    shapes: list[tuple[tuple[int, ...], bool]] = [((5, 2048), True), ((300, 1024), False), ((7, 33), False)]
    section = layout_of(shapes).sections[0]
    ks = some_exponents(section.num_blocks, rng)
    eager, fused = PartialSum(section, ks), PartialSum(section, ks)
    for _ in range(3):
        grads = random_grads(shapes, rng)
        assert eager.add_item(grads) == fused.add_item(grads, fused=True)
    assert eager.values.numpy().tobytes() == fused.values.numpy().tobytes()
    assert torch.equal(eager.maxima, fused.maxima)
    with pytest.raises(NonFiniteGradient):
        fused.add_item([*grads[:2], (2, torch.full((7, 33), math.nan))], fused=True)
    assert torch.equal(eager.values, fused.values)
