"""The submission of a run in the log store, beside its journal: who has the store can lead the run without the lost disk.

One write-once key a run, ``runs/RUN_ID/run``, kept for ever like the journal. It is put when a run is accepted and again,
idempotently, before its first record is written: a journal in the log store always has its submission beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from subnet.errors import Corrupt, Exists
from subnet.protocol import wire
from subnet.protocol.messages import LIMIT_SUBMISSION_BYTES
from subnet.store.base import NamedKey
from subnet.timing import Deadline
from validator.run_registry import StoredRun

PREFIX = "runs/"
LIMIT_RUN_BYTES = 2 * LIMIT_SUBMISSION_BYTES
_KEY = re.compile(r"runs/(?P<run_id>[^/]+)/(?:(?P<run>run)|journal/(?P<number>[0-9]{10}))")


class NamedStore(Protocol):
    """What reading and writing runs needs of a store; see :mod:`subnet.store.base`."""

    async def put_named(self, name: str, data: bytes, *, deadline: Deadline) -> None: ...

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes: ...

    async def list_named(self, prefix: str, *, deadline: Deadline) -> Sequence[NamedKey]: ...


@dataclass
class RunKeys:
    """What the store holds of one run; ``segments`` in order of their names, which is that of their numbers."""

    run_id: str
    run: NamedKey | None = None
    segments: list[NamedKey] = field(default_factory=lambda: [])


def run_key(run_id: str) -> str:
    return f"{PREFIX}{run_id}/run"


def group_keys(keys: Iterable[NamedKey]) -> dict[str, RunKeys]:
    """By run id; keys that are neither a submission nor a segment are somebody else's."""
    runs: dict[str, RunKeys] = {}
    for key in sorted(keys):
        match = _KEY.fullmatch(key.name)
        if match is None:
            continue
        found = runs.setdefault(match["run_id"], RunKeys(match["run_id"]))
        if match["run"]:
            found.run = key
        else:
            found.segments.append(key)
    return runs


async def put_run(store: NamedStore, stored: StoredRun, *, deadline: Deadline) -> None:
    """Keep the submission in the log store; the same one again is fine, whatever its place in another's queue."""
    key = run_key(stored.run_id)
    try:
        await store.put_named(key, wire.encode(stored), deadline=deadline)
    except Exists as error:
        there = await get_run(store, stored.run_id, deadline=deadline)
        if msgspec.structs.replace(there, place=stored.place) != stored:
            raise Corrupt(
                f"{key} in the log store is not the submission of run {stored.run_id} here",
                hint="move this run's directory away and submit it again",
            ) from error


async def get_run(store: NamedStore, run_id: str, *, deadline: Deadline) -> StoredRun:
    key = run_key(run_id)
    data = await store.get_named(key, deadline=deadline)
    stored = wire.decode(data, StoredRun, limit_bytes=LIMIT_RUN_BYTES, what=key)
    if stored.run_id != run_id:
        raise Corrupt(f"{key} in the log store is of run {stored.run_id}", hint="restore it from a copy of the store")
    return stored
