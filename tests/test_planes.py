"""Lossless packing: the same bytes come back, and a body that isn't exactly one frame of its size is refused unread."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import InputError, TooLarge
from subnet.numerics.codes import encode, planes_of
from subnet.numerics.planes import pack, unpack


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from((1, 2, 4))), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.integers(1, 256),
)
@settings(max_examples=50, deadline=None)
def test_the_same_bytes_come_back(shape: list[tuple[int, int]], seed: int, values: int) -> None:
    parts = tuple((count * width, width) for count, width in shape)
    size = sum(part for part, _ in parts)
    data = np.random.default_rng(seed).integers(0, values, size).astype(np.uint8).tobytes()
    assert bytes(unpack(pack(data, parts), parts)) == data


@pytest.mark.parametrize("code", ["raw", "int8", "int4"])
def test_packing_saves_where_there_is_something_to_save(code: str) -> None:
    x = (np.random.default_rng(1).standard_normal((256, 256)) * 0.3).astype(np.float32)
    parts, data = planes_of(code, 256, 256), encode(code, x)
    body = pack(data, parts)
    assert bytes(unpack(body, parts)) == bytes(data)
    assert len(body) < {"raw": 0.9, "int8": 0.98, "int4": 0.98}[code] * data.nbytes


PARTS = ((4096, 4), (512, 1))
SIZE = 4608


def compressed(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(data)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", InputError),
        (b"not zstd at all", InputError),
        (compressed(bytes(SIZE))[:-3], InputError),
        (compressed(bytes(SIZE)) + b"\0", InputError),
        (compressed(bytes(SIZE)) + compressed(b""), InputError),
        (compressed(bytes(SIZE - 1)), InputError),
        (compressed(bytes(SIZE + 1)), TooLarge),
        (compressed(bytes(256 << 20)), TooLarge),
        (compressed(bytes(SIZE), write_content_size=False), InputError),
        (b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + compressed(bytes(SIZE)), InputError),
    ],
    ids=["empty", "other", "truncated", "longer", "two frames", "short", "one more", "bomb", "no size", "skippable"],
)
def test_what_is_not_one_whole_frame_of_its_size_is_refused(body: bytes, error: type[InputError]) -> None:
    with pytest.raises(error) as caught:
        unpack(body, PARTS)
    assert type(caught.value) is error


def test_a_frame_that_lies_about_its_size_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The announced size is right and the content isn't: 16 MiB behind a header that says 4,608 bytes."""
    honest, bomb = compressed(bytes(SIZE)), bytearray(compressed(bytes(16 << 20)))
    header = zstandard.frame_header_size(honest)
    lying = bytes(honest[:header]) + bytes(bomb[zstandard.frame_header_size(bytes(bomb)) :])
    assert zstandard.get_frame_parameters(lying).content_size == SIZE
    with pytest.raises(InputError):
        unpack(lying, PARTS)


def test_packing_something_else_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="are not the parts"):
        pack(bytes(10), PARTS)
