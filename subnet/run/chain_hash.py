"""The journal's hash chain: one head commits to every record before it, in order."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

GENESIS_HEAD = blake3(b"iota/journal/1\0").hexdigest()


def next_head(head: str, record: bytes) -> str:
    """Head after appending ``record`` (its encoded bytes) to a journal whose head is ``head``."""
    return blake3(bytes.fromhex(head) + record).hexdigest()


def fold_heads(head: str, records: Iterable[bytes]) -> str:
    for record in records:
        head = next_head(head, record)
    return head
