"""The proxy of :mod:`benchmarks.tempos`: between a validator and its local chain, and often unkind, from a seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from iota.ports import HOST
from subnet.chain.refusals import ChainRefused

REFUSALS = (
    "NeuronNoValidatorPermit",
    "NotEnoughStakeToSetWeights",
    "IncorrectWeightVersionKey",
    "SettingWeightsTooFast",
)
READ_FAULTS = {"reset": 0.02, "late": 0.01, "garbage": 0.01, "internal": 0.01}
WRITE_FAULTS = {"reset": 0.06, "answer lost": 0.06, "late": 0.02, "internal": 0.04, "refused": 0.12}
LATE_S = 0.3
"""How long an answer is held back: a fifth of a tempo."""


class BadLink:
    """An HTTP proxy to the chain; what it does to a request is drawn from ``seed``."""

    def __init__(self, upstream: str, seed: int) -> None:
        self._upstream, self._rng = upstream, random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.num_requests = 0
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._session: ClientSession | None = None

    async def start(self, port: int) -> None:
        app = web.Application(client_max_size=1 << 20)
        app.add_routes([web.route("*", "/{path:.*}", self._pass)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self._session = ClientSession(timeout=ClientTimeout(total=30))
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, port).start()
        self.url = f"http://{HOST}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _drawn(self, method: str) -> str:
        at = self._rng.random()
        for fault, share in (WRITE_FAULTS if method == "POST" else READ_FAULTS).items():
            if at < share:
                self.faults[fault] += 1
                return fault
            at -= share
        return ""

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        fault = self._drawn(request.method)
        if fault == "reset":
            return _cut(request)
        if fault == "internal":
            return web.json_response({"code": "internal", "reason": "a fault", "retry_after": 1.0}, status=500)
        if fault == "refused":
            refused = ChainRefused(self._rng.choice(REFUSALS), "so the proxy says")
            return web.Response(
                body=msgspec.json.encode(refused.refusal()), status=refused.http_status, content_type="application/json"
            )
        if fault == "late":
            await asyncio.sleep(LATE_S)
        status, kind, body = await self._asked(request)
        if fault == "answer lost":
            return _cut(request)
        if fault == "garbage":
            body = body[: len(body) // 2]
        return web.Response(body=body, status=status, content_type=kind)

    async def _asked(self, request: web.Request) -> tuple[int, str, bytes]:
        assert self._session is not None
        try:
            async with self._session.request(
                request.method, self._upstream + request.path_qs, data=await request.read()
            ) as answer:
                return answer.status, answer.content_type, await answer.read()
        except ClientError as error:
            raise web.HTTPBadGateway(text=str(error)) from error


def _cut(request: web.Request) -> web.Response:
    """Reset the connection; what is returned goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
