"""Two signed heads at one number: proof that whoever signed both told two journals of one run, which anyone can check.

A proof holds both segments whole and the head before them. Both heads commit to that head, and so to one history of one run;
from there on they say different things under one hotkey's signature. No chain, no clock and no store is needed to see it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from subnet.errors import InputError
from subnet.protocol import wire
from subnet.run.chain_hash import fold_heads
from subnet.store.disk import atomic_write
from validator.log_publisher import LIMIT_SEGMENT_BYTES, SegmentFile
from validator.log_reader import is_signed


class TwoHeads(msgspec.Struct, frozen=True):
    """``before``: the head after record ``one.first - 1``, from which both segments go on."""

    before: str
    one: SegmentFile
    other: SegmentFile

    @property
    def hotkey(self) -> str:
        return self.one.hotkey

    @property
    def number(self) -> int:
        """The first record that the two tell differently."""
        pairs = zip(self.one.records, self.other.records, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return self.one.first + (min(len(self.one.records), len(self.other.records)) if same is None else same)

    def refuted(self) -> str:
        """Why it proves nothing; empty where it does."""
        one, other = self.one, self.other
        if (one.run_id, one.first) != (other.run_id, other.first):
            return "the two segments don't begin at one place of one run"
        if one.hotkey != other.hotkey:
            return "two hotkeys signed them"
        for segment in (one, other):
            if not segment.records or fold_heads(self.before, segment.records) != segment.head:
                return "a head isn't that of its records"
            if not is_signed(segment):
                return f"a signature isn't {segment.hotkey}'s"
        if self.number == one.first + min(len(one.records), len(other.records)):
            return "one segment only says more than the other"
        return ""


def write_proof(directory: Path, proof: TwoHeads) -> Path:
    """For the world to read; its name says of which run and record it is."""
    path = directory / "proofs" / f"{proof.one.run_id}-{proof.number:010d}.msgpack"
    atomic_write(path, wire.encode(proof))
    return path


def read_proof(path: Path) -> TwoHeads:
    """A proof that holds; :class:`InputError` says why it doesn't."""
    proof = wire.decode(path.read_bytes(), TwoHeads, limit_bytes=3 * LIMIT_SEGMENT_BYTES, what=str(path))
    if why := proof.refuted():
        raise InputError(f"{path} proves nothing: {why}")
    return proof


def proven(directory: Path) -> dict[str, tuple[str, int]]:
    """By hotkey: run and record of the first proof against it that lies in ``directory``."""
    found: dict[str, tuple[str, int]] = {}
    for path in sorted((directory / "proofs").glob("*.msgpack")):
        proof = read_proof(path)
        found.setdefault(proof.hotkey, (proof.one.run_id, proof.number))
    return found
