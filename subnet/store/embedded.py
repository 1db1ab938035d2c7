"""The owner's side of the embedded store: mints grants; reaches names, holds and usage with URLs it signs itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from subnet.errors import Exists, InputError, NotFound
from subnet.protocol import wire
from subnet.protocol.messages import StoreUse
from subnet.protocol.wire import Buffer, blob_hash
from subnet.store.base import (
    MAX_SIZES,
    Expiry,
    Grant,
    Hold,
    NamedKey,
    NamedPage,
    PutWant,
    Usage,
    check_blob,
    check_name,
    check_prefix,
)
from subnet.store.meter import StoreMeter, run_of
from subnet.store.presigned import BlobClient
from subnet.store.signed_urls import StoreSigner
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from subnet.words import BlobHash


class EmbeddedStore:
    """Implements :class:`subnet.store.base.OwnerStore` over ``iota store serve``; ``blobs`` moves bytes by grants.

    The server checks BLAKE3 on arrival and keeps the holds, so grants need no SHA-256, no index and no request.
    """

    def __init__(self, base_url: str, secret: bytes, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._signer = StoreSigner(secret, base_url, clock=clock)
        self.blobs = BlobClient()
        self.meter = StoreMeter()

    async def __aenter__(self) -> EmbeddedStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, *, deadline: Deadline) -> None:
        return

    async def maintain(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self.blobs.close()

    async def grant_puts(
        self, wants: Sequence[PutWant], hold: Hold, *, who: str = "", deadline: Deadline
    ) -> tuple[Grant, ...]:
        self.meter.granted(hold.label, puts=len(wants), bytes_up=sum(want.size_bytes for want in wants))
        return tuple(self.presign_put(want.blob, want.size_bytes, hold) for want in wants)

    async def grant_parts(
        self, want: PutWant, numbers: Sequence[int], hold: Hold, *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        raise InputError("this store takes blobs whole", hint="ask for a grant to put it")

    async def complete_parts(self, want: PutWant, hold: Hold, *, deadline: Deadline) -> Grant:
        raise InputError("this store takes blobs whole", hint="ask for a grant to put it")

    async def grant_gets(
        self, refs: Sequence[tuple[BlobHash, int]], label: str = "", *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        unknown = [blob for blob, size_bytes in refs if size_bytes <= 0]
        sizes = await self.sizes(unknown, deadline=deadline) if unknown else {}
        grants: list[Grant] = []
        for blob, size_bytes in refs:
            known = size_bytes if size_bytes > 0 else sizes.get(blob)
            if known is None:
                raise NotFound(f"blob {blob[:16]} is not in the store")
            grants.append(self.presign_get(blob, known))
        self.meter.granted(label, gets=len(grants), bytes_down=sum(grant.size_bytes for grant in grants))
        return tuple(grants)

    async def check_blobs(self, blobs: Sequence[BlobHash], *, deadline: Deadline) -> None:
        """What is here has the right hash: it was checked on arrival, and a damaged disk is no matter of grants."""

    def presign_put(self, blob: BlobHash, size_bytes: int, hold: Hold, *, ttl_s: float = TIMEOUTS.url_ttl_s) -> Grant:
        return self._signer.presign_put(blob, size_bytes, hold, ttl_s=ttl_s)

    def presign_get(self, blob: BlobHash, size_bytes: int, *, ttl_s: float = TIMEOUTS.url_ttl_s) -> Grant:
        return self._signer.presign_get(blob, size_bytes, ttl_s=ttl_s)

    def presign_put_named(
        self, name: str, content: BlobHash, size_bytes: int, *, sha256: str = "", ttl_s: float = TIMEOUTS.url_ttl_s
    ) -> Grant:
        return self._signer.presign_put_named(name, content, size_bytes, ttl_s=ttl_s)

    async def put_blob(self, data: Buffer, hold: Hold, *, deadline: Deadline) -> BlobHash:
        """Store bytes of the owner itself; returns their address."""
        blob, size_bytes = blob_hash(data), memoryview(data).nbytes

        async def renew(limit: Deadline) -> Grant:
            return self.presign_put(blob, size_bytes, hold)

        await self.blobs.put(self.presign_put(blob, size_bytes, hold), data, deadline=deadline, renew=renew)
        self.meter.own_use(hold.label, StoreUse(puts=1, bytes_up=size_bytes))
        return blob

    async def get_blob(self, blob: BlobHash, size_bytes: int, *, deadline: Deadline) -> bytearray:
        async def renew(limit: Deadline) -> Grant:
            return self.presign_get(blob, size_bytes)

        return await self.blobs.get(self.presign_get(blob, size_bytes), deadline=deadline, renew=renew)

    async def get_range(
        self, blob: BlobHash, size_bytes: int, start: int, num_bytes: int, *, deadline: Deadline
    ) -> bytearray:
        async def renew(limit: Deadline) -> Grant:
            return self.presign_get(blob, size_bytes)

        grant = self.presign_get(blob, size_bytes)
        return await self.blobs.get_range(grant, start, num_bytes, deadline=deadline, renew=renew)

    async def put_named(self, name: str, data: Buffer, *, deadline: Deadline) -> None:
        """Write once. A write whose answer was lost is recognised by its bytes, so a retry is no ``Exists``."""
        content, size_bytes = blob_hash(data), memoryview(data).nbytes

        async def renew(limit: Deadline) -> Grant:
            return self.presign_put_named(name, content, size_bytes)

        grant = self.presign_put_named(name, content, size_bytes)
        self.meter.own(run_of(name), "puts", bytes_up=size_bytes)
        try:
            await self.blobs.put(grant, data, deadline=deadline, renew=renew)
        except Exists:
            try:
                there = await self.get_named(name, deadline=deadline)
            except NotFound as error:
                raise Exists(f"key {name} is being written by another") from error
            if there != bytes(data):
                raise

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes:
        check_name(name)
        data: bytes = await self._call("GET", f"/named/{name}", {}, bytes, deadline)
        self.meter.own(run_of(name), "gets", bytes_down=len(data))
        return data

    async def list_named(self, prefix: str, *, deadline: Deadline) -> Sequence[NamedKey]:
        check_prefix(prefix)
        keys: list[NamedKey] = []
        while True:
            after = keys[-1].name if keys else ""
            page = await self._call("GET", "/named", {"prefix": prefix, "after": after}, NamedPage, deadline)
            self.meter.own(run_of(prefix), "lists")
            keys.extend(page.keys)
            if not page.more:
                return keys

    async def delete(self, blob: BlobHash, *, deadline: Deadline) -> None:
        await self._call("DELETE", f"/blob/{check_blob(blob)}", {}, None, deadline)

    async def expire(self, retention: str, label: str, below: int, *, deadline: Deadline) -> Expiry:
        Hold(retention, label).check()
        params: dict[str, str | int] = {"retention": retention, "label": label, "below": below}
        return await self._call("POST", "/expire", params, Expiry, deadline)

    async def sizes(self, blobs: Iterable[BlobHash], *, deadline: Deadline) -> dict[BlobHash, int]:
        asked = [check_blob(blob) for blob in dict.fromkeys(blobs)]
        found: dict[BlobHash, int] = {}
        for start in range(0, len(asked), MAX_SIZES):
            body = wire.encode(asked[start : start + MAX_SIZES])
            found |= await self._call("POST", "/sizes", {}, dict[BlobHash, int], deadline, body)
        return found

    async def usage(self, *, deadline: Deadline) -> Usage:
        return await self._call("GET", "/usage", {}, Usage, deadline)

    async def _call(
        self, method: str, path: str, params: dict[str, str | int], kind: Any, deadline: Deadline, body: bytes = b""
    ) -> Any:
        def fresh() -> str:
            return self._signer.mint(method, path, params, ttl_s=TIMEOUTS.url_ttl_s)[0]

        return await self.blobs.call(method, fresh, kind, deadline=deadline, body=body)
