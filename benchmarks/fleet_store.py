"""Puts the small blobs of simulated miners into the store, by grants of the validator as real ones do."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from blake3 import blake3

from subnet.protocol import messages as msg
from subnet.protocol import wire
from subnet.protocol.signing import Signer
from subnet.store.base import Grant
from subnet.store.presigned import BlobClient
from subnet.timing import Deadline
from subnet.words import PROTOCOL_VERSION, BlobHash

AT_ONCE = 32


class FleetStore:
    def __init__(self, url: str, receiver: str, run: str) -> None:
        self._url, self._receiver, self._run = url, receiver, run
        self._session: aiohttp.ClientSession | None = None
        self._blobs = BlobClient()
        self._storing = asyncio.Semaphore(AT_ONCE)

    async def put(self, signer: Signer, data: bytes) -> str:
        """The blob's address once the store has it."""
        blob = BlobHash(blake3(data).hexdigest())
        async with self._storing:
            grant = await self._grant(signer, blob, len(data))
            if not getattr(grant, "held", False):
                await self._blobs.put(grant, data, deadline=Deadline.after(30.0))
        return blob

    async def _grant(self, signer: Signer, blob: BlobHash, size: int) -> Grant:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE))
        blobs = ((blob, size),)
        request = msg.GrantRequest(version=PROTOCOL_VERSION, run=self._run, put=True, blobs=blobs, retention="log")
        body, path = wire.encode(request), "/v1/grants"
        headers = signer.sign_request(
            method="POST", target=path, body=body, receiver=self._receiver, wall_ns=time.time_ns()
        )
        headers |= {"Accept": wire.CONTENT_TYPE, "Content-Type": wire.CONTENT_TYPE}
        async with self._session.post(self._url + path, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"grants: {response.status} {answer[:200]!r}")
        return wire.decode(answer, tuple[Grant, ...], limit_bytes=1 << 20, what="grants")[0]

    async def close(self) -> None:
        await self._blobs.close()
        if self._session is not None:
            await self._session.close()
