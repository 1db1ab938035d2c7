"""Pages for browsers: files from a fixed table, a strict policy for them, JSON, and who may ask. For validator and miner alike.

Nothing a request says becomes a path: files are read once, by name, when the process starts.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from subnet.errors import AuthFailed, NotFound
from subnet.net.http import Call

SHARED = Path(__file__).resolve().parent.parent / "pages"
"""What every page has: style, words for numbers, the chart library."""
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
SMALLEST_ZIPPED_BYTES = 4 << 10


@dataclass(frozen=True)
class Asset:
    body: bytes
    zipped: bytes
    content_type: str
    etag: str


class Assets:
    """The files of ``folder`` and the shared ones."""

    def __init__(self, folder: Path) -> None:
        self._found = {path.name: _load(path) for path in paths_of(folder)}

    def answer(self, call: Call, name: str) -> web.Response:
        """:class:`~subnet.errors.NotFound` where there is no such file."""
        asset = self._found.get(name)
        if asset is None:
            raise NotFound(f"the page has no file {name[:80]!r}", hint="the page itself is at /")
        headers = {**HEADERS, "ETag": asset.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if call.request.headers.get("If-None-Match") == asset.etag:
            return web.Response(status=304, headers=headers)
        body = asset.body
        if "gzip" in call.request.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = asset.zipped, "gzip"
        return web.Response(body=body, content_type=asset.content_type, charset="utf-8", headers=headers)


def paths_of(folder: Path) -> list[Path]:
    """A page's files, the shared ones first."""
    return [path for place in (SHARED, folder) for path in sorted(place.iterdir()) if path.suffix in TYPES]


def _load(path: Path) -> Asset:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return Asset(body, gzip.compress(body, mtime=0), TYPES[path.suffix], etag)


async def json_answer(call: Call, value: object) -> web.Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    body = msgspec.json.encode(value)
    if len(body) >= SMALLEST_ZIPPED_BYTES and "gzip" in call.request.headers.get("Accept-Encoding", ""):
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, content_type="application/json", headers=headers)


def require_same_origin(headers: Mapping[str, str]) -> None:
    """Another site's script may not ask. A browser says where a request comes from; whoever is none says nothing."""
    site = headers.get("Sec-Fetch-Site", "same-origin")
    if site not in ("same-origin", "none"):
        raise AuthFailed(f"asked for from another site ({site[:20]})", hint="open this server's own page")
    origin = headers.get("Origin")
    if origin is not None and origin.split("://", 1)[-1] != headers.get("Host"):
        raise AuthFailed(f"asked for by a page of {origin[:80]}", hint="open this server's own page")
