"""The parts of a lane's boundary, as one list: what its receipt names, and what an audit opens the parts by.

An item of a lane (docs/lanes.md) crosses each boundary once for each of its microbatches. Its receipt names the BLAKE3 of the
list of their hashes, 32 bytes each in the order in which they are computed; so the list is a blob like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from subnet.errors import InputError

PART_BYTES = 32


def encode_parts(hashes: Sequence[str]) -> bytes:
    """The list as bytes; ``hashes`` are BLAKE3 in hexadecimal, of part 1 on."""
    return b"".join(bytes.fromhex(value) for value in hashes)


def decode_parts(data: bytes | bytearray | memoryview, num_parts: int) -> tuple[str, ...]:
    """The hashes; raises :class:`InputError` for a list of another length."""
    if len(data) != num_parts * PART_BYTES:
        raise InputError(f"a list of {len(data)} bytes, of {num_parts} parts it has {num_parts * PART_BYTES}")
    raw = bytes(data)
    return tuple(raw[at : at + PART_BYTES].hex() for at in range(0, len(raw), PART_BYTES))


def parts_hash(hashes: Sequence[str]) -> str:
    """What a receipt says of them."""
    return blake3(encode_parts(hashes)).hexdigest()
