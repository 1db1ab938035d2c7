"""Limits before decoding, decoding is validating, and the codecs that all members share.

Changing a domain string, the framing, or the hash makes older members unable to talk to newer ones: bump
:data:`subnet.words.PROTOCOL_VERSION` with it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast, overload

import msgspec
from blake3 import blake3

from subnet.errors import InputError, TooLarge
from subnet.words import BlobHash

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

FRAME_LENGTH = struct.Struct(">I")
"""Length of a header."""
STREAM_HEAD = struct.Struct(">II")
"""Before each frame of an HTTP stream: its length, and that with all bits turned (see :func:`stream_size`)."""
BODY_LENGTH = struct.Struct(">Q")
MAX_HEADER_BYTES = 64 << 10
MAX_STREAM_FRAME_BYTES = 16 << 20
CONTENT_TYPE = "application/msgpack"

_LEAF, _NODE, _ROOT = b"iota/merkle/leaf/1\0", b"iota/merkle/node/1\0", b"iota/merkle/root/1\0"
_ENCODER = msgspec.msgpack.Encoder()


def stream_head(size_bytes: int) -> bytes:
    return STREAM_HEAD.pack(size_bytes, size_bytes ^ 0xFFFFFFFF)


def stream_size(head: Buffer) -> int:
    """The length of the frame that follows. A garbled one is found at once: else a reader waits for bytes that never come,
    and the keep-alives of a quiet stream fill its frame up."""
    size_bytes, turned = STREAM_HEAD.unpack(head)
    if size_bytes ^ turned != 0xFFFFFFFF:
        raise InputError("the length of a stream's frame is garbled")
    if size_bytes > MAX_STREAM_FRAME_BYTES:
        raise TooLarge(f"a frame of {size_bytes} bytes, more than {MAX_STREAM_FRAME_BYTES}")
    return size_bytes


def encode(value: object) -> bytes:
    """msgpack of a struct (or any type msgspec knows)."""
    return _ENCODER.encode(value)


@lru_cache(maxsize=512)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@overload
def decode(data: Buffer, kind: type[T], *, limit_bytes: int, what: str) -> T: ...
@overload
def decode(data: Buffer, kind: Any, *, limit_bytes: int, what: str) -> Any: ...
def decode(data: Buffer, kind: Any, *, limit_bytes: int, what: str) -> Any:
    """``data`` as a ``kind``; :class:`TooLarge` before, :class:`InputError` (naming the place) while decoding."""
    size_bytes = memoryview(data).nbytes
    if size_bytes > limit_bytes:
        raise TooLarge(f"{what}: {size_bytes} bytes, more than {limit_bytes}")
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{what}: {error}") from error


def byte_views(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat views of bytes, none empty, nothing copied; each must be contiguous."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = [memoryview(cast("Buffer", part)) for part in parts]
    return [view.cast("B") for view in views if view.nbytes]


def blob_hash(*buffers: Buffer) -> BlobHash:
    """BLAKE3 of the buffers one after the other: the address of a blob."""
    hasher = blake3()
    for view in byte_views(buffers):
        hasher.update(view)
    return BlobHash(hasher.hexdigest())


def is_blob_hash(text: str) -> bool:
    return len(text) == 64 and not text.strip("0123456789abcdef")


class MerkleProof(msgspec.Struct, frozen=True):
    """The way from leaf ``index`` of ``count`` up to the root."""

    index: int
    count: int
    siblings: tuple[bytes, ...]


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Commits to the leaves, their order and their number; an odd node moves up as it is."""
    level = _leaf_hashes(leaves)
    while len(level) > 1:
        level = _parents(level)
    return _root(len(leaves), level[0] if level else bytes(32))


def merkle_proof(leaves: Sequence[bytes], index: int) -> MerkleProof:
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf {index} of {len(leaves)}")
    level, position = _leaf_hashes(leaves), index
    siblings: list[bytes] = []
    while len(level) > 1:
        if position ^ 1 < len(level):
            siblings.append(level[position ^ 1])
        level, position = _parents(level), position // 2
    return MerkleProof(index=index, count=len(leaves), siblings=tuple(siblings))


def verify_proof(root: bytes, leaf: bytes, proof: MerkleProof) -> bool:
    """Whether ``leaf`` is where ``proof`` says in the list that ``root`` commits to."""
    if not 0 <= proof.index < proof.count or len(proof.siblings) > 64:
        return False
    node = blake3(_LEAF + leaf).digest()
    position, width, siblings = proof.index, proof.count, list(reversed(proof.siblings))
    while width > 1:
        if position ^ 1 < width:
            if not siblings:
                return False
            sibling = siblings.pop()
            node = _node(sibling, node) if position & 1 else _node(node, sibling)
        position, width = position // 2, (width + 1) // 2
    return not siblings and _root(proof.count, node) == root


def _leaf_hashes(leaves: Iterable[bytes]) -> list[bytes]:
    return [blake3(_LEAF + leaf).digest() for leaf in leaves]


def _parents(level: list[bytes]) -> list[bytes]:
    return [_node(level[i], level[i + 1]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]


def _node(left: bytes, right: bytes) -> bytes:
    return blake3(_NODE + left + right).digest()


def _root(count: int, top: bytes) -> bytes:
    return blake3(_ROOT + count.to_bytes(8, "little") + top).digest()
