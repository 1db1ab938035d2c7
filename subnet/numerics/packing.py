"""Exact-width packing of slices for slow links: loses nothing, and one slice has one packed form.

Value i of width w occupies bits [i * w, (i + 1) * w) of a little-endian bit string, in two's complement; the bits after
the last value are zero, and bytes that break this are refused.

Eight values of width w are w bytes. Neighbours are folded together in ever wider registers (values into pairs, pairs into
fours), the registers into 64-bit words, and the words of all groups of eight are moved in strides of w bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subnet.errors import InputError
from subnet.numerics.layout import Partition, Section
from subnet.numerics.slices import Buffer, integer_type, slice_size, sum_bits

_TILE = 1 << 16
"""Values worked on at a time: a multiple of 8, and few enough that intermediate results stay in the cache."""
_GROUP = 8
_ONE_LOAD_BITS = 25
"""Values up to this width lie in four bytes, wherever they begin."""
_SLACK = 8
"""Bytes behind a buffer that whole words may touch."""

Words = NDArray[np.uint64]


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` values of ``bits`` bits take."""
    return -(-count * bits // 8)


def pack_bits(values: NDArray[Any], bits: int) -> bytes:
    """Integers that fit ``bits`` bits (two's complement), packed."""
    size = packed_size(len(values), bits)
    out = np.empty(size + _SLACK, dtype=np.uint8)
    _pack_into(out, values, bits)
    return out[:size].tobytes()


def unpack_bits(buffer: Buffer, count: int, bits: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """``count`` integers from their packed form; wrong lengths and set padding bits are refused."""
    out = np.empty(count, dtype=dtype)
    for _ in unpack_tiles(buffer, bits, out):
        pass
    return out


def unpack_tiles(buffer: Buffer, bits: int, out: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Fill ``out`` piece by piece: yields the range (first, end) that has just been written and is still in the cache."""
    _check_bits(bits)
    raw, count = np.frombuffer(buffer, dtype=np.uint8), len(out)
    if len(raw) != packed_size(count, bits):
        raise InputError(f"{count} values of {bits} bits are {packed_size(count, bits)} bytes, not {len(raw)}")
    spare = -(count * bits) % 8
    if spare and int(raw[-1]) >> (8 - spare):
        raise InputError("the bits behind the last packed value aren't zero")
    whole = _TILE * bits // 8
    unpack = _unpack_narrow if bits < _GROUP else _unpack_tile
    for at in range(0, count, _TILE):
        end = min(at + _TILE, count)
        part = raw[at // _TILE * whole :]
        needed = -(-(end - at) // _GROUP) * bits + _SLACK
        if len(part) < needed:
            padded = np.zeros(needed, dtype=np.uint8)
            padded[: len(part)] = part
            part = padded
        unpack(part, bits, out[at:end])
        yield at, end


def pack_slice(section: Section, partition: Partition, buffer: Buffer, num_items: int) -> memoryview:
    """The transport form of a canonical slice: its integers at their exact width, its maxima as they are."""
    view = memoryview(buffer).cast("B")
    integers = np.frombuffer(view, dtype=integer_type(section, num_items), count=partition.num_elements)
    bits = sum_bits(num_items, section.item_bound)
    split = packed_size(len(integers), bits)
    size = split + partition.num_blocks * 4
    out = np.empty(size + _SLACK, dtype=np.uint8)
    _pack_into(out, integers, bits)
    out[split:size] = np.frombuffer(view[integers.nbytes :], dtype=np.uint8)
    return out[:size].data


def unpack_slice(section: Section, partition: Partition, buffer: Buffer, num_items: int) -> memoryview:
    """The canonical slice from its transport form; still to be checked by who uses it, as any foreign slice."""
    view, bits = memoryview(buffer).cast("B"), sum_bits(num_items, section.item_bound)
    split = split_packed(partition, len(view), bits)
    out = np.empty(slice_size(section, partition, num_items), dtype=np.uint8)
    integers = out[: len(out) - partition.num_blocks * 4].view(integer_type(section, num_items))
    for _ in unpack_tiles(view[:split], bits, integers):
        pass
    out[integers.nbytes :] = np.frombuffer(view[split:], dtype=np.uint8)
    return out.data


def split_packed(partition: Partition, size_bytes: int, bits: int) -> int:
    """Where the maxima begin in a packed slice; refuses other sizes than the one it can have."""
    split = packed_size(partition.num_elements, bits)
    if size_bytes != split + partition.num_blocks * 4:
        raise InputError(f"a packed slice has {size_bytes} bytes instead of {split + partition.num_blocks * 4}")
    return split


# --- tiles -------------------------------------------------------------------------------------------------------


def _pack_into(out: NDArray[np.uint8], values: NDArray[Any], bits: int) -> None:
    """Packed bytes from the start of ``out`` on, which is at least a word longer; what is behind them is undefined."""
    _check_bits(bits)
    pack = _pack_narrow if bits < _GROUP else _pack_tile
    for at in range(0, len(values), _TILE):
        tile = values[at : at + _TILE]
        groups = -(-len(tile) // _GROUP)
        register = np.empty(groups * _GROUP, dtype=np.int16 if bits <= 16 else np.int32)
        register[len(tile) :] = 0
        np.copyto(register[: len(tile)], tile, casting="unsafe")
        size = packed_size(len(tile), bits)
        start = at * bits // 8
        if groups * bits + _SLACK <= len(out) - start:
            pack(register, bits, out[start:])
            continue
        padded = np.empty(groups * bits + _SLACK, dtype=np.uint8)
        pack(register, bits, padded)
        out[start : start + size] = padded[:size]


def _words_of(out: NDArray[np.uint8], word: int, groups: int, bits: int) -> Words:
    """Word ``word`` of every group of eight values, wherever it lies."""
    return np.ndarray((groups,), dtype="<u8", buffer=out.data, offset=8 * word, strides=(bits,))


def _pack_tile(register: NDArray[Any], bits: int, out: NDArray[np.uint8]) -> None:
    groups = len(register) // _GROUP
    pieces, width = _folded(register, bits)
    num_pieces = len(pieces) // groups
    words: list[Words] = []
    for i in range(num_pieces):
        piece = pieces[i::num_pieces]
        word, shift = divmod(i * width, 64)
        if word == len(words):
            words.append(piece)
        else:
            words[word] = np.bitwise_or(words[word], piece << np.uint64(shift))
        if shift + width > 64:
            words.append(piece >> np.uint64(64 - shift))
    # The last word of a group may reach into the first of the next, which is written after it.
    for word in reversed(range(len(words))):
        np.copyto(_words_of(out, word, groups, bits), words[word])


def _unpack_tile(part: NDArray[np.uint8], bits: int, out: NDArray[Any]) -> None:
    if 16 < bits <= _ONE_LOAD_BITS and len(out) % _GROUP == 0:
        _unpack_loads(part, bits, out)
        return
    groups = -(-len(out) // _GROUP)
    words = [np.ascontiguousarray(_words_of(part, word, groups, bits)) for word in range(-(-bits // 8))]
    num_pieces, width = (2, 4 * bits) if bits <= 16 else (4, 2 * bits)
    pieces = np.empty(groups * num_pieces, dtype=np.uint64)
    for i in range(num_pieces):
        word, shift = divmod(i * width, 64)
        piece = words[word] >> np.uint64(shift)
        if shift + width > 64:
            piece |= words[word + 1] << np.uint64(64 - shift)
        pieces[i::num_pieces] = piece
    np.copyto(out, _unfolded(pieces, bits)[: len(out)], casting="unsafe")


def _unpack_loads(part: NDArray[np.uint8], bits: int, out: NDArray[Any]) -> None:
    """Each value lies in the four bytes from its first one on: its upper bits are shifted away, then its sign down."""
    groups = len(out) // _GROUP
    lanes = np.empty((_GROUP, groups), dtype=np.int32)
    for i in range(_GROUP):
        first, shift = divmod(i * bits, 8)
        found = np.ndarray((groups,), dtype="<i4", buffer=part.data, offset=first, strides=(bits,))
        np.left_shift(found, 32 - bits - shift, out=lanes[i])
    lanes >>= 32 - bits
    np.copyto(out.reshape(groups, _GROUP).T, lanes, casting="unsafe")


def _folded(register: NDArray[Any], bits: int) -> tuple[Words, int]:
    """Neighbours side by side at their own width: four to a word up to 16 bits, else two; and the bits they take."""
    if bits > 16:
        return _halves_together(register.view(np.uint64), bits, 32), 2 * bits
    pairs = _halves_together(register.view(np.uint32), bits, 16)
    return _halves_together(pairs.view(np.uint64), 2 * bits, 32), 4 * bits


def _unfolded(pieces: Words, bits: int) -> NDArray[Any]:
    if bits > 16:
        return _signed(_halves_apart(pieces, bits, 32).view(np.int32), 32 - bits)
    pairs = _halves_apart(pieces, 2 * bits, 32).view(np.uint32)
    return _signed(_halves_apart(pairs, bits, 16).view(np.int16), 16 - bits)


def _halves_together(wide: NDArray[Any], bits: int, half: int) -> NDArray[Any]:
    kind = wide.dtype.type
    mask = (1 << bits) - 1
    upper = wide >> kind(half - bits)
    upper &= kind(mask << bits)
    lower = wide & kind(mask)
    lower |= upper
    return lower


def _halves_apart(wide: NDArray[Any], bits: int, half: int) -> NDArray[Any]:
    kind = wide.dtype.type
    mask = (1 << bits) - 1
    upper = wide & kind(mask << bits)
    upper <<= kind(half - bits)
    lower = wide & kind(mask)
    lower |= upper
    return lower


def _signed(values: NDArray[Any], spare: int) -> NDArray[Any]:
    if spare:
        shift = values.dtype.type(spare)
        values <<= shift
        values >>= shift
    return values


def _pack_narrow(register: NDArray[Any], bits: int, out: NDArray[np.uint8]) -> None:
    """Under a byte a value, words of groups would overlap more than once: the bits one by one."""
    lanes = (register.view(np.uint16)[:, None] >> np.arange(bits, dtype=np.uint16)) & np.uint16(1)
    packed = np.packbits(lanes.astype(np.uint8).reshape(-1), bitorder="little")
    out[: len(packed)] = packed


def _unpack_narrow(part: NDArray[np.uint8], bits: int, out: NDArray[Any]) -> None:
    flags = np.unpackbits(part, count=len(out) * bits, bitorder="little").reshape(len(out), bits)
    values = (flags.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(axis=1, dtype=np.int16)
    np.copyto(out, _signed(values, 16 - bits), casting="unsafe")


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 32:
        raise InputError(f"values of {bits} bits can't be packed")
