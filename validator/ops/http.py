"""``/healthz``, ``/readyz`` and ``/metrics`` on a port of their own, meant for loopback: nothing is signed, nothing changes.

``/healthz``: 200 while the process answers and isn't held up; a supervisor may restart it on anything else. ``/readyz``: 200
while runs can be led (or followed) and paid; 503 with the problems otherwise. Both answer with all problems as JSON.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from validator.ops.look import Watched
from validator.ops.metrics import CONTENT_TYPE, ValidatorMetrics
from validator.ops.problems import Limits, Problem, problems

STUCK_S = 60.0
"""An event loop that was held up so long isn't healthy, though it answers again."""

_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


class Health(msgspec.Struct, frozen=True):
    """``status``: ``ok``, or why not in a word."""

    status: str
    role: str
    run: str
    state: str
    step: int
    problems: tuple[Problem, ...]


class OpsApi:
    def __init__(self, watched: Watched, limits: Limits = Limits()) -> None:
        self._watched, self._limits, self._metrics = watched, limits, ValidatorMetrics(watched)
        self.app = web.Application(client_max_size=0)
        routes: tuple[tuple[str, Callable[[web.Request], Awaitable[web.Response]]], ...] = (
            ("/healthz", self._healthz),
            ("/readyz", self._readyz),
            ("/metrics", self._scrape),
        )
        for path, handler in routes:
            self.app.router.add_get(path, handler)

    def problems(self) -> tuple[Problem, ...]:
        return problems(self._watched.look(), self._limits)

    async def _healthz(self, request: web.Request) -> web.Response:
        look = self._watched.look()
        return self._answer("ok" if look.loop_lag_s < STUCK_S else "stuck")

    async def _readyz(self, request: web.Request) -> web.Response:
        return self._answer("not_ready" if any(problem.blocks for problem in self.problems()) else "ok")

    def _answer(self, status: str) -> web.Response:
        look = self._watched.look()
        run = look.run
        health = Health(
            status,
            "leader" if look.leads else "follower",
            run.name if run else "",
            run.state if run else "idle",
            run.step if run else 0,
            problems(look, self._limits),
        )
        return web.Response(
            status=200 if status == "ok" else 503,
            body=_encode(health),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    async def _scrape(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
