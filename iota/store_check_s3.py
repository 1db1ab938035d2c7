"""What runs need of an S3 bucket, each thing done against it: signatures, sizes, checksums, write-once keys, ranges, parts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from types import TracebackType

import msgspec

from iota.store_check import Check, Lacking, expect, same
from subnet.errors import AuthFailed, Exists, Expired, HashMismatch, InputError
from subnet.protocol.wire import blob_hash
from subnet.store.base import Grant
from subnet.store.meter import StoreMeter
from subnet.store.presigned import BlobClient
from subnet.store.s3_admin import try_lifecycle
from subnet.store.s3_calls import S3Calls
from subnet.store.s3_place import S3Signer
from subnet.timing import SYSTEM_CLOCK, Clock, Deadline

DATA = b"what runs need of a store" * 40
PART_BYTES = 5 << 20
"""The least that S3 takes as a part that isn't the last."""
TTL_S = 300
WRITERS = 16
FORGED = "anybody with a URL could {}: miners can't be given any"


class _Shifted:
    """A clock that is off by so many seconds."""

    def __init__(self, shift_s: float) -> None:
        self._shift_s = shift_s

    def now_s(self) -> float:
        return SYSTEM_CLOCK.now_s()

    def wall_ns(self) -> int:
        return SYSTEM_CLOCK.wall_ns() + int(self._shift_s * 1e9)


class S3Trial:
    def __init__(self, signer: S3Signer, trial: str) -> None:
        self._signer, self._prefix = signer, signer.place.key(trial)
        self._client = BlobClient(clock=SYSTEM_CLOCK)
        self._calls = S3Calls(signer, self._client, StoreMeter())

    async def __aenter__(self) -> S3Trial:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    def checks(self) -> list[Check]:
        altered = FORGED.format("read or write what it was not made for")
        return [
            Check("the bucket answers with these credentials", self._answers, "nothing works"),
            Check("a presigned URL puts, another gets", self._round_trip, "nothing works"),
            Check("a late URL is refused", self._late, FORGED.format("use it for ever")),
            Check("a URL for another key or method is refused", self._altered, altered),
            Check("nobody reads without a URL", self._anonymous, "the bucket is public: everybody can read it"),
            Check("a body of another length is refused", self._lengths, FORGED.format("fill the bucket")),
            Check(
                "a body of another SHA-256 is refused",
                self._checksum,
                "a liar can store other bytes under an address; they are found when read, and cost a round",
            ),
            Check("a key is written once", self._once, "two validators could both lead: the log store is no log store"),
            Check("of racing writers one wins", self._race, "two validators could both lead at the same moment"),
            Check("ranges are read", self._ranges, "merges, tokens and broken downloads need parts of blobs"),
            Check("keys are listed in pages", self._paging, "no validator can take over a run"),
            Check(
                "objects are deleted in batches", self._delete, "the bucket only grows: every request is kept for ever"
            ),
            Check("blobs go up in parts", self._parts, "blobs over 64 MiB can't be stored"),
            Check("a part of another SHA-256 is refused", self._part_checksum, "as above, for blobs over 64 MiB"),
            Check(
                "lifecycle rules are kept", self._lifecycle, "no net: what a dead validator leaves stays", needed=False
            ),
            Check("its traces are removed", self._clean, "remove the prefix by hand", needed=False),
        ]

    # --- signatures

    async def _answers(self, deadline: Deadline) -> str:
        await self._calls.list(self._key(""), deadline=deadline)
        return f"{self._signer.place} at {self._signer.place.base_url}"

    async def _round_trip(self, deadline: Deadline) -> str:
        await self._client.put(self._put_grant("a", DATA), DATA, deadline=deadline)
        same(await self._client.get(self._get_grant("a", DATA), deadline=deadline), DATA)
        return f"{len(DATA)} bytes"

    async def _late(self, deadline: Deadline) -> str:
        await expect(self._client.get(self._get_grant("a", DATA, shift_s=-2 * TTL_S), deadline=deadline), Expired)
        late = self._put_grant("late", DATA, shift_s=-2 * TTL_S)
        return await expect(self._client.put(late, DATA, deadline=deadline), Expired)

    async def _altered(self, deadline: Deadline) -> str:
        get = self._get_grant("a", DATA)
        await self._client.put(self._put_grant("b", DATA), DATA, deadline=deadline)
        other = msgspec.structs.replace(get, url=get.url.replace("/a?", "/b?"))
        longer = msgspec.structs.replace(get, url=get.url.replace("Expires=3", "Expires=6"))
        for grant in (other, longer):
            await expect(self._client.get(grant, deadline=deadline), AuthFailed)
        await expect(self._client.exchange("PUT", get.url, limit=deadline, body=DATA), AuthFailed)
        return await expect(self._client.exchange("DELETE", get.url, limit=deadline), AuthFailed)

    async def _anonymous(self, deadline: Deadline) -> str:
        url = self._signer.place.url(self._key("a"))
        return await expect(self._client.exchange("GET", url, limit=deadline), AuthFailed)

    # --- what is bound to a PUT

    async def _lengths(self, deadline: Deadline) -> str:
        said = ""
        for data in (DATA + b"more", DATA[:-4]):
            grant = self._put_grant("length", DATA)
            headers = grant.headers | {"Content-Length": str(len(data))}
            work = self._client.exchange("PUT", grant.url, limit=deadline, headers=headers, body=data)
            said = await expect(work, AuthFailed, InputError)
        return said

    async def _checksum(self, deadline: Deadline) -> str:
        wrong = bytes(len(DATA))
        said = await expect(self._client.put(self._put_grant("sum", DATA), wrong, deadline=deadline), HashMismatch)
        if await self._calls.head(self._key("sum"), deadline=deadline) is not None:
            raise Lacking("refused, but kept")
        return said

    async def _once(self, deadline: Deadline) -> str:
        await self._client.put(self._put_grant("once", DATA, once=True), DATA, deadline=deadline)
        said = await expect(self._client.put(self._put_grant("once", DATA, once=True), DATA, deadline=deadline), Exists)
        other = DATA[::-1]
        await expect(self._client.put(self._put_grant("once", other, once=True), other, deadline=deadline), Exists)
        return said

    async def _race(self, deadline: Deadline) -> str:
        async def write(i: int) -> bool:
            data = DATA + bytes([i])
            try:
                await self._client.put(self._put_grant("race", data, once=True), data, deadline=deadline)
            except Exists:
                return False
            return True

        won = await asyncio.gather(*(write(i) for i in range(WRITERS)))
        if won.count(True) != 1:
            raise Lacking(f"{won.count(True)} of {WRITERS} won")
        there = await self._calls.get(self._key("race"), deadline=deadline)
        if there[-1] != won.index(True):
            raise Lacking("the winner's bytes aren't there")
        return f"1 of {WRITERS}"

    # --- reading

    async def _ranges(self, deadline: Deadline) -> str:
        grant = self._get_grant("a", DATA)
        for start, count in ((0, 1), (len(DATA) - 1, 1), (10, 500)):
            found = await self._client.get_range(grant, start, count, deadline=deadline)
            same(found, DATA[start : start + count])
        return "206"

    async def _paging(self, deadline: Deadline) -> str:
        for i in range(5):
            await self._calls.put(self._key(f"list/{i}"), DATA, deadline=deadline)
        listed = await self._calls.list(self._key("list/"), page=2, deadline=deadline)
        if [item.key for item in listed] != [self._key(f"list/{i}") for i in range(5)]:
            raise Lacking(f"{len(listed)} of 5 keys, or in another order")
        if {item.size_bytes for item in listed} != {len(DATA)}:
            raise Lacking("other sizes")
        return "5 keys in pages of 2"

    async def _delete(self, deadline: Deadline) -> str:
        keys = [self._key(f"list/{i}") for i in range(6)]
        await self._calls.delete(keys, deadline=deadline)
        if await self._calls.list(self._key("list/"), deadline=deadline):
            raise Lacking("some are still there")
        return "5 and an absent one"

    # --- parts

    async def _parts(self, deadline: Deadline) -> str:
        key, parts = self._key("parts"), [os.urandom(PART_BYTES), b"the last"]
        upload = await self._calls.create_upload(key, deadline=deadline)
        for number, part in enumerate(parts, 1):
            await self._client.put(self._part_grant(key, upload, number, part), part, deadline=deadline)
        there = await self._calls.list_parts(key, upload, deadline=deadline)
        if {number: size for number, (_, size) in there.items()} != {1: PART_BYTES, 2: len(parts[1])}:
            raise Lacking("the parts that are there aren't listed")
        named = [(number, there[number][0], _base64(part)) for number, part in enumerate(parts, 1)]
        await self._calls.complete_upload(key, upload, named, deadline=deadline)
        whole = b"".join(parts)
        same(await self._client.get(self._get_grant("parts", whole), deadline=deadline), whole)
        return f"2 parts, {len(whole)} bytes"

    async def _part_checksum(self, deadline: Deadline) -> str:
        key, part = self._key("wrong"), b"right"
        upload = await self._calls.create_upload(key, deadline=deadline)
        try:
            grant = self._part_grant(key, upload, 1, part)
            return await expect(self._client.put(grant, b"wrong", deadline=deadline), HashMismatch)
        finally:
            await self._calls.abort_upload(key, upload, deadline=deadline)

    # --- the bucket

    async def _lifecycle(self, deadline: Deadline) -> str:
        await asyncio.to_thread(try_lifecycle, self._signer.at(SYSTEM_CLOCK, prefix=self._prefix))
        return "set, read back, set back"

    async def _clean(self, deadline: Deadline) -> str:
        listed = await self._calls.list(f"{self._prefix}/", deadline=deadline)
        await self._calls.delete([item.key for item in listed], deadline=deadline)
        return f"{len(listed)} objects"

    # --- how

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _signing(self, shift_s: float) -> S3Signer:
        clock: Clock = _Shifted(shift_s) if shift_s else SYSTEM_CLOCK
        return self._signer.at(clock)

    def _put_grant(self, name: str, data: bytes, *, once: bool = False, shift_s: float = 0.0) -> Grant:
        headers = {"Content-Length": str(len(data)), "x-amz-checksum-sha256": _base64(data)}
        if once:
            headers["If-None-Match"] = "*"
        url, expires_s = self._signing(shift_s).presign("PUT", self._key(name), ttl_s=TTL_S, headers=headers)
        return Grant(url, "PUT", headers, blob_hash(data), len(data), expires_s)

    def _get_grant(self, name: str, data: bytes, *, shift_s: float = 0.0) -> Grant:
        url, expires_s = self._signing(shift_s).presign("GET", self._key(name), ttl_s=TTL_S)
        return Grant(url, "GET", {}, blob_hash(data), len(data), expires_s)

    def _part_grant(self, key: str, upload: str, number: int, part: bytes) -> Grant:
        headers = {"Content-Length": str(len(part)), "x-amz-checksum-sha256": _base64(part)}
        query: dict[str, str | int] = {"partNumber": number, "uploadId": upload}
        url, expires_s = self._signer.presign("PUT", key, ttl_s=TTL_S, headers=headers, query=query)
        return Grant(url, "PUT", headers, blob_hash(part), len(part), expires_s)


def _base64(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
