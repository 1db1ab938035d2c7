"""What boundary tensors are rounded to: ``int8`` and ``int4`` block codes, the same bytes on every machine. No torch.

``docs/arithmetic.md``, "Codes of boundaries". A coded boundary is, of each chunk, an exponent for every channel (a byte),
then the scales of all blocks (bf16), then the integers: of ``int8`` one byte an element, of ``int4`` half a byte. Coding what
was decoded, with the same exponents of channels, gives the same bytes. ``raw`` is fp32 as computed. All little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subnet.errors import InputError

Buffer = bytes | bytearray | memoryview
Floats = NDArray[np.float32]
Exponents = NDArray[np.int64]

RAW = "raw"
SCALE_BYTES = 2
FLOOR_BITS = 27 << 7
"""No scale is below 2^-100, so that its inverse and every decoded number are normal: flushing denormals changes nothing."""
NAN_BITS = 0x7FC0
"""Scale of a block with an element that isn't finite: all of it decodes to NaN. Only hold-out items may have one."""
CLIP = np.float32(2.0**112)
"""Magnitudes above this are clipped, so that nothing that is finite decodes to an infinity."""
MOST = 15
"""Exponents of channels are in [-15, 15]."""
EXPONENT_BIAS = 128

_SIGN = 0x8000
_TILE = 1 << 16
_ONE = np.float32(1.0)
_LARGE = np.float32(2.0**96)
"""Scaled numbers up to this come from numbers that aren't clipped."""
_LARGE_BITS = (127 + 80) << 7
"""Scales up to this decode to finite numbers, whatever the integers and exponents."""


@dataclass(frozen=True)
class BlockCode:
    """A lossy code: integers from ``lowest`` to ``highest``, blocks of ``block`` elements of one token, or what is left.

    Changing anything here changes the results of every run with the code.
    """

    name: str
    block: int
    lowest: int
    highest: int
    per_byte: int
    share: np.float32
    """The scale of a block is its largest magnitude times this, rounded to bf16."""

    @property
    def signed(self) -> bool:
        """Whether scales have signs: the largest magnitude of a block maps to the lowest integer, whatever its sign."""
        return self.lowest + self.highest != 0

    def num_blocks(self, hidden: int) -> int:
        """Of one token."""
        return -(-hidden // self.block)

    def row_bytes(self, hidden: int) -> int:
        """Bytes of one token's integers."""
        return -(-hidden // self.per_byte)

    def sizes(self, tokens: int, hidden: int, chunks: int) -> tuple[int, int, int]:
        """Bytes of exponents, scales and integers."""
        return chunks * hidden, SCALE_BYTES * tokens * self.num_blocks(hidden), tokens * self.row_bytes(hidden)

    def parts(self, hidden: int) -> list[_Part]:
        """A token's whole blocks, and its last, shorter one."""
        whole = hidden // self.block
        cut = whole * self.block
        parts = [_Part(slice(0, whole), slice(0, cut), self.block)] if whole else []
        return [*parts, _Part(slice(whole, whole + 1), slice(cut, hidden), hidden - cut)] if hidden > cut else parts


@dataclass(frozen=True)
class _Part:
    """Blocks of equal width of a token."""

    blocks: slice
    columns: slice
    width: int

    def view(self, table: NDArray[Any]) -> NDArray[Any]:
        """(token, block, element) of a contiguous (token, element)."""
        return table[:, self.columns].reshape(len(table), -1, self.width)


INT8 = BlockCode("int8", 128, -127, 127, 1, np.float32(1 / 127))
INT4 = BlockCode("int4", 64, -8, 7, 2, np.float32(1 / 8))
_CODES = {code.name: code for code in (INT8, INT4)}


def block_code(name: str) -> BlockCode | None:
    """The code of this name; None for ``raw``."""
    if name == RAW:
        return None
    found = _CODES.get(name)
    if found is None:
        raise InputError(f"there is no boundary code {name!r}", hint=f"raw, {', '.join(_CODES)}")
    return found


def coded_size(name: str, tokens: int, hidden: int, chunks: int = 1) -> int:
    """Bytes of a boundary of ``tokens`` x ``hidden`` elements, worked on in ``chunks`` of equally many tokens."""
    code = block_code(name)
    return 4 * tokens * hidden if code is None else sum(code.sizes(tokens, hidden, chunks))


def planes_of(name: str, tokens: int, hidden: int, chunks: int = 1) -> tuple[tuple[int, int], ...]:
    """The parts of a coded boundary as (bytes, bytes of one number), for :mod:`subnet.numerics.planes`."""
    code = block_code(name)
    if code is None:
        return ((4 * tokens * hidden, 4),)
    return tuple(zip(code.sizes(tokens, hidden, chunks), (1, SCALE_BYTES, 1), strict=True))


def encode(name: str, values: Floats, chunks: int = 1, *, exponents: Exponents | None = None) -> memoryview:
    """The bytes of ``values`` (tokens, hidden; contiguous) that are hashed, kept and sent; ``raw`` isn't copied.

    ``exponents`` (chunks, hidden): those of the channels, if not the ones that these values have.
    """
    code = block_code(name)
    if code is None:
        return values.reshape(-1).data.cast("B")
    tokens, hidden = values.shape
    if exponents is None:
        exponents = np.stack([channel_exponents(chunk) for chunk in np.split(values, chunks)])
    out = np.empty(sum(code.sizes(tokens, hidden, chunks)), dtype=np.uint8)
    stored, bits, integers = _views(code, out, tokens, hidden, chunks)
    stored[:] = exponents + EXPONENT_BIAS
    length, parts = tokens // chunks, code.parts(hidden)
    step = max(1, _TILE // hidden)
    work = np.empty((min(step, length), hidden), dtype=np.float32)
    for number in range(chunks):
        down = np.ldexp(_ONE, -exponents[number]).astype(np.float32)
        for at in range(number * length, (number + 1) * length, step):
            rows = slice(at, min(at + step, (number + 1) * length))
            used = work[: rows.stop - at]
            _scale_down(values[rows], down, used)
            for part in parts:
                bits[rows, part.blocks] = _quantise(code, part.view(used))
            _store(code, used, integers[rows])
    return out.data


def decode(
    name: str, buffer: Buffer, out: Floats, chunks: int = 1, *, finite: bool = True, what: str = "boundary"
) -> None:
    """Fills ``out`` (tokens, hidden; contiguous). Bytes that :func:`encode` can't make are refused.

    The size is checked before anything else; with ``finite`` a block that isn't finite is refused too.
    """
    tokens, hidden = out.shape
    code, expected, given = block_code(name), coded_size(name, tokens, hidden, chunks), memoryview(buffer).nbytes
    if given != expected:
        raise InputError(f"the {what} has {given} bytes instead of {expected}")
    if code is None:
        out.reshape(-1)[:] = np.frombuffer(buffer, dtype="<f4")
        large = finite
    else:
        stored, bits, integers = _views(code, np.frombuffer(buffer, dtype=np.uint8), tokens, hidden, chunks)
        large = _check(code, stored, bits, integers, hidden, finite, what)
        _fill(code, stored, bits, integers, out)
    if large and not (np.isfinite(out.min()) and np.isfinite(out.max())):
        raise InputError(f"the {what} is not finite")


def channel_exponents(values: Floats) -> Exponents:
    """Of a chunk: half of what a channel's mean logarithm is above the median channel's, in whole powers of two.

    Half, so that an outlier channel doesn't drown the others of its block, nor small ones get more than their part.
    The upper 15 bits of a magnitude are its logarithm, near enough, in units of 2^-7; integers add in any order.
    """
    tokens, hidden = values.shape
    total, step = np.zeros(hidden, dtype=np.int64), max(1, _TILE // hidden)
    for at in range(0, tokens, step):
        tile = values[at : at + step].view(np.uint32)
        total += np.add.reduce((tile >> np.uint32(16)) & np.uint32(0x7FFF), axis=0, dtype=np.uint32)
    mean = total // tokens
    over = mean - np.sort(mean)[hidden // 2]
    return np.clip((over + 128) >> 8, -MOST, MOST)


def _views(
    code: BlockCode, raw: NDArray[np.uint8], tokens: int, hidden: int, chunks: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint8]]:
    """Exponents (chunk, channel), bits of the scales (token, block), integers (token, byte)."""
    first, second, _ = code.sizes(tokens, hidden, chunks)
    scales = raw[first : first + second].reshape(tokens, -1, SCALE_BYTES).view("<u2")
    return raw[:first].reshape(chunks, hidden), scales[..., 0], raw[first + second :].reshape(tokens, -1)


def _scale_down(values: Floats, down: Floats, into: Floats) -> None:
    """Channels times their powers of two; what isn't finite stays so, what is too large is clipped first."""
    with np.errstate(over="ignore"):
        np.multiply(values, down, out=into)
    if not (into.max() <= _LARGE and into.min() >= -_LARGE):
        clipped = np.clip(values, -CLIP, CLIP)
        clipped[~np.isfinite(values)] = np.nan
        np.multiply(clipped, down, out=into)


def _quantise(code: BlockCode, x: Floats) -> NDArray[np.uint32]:
    """Makes ``x`` (token, block, element) whole numbers; returns the bits of the scales."""
    high, low = x.max(axis=-1), x.min(axis=-1)
    largest = np.maximum(high, -low)
    bits = np.maximum(_bf16_bits(largest * code.share), np.uint32(FLOOR_BITS))
    if code.signed:
        bits |= np.where((high >= -low) & (bits > FLOOR_BITS), np.uint32(_SIGN), np.uint32(0))
    wrong = np.isnan(largest)
    bits[wrong] = NAN_BITS
    inverse = _ONE / (bits << np.uint32(16)).view(np.float32)
    x *= inverse[..., None]
    if bool(wrong.any()):
        x[wrong] = 0.0
    np.rint(x, out=x)
    return bits


def _bf16_bits(values: Floats) -> NDArray[np.uint32]:
    """Of magnitudes, rounded half to even: the upper half of the fp32 bits. A zero may come with a sign."""
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _store(code: BlockCode, whole: Floats, into: NDArray[np.uint8]) -> None:
    """Whole numbers as bytes; ``whole`` is overwritten."""
    if code.per_byte == 1:
        np.copyto(into.view(np.int8), whole, casting="unsafe")
        return
    np.minimum(whole, code.highest, out=whole)
    whole -= code.lowest
    nibbles = whole.astype(np.uint8)
    half = into.shape[1]
    into[:] = nibbles[:, :half]
    into[:, : nibbles.shape[1] - half] |= nibbles[:, half:] << np.uint8(4)


def _fill(
    code: BlockCode,
    stored: NDArray[np.uint8],
    bits: NDArray[np.uint16],
    integers: NDArray[np.uint8],
    out: Floats,
) -> None:
    tokens, hidden = out.shape
    length, parts = tokens // len(stored), code.parts(hidden)
    step = max(1, _TILE // hidden)
    for number, exponents in enumerate(stored):
        up = np.ldexp(_ONE, exponents.astype(np.int64) - EXPONENT_BIAS).astype(np.float32)
        for at in range(number * length, (number + 1) * length, step):
            rows = slice(at, min(at + step, (number + 1) * length))
            tile, into = _load(code, integers[rows], hidden), out[rows]
            scales = (bits[rows].astype(np.uint32) << np.uint32(16)).view(np.float32)
            with np.errstate(over="ignore"):
                for part in parts:
                    np.multiply(part.view(tile), scales[:, part.blocks, None], out=part.view(into))
                into *= up


def _load(code: BlockCode, integers: NDArray[np.uint8], hidden: int) -> NDArray[np.int8]:
    if code.per_byte == 1:
        return integers.view(np.int8)
    half = integers.shape[1]
    nibbles = np.empty((len(integers), hidden), dtype=np.uint8)
    np.bitwise_and(integers, 15, out=nibbles[:, :half])
    np.right_shift(integers[:, : hidden - half], 4, out=nibbles[:, half:])
    whole = nibbles.view(np.int8)
    whole += np.int8(code.lowest)
    return whole


def _check(
    code: BlockCode,
    stored: NDArray[np.uint8],
    bits: NDArray[np.uint16],
    integers: NDArray[np.uint8],
    hidden: int,
    finite: bool,
    what: str,
) -> bool:
    """Refuses what can't be; True if the decoded numbers have to be looked at, for they might not be finite."""
    if int(stored.min()) < EXPONENT_BIAS - MOST or int(stored.max()) > EXPONENT_BIAS + MOST:
        raise InputError(f"the {what} has an exponent that {code.name} can't give")
    if code.per_byte == 1:
        wrong = int(integers.view(np.int8).min()) < code.lowest
    else:
        wrong = hidden % 2 == 1 and int(integers[:, -1].max()) > 15
    if wrong:
        raise InputError(f"the {what} has an integer that {code.name} can't give")
    magnitude = bits & np.uint16(0x7FFF) if code.signed else bits
    if int(magnitude.min()) >= FLOOR_BITS and int(magnitude.max()) <= _LARGE_BITS:
        return False
    bad = (magnitude < FLOOR_BITS) | (magnitude >= 0x7F80)
    if not bool((bits[bad] == NAN_BITS).all()):
        raise InputError(f"the {what} has a scale that {code.name} can't give")
    return finite
