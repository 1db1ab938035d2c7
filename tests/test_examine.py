"""One pass over foreign bytes says what the separate passes say, to the number, and refuses what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_cases import QMAX, SHAPES, layout_of, some_exponents, square_sum

from subnet.errors import HashMismatch, InputError
from subnet.numerics.examine import accept_slice, examine_merged
from subnet.numerics.fingerprint import slice_fingerprint
from subnet.numerics.fixed_point import PartialSum, host_exponents
from subnet.numerics.layout import RunLayout, block_lengths
from subnet.numerics.packing import pack_slice, unpack_slice
from subnet.numerics.slices import parse_slice, sum_bits
from subnet.run.schedule import SQUARES_BIAS

SEED = b"\x09" * 32
BIG = [*SHAPES, ((90, 1536), True), ((70, 1024), False), ((3,), False), ((65, 1000), False)]


def sum_of(layout: RunLayout, items: int, seed: int) -> PartialSum:
    """Any integers that ``items`` microbatches can add up to, the bounds among them."""
    rng, section = np.random.default_rng(seed), layout.sections[0]
    partial = PartialSum(section, some_exponents(section.num_blocks, rng))
    bound = items * section.item_bound
    values = rng.integers(-bound, bound + 1, section.num_elements)
    values[rng.random(len(values)) < 0.01] = rng.choice([bound, -bound])
    partial.values.copy_(torch.from_numpy(values))
    partial.maxima.copy_(torch.from_numpy(rng.random(section.num_blocks, dtype=np.float32)))
    partial.num_items = items
    return partial


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 16, 64, 3000]), st.integers(1, 5))
def test_one_pass_is_all_the_passes(seed: int, items: int, partitions: int) -> None:
    layout = layout_of(BIG, partitions)
    section, partial = layout.sections[0], sum_of(layout, items, seed)
    exponents = some_exponents(section.num_blocks, np.random.default_rng(seed + 1))
    host, width = host_exponents(exponents), sum_bits(items, section.item_bound)
    whole = np.full(section.num_elements, np.nan, dtype=np.float32)
    for partition in layout.groups[0].partitions:
        data, hash_ = partial.encode_hashed(partition)
        assert data == partial.encode(partition)
        assert hash_ == blake3(data).hexdigest()
        packed = pack_slice(section, partition, data, items)
        assert unpack_slice(section, partition, packed, items) == data
        for body, is_packed in ((data, False), (packed, True)):
            assert accept_slice(section, partition, body, items, hash=hash_, packed=is_packed) == data
        integers, maxima = parse_slice(section, partition, data, items)
        assert integers is not None
        found = examine_merged(
            section, partition, data, items, exponents=host, seed=SEED, width_bits=width,
            values=whole[partition.element_start : partition.element_end],
        )  # fmt: skip
        assert found.fingerprint == slice_fingerprint(integers, maxima, SEED, width, partition.index)
        own = partial.maxima[partition.block_start : partition.block_end].numpy()
        assert found.fingerprint == slice_fingerprint(partial.integers(partition), own, SEED, width, partition.index)
        assert found.squares == square_sum(section, partition, integers, host, items * section.item_bound)
        starts = np.cumsum(block_lengths(section)[partition.block_start : partition.block_end])[:-1]
        exact = sum(
            int((block.astype(object) ** 2).sum()) << 2 * (int(k) + SQUARES_BIAS)
            for block, k in zip(
                np.split(integers, starts), host[partition.block_start : partition.block_end], strict=True
            )
        )
        assert found.squares == exact
        assert np.array_equal(found.maxima, maxima)
    assert np.array_equal(whole, partial.values.numpy())


def test_bytes_that_cannot_be_a_slice_are_refused_packed_or_not() -> None:
    layout = layout_of([((41, 61), False)])
    section, partition = layout.sections[0], layout.groups[0].partitions[0]
    items = 2
    good = bytes(sum_of(layout, items, 0).encode(partition))
    packed = bytes(pack_slice(section, partition, good, items))

    def accept(body: bytes, *, is_packed: bool, canonical: bytes | None = None) -> None:
        hash_ = blake3(body if canonical is None else canonical).hexdigest()
        accept_slice(section, partition, body, items, hash=hash_, packed=is_packed)

    accept(good, is_packed=False)
    accept(packed, is_packed=True, canonical=good)
    over = (items * QMAX + 1).to_bytes(2, "little") + good[2:]
    nan = good[:-4] + np.float32(np.nan).tobytes()
    for canonical in (over, nan):
        with pytest.raises(InputError):
            accept(canonical, is_packed=False)
        with pytest.raises(InputError):
            accept(bytes(pack_slice(section, partition, canonical, items)), is_packed=True, canonical=canonical)
    for body in (packed[:-1], packed + b"\0", b"", good):
        with pytest.raises(InputError):
            accept(body, is_packed=True, canonical=good)
    for body in (good[:-1], good + b"\0", b""):
        with pytest.raises(InputError):
            accept(body, is_packed=False)
    split = len(packed) - partition.num_blocks * 4
    assert partition.num_elements * sum_bits(items, section.item_bound) % 8, "there are bits to spare"
    padded = bytearray(packed)
    padded[split - 1] |= 0x80
    with pytest.raises(InputError, match="aren't zero"):
        accept(bytes(padded), is_packed=True, canonical=good)
    for body, is_packed in ((good, False), (packed, True)):
        with pytest.raises(HashMismatch):
            accept_slice(section, partition, body, items, hash="00" * 32, packed=is_packed)


def test_a_leaf_of_two_keeps_to_its_share_of_the_range() -> None:
    layout = layout_of([((40, 61), False)])
    section, partition = layout.sections[0], layout.groups[0].partitions[0]
    good = bytes(sum_of(layout, 1, 0).encode(partition))
    hash_ = blake3(good).hexdigest()
    accept_slice(section, partition, good, 1, hash=hash_, packed=False)
    packed = pack_slice(section, partition, good, 1)
    for body, is_packed in ((good, False), (packed, True)):
        with pytest.raises(InputError, match="range"):
            accept_slice(section, partition, body, 1, hash=hash_, packed=is_packed, item_bound=QMAX // 2)


def test_merged_bytes_that_cannot_be_a_sum_are_refused() -> None:
    layout = layout_of([((70, 1024), False)])
    section, partition = layout.sections[0], layout.groups[0].partitions[0]
    good = bytes(sum_of(layout, 3, 0).encode(partition))
    host = host_exponents(torch.zeros(section.num_blocks, dtype=torch.int16))
    last = partition.num_elements * 2 - 2
    over = good[:last] + (-3 * QMAX - 1).to_bytes(2, "little", signed=True) + good[last + 2 :]
    for body in (over, good[:-1], good + b"\0", good[:-4] + np.float32(-0.0).tobytes()):
        with pytest.raises(InputError):
            examine_merged(section, partition, body, 3, exponents=host, seed=SEED, width_bits=13)
