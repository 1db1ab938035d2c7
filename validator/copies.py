"""Copies of a run's fold at final numbers: what a journal can begin with instead of record 0; good only if its own hash fits.

A copy holds all that is derived from the records before it: the state, its history for people, the numbers of the terms,
and what the owner of the run keeps beside (scores). When one is taken is in :mod:`validator.copier`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec
from blake3 import blake3

from subnet.run.state import RunState
from subnet.run.state_codec import load_state

_DOMAIN = b"iota/copy/1\0"


class Beside(msgspec.Struct, frozen=True, array_like=True):
    """What a copy holds beside the state. ``terms``: (term, number of its ``TermStarted``), rising; ``ledger``: what audits
    need of steps that are sealed (:mod:`subnet.audit.ledger`), empty in copies of a version before."""

    terms: tuple[tuple[int, int], ...]
    history: bytes
    projection: bytes
    ledger: bytes = b""


_beside_decoder = msgspec.msgpack.Decoder(Beside)


@dataclass(frozen=True)
class Copy:
    """The fold of records ``0 .. number - 1``, whose chain value is ``head``."""

    number: int
    head: str
    state: bytes
    beside: bytes

    @cached_property
    def digest(self) -> str:
        hasher = blake3(_DOMAIN + self.number.to_bytes(8, "little") + self.head.encode() + b"\0")
        hasher.update(len(self.state).to_bytes(8, "little")).update(self.state).update(self.beside)
        return hasher.hexdigest()

    @property
    def decodes(self) -> bool:
        """Whether this version can load it, and it is of the number it says."""
        try:
            self.load_beside()
            return self.load().number == self.number
        except msgspec.MsgspecError:
            return False

    def load(self) -> RunState:
        return load_state(self.state)

    def load_beside(self) -> Beside:
        return _beside_decoder.decode(self.beside)


def encode_beside(beside: Beside) -> bytes:
    return msgspec.msgpack.encode(beside)
