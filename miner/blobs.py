"""Blobs by hash: asks the validator for presigned URLs in batches and moves the bytes; what arrives has the hash asked for.

An expired URL is replaced once per try and the same transfer goes on; everything ends at the caller's deadline. Of several
transfers the first that fails for good ends the others, and its error is raised as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from subnet.errors import IotaError
from subnet.logs import ReasonLog
from subnet.net.client import SignedClient
from subnet.protocol.messages import LIMIT_GRANTS, GrantRequest
from subnet.store.base import Grant
from subnet.store.presigned import BlobClient, Renew
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import PROTOCOL_VERSION

Buffer = bytes | bytearray | memoryview
BlobRef = tuple[str, int]
"""(hash, size in bytes); a size of 0 to get means that the store knows it."""
T = TypeVar("T")

MAX_PARALLEL = 8


class Blobs:
    def __init__(self, validator: SignedClient, store: BlobClient, run: str) -> None:
        self._validator, self._store, self._run = validator, store, run
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._reasons = ReasonLog()
        self.bytes_in = 0
        self.bytes_out = 0

    async def get_many(self, refs: Sequence[BlobRef], deadline: Deadline) -> list[bytearray]:
        """The blobs in order; raises the first error that retries can't cure."""
        if not refs:
            return []
        grants = await self._grants(refs, put=False, retention="", deadline=deadline)
        return await all_of([self._get(ref, grant, deadline) for ref, grant in zip(refs, grants, strict=True)])

    async def get(self, ref: BlobRef, deadline: Deadline) -> bytearray:
        return (await self.get_many([ref], deadline))[0]

    async def get_patiently(self, ref: BlobRef) -> bytearray:
        """The blob, however long the validator or the store are away; raises what waiting can't cure."""
        backoff = Backoff(0.5, 5.0)
        while True:
            try:
                return await self.get(ref, Deadline.after(TIMEOUTS.store_request_s))
            except IotaError as error:
                if not error.retryable:
                    raise
                self._reasons.note(f"waiting for blob {ref[0][:10]}", error.code, str(error))
            await asyncio.sleep(backoff.next_s())

    async def get_range(self, ref: BlobRef, start: int, num_bytes: int, deadline: Deadline) -> bytearray:
        """Part of a blob; the caller checks the bytes (a row group has a hash of its own)."""
        (grant,) = await self._grants([ref], put=False, retention="", deadline=deadline)
        renew = self._renewing(ref, put=False, retention="")
        async with self._slots:
            data = await self._store.get_range(grant, start, num_bytes, deadline=deadline, renew=renew)
        self.bytes_in += len(data)
        return data

    async def put_many(self, blobs: Sequence[tuple[str, Buffer]], retention: str, deadline: Deadline) -> None:
        """Store the blobs under their hashes; a blob that is already there costs nothing."""
        if not blobs:
            return
        refs = [(hash_, memoryview(data).nbytes) for hash_, data in blobs]
        grants = await self._grants(refs, put=True, retention=retention, deadline=deadline)
        pairs = zip(refs, blobs, grants, strict=True)
        await all_of([self._put(ref, data, grant, retention, deadline) for ref, (_, data), grant in pairs])

    async def _grants(
        self, refs: Sequence[BlobRef], *, put: bool, retention: str, deadline: Deadline
    ) -> tuple[Grant, ...]:
        grants: list[Grant] = []
        for start in range(0, len(refs), LIMIT_GRANTS):
            request = GrantRequest(
                PROTOCOL_VERSION, self._run, put, tuple(refs[start : start + LIMIT_GRANTS]), retention or "log"
            )
            grants += await self._validator.request("POST", "/v1/grants", request, tuple[Grant, ...], deadline=deadline)
        return tuple(grants)

    def _renewing(self, ref: BlobRef, *, put: bool, retention: str) -> Renew:
        async def renew(limit: Deadline) -> Grant:
            (grant,) = await self._grants([ref], put=put, retention=retention, deadline=limit)
            return grant

        return renew

    async def _get(self, ref: BlobRef, grant: Grant, deadline: Deadline) -> bytearray:
        renew = self._renewing((ref[0], grant.size_bytes), put=False, retention="")
        async with self._slots:
            data = await self._store.get(grant, deadline=deadline, renew=renew)
        self.bytes_in += len(data)
        return data

    async def _put(self, ref: BlobRef, data: Buffer, grant: Grant, retention: str, deadline: Deadline) -> None:
        renew = self._renewing(ref, put=True, retention=retention)
        async with self._slots:
            await self._store.put(grant, data, deadline=deadline, renew=renew)
        self.bytes_out += ref[1]


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error ends the others and is raised alone (a task group would wrap it)."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(error: BaseException) -> BaseException:
    """A fault of our own before an error of the tree: it must not be taken for a store that is away."""
    while isinstance(error, BaseExceptionGroup):
        inner: list[BaseException] = list(error.exceptions)
        error = next((one for one in inner if not isinstance(one, IotaError)), inner[0])
    return error
