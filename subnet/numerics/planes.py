"""Lossless packing of boundaries for slow links: byte planes, then zstd; what comes back is exactly as long as expected.

Bytes of equal significance lie together, so that exponents, which repeat, compress. The size that a frame announces is
checked before anything is decompressed, and nothing but one whole frame is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard

from subnet.errors import InputError, TooLarge

Buffer = bytes | bytearray | memoryview

LEVEL = 1
"""Of zstd. Higher levels cost several times the time and gain a per cent or two on such data."""


def pack(buffer: Buffer, parts: Sequence[tuple[int, int]]) -> bytes:
    """``parts``: (bytes, bytes of one number) of each part of the buffer, in order."""
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if raw.nbytes != sum(size for size, _ in parts):
        raise ValueError(f"{raw.nbytes} bytes are not the parts {list(parts)}")
    planes = np.empty_like(raw)
    at = 0
    for size, width in parts:
        planes[at : at + size].reshape(width, -1)[:] = raw[at : at + size].reshape(-1, width).T
        at += size
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(planes.data)


def unpack(body: Buffer, parts: Sequence[tuple[int, int]]) -> memoryview:
    """The buffer again; a body that isn't one whole frame of exactly its size is refused."""
    expected = sum(size for size, _ in parts)
    try:
        announced = zstandard.get_frame_parameters(body).content_size
        if announced != expected:
            kind = InputError if announced < expected or announced == zstandard.CONTENTSIZE_UNKNOWN else TooLarge
            raise kind(f"a packed body that announces {announced} bytes instead of {expected}")
        found = zstandard.ZstdDecompressor().decompress(body, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InputError(f"a packed body that can't be unpacked: {error}") from error
    if len(found) != expected:
        raise InputError(f"a packed body gave {len(found)} bytes instead of {expected}")
    planes, raw = np.frombuffer(found, dtype=np.uint8), np.empty(expected, dtype=np.uint8)
    at = 0
    for size, width in parts:
        raw[at : at + size].reshape(-1, width)[:] = planes[at : at + size].reshape(width, -1).T
        at += size
    return raw.data
