"""The owner's own requests to a bucket: small, signed, retried within a deadline, each answer read as what it should be.

Bodies of blobs never come through here: they go by presigned URLs, for the owner as for everybody else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

from subnet.errors import Expired, NotFound, Unreachable
from subnet.net.border import retrying
from subnet.store.meter import StoreMeter
from subnet.store.presigned import BlobClient
from subnet.store.s3_errors import parse_xml, s3_error, xml_text
from subnet.store.s3_place import S3Signer
from subnet.timing import TIMEOUTS, Deadline

T = TypeVar("T")
LIST_KEYS = 1000
DELETE_KEYS = 1000
_LIMIT_BYTES = 16 << 20
_XML = {"Content-Type": "application/xml"}


@dataclass(frozen=True)
class ListedKey:
    key: str
    size_bytes: int
    modified_s: float


@dataclass(frozen=True)
class ListedUpload:
    key: str
    upload: str
    initiated_s: float


@dataclass(frozen=True)
class _Request:
    method: str
    key: str
    kind: str
    run: str
    query: Mapping[str, str | int] | None = None
    headers: Mapping[str, str] | None = None
    body: bytes = b""
    limit_bytes: int = _LIMIT_BYTES


class S3Calls:
    """``run`` of each call is whom the meter counts it for; kinds are those of :class:`StoreUse`."""

    def __init__(self, signer: S3Signer, client: BlobClient, meter: StoreMeter) -> None:
        self.signer, self._client, self._meter = signer, client, meter
        self.answered_s = float("-inf")
        """When the store last did what was asked of it."""

    async def head(self, key: str, *, run: str = "", deadline: Deadline) -> int | None:
        """Bytes of the object, None if there is none."""
        try:
            headers, _ = await self._call("HEAD", key, "gets", run, deadline=deadline)
        except NotFound:
            return None
        return int(headers.get("Content-Length", "0"))

    async def get(self, key: str, *, run: str = "", limit_bytes: int = _LIMIT_BYTES, deadline: Deadline) -> bytes:
        _, body = await self._call("GET", key, "gets", run, deadline=deadline, limit_bytes=limit_bytes)
        return body

    async def put(self, key: str, body: bytes, *, run: str = "", once: bool = False, deadline: Deadline) -> None:
        """A small object; ``once``: :class:`Exists` where there is one."""
        headers = {"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(body).digest()).decode()}
        if once:
            headers["If-None-Match"] = "*"
        await self._call("PUT", key, "puts", run, deadline=deadline, headers=headers, body=body)

    async def list(self, prefix: str, *, run: str = "", page: int = LIST_KEYS, deadline: Deadline) -> list[ListedKey]:
        """All keys that begin so, in the server's order, asked for a page at a time."""
        found: list[ListedKey] = []
        token = ""
        while True:
            query: dict[str, str | int] = {"list-type": 2, "max-keys": page, "prefix": prefix}
            if token:
                query["continuation-token"] = token
            root = await self._xml("GET", "", "lists", run, deadline=deadline, query=query)
            found += [
                ListedKey(
                    xml_text(item, "Key"), int(xml_text(item, "Size") or 0), _time_s(xml_text(item, "LastModified"))
                )
                for item in root.findall("{*}Contents")
            ]
            token = xml_text(root, "NextContinuationToken")
            if xml_text(root, "IsTruncated") != "true" or not token:
                return found

    async def delete(self, keys: Sequence[str], *, run: str = "", deadline: Deadline) -> None:
        """Absent ones are fine; at most :data:`DELETE_KEYS` a request."""
        for start in range(0, len(keys), DELETE_KEYS):
            objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys[start : start + DELETE_KEYS])
            body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
            headers = {"Content-MD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
            root = await self._xml(
                "POST", "", "deletes", run, deadline=deadline, query={"delete": ""}, headers=headers | _XML, body=body
            )
            failed = root.find("{*}Error")
            if failed is not None and xml_text(failed, "Code") != "NoSuchKey":
                raise Unreachable(f"DELETE {xml_text(failed, 'Key')}: {xml_text(failed, 'Code')}")

    # --- uploads in parts

    async def create_upload(self, key: str, *, run: str = "", deadline: Deadline) -> str:
        headers = {"x-amz-checksum-algorithm": "SHA256"}
        root = await self._xml("POST", key, "puts", run, deadline=deadline, query={"uploads": ""}, headers=headers)
        return xml_text(root, "UploadId")

    async def list_parts(
        self, key: str, upload: str, *, run: str = "", deadline: Deadline
    ) -> dict[int, tuple[str, int]]:
        """ETag and size of each part that is there; :class:`NotFound` when the upload has ended."""
        found: dict[int, tuple[str, int]] = {}
        marker = ""
        while True:
            query: dict[str, str | int] = {"uploadId": upload, "max-parts": LIST_KEYS}
            if marker:
                query["part-number-marker"] = marker
            root = await self._xml("GET", key, "lists", run, deadline=deadline, query=query)
            for part in root.findall("{*}Part"):
                found[int(xml_text(part, "PartNumber"))] = (xml_text(part, "ETag"), int(xml_text(part, "Size") or 0))
            marker = xml_text(root, "NextPartNumberMarker")
            if xml_text(root, "IsTruncated") != "true" or not marker:
                return found

    async def complete_upload(
        self, key: str, upload: str, parts: Sequence[tuple[int, str, str]], *, run: str = "", deadline: Deadline
    ) -> None:
        """``parts``: number, ETag, SHA-256 (base64)."""
        lines = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>"
            f"<ChecksumSHA256>{digest}</ChecksumSHA256></Part>"
            for number, etag, digest in parts
        )
        body = f"<CompleteMultipartUpload>{lines}</CompleteMultipartUpload>".encode()
        await self._xml(
            "POST", key, "puts", run, deadline=deadline, query={"uploadId": upload}, headers=_XML, body=body
        )

    async def abort_upload(self, key: str, upload: str, *, run: str = "", deadline: Deadline) -> None:
        try:
            await self._call("DELETE", key, "deletes", run, deadline=deadline, query={"uploadId": upload})
        except NotFound:
            return

    async def list_uploads(self, prefix: str, *, deadline: Deadline) -> list[ListedUpload]:
        """The first page of them, which is enough for leftovers that are looked for again and again."""
        query: dict[str, str | int] = {"uploads": "", "prefix": prefix}
        root = await self._xml("GET", "", "lists", "", deadline=deadline, query=query)
        return [
            ListedUpload(xml_text(item, "Key"), xml_text(item, "UploadId"), _time_s(xml_text(item, "Initiated")))
            for item in root.findall("{*}Upload")
        ]

    # --- how

    async def _xml(self, method: str, key: str, kind: str, run: str, *, deadline: Deadline, **options: Any) -> Element:
        what = f"{method} {self.signer.place.url(key)} {next(iter(options['query']))}"

        def read(answer: bytes) -> Element:
            root = parse_xml(answer, what)
            if root.tag.rpartition("}")[2] == "Error":  # a 200 that began before the work failed
                raise s3_error(what, 500, answer)
            return root

        return await self._retried(_Request(method, key, kind, run, **options), lambda _, body: read(body), deadline)

    async def _call(
        self, method: str, key: str, kind: str, run: str, *, deadline: Deadline, **options: Any
    ) -> tuple[Mapping[str, str], bytes]:
        return await self._retried(
            _Request(method, key, kind, run, **options), lambda found, body: (found, body), deadline
        )

    async def _retried(self, request: _Request, read: Callable[[Mapping[str, str], bytes], T], deadline: Deadline) -> T:
        async def attempt(limit: Deadline) -> T:
            url, headers = self.signer.signed(
                request.method, request.key, query=request.query, headers=request.headers, body=request.body
            )
            self._meter.own(request.run, request.kind, bytes_up=len(request.body))
            found, answer = await self._client.exchange(
                request.method, url, limit=limit, headers=headers, body=request.body, limit_bytes=request.limit_bytes
            )
            self._meter.own(request.run, bytes_down=len(answer))
            self.answered_s = self.signer.clock.now_s()
            return read(found, answer)

        return await retrying(attempt, deadline, try_s=TIMEOUTS.http_request_s, stop_at=(Expired,))


def _time_s(text: str) -> float:
    """An ISO time as seconds since 1970; 0 where it can't be read."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
