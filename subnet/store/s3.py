"""The owner's side of an S3 bucket: miners get URLs that are good for one method, key, size and SHA-256, and no credentials.

    PREFIX/blobs/<blake3>.<sha256>       blobs; the SHA-256 in the key is what the bucket enforces on arrival
    PREFIX/evidence/<blake3>.<sha256>    the same for class ``evidence``, which a lifecycle rule may take when old
    PREFIX/named/<name with ~ for />     write-once keys (``If-None-Match: *``)
    PREFIX/index/<owner>/<time>          copies of the index of holds

A key has one content, whoever puts it: a second writer finds it there, and a liar who names another SHA-256 for a blob gets
another key. Which of them is right is looked at when they differ or somebody complains (:meth:`S3Store.check_blobs`).
A hold is on the owner's disk before its grant leaves; what no hold keeps is deleted (:mod:`subnet.store.s3_upkeep`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from subnet.errors import Exists, HashMismatch, InputError, NotFound, TooLarge
from subnet.protocol.messages import StoreUse
from subnet.protocol.wire import Buffer, blob_hash, is_blob_hash
from subnet.store.base import (
    MAX_NAMED_BYTES,
    MAX_PARTS,
    PART_BYTES,
    Expiry,
    Grant,
    Hold,
    NamedKey,
    NeedsSha256,
    PutWant,
    Usage,
    check_blob,
    check_name,
    check_prefix,
    num_parts,
    part_digests,
)
from subnet.store.hold_index import HoldIndex, StoredObject, shelf_of
from subnet.store.meter import StoreMeter, run_of
from subnet.store.parts import put_parts
from subnet.store.presigned import BlobClient, Renew
from subnet.store.s3_calls import S3Calls
from subnet.store.s3_place import S3Signer
from subnet.store.s3_presence import Presence
from subnet.store.s3_upkeep import Upkeep
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash

_SEPARATOR = "~"
"""In place of / in named keys: servers over file systems can't have both ``a`` and ``a/b``."""
_PROBE = "probe"
"""A key that is never written: that the bucket says so is an answer."""
ANSWERED_FOR_S = 2.0


_STRIPES = 64
"""Locks among which keys are spread."""
_Upload = tuple[Grant, str, dict[int, tuple[str, int]]]
"""What is lacking; the upload's id; ETag and size of the parts that are there."""


class S3Store:
    """Implements :class:`subnet.store.base.OwnerStore`; ``blobs`` moves bytes by grants.

    ``index`` is the file of holds; ``owner`` names this owner's copies of it in the bucket.
    """

    def __init__(self, signer: S3Signer, index: Path, *, owner: str, client: BlobClient | None = None) -> None:
        self._signer, self._place = signer, signer.place
        self.blobs = client or BlobClient(clock=signer.clock)
        self.meter = StoreMeter()
        self._index = HoldIndex(index)
        self._calls = S3Calls(signer, self.blobs, self.meter)
        self._beginning = [asyncio.Lock() for _ in range(_STRIPES)]
        self._presence = Presence(signer, self._calls, self._index, self.blobs, self.meter)
        self.upkeep = Upkeep(signer, self._calls, self._index, self.meter, self._presence, owner=owner)

    async def open(self, *, deadline: Deadline) -> None:
        await self.upkeep.open(deadline)

    async def maintain(self) -> None:
        await self.upkeep.run()

    async def close(self) -> None:
        await self.upkeep.close()
        await self.blobs.close()
        await asyncio.to_thread(self._index.close)

    # --- grants to put

    async def grant_puts(
        self, wants: Sequence[PutWant], hold: Hold, *, who: str = "", deadline: Deadline
    ) -> tuple[Grant, ...]:
        hold.check()
        entries = [self._entry(want, hold, who) for want in wants]
        await self.upkeep.hold([(entry, hold) for entry in entries], deadline)
        grants = [
            await self._put_grant(want, entry, hold.label, deadline) for want, entry in zip(wants, entries, strict=True)
        ]
        moving = [grant for grant in grants if not grant.held]
        num_puts = sum(len(grant.parts) or 1 for grant in moving)
        self.meter.granted(hold.label, puts=num_puts, bytes_up=sum(grant.size_bytes for grant in moving))
        return tuple(grants)

    async def grant_parts(
        self, want: PutWant, numbers: Sequence[int], hold: Hold, *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        entry = self._entry(want, hold, "")
        if not all(1 <= number <= len(want.sha256) for number in numbers):
            raise InputError(f"parts {numbers} of a blob of {len(want.sha256)} parts")
        upload = await asyncio.to_thread(self._index.upload_of, entry)
        if not upload and await self._presence.is_there(entry, deadline):
            sizes = [_part_bytes(want, number) for number in numbers]
            return tuple(Grant("", "PUT", {}, want.blob, size, 0, held=True) for size in sizes)
        if not upload:
            raise NotFound(f"no upload in parts of blob {want.blob[:10]}… is open", hint="ask for a grant to put it")
        return tuple(self._part_grant(want, entry, number, upload) for number in numbers)

    async def complete_parts(self, want: PutWant, hold: Hold, *, deadline: Deadline) -> Grant:
        entry = self._entry(want, hold, "")
        grant, upload, there = await self._open_upload(want, entry, hold.label, deadline)
        if grant.held or grant.parts:
            return grant
        parts = [(number, there[number][0], _base64(digest)) for number, digest in enumerate(want.sha256, 1)]
        try:
            await self._calls.complete_upload(self._key(entry), upload, parts, run=hold.label, deadline=deadline)
        except NotFound:  # another member has just put the same parts together
            if await self._calls.head(self._key(entry), run=hold.label, deadline=deadline) != want.size_bytes:
                raise
        await asyncio.to_thread(self._index.set_upload, entry, "")
        self._presence.saw(entry)
        return Grant("", "PUT", {}, want.blob, want.size_bytes, 0, held=True)

    def _entry(self, want: PutWant, hold: Hold, who: str) -> StoredObject:
        """Where these bytes go; the SHA-256 must be named for each part."""
        check_blob(want.blob)
        if want.size_bytes < 0:
            raise InputError(f"a blob of {want.size_bytes} bytes")
        if not want.sha256:
            raise NeedsSha256("this store binds grants to SHA-256", hint="name the SHA-256 of each part of each blob")
        expected = num_parts(want.size_bytes)
        if expected > MAX_PARTS:
            raise TooLarge(f"a blob of {want.size_bytes} bytes", hint=f"at most {MAX_PARTS * PART_BYTES}")
        if len(want.sha256) != expected or not all(map(is_blob_hash, want.sha256)):
            raise InputError(f"{len(want.sha256)} digests of a blob of {expected} parts", hint="64 hex digits each")
        (digest, *others) = want.sha256
        if others:
            digest = hashlib.sha256(b"".join(map(bytes.fromhex, want.sha256))).hexdigest()
        return StoredObject(want.blob, digest, shelf_of(hold), want.size_bytes, who)

    async def _put_grant(self, want: PutWant, entry: StoredObject, label: str, deadline: Deadline) -> Grant:
        if self._presence.known(entry):
            return Grant("", "PUT", {}, want.blob, want.size_bytes, 0, held=True)
        if len(want.sha256) > 1:
            return (await self._open_upload(want, entry, label, deadline))[0]
        headers = _checked(entry.sha256, want.size_bytes) | {"If-None-Match": "*"}
        url, expires_s = self._signer.presign("PUT", self._key(entry), ttl_s=TIMEOUTS.url_ttl_s, headers=headers)
        return Grant(url, "PUT", headers, want.blob, want.size_bytes, expires_s, same_bytes=True)

    async def _open_upload(self, want: PutWant, entry: StoredObject, label: str, deadline: Deadline) -> _Upload:
        """Which parts are lacking; begins an upload where none is open."""
        key = self._key(entry)
        async with self._beginning[hash(key) % _STRIPES]:  # two at once would begin two
            if await self._presence.is_there(entry, deadline):
                return Grant("", "PUT", {}, want.blob, want.size_bytes, 0, held=True), "", {}
            upload, there = await asyncio.to_thread(self._index.upload_of, entry), dict[int, tuple[str, int]]()
            if upload:
                try:
                    there = await self._calls.list_parts(key, upload, run=label, deadline=deadline)
                except NotFound:
                    upload = ""
            if not upload:
                upload = await self._calls.create_upload(key, run=label, deadline=deadline)
                await asyncio.to_thread(self._index.set_upload, entry, upload)
        lacking = tuple(
            number
            for number in range(1, len(want.sha256) + 1)
            if number not in there or there[number][1] != _part_bytes(want, number)
        )
        grant = Grant("", "PUT", {}, want.blob, want.size_bytes, 0, parts=lacking, part_bytes=PART_BYTES)
        return grant, upload, there

    def _part_grant(self, want: PutWant, entry: StoredObject, number: int, upload: str) -> Grant:
        size_bytes = _part_bytes(want, number)
        headers = _checked(want.sha256[number - 1], size_bytes)
        query: dict[str, str | int] = {"partNumber": number, "uploadId": upload}
        url, expires_s = self._signer.presign(
            "PUT", self._key(entry), ttl_s=TIMEOUTS.url_ttl_s, headers=headers, query=query
        )
        return Grant(url, "PUT", headers, want.blob, size_bytes, expires_s)

    # --- grants to get

    async def grant_gets(
        self, refs: Sequence[tuple[BlobHash, int]], label: str = "", *, deadline: Deadline
    ) -> tuple[Grant, ...]:
        places = await self._presence.locate([check_blob(blob) for blob, _ in refs], deadline)
        grants: list[Grant] = []
        for blob, size_bytes in refs:
            entry = places.get(blob)
            if entry is None:
                raise NotFound(f"blob {blob[:16]} is not in the store")
            if size_bytes > 0 and size_bytes != entry.size_bytes:
                raise InputError(f"blob {blob[:16]} has {entry.size_bytes} bytes, not {size_bytes}")
            grants.append(self._get_grant(entry))
        total_bytes = sum(grant.size_bytes for grant in grants)
        self.meter.granted(label, gets=len(grants), bytes_down=total_bytes)
        return tuple(grants)

    def _get_grant(self, entry: StoredObject) -> Grant:
        url, expires_s = self._signer.presign("GET", self._key(entry), ttl_s=TIMEOUTS.url_ttl_s)
        part_bytes = PART_BYTES if entry.size_bytes >= 2 * PART_BYTES else 0
        return Grant(url, "GET", {}, entry.blob, entry.size_bytes, expires_s, part_bytes=part_bytes)

    async def check_blobs(self, blobs: Sequence[BlobHash], *, deadline: Deadline) -> None:
        for blob in blobs:
            await self._presence.check(check_blob(blob), deadline)

    # --- the owner's own bytes

    async def put_blob(self, data: Buffer, hold: Hold, *, deadline: Deadline) -> BlobHash:
        """Store bytes of the owner itself; returns their address."""
        blob, digests = await asyncio.to_thread(lambda: (blob_hash(data), part_digests(data)))
        want = PutWant(blob, memoryview(data).nbytes, digests)
        (grant,) = await self.grant_puts([want], hold, who="owner", deadline=deadline)

        async def renew(limit: Deadline) -> Grant:
            return (await self.grant_puts([want], hold, who="owner", deadline=limit))[0]

        async def sign(number: int, limit: Deadline) -> Grant:
            return (await self.grant_parts(want, [number], hold, deadline=limit))[0]

        async def complete(limit: Deadline) -> Grant:
            return await self.complete_parts(want, hold, deadline=limit)

        if grant.parts:
            await put_parts(self.blobs, grant, data, sign, complete, deadline=deadline)
        else:
            await self.blobs.put(grant, data, deadline=deadline, renew=renew)
        if not grant.held:
            self.meter.own_use(hold.label, StoreUse(puts=max(1, len(grant.parts)), bytes_up=want.size_bytes))
        self._presence.saw(self._entry(want, hold, "owner"))
        return blob

    async def get_blob(self, blob: BlobHash, size_bytes: int, *, deadline: Deadline) -> bytearray:
        grant, renew = await self._own_get(blob, size_bytes, deadline)
        try:
            return await self.blobs.get(grant, deadline=deadline, renew=renew)
        except HashMismatch:
            await self.check_blobs([blob], deadline=deadline)
            grant, renew = await self._own_get(blob, size_bytes, deadline)
            return await self.blobs.get(grant, deadline=deadline, renew=renew)

    async def get_range(
        self, blob: BlobHash, size_bytes: int, start: int, num_bytes: int, *, deadline: Deadline
    ) -> bytearray:
        grant, renew = await self._own_get(blob, size_bytes, deadline)
        return await self.blobs.get_range(grant, start, num_bytes, deadline=deadline, renew=renew)

    async def _own_get(self, blob: BlobHash, size_bytes: int, deadline: Deadline) -> tuple[Grant, Renew]:
        async def renew(limit: Deadline) -> Grant:
            return (await self.grant_gets([(blob, size_bytes)], deadline=limit))[0]

        return await renew(deadline), renew

    # --- names

    def presign_put_named(
        self, name: str, content: BlobHash, size_bytes: int, *, sha256: str = "", ttl_s: float = TIMEOUTS.url_ttl_s
    ) -> Grant:
        check_name(name)
        if not is_blob_hash(sha256):
            raise NeedsSha256("this store binds grants to SHA-256", hint="name the SHA-256 of the bytes")
        if size_bytes > MAX_NAMED_BYTES:
            raise TooLarge(f"a named key of {size_bytes} bytes, more than {MAX_NAMED_BYTES}")
        headers = _checked(sha256, size_bytes) | {"If-None-Match": "*"}
        url, expires_s = self._signer.presign("PUT", self._named(name), ttl_s=ttl_s, headers=headers)
        return Grant(url, "PUT", headers, check_blob(content), size_bytes, expires_s)

    async def put_named(self, name: str, data: Buffer, *, deadline: Deadline) -> None:
        """Write once. A write whose answer was lost is recognised by its bytes, so a retry is no ``Exists``."""
        check_name(name)
        body = bytes(data)
        if len(body) > MAX_NAMED_BYTES:
            raise TooLarge(f"a named key of {len(body)} bytes, more than {MAX_NAMED_BYTES}")
        try:
            await self._calls.put(self._named(name), body, run=run_of(name), once=True, deadline=deadline)
        except Exists:
            try:
                there = await self.get_named(name, deadline=deadline)
            except NotFound as error:
                raise Exists(f"key {name} is being written by another") from error
            if there != body:
                raise

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes:
        check_name(name)
        key = self._named(name)
        return await self._calls.get(key, run=run_of(name), limit_bytes=MAX_NAMED_BYTES, deadline=deadline)

    async def list_named(self, prefix: str, *, deadline: Deadline) -> Sequence[NamedKey]:
        check_prefix(prefix)
        start = self._place.key("named/")
        listed = await self._calls.list(self._named(prefix), run=run_of(prefix), deadline=deadline)
        keys = [NamedKey(item.key.removeprefix(start).replace(_SEPARATOR, "/"), item.size_bytes) for item in listed]
        return sorted(keys)

    # --- letting go, looking

    async def delete(self, blob: BlobHash, *, deadline: Deadline) -> None:
        await asyncio.to_thread(self._index.delete, check_blob(blob))
        await self.upkeep.purge(deadline)

    async def expire(self, retention: str, label: str, below: int, *, deadline: Deadline) -> Expiry:
        Hold(retention, label).check()
        num_blobs, freed_bytes = await asyncio.to_thread(self._index.expire, retention, label, below)
        await self.upkeep.purge(deadline, run=label)
        return Expiry(num_blobs, freed_bytes)

    async def sizes(self, blobs: Iterable[BlobHash], *, deadline: Deadline) -> dict[BlobHash, int]:
        places = await self._presence.present([check_blob(blob) for blob in dict.fromkeys(blobs)], deadline)
        return {blob: entry.size_bytes for blob, entry in places.items()}

    async def usage(self, *, deadline: Deadline) -> Usage:
        """What is held, as far as granted; asks the bucket, unless that answered something just now."""
        if self._signer.clock.now_s() - self._calls.answered_s > ANSWERED_FOR_S:
            with suppress(NotFound):
                await self._calls.get(self._place.key(_PROBE), deadline=deadline)
        totals = await asyncio.to_thread(self._index.totals)
        return Usage(totals.used_bytes, 0, totals.num_blobs, 0)

    # --- keys

    def _key(self, entry: StoredObject) -> str:
        return self._place.key(entry.name)

    def _named(self, name: str) -> str:
        return self._place.key(f"named/{name.replace('/', _SEPARATOR)}")


def _checked(sha256: str, size_bytes: int) -> dict[str, str]:
    """Headers that bind a PUT to these very bytes."""
    return {"Content-Length": str(size_bytes), "x-amz-checksum-sha256": _base64(sha256)}


def _base64(digest: str) -> str:
    return base64.b64encode(bytes.fromhex(digest)).decode()


def _part_bytes(want: PutWant, number: int) -> int:
    return min(PART_BYTES, want.size_bytes - (number - 1) * PART_BYTES)
