"""The fingerprint is linear, exact, and finds every change; checked against plain Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.numerics.fingerprint import (
    PRIME,
    SAMPLED_BLOCKS,
    add_fingerprints,
    fingerprint,
    merged_fingerprint,
    num_passes,
    random_bits,
    sampled_maxima,
    slice_fingerprint,
)

SEED = b"\x07" * 32


def plain_fingerprint(values: list[int], seed: bytes, width: int, partition: int) -> tuple[int, ...]:
    """The definition in Python integers."""
    rows = [values[i : i + 1024] for i in range(0, len(values), 1024)]
    out = []
    for number in range(num_passes(width)):
        label = partition.to_bytes(8, "little") + number.to_bytes(8, "little") + len(seed).to_bytes(8, "little")
        stream = blake3(b"iota/fingerprint/1\0" + label + seed).digest(length=8 * (1024 + len(rows)))
        words = [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]
        multipliers = [word % 2 ** random_bits(width) for word in words[:1024]]
        factors = [word % 2**61 % PRIME for word in words[1024:]]
        dots = [sum(v * r for v, r in zip(row, multipliers, strict=False)) for row in rows]
        assert all(abs(dot) < 2**53 for dot in dots)
        out.append(sum(d * c for d, c in zip(dots, factors, strict=True)) % PRIME)
    return tuple(out)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5000), st.integers(2, 25), st.binary(min_size=1, max_size=40))
def test_equals_the_definition_in_any_form(seed: int, count: int, width: int, secret: bytes) -> None:
    rng = np.random.default_rng(seed)
    top = 2 ** (width - 1) - 1
    values = rng.integers(-top, top + 1, count)
    values[rng.random(count) < 0.2] = top
    expected = plain_fingerprint(values.tolist(), secret, width, seed % 50)
    for form in (values, values.astype(np.int32), values.astype(np.float32), torch.from_numpy(values).float()):
        assert fingerprint(form, secret, width, seed % 50) == expected


def test_extreme_rows_are_exact() -> None:
    for width in (2, 11, 17, 25, 32):
        top = 2 ** (width - 1) - 1
        for sign in (1, -1):
            values = [sign * top] * 3000
            assert fingerprint(np.array(values), SEED, width, 3) == plain_fingerprint(values, SEED, width, 3)


@pytest.mark.parametrize("width", range(1, 33))
def test_the_error_is_below_two_to_the_minus_fifty(width: int) -> None:
    assert random_bits(width) + width + 10 <= 53
    assert (2.0 ** -random_bits(width) + 2.0**-61) ** num_passes(width) < 2.0**-50


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4000))
def test_linear(seed: int, contributors: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    partials = rng.integers(-5000, 5001, (contributors, count))
    each = [fingerprint(partial, SEED, 17, 2) for partial in partials]
    assert add_fingerprints(each) == fingerprint(partials.sum(0), SEED, 17, 2)
    assert add_fingerprints(each[::-1]) == add_fingerprints(each)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 4999), st.integers(-60_000, 60_000).filter(bool))
def test_a_changed_integer_is_found(seed: int, position: int, delta: int) -> None:
    values = np.random.default_rng(seed).integers(-1000, 1001, 5000)
    before = fingerprint(values, SEED, 18, 0)
    values[position] += delta
    assert all(a != b for a, b in zip(fingerprint(values, SEED, 18, 0), before, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_compensated_changes_are_found(seed: int, data: st.DataObject) -> None:
    """Changes that keep sums, sums of rows and columns, or the multiset: nothing about the seed was known."""
    values = np.random.default_rng(seed).permutation(np.arange(-2048, 2048))
    changed = values.copy()
    a, b = data.draw(st.lists(st.integers(0, 4095), min_size=2, max_size=2, unique=True))
    kind = data.draw(st.sampled_from(["move", "swap", "rows", "square", "negate"]))
    if kind == "move":
        changed[a] += 1
        changed[b] -= 1
    elif kind == "swap":
        changed[[a, b]] = changed[[b, a]]
    elif kind == "rows":
        changed = np.concatenate([changed[1024:2048], changed[:1024], changed[2048:]])
    elif kind == "square":
        grid = changed.reshape(4, 1024)
        for row, column, delta in ((0, 5, 3), (0, 9, -3), (2, 5, -3), (2, 9, 3)):
            grid[row, column] += delta
    else:
        changed = -changed
    assert fingerprint(values, SEED, 14, 1) != fingerprint(changed, SEED, 14, 1)


def test_every_seed_and_partition_has_its_own() -> None:
    values = np.arange(3000)
    found = {fingerprint(values, seed, 14, p) for seed in (b"a", b"b", b"a\0") for p in range(3)}
    assert len(found) == 9


def test_only_like_fingerprints_add() -> None:
    for wrong in ([], [(1, 2), (1,)]):
        with pytest.raises(ValueError):
            add_fingerprints(wrong)
    with pytest.raises(ValueError):
        fingerprint(np.arange(3), SEED, 33, 0)


def test_the_merged_fingerprint_is_told_from_those_of_the_contributions() -> None:
    random = np.random.default_rng(3)
    parts = random.integers(-4000, 4001, (3, 5000))
    maxima = random.random((3, 40)).astype(np.float32)
    each = [slice_fingerprint(part, high, SEED, 17, 5) for part, high in zip(parts, maxima, strict=True)]
    whole = slice_fingerprint(parts.sum(0), maxima.max(0), SEED, 17, 5)
    assert merged_fingerprint(each, 17) == merged_fingerprint(each[::-1], 17) == whole
    assert len(whole) == num_passes(17) + SAMPLED_BLOCKS
    for wrong in ([], [each[0], each[1][:-1]]):
        with pytest.raises(ValueError, match="fingerprints"):
            merged_fingerprint(wrong, 17)


@given(
    st.lists(
        st.floats(min_value=0, allow_infinity=False, allow_nan=False, width=32), min_size=1, max_size=SAMPLED_BLOCKS
    )
)
def test_of_few_blocks_every_maximum_is_compared(values: list[float]) -> None:
    maxima = np.abs(np.array(values, dtype=np.float32))
    bits = sampled_maxima(maxima, SEED, 0)
    assert bits == tuple(maxima.view(np.uint32).tolist())
    assert sorted(bits) == np.sort(maxima).view(np.uint32).tolist()


def test_which_blocks_are_drawn_nobody_knows_before_the_seed() -> None:
    maxima = np.arange(10_000, dtype=np.float32)
    drawn = {sampled_maxima(maxima, bytes([n]) * 32, n % 3) for n in range(60)}
    assert len(drawn) == 60
    inflated = maxima.copy()
    inflated[:1000] = 1e9
    found = sum(
        sampled_maxima(inflated, n.to_bytes(32, "big"), 0) != sampled_maxima(maxima, n.to_bytes(32, "big"), 0)
        for n in range(500)
    )
    assert abs(found / 500 - (1 - 0.9**SAMPLED_BLOCKS)) < 0.06
