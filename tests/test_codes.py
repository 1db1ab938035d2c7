"""Boundary codes: the page's second writing agrees to the bit, coding twice changes nothing, errors stay in their bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rounding import rounded
from subnet.errors import InputError
from subnet.numerics import codes
from subnet.numerics.codes import INT4, INT8, NAN_BITS, channel_exponents, coded_size, decode, encode, planes_of

CODES = ("int8", "int4")
WIDTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 256)
BLOCKS = {"int8": INT8.block, "int4": INT4.block}
HUGE = np.float32(np.finfo(np.float32).max)


def decoded(
    code: str, data: memoryview | bytes, shape: tuple[int, int], chunks: int = 1, *, finite: bool = True
) -> np.ndarray:
    out = np.full(shape, 7.0, np.float32)
    decode(code, data, out, chunks, finite=finite)
    return out


def second_writing(code: str, x: np.ndarray) -> np.ndarray:
    return rounded(code, torch.from_numpy(x.copy())).numpy()


def same_bits(one: np.ndarray, two: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint32), two.view(np.uint32))


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """Of very different sizes from block to block and element to element, with signs, zeros and ties."""
    tokens, hidden = draw(st.integers(1, 5)), draw(st.sampled_from(WIDTHS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((tokens, hidden))
    kind = draw(st.sampled_from(("plain", "spread", "whole", "sparse", "outlier", "bits")))
    if kind == "spread":
        x *= np.exp2(rng.integers(-60, 60, x.shape).astype(float))
    elif kind == "whole":
        x = np.rint(x * 3)
    elif kind == "sparse":
        x[rng.random(x.shape) < 0.8] = 0
    elif kind == "outlier":
        x[:, rng.integers(hidden)] *= 1000
    elif kind == "bits":
        found = rng.integers(0, 2**32, x.shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
        x = np.where(np.isfinite(found), found, np.float32(0)).astype(np.float64)
    factor = 2.0 ** draw(st.integers(-140, 100)) if kind != "bits" else 1.0
    with np.errstate(over="ignore"):
        return np.clip(x * factor, -HUGE, HUGE).astype(np.float32)


def bounds(code: str, x: np.ndarray) -> np.ndarray:
    """What the page promises of each element's error; what is clipped counts as its clipped value."""
    width, factor = BLOCKS[code], np.exp2(channel_exponents(x).astype(float))
    small = np.clip(x.astype(np.float64), -(2.0**112), 2.0**112) / factor
    pieces = []
    for piece in np.split(small, range(width, x.shape[1], width), axis=1):
        largest = np.abs(piece).max(axis=1, keepdims=True)
        share = 0.5 / 127 if code == "int8" else 1 / 8
        pieces.append(np.broadcast_to(largest * share * (1 + 2**-5) + 2.0**-100, piece.shape))
    return np.concatenate(pieces, axis=1) * factor


def check(code: str, x: np.ndarray) -> None:
    data = encode(code, x)
    assert data.nbytes == coded_size(code, *x.shape)
    once = decoded(code, data, x.shape)
    assert np.isfinite(once).all()
    assert same_bits(once, second_writing(code, x))
    assert bytes(encode(code, once, exponents=channel_exponents(x)[None])) == bytes(data)
    assert np.all(np.abs(once - np.clip(x.astype(np.float64), -(2.0**112), 2.0**112)) <= bounds(code, x))


@pytest.mark.parametrize("code", CODES)
@given(x=tensors())
@settings(max_examples=50, deadline=None)
def test_two_writings_agree_and_coding_twice_changes_nothing(code: str, x: np.ndarray) -> None:
    check(code, x)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, 2.0**-100, -(2.0**-97), 2.0**-93, 1.0, -1.0, 65504.0, HUGE, -HUGE],
)
def test_exotic_values_alone_and_as_one_outlier(code: str, value: float) -> None:
    for filler in (0.0, 1e-45, 2.0**-100, 1e-3, -1.0, HUGE / 3):
        x = np.full((2, 130), filler, np.float32)
        x[0, 77] = value
        x[1] = value
        check(code, x)


def test_the_largest_magnitude_is_kept_within_its_scales_rounding() -> None:
    x = np.random.default_rng(3).standard_normal((50, 256)).astype(np.float32)
    for code, width in (("int8", 128), ("int4", 64)):
        once = decoded(code, encode(code, x), x.shape)
        for start in range(0, 256, width):
            at = np.abs(x[:, start : start + width]).argmax(axis=1)
            rows = np.arange(50)
            before, after = x[:, start : start + width][rows, at], once[:, start : start + width][rows, at]
            assert np.all(np.abs(after / before - 1) <= 2**-8)


@pytest.mark.parametrize("code", CODES)
def test_chunks_are_coded_alone_and_tiles_dont_matter(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(4).standard_normal((36, 200)).astype(np.float32)
    x[:, ::7] *= 40
    x[12:24] *= 1000
    whole, found = bytes(encode(code, x, 3)), {"int8": INT8, "int4": INT4}[code]
    parts = [bytes(encode(code, part)) for part in np.split(x, 3)]
    ends = np.cumsum(found.sizes(12, 200, 1))
    pieces = zip((0, *ends), ends, strict=False)
    assert whole == b"".join(part[begin:end] for begin, end in pieces for part in parts)
    expected = decoded(code, whole, x.shape, 3)
    assert same_bits(expected, np.concatenate([second_writing(code, part) for part in np.split(x, 3)]))
    for tile in (1, 201, 1000):
        monkeypatch.setattr(codes, "_TILE", tile)
        assert bytes(encode(code, x, 3)) == whole
        assert np.array_equal(decoded(code, whole, x.shape, 3), expected)


@pytest.mark.parametrize("code", CODES)
def test_a_channel_far_above_the_others_doesnt_drown_them(code: str) -> None:
    """What blocks alone would lose: an outlier channel sets the scale of its whole block."""
    for factor, most in ((10, {"int8": 2e-4, "int4": 0.03}), (100, {"int8": 2e-3, "int4": 0.3})):
        x = np.random.default_rng(8).standard_normal((256, 128)).astype(np.float32)
        x[:, 5] *= factor
        off = decoded(code, encode(code, x), x.shape) - x
        assert ((off**2).sum(axis=0) / (x**2).sum(axis=0)).max() < most[code]
        assert channel_exponents(x)[5] >= 2


def test_sizes_are_the_formula() -> None:
    assert coded_size("raw", 10, 768) == 10 * 3072
    assert coded_size("int8", 10, 768) == 768 + 10 * (768 + 2 * 6)
    assert coded_size("int4", 10, 768) == 768 + 10 * (384 + 2 * 12)
    assert coded_size("int4", 4, 65, 2) == 2 * 65 + 4 * (33 + 4)
    for code in ("raw", *CODES):
        assert sum(size for size, _ in planes_of(code, 9, 77, 3)) == coded_size(code, 9, 77, 3)
    with pytest.raises(InputError, match="no boundary code"):
        coded_size("int2", 1, 1)


def test_raw_is_the_bytes() -> None:
    x = np.random.default_rng(5).standard_normal((3, 9)).astype(np.float32)
    assert bytes(encode("raw", x)) == x.tobytes()
    assert np.array_equal(decoded("raw", x.tobytes(), x.shape), x)
    x[1, 1] = np.inf
    with pytest.raises(InputError, match="not finite"):
        decoded("raw", x.tobytes(), x.shape)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_decodes_to_nan_and_is_refused_in_training(code: str, value: float) -> None:
    x = np.random.default_rng(6).standard_normal((3, 200)).astype(np.float32)
    x[1, 150] = value
    exponents = channel_exponents(x)[None]
    data = encode(code, x)
    found = decoded(code, data, x.shape, finite=False)
    bad = np.zeros(x.shape, bool)
    bad[1, 150 // BLOCKS[code] * BLOCKS[code] : (150 // BLOCKS[code] + 1) * BLOCKS[code]] = True
    assert np.isnan(found[bad]).all()
    assert np.isfinite(found[~bad]).all()
    assert np.array_equal(found, second_writing(code, x), equal_nan=True)
    assert bytes(encode(code, found, exponents=exponents)) == bytes(data)
    with pytest.raises(InputError, match="not finite"):
        decoded(code, data, x.shape)


@pytest.mark.parametrize("code", CODES)
def test_bytes_that_no_boundary_has_are_refused(code: str) -> None:
    x = np.random.default_rng(7).standard_normal((3, 65)).astype(np.float32)
    good = bytes(encode(code, x))
    for wrong in (b"", good[:-1], good + b"\0", good * 2):
        with pytest.raises(InputError, match="bytes instead of"):
            decoded(code, wrong, x.shape)
    first, rest = good[:65], good[67:]
    for bits in (0, (27 << 7) - 1, 0x7F80, 0x7FC1, 0xFFC0, *((0xBF80,) if code == "int8" else ())):
        with pytest.raises(InputError, match="scale"):
            decoded(code, first + bits.to_bytes(2, "little") + rest, x.shape, finite=False)
    for bits in (NAN_BITS, 0x7F7F):
        with pytest.raises(InputError, match="not finite"):
            decoded(code, first + bits.to_bytes(2, "little") + rest, x.shape)
    for exponent in (0, 112, 144, 255):
        with pytest.raises(InputError, match="exponent"):
            decoded(code, bytes([exponent]) + good[1:], x.shape)
    with pytest.raises(InputError, match="integer"):
        decoded(code, good[:-1] + b"\x80", x.shape)


def test_what_int4_does_with_two_equal_extremes() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :3] = 8.0, -8.0, 3.4
    once = decoded("int4", encode("int4", x, exponents=np.zeros((1, 64), np.int64)), x.shape)
    assert once[0, :4].tolist() == [8.0, -7.0, 3.0, 0.0]
