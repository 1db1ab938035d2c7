"""Blobs by hash: asks the validator for presigned URLs in batches and moves the bytes; what arrives has the hash asked for.

An expired URL is replaced once per try and the same transfer goes on; everything ends at the caller's deadline. Of several
transfers the first that fails for good ends the others, and its error is raised as it is.

A store that binds grants to SHA-256 says so once (``needs_sha256``); only then are digests computed. Big blobs go up in parts.
Wrong bytes under a hash are reported, and asked for once more after the validator has looked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from subnet.errors import HashMismatch, IotaError, Refused
from subnet.logs import ReasonLog
from subnet.net.client import SignedClient
from subnet.protocol.messages import LIMIT_GRANTS, GrantRequest, StoreUse
from subnet.store.base import Grant, NeedsSha256, part_digests
from subnet.store.parts import put_parts
from subnet.store.presigned import BlobClient, Renew
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import PROTOCOL_VERSION

Buffer = bytes | bytearray | memoryview
BlobRef = tuple[str, int]
"""(hash, size in bytes); a size of 0 to get means that the store knows it."""
MAX_PARALLEL = 8
_DIGEST_INLINE_BYTES = 1 << 20


class Blobs:
    def __init__(self, validator: SignedClient, store: BlobClient, run: str) -> None:
        self._validator, self._store, self._run = validator, store, run
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._reasons = ReasonLog()
        self._needs_sha256 = False
        self._process, self._used_before = secrets.token_hex(8), store.used
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

    async def sizes(self, hashes: Sequence[str], deadline: Deadline) -> list[int]:
        """What the store says that these blobs take; none of them is moved."""
        if not hashes:
            return []
        grants = await self._grants([(hash_, 0) for hash_ in hashes], put=False, retention="", deadline=deadline)
        return [grant.size_bytes for grant in grants]

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
        renew = self._renewing(ref)
        async with self._slots:
            data = await self._store.get_range(grant, start, num_bytes, deadline=deadline, renew=renew)
        self.bytes_in += len(data)
        return data

    async def put_many(self, blobs: Sequence[tuple[str, Buffer]], retention: str, deadline: Deadline) -> None:
        """Store the blobs under their hashes; a blob that is already there costs nothing."""
        if not blobs:
            return
        wants = [_Want((hash_, memoryview(data).nbytes), data) for hash_, data in blobs]
        grants = await self._put_grants(wants, retention, deadline)
        await all_of([self._put(want, grant, retention, deadline) for want, grant in zip(wants, grants, strict=True)])

    async def _put_grants(self, wants: Sequence[_Want], retention: str, deadline: Deadline) -> tuple[Grant, ...]:
        if not self._needs_sha256:
            try:
                return await self._grants(
                    [want.ref for want in wants], put=True, retention=retention, deadline=deadline
                )
            except Refused as refused:
                if refused.code != NeedsSha256.code:
                    raise
                self._needs_sha256 = True
        for want in wants:
            await want.digest()
        return await self._grants(
            [want.ref for want in wants],
            put=True,
            retention=retention,
            deadline=deadline,
            sha256=[want.sha256 for want in wants],
        )

    async def _grants(
        self,
        refs: Sequence[BlobRef],
        *,
        put: bool,
        retention: str,
        deadline: Deadline,
        sha256: Sequence[tuple[str, ...]] = (),
        parts: tuple[int, ...] = (),
        complete: bool = False,
        damaged: bool = False,
    ) -> tuple[Grant, ...]:
        grants: list[Grant] = []
        for start in range(0, len(refs), LIMIT_GRANTS):
            request = GrantRequest(
                PROTOCOL_VERSION,
                self._run,
                put,
                tuple(refs[start : start + LIMIT_GRANTS]),
                retention or "log",
                sha256=tuple(sha256[start : start + LIMIT_GRANTS]),
                parts=parts,
                complete=complete,
                damaged=damaged,
                process=self._process,
                used=self.used,
            )
            grants += await self._validator.request("POST", "/v1/grants", request, tuple[Grant, ...], deadline=deadline)
        return tuple(grants)

    @property
    def process(self) -> str:
        """Whose :attr:`used` it is; another one counts from nothing."""
        return self._process

    @property
    def used(self) -> StoreUse:
        """What was asked of the store since this object was made."""
        return self._store.used.minus(self._used_before)

    def _renewing(self, ref: BlobRef) -> Renew:
        async def renew(limit: Deadline) -> Grant:
            (grant,) = await self._grants([ref], put=False, retention="", deadline=limit)
            return grant

        return renew

    async def _get(self, ref: BlobRef, grant: Grant, deadline: Deadline) -> bytearray:
        known = (ref[0], grant.size_bytes)
        async with self._slots:
            try:
                data = await self._store.get(grant, deadline=deadline, renew=self._renewing(known))
            except HashMismatch:
                (grant,) = await self._grants([known], put=False, retention="", deadline=deadline, damaged=True)
                data = await self._store.get(grant, deadline=deadline, renew=self._renewing(known))
        self.bytes_in += len(data)
        return data

    async def _put(self, want: _Want, grant: Grant, retention: str, deadline: Deadline) -> None:
        async def renew(limit: Deadline) -> Grant:
            return (await self._put_grants([want], retention, limit))[0]

        async with self._slots:
            if grant.parts:
                await self._put_parts(want, grant, retention, deadline)
            else:
                await self._store.put(grant, want.data, deadline=deadline, renew=renew)
        self.bytes_out += want.ref[1]

    async def _put_parts(self, want: _Want, grant: Grant, retention: str, deadline: Deadline) -> None:
        async def ask(limit: Deadline, parts: tuple[int, ...], complete: bool) -> Grant:
            (found,) = await self._grants(
                [want.ref],
                put=True,
                retention=retention,
                deadline=limit,
                sha256=[want.sha256],
                parts=parts,
                complete=complete,
            )
            return found

        await put_parts(
            self._store,
            grant,
            want.data,
            lambda number, limit: ask(limit, (number,), False),
            lambda limit: ask(limit, (), True),
            deadline=deadline,
        )


class _Want:
    """Bytes to put, and their digests once the store wants them."""

    def __init__(self, ref: BlobRef, data: Buffer) -> None:
        self.ref, self.data = ref, data
        self.sha256: tuple[str, ...] = ()

    async def digest(self) -> None:
        if self.sha256:
            return
        if self.ref[1] > _DIGEST_INLINE_BYTES:
            self.sha256 = await asyncio.to_thread(part_digests, self.data)
        else:
            self.sha256 = part_digests(self.data)
