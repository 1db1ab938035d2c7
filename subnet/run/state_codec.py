"""A state as bytes: canonical ones to compare (equal whatever the order of insertion or the hash seed), and ones to load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from subnet.run.state import RunState

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RunState)


def state_bytes(state: RunState) -> bytes:
    """Canonical bytes: equal states give equal bytes, whatever the order of insertion or the hash seed."""
    return canonical_bytes(canonical(state))


def dump_state(state: RunState) -> bytes:
    """Bytes for :func:`load_state`: what a fold can be resumed from."""
    return _encoder.encode(state)


def load_state(data: bytes) -> RunState:
    return _decoder.decode(data)


def canonical_bytes(value: Any) -> bytes:
    """Of what :func:`canonical` gave, or of lists and dictionaries of it."""
    return _encoder.encode(value)


def canonical(value: Any) -> Any:
    """Plain lists, in an order that depends on the contents alone."""
    if isinstance(value, msgspec.Struct):
        return [canonical(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, dict):
        return _sorted([canonical(key), canonical(entry)] for key, entry in value.items())
    if isinstance(value, set | frozenset):
        return _sorted(canonical(entry) for entry in value)
    if isinstance(value, list | tuple):
        return [canonical(entry) for entry in value]
    return value


def _sorted(entries: Iterable[Any]) -> list[Any]:
    return sorted(entries, key=_encoder.encode)
