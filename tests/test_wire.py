"""Limits hold before decoding, faults name their place, and a Merkle root commits to leaves, order and number."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import InputError, TooLarge
from subnet.protocol.wire import (
    MerkleProof,
    _leaf_hashes,
    blob_hash,
    byte_views,
    decode,
    encode,
    is_blob_hash,
    merkle_proof,
    merkle_root,
    verify_proof,
)

leaves_of = st.lists(st.binary(max_size=40), max_size=40)
bounded = settings(max_examples=50, deadline=None)


class Inner(msgspec.Struct, frozen=True):
    numbers: tuple[int, ...]


class Outer(msgspec.Struct, frozen=True, tag="outer"):
    name: str
    inner: Inner


def read(data: bytes, limit_bytes: int = 1000) -> Outer:
    return decode(data, Outer, limit_bytes=limit_bytes, what="a report")


@bounded
@given(st.text("abcé\0"), st.lists(st.integers(-(2**63), 2**64 - 1)))
def test_what_is_encoded_is_decoded(name: str, numbers: list[int]) -> None:
    value = Outer(name, Inner(tuple(numbers)))
    assert read(encode(value), 1 << 20) == value


def test_the_limit_comes_first() -> None:
    data = encode(Outer("x", Inner((1,))))
    assert read(data, len(data)).name == "x"
    with pytest.raises(TooLarge, match="a report"):
        read(data, len(data) - 1)
    with pytest.raises(TooLarge):
        read(b"\xc1" * 1001)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (
            msgspec.msgpack.encode({"type": "outer", "name": "x", "inner": {"numbers": [1, "2"]}}),
            r"\$\.inner\.numbers\[1\]",
        ),
        (msgspec.msgpack.encode({"type": "outer", "inner": {"numbers": []}}), "`name`"),
        (msgspec.msgpack.encode({"type": "other"}), "other"),
        (b"", "a report"),
        (b"\xc1", "a report"),
        (encode(Outer("x", Inner(())))[:-1], "a report"),
        (encode(Outer("x", Inner(()))) + b"\0", "a report"),
        (msgspec.msgpack.encode({"type": "outer", "name": "x"}).replace(b"\xa1x", b"\xa1\xff"), "a report"),
        (b"\x91" * 900 + b"\0", "a report"),
        (b"\x81\xa1x" + b"\x91" * 900 + b"\0", "a report"),
    ],
)
def test_a_fault_names_its_place(data: bytes, place: str) -> None:
    with pytest.raises(InputError, match=place):
        read(data)


@bounded
@given(st.binary(max_size=200))
def test_garbage_raises_input_errors_only(data: bytes) -> None:
    with suppress(InputError):
        read(data)


@bounded
@given(st.lists(st.binary(max_size=40), max_size=40, unique=True))
def test_every_leaf_has_a_proof(leaves: list[bytes]) -> None:
    root = merkle_root(leaves)
    for i, leaf in enumerate(leaves):
        proof = merkle_proof(leaves, i)
        assert verify_proof(root, leaf, proof)
        assert not verify_proof(root, leaf + b"x", proof)
        for wrong in (
            MerkleProof(i, len(leaves) + 1, proof.siblings),
            MerkleProof(i + 1, len(leaves), proof.siblings),
            MerkleProof(i, len(leaves), (*proof.siblings, bytes(32))),
            MerkleProof(i, len(leaves), proof.siblings[:-1]),
        ):
            assert wrong == proof or not verify_proof(root, leaf, wrong)


@bounded
@given(leaves_of, leaves_of)
def test_equal_roots_mean_equal_leaves(a: list[bytes], b: list[bytes]) -> None:
    assert (merkle_root(a) == merkle_root(b)) == (a == b)


def test_a_node_does_not_pass_for_a_leaf() -> None:
    leaves = [b"a", b"b", b"c", b"d"]
    hashes = _leaf_hashes(leaves)
    assert merkle_root(leaves) != merkle_root([hashes[0] + hashes[1], hashes[2] + hashes[3]])
    assert len({merkle_root([]), merkle_root([b""]), merkle_root([b"", b""])}) == 3
    with pytest.raises(IndexError):
        merkle_proof(leaves, 4)


def test_hashes_of_buffers() -> None:
    whole = blob_hash(b"abcdef")
    assert whole == blob_hash(b"ab", bytearray(b""), memoryview(b"cdef"))
    assert is_blob_hash(whole)
    assert not is_blob_hash(whole.upper() + "0")
    assert [bytes(view) for view in byte_views(memoryview(b"abcdabcd").cast("I"))] == [b"abcdabcd"]
