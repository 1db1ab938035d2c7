"""Exact-width packing of slices for slow links: loses nothing, and one slice has one packed form.

Value i of width w occupies bits [i * w, (i + 1) * w) of a little-endian bit string, in two's complement; the bits after
the last value are zero, and bytes that break this are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from subnet.errors import InputError
from subnet.numerics.layout import Partition, Section
from subnet.numerics.slices import Buffer, integer_type, slice_size, sum_bits

_LANES = 64
_TILE = 1 << 17


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` values of ``bits`` bits take."""
    return -(-count * bits // 8)


def pack_bits(values: NDArray[Any], bits: int) -> bytes:
    """Integers that fit ``bits`` bits (two's complement), packed."""
    _check_bits(bits)
    mask = np.uint64((1 << bits) - 1)
    out = bytearray()
    for at in range(0, len(values), _TILE):
        tile = values[at : at + _TILE]
        groups = -(-len(tile) // _LANES)
        wide = np.zeros(groups * _LANES, dtype=np.int64)
        wide[: len(tile)] = tile
        lanes = np.ascontiguousarray(wide.view(np.uint64).reshape(groups, _LANES).T) & mask
        words = np.zeros((bits, groups), dtype=np.uint64)
        for lane in range(_LANES):
            word, shift = divmod(lane * bits, 64)
            words[word] |= lanes[lane] << np.uint64(shift)
            if shift + bits > 64:
                words[word + 1] |= lanes[lane] >> np.uint64(64 - shift)
        out += np.ascontiguousarray(words.T).astype("<u8", copy=False).tobytes()
    return bytes(memoryview(out)[: packed_size(len(values), bits)])


def unpack_bits(buffer: Buffer, count: int, bits: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """``count`` integers from their packed form; wrong lengths and set padding bits are refused."""
    _check_bits(bits)
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if len(raw) != packed_size(count, bits):
        raise InputError(f"{count} values of {bits} bits are {packed_size(count, bits)} bytes, not {len(raw)}")
    spare = -(count * bits) % 8
    if spare and int(raw[-1]) >> (8 - spare):
        raise InputError("the bits behind the last packed value aren't zero")
    out = np.empty(count, dtype=dtype)
    step = _TILE * bits // 8
    up = np.int64(64 - bits)
    for at in range(0, count, _TILE):
        part = raw[at // _TILE * step :][:step]
        groups = -(-min(_TILE, count - at) // _LANES)
        padded = np.zeros(groups * bits * 8, dtype=np.uint8)
        padded[: len(part)] = part
        words = np.ascontiguousarray(padded.view("<u8").reshape(groups, bits).T)
        lanes = np.empty((_LANES, groups), dtype=np.uint64)
        for lane in range(_LANES):
            word, shift = divmod(lane * bits, 64)
            lanes[lane] = words[word] >> np.uint64(shift)
            if shift + bits > 64:
                lanes[lane] |= words[word + 1] << np.uint64(64 - shift)
        values = (lanes.view(np.int64) << up) >> up
        target = out[at : at + _TILE]
        np.copyto(target, values.T.reshape(-1)[: len(target)], casting="unsafe")
    return out


def pack_slice(section: Section, partition: Partition, buffer: Buffer, num_items: int) -> bytes:
    """The transport form of a canonical slice: its integers at their exact width, its maxima as they are."""
    view = memoryview(buffer)
    integers = np.frombuffer(view, dtype=integer_type(section, num_items), count=partition.num_elements)
    packed = pack_bits(integers, sum_bits(num_items, section.item_bound))
    return b"".join((packed, view[integers.nbytes :]))


def unpack_slice(section: Section, partition: Partition, buffer: Buffer, num_items: int) -> memoryview:
    """The canonical slice from its transport form; still to be checked by who uses it, as any foreign slice."""
    view = memoryview(buffer).cast("B")
    bits = sum_bits(num_items, section.item_bound)
    split = packed_size(partition.num_elements, bits)
    if len(view) != split + partition.num_blocks * 4:
        raise InputError(f"a packed slice has {len(view)} bytes instead of {split + partition.num_blocks * 4}")
    out = np.empty(slice_size(section, partition, num_items), dtype=np.uint8)
    integers = unpack_bits(view[:split], partition.num_elements, bits, integer_type(section, num_items))
    out[: integers.nbytes] = integers.view(np.uint8)
    out[integers.nbytes :] = np.frombuffer(view[split:], dtype=np.uint8)
    return out.data


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 32:
        raise InputError(f"values of {bits} bits can't be packed")
