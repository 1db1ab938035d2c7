"""The run's page over HTTP: its files from a fixed table, and the JSON it reads. All of it is public and read-only.

``/`` and ``/page/FILE``; ``/v1/page/runs``, ``/v1/page/runs/NAME`` and below it ``history``, ``disruptions``, ``journal``,
``cases``, ``live`` (server-sent events); ``/v1/page/scores`` and ``/v1/page/scores/HOTKEY``. Nothing here changes anything.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from subnet.errors import AuthFailed, InputError, NotFound
from subnet.net.http import Call, Handler, Route
from subnet.timing import TIMEOUTS
from validator.http_api import number_of
from validator.page_desk import PageDesk
from validator.page_feed import PageFeed
from validator.page_sight import RunSight
from validator.score_api import MAX_HOTKEY_CHARS

PAGES = Path(__file__).parent / "pages"
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
DEFAULT_POINTS = 1_000
SMALLEST_ZIPPED_BYTES = 4 << 10


@dataclass(frozen=True)
class Asset:
    body: bytes
    zipped: bytes
    content_type: str
    etag: str


def load_assets(folder: Path = PAGES) -> dict[str, Asset]:
    """All files of the page by name; read once, so that no request names a path."""
    found: dict[str, Asset] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[path.name] = Asset(body, gzip.compress(body, mtime=0), TYPES[path.suffix], etag)
    return found


class PageApi:
    def __init__(self, desk: PageDesk, feed: PageFeed | None = None) -> None:
        self._desk, self._assets = desk, load_assets()
        self.feed = feed or PageFeed(desk)

    def routes(self) -> list[Route]:
        run = "/v1/page/runs/{name}"
        handlers: dict[str, Handler] = {
            "/": self._index,
            "/page/{file}": self._file,
            "/v1/page/runs": self._runs,
            run: self._overview,
            f"{run}/history": self._history,
            f"{run}/disruptions": self._disruptions,
            f"{run}/journal": self._journal,
            f"{run}/cases": self._cases,
            f"{run}/live": self._live,
            "/v1/page/scores": self._scores,
            "/v1/page/scores/{hotkey}": self._score,
        }
        return [Route("GET", path, handler, signed=False, body_limit_bytes=0) for path, handler in handlers.items()]

    async def close(self, app: web.Application) -> None:
        """For the application's ``on_shutdown``."""
        await self.feed.close()

    # --- files ---------------------------------------------------------------------------------------------------

    async def _index(self, call: Call) -> web.StreamResponse:
        return self._asset(call, "index.html")

    async def _file(self, call: Call) -> web.StreamResponse:
        return self._asset(call, call.request.match_info["file"])

    def _asset(self, call: Call, name: str) -> web.StreamResponse:
        asset = self._assets.get(name)
        if asset is None:
            raise NotFound(f"the page has no file {name[:80]!r}", hint="the page itself is at /")
        headers = {**HEADERS, "ETag": asset.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if call.request.headers.get("If-None-Match") == asset.etag:
            return web.Response(status=304, headers=headers)
        body = asset.body
        if "gzip" in call.request.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = asset.zipped, "gzip"
        return web.Response(body=body, content_type=asset.content_type, charset="utf-8", headers=headers)

    # --- JSON ----------------------------------------------------------------------------------------------------

    async def _sight(self, call: Call) -> RunSight:
        return await self._desk.sight(call.request.match_info["name"])

    async def _runs(self, call: Call) -> web.StreamResponse:
        return await json_answer(call, self._desk.runs())

    async def _overview(self, call: Call) -> web.StreamResponse:
        return await json_answer(call, self._desk.overview(await self._sight(call)))

    async def _history(self, call: Call) -> web.StreamResponse:
        points, first = number_of(call, "points", DEFAULT_POINTS), number_of(call, "first", 0)
        last = number_of(call, "last", 1 << 59)
        return await json_answer(call, self._desk.history(await self._sight(call), points, first, last))

    async def _disruptions(self, call: Call) -> web.StreamResponse:
        before, limit = _before(call), number_of(call, "limit", 50)
        return await json_answer(call, self._desk.disruptions(await self._sight(call), before, limit))

    async def _journal(self, call: Call) -> web.StreamResponse:
        before, limit, query = _before(call), number_of(call, "limit", 50), call.request.query.get("q", "")
        return await json_answer(call, await self._desk.journal(await self._sight(call), before, limit, query))

    async def _cases(self, call: Call) -> web.StreamResponse:
        return await json_answer(call, self._desk.cases(await self._sight(call)))

    async def _scores(self, call: Call) -> web.StreamResponse:
        return await json_answer(call, self._desk.scores())

    async def _score(self, call: Call) -> web.StreamResponse:
        hotkey = call.request.match_info["hotkey"]
        if len(hotkey) > MAX_HOTKEY_CHARS or not hotkey.isalnum():
            raise InputError(f"{hotkey[:MAX_HOTKEY_CHARS]!r} is no hotkey")
        return await json_answer(call, self._desk.score(hotkey))

    # --- live ------------------------------------------------------------------------------------------------------

    async def _live(self, call: Call) -> web.StreamResponse:
        require_same_origin(call)
        viewer = await self.feed.open(call.request.match_info["name"])
        response = web.StreamResponse(headers={**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        try:
            await response.prepare(call.request)
            while viewer.ended is None or not viewer.queue.empty():
                message = await self.feed.next(viewer, lambda: is_gone(call))
                async with asyncio.timeout(TIMEOUTS.stream_idle_s):
                    await response.write(message)
        except (ConnectionError, TimeoutError):
            pass  # it is gone, or reads nothing: nobody is left to tell
        finally:
            self.feed.close_viewer(viewer)
        return response


def is_gone(call: Call) -> bool:
    transport = call.request.transport
    return transport is None or transport.is_closing()


def require_same_origin(call: Call) -> None:
    """Another site's script may not hold this validator's places for viewers."""
    site = call.request.headers.get("Sec-Fetch-Site", "same-origin")
    if site not in ("same-origin", "none"):
        raise AuthFailed(f"asked for from another site ({site[:20]})", hint="open the validator's own page")


def _before(call: Call) -> int | None:
    return number_of(call, "before", 0) if "before" in call.request.query else None


async def json_answer(call: Call, value: object) -> web.Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    body = msgspec.json.encode(value)
    if len(body) >= SMALLEST_ZIPPED_BYTES and "gzip" in call.request.headers.get("Accept-Encoding", ""):
        body = await asyncio.to_thread(gzip.compress, body, 1)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=body, content_type="application/json", headers=headers)
