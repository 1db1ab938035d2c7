"""The run's page over HTTP: its files from a fixed table, and the JSON it reads. All of it is public and read-only.

``/`` and ``/page/FILE``; ``/v1/page/runs``, ``/v1/page/runs/NAME`` and below it ``history``, ``disruptions``, ``journal``,
``cases``, ``live`` (server-sent events); ``/v1/page/scores`` and ``/v1/page/scores/HOTKEY``. Nothing here changes anything.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from subnet.errors import InputError
from subnet.net.http import Call, Handler, Route
from subnet.net.pages import HEADERS, Assets, json_answer, require_same_origin
from subnet.timing import TIMEOUTS
from validator.http_api import number_of
from validator.page_desk import PageDesk
from validator.page_feed import PageFeed
from validator.page_sight import RunSight
from validator.score_api import MAX_HOTKEY_CHARS

PAGES = Path(__file__).parent / "pages"
DEFAULT_POINTS = 1_000


class PageApi:
    def __init__(self, desk: PageDesk, feed: PageFeed | None = None) -> None:
        self._desk, self._assets = desk, Assets(PAGES)
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
        return self._assets.answer(call, "index.html")

    async def _file(self, call: Call) -> web.StreamResponse:
        return self._assets.answer(call, call.request.match_info["file"])

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
        require_same_origin(call.request.headers)
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


def _before(call: Call) -> int | None:
    return number_of(call, "before", 0) if "before" in call.request.query else None
