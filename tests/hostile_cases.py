"""Bundles as somebody makes them who wants the replay to fall over: one leaf of a sound case replaced by something else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec

Path = tuple[Any, ...]

NUMBERS = (-1, 0, 1, 2, 3, 7, 255, 4096, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e308, -1e308, 5e-324)
TEXTS = ("", "0" * 64, "f" * 64, "../../etc/passwd", "/etc/passwd", "a" * 10_000, "\0", "x" * 64, "0" * 63 + "/")


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf, every list and every table of plain data."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        yield path, value
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path, value


def changed(value: Any, path: Path, new: Any) -> Any:
    """A copy with ``new`` at ``path``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def others(value: Any, rng: random.Random) -> Any:
    """Something else, mostly of the same kind."""
    if rng.random() < 0.1:
        return rng.choice([None, True, -1, 1.5, "x", [], {}, [[]]])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*NUMBERS, value + 1, value - 1, value * 2])
    if isinstance(value, float):
        return rng.choice([*FLOATS, value * 2])
    if isinstance(value, str):
        return rng.choice([*TEXTS, value[::-1], value.upper(), value[:-1]])
    if isinstance(value, bytes):
        return rng.choice([b"", value[:-1], value + b"\0", bytes(len(value))])
    if isinstance(value, list):
        return rng.choice([[], value[:-1], value * 2, value[::-1], [*value, *value[:1]], value * 1000])
    if isinstance(value, dict):
        return rng.choice([{}, dict(list(value.items())[:-1]), {**value, "another": 1}])
    return rng.choice([0, "", [], False, 1])


def mutants(encoded: bytes, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """(which leaf, the case with it changed) of ``count`` leaves drawn evenly."""
    rng, plain = random.Random(seed), msgspec.msgpack.decode(encoded)
    found = list(leaves(plain))
    for _ in range(count):
        path, value = rng.choice(found)
        new = others(value, rng)
        words = f"{'.'.join(map(str, path))} = {new!r:.60}"
        try:
            data = msgspec.msgpack.encode(changed(plain, path, new))
        except (OverflowError, ValueError):
            continue
        yield words, data
