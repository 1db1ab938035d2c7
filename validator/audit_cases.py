"""Bundles of cases in the store: put there whole and held for the run's life, found again by the case's hash alone.

A bundle is ``case.msgpack`` and the blobs it names, each under its own hash with a hold of class ``case``; which they are says
a named key beside the journal, ``runs/RUN_ID/cases/HASH``. The case goes up last: what a journaled hash names is there.
"""

from __future__ import annotations

import asyncio

import msgspec

from subnet.audit.case import LIMIT_CASE_BYTES, Case
from subnet.errors import NotFound
from subnet.protocol import wire
from subnet.store.base import Hold, OwnerStore, check_blob
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash
from validator.audit_evidence import Bundle

RETENTION = "case"
LIMIT_INDEX_BYTES = 16 << 20
MAX_PARALLEL = 4


class BundleIndex(msgspec.Struct, frozen=True):
    """What ``runs/RUN_ID/cases/HASH`` holds: size of the case, and (hash, bytes) of its blobs."""

    case_bytes: int
    blobs: tuple[tuple[str, int], ...]


def index_name(run_id: str, bundle: str) -> str:
    return f"runs/{run_id}/cases/{bundle}"


class CaseShelf:
    """The cases of one run in its store."""

    def __init__(self, store: OwnerStore, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._indexes: dict[str, BundleIndex] = {}

    async def keep(self, case: Case, bundle: Bundle, deadline: Deadline) -> str:
        """Put the case and the bundle's blobs into the store; returns the case's hash."""
        slots = asyncio.Semaphore(MAX_PARALLEL)
        hold = Hold(RETENTION, self._run_id)

        async def put(blob: str) -> None:
            async with slots:
                data = await asyncio.to_thread(bundle.read, blob)
                await self._store.put_blob(data, hold, deadline=deadline.sooner(TIMEOUTS.store_request_s))

        await all_of([put(blob) for blob in sorted(bundle.sizes)])
        data = wire.encode(case)
        index = BundleIndex(len(data), tuple(sorted(bundle.sizes.items())))
        name = wire.blob_hash(data)
        await self._store.put_named(
            index_name(self._run_id, name), wire.encode(index), deadline=deadline.sooner(TIMEOUTS.store_request_s)
        )
        await self._store.put_blob(data, hold, deadline=deadline.sooner(TIMEOUTS.store_request_s))
        self._indexes[name] = index
        return name

    async def index(self, bundle: str, deadline: Deadline) -> BundleIndex:
        """What lies beside the case with this hash; :class:`NotFound` where it was never kept here."""
        known = self._indexes.get(bundle)
        if known is None:
            name = index_name(self._run_id, check_blob(bundle))
            data = await self._store.get_named(name, deadline=deadline)
            known = wire.decode(data, BundleIndex, limit_bytes=LIMIT_INDEX_BYTES, what=name)
            self._indexes[bundle] = known
        return known

    async def case(self, bundle: str, deadline: Deadline) -> Case:
        blob = check_blob(bundle)
        size_bytes = (await self._store.sizes([blob], deadline=deadline)).get(blob)
        if size_bytes is None:
            raise NotFound(f"case {bundle[:16]} is not in the store")
        if size_bytes > LIMIT_CASE_BYTES:
            raise NotFound(f"blob {bundle[:16]} of {size_bytes} bytes is no case")
        data = await self._store.get_blob(BlobHash(bundle), size_bytes, deadline=deadline)
        return wire.decode(data, Case, limit_bytes=LIMIT_CASE_BYTES, what=f"case {bundle[:16]}")
