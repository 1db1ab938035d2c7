"""Blobs by hash: asks the validator for presigned URLs in batches and moves the bytes; what arrives has the hash asked for.

An expired URL is replaced once per try; everything ends at the caller's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from subnet.errors import Expired
from subnet.net.client import SignedClient
from subnet.protocol.messages import LIMIT_GRANTS, GrantRequest
from subnet.store.base import Grant
from subnet.store.presigned import BlobClient
from subnet.timing import Deadline
from subnet.words import PROTOCOL_VERSION

Buffer = bytes | bytearray | memoryview
BlobRef = tuple[str, int]
"""(hash, size in bytes); a size of 0 to get means that the store knows it."""

MAX_PARALLEL = 8


class Blobs:
    def __init__(self, validator: SignedClient, store: BlobClient, run: str) -> None:
        self._validator, self._store, self._run = validator, store, run
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self.bytes_in = 0
        self.bytes_out = 0

    async def get_many(self, refs: Sequence[BlobRef], deadline: Deadline) -> list[bytearray]:
        """The blobs in order; raises the first error that retries can't cure."""
        if not refs:
            return []
        grants = await self._grants(refs, put=False, retention="", deadline=deadline)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._get(ref, grant, deadline)) for ref, grant in zip(refs, grants, strict=True)
            ]
        return [task.result() for task in tasks]

    async def get(self, ref: BlobRef, deadline: Deadline) -> bytearray:
        return (await self.get_many([ref], deadline))[0]

    async def get_range(self, ref: BlobRef, start: int, num_bytes: int, deadline: Deadline) -> bytearray:
        """Part of a blob; the caller checks the bytes (a row group has a hash of its own)."""
        (grant,) = await self._grants([ref], put=False, retention="", deadline=deadline)
        async with self._slots:
            data = await self._store.get_range(grant, start, num_bytes, deadline=deadline)
        self.bytes_in += len(data)
        return data

    async def put_many(self, blobs: Sequence[tuple[str, Buffer]], retention: str, deadline: Deadline) -> None:
        """Store the blobs under their hashes; a blob that is already there costs nothing."""
        if not blobs:
            return
        refs = [(hash_, memoryview(data).nbytes) for hash_, data in blobs]
        grants = await self._grants(refs, put=True, retention=retention, deadline=deadline)
        async with asyncio.TaskGroup() as group:
            for ref, (_, data), grant in zip(refs, blobs, grants, strict=True):
                group.create_task(self._put(ref, data, grant, retention, deadline))

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

    async def _get(self, ref: BlobRef, grant: Grant, deadline: Deadline) -> bytearray:
        async with self._slots:
            try:
                data = await self._store.get(grant, deadline=deadline)
            except Expired:
                (grant,) = await self._grants([ref], put=False, retention="", deadline=deadline)
                data = await self._store.get(grant, deadline=deadline)
        self.bytes_in += len(data)
        return data

    async def _put(self, ref: BlobRef, data: Buffer, grant: Grant, retention: str, deadline: Deadline) -> None:
        async with self._slots:
            try:
                await self._store.put(grant, data, deadline=deadline)
            except Expired:
                (grant,) = await self._grants([ref], put=True, retention=retention, deadline=deadline)
                await self._store.put(grant, data, deadline=deadline)
        self.bytes_out += ref[1]
