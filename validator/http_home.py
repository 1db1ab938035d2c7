"""What a machine asks of a validator before it joins: a run's plan, and how fast the way here is.

``GET /v1/runs/NAME/plan`` (public): the run as its members compute it, also before it has a state. ``POST /v1/bandwidth``
(signed): bytes each way, few of a hotkey and few of all, so that nobody's run is slower for it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING

from aiohttp import web

from subnet.errors import Busy, InputError
from subnet.net.http import Call, Route, answer
from subnet.protocol.bandwidth import LIMIT_BODY_BYTES, LIMIT_PROBE_BYTES, BandwidthAnswer, BandwidthProbe
from subnet.timing import SYSTEM_CLOCK, Clock
from validator.http_audits import audit_routes
from validator.policy_desk import policy_routes
from validator.run_export import plan_info
from validator.score_api import score_routes

if TYPE_CHECKING:
    from validator.node import ValidatorNode

EACH_BYTES = 32 << 20
"""Of one hotkey in ``EACH_S``, both ways together."""
EACH_S = 60.0
ALL_BYTES = 16 << 20
"""Of all of them, a second."""
MAX_HOTKEYS = 1024


class BandwidthDesk:
    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._second, self._second_bytes = clock.now_s(), 0
        self._noise = os.urandom(LIMIT_PROBE_BYTES)

    def probe(self, hotkey: str, request: BandwidthProbe) -> BandwidthAnswer:
        """:class:`~subnet.errors.Busy` where this hotkey, or all together, asked for enough."""
        if not 0 <= request.answer_bytes <= LIMIT_PROBE_BYTES or len(request.data) > LIMIT_PROBE_BYTES:
            raise InputError(
                f"{len(request.data)} bytes up and {request.answer_bytes} down are not allowed",
                hint=f"allowed: up to {LIMIT_PROBE_BYTES} each",
            )
        size_bytes, now_s = len(request.data) + request.answer_bytes, self._clock.now_s()
        since_s, spent = self._spent.get(hotkey, (now_s, 0))
        if now_s - since_s >= EACH_S:
            since_s, spent = now_s, 0
        if spent + size_bytes > EACH_BYTES:
            raise Busy("the way was measured enough for now", retry_after_s=max(0.0, since_s + EACH_S - now_s))
        if now_s - self._second >= 1.0:
            self._second, self._second_bytes = now_s, 0
        if self._second_bytes + size_bytes > ALL_BYTES:
            raise Busy("others measure their way here just now", retry_after_s=1.0)
        self._second_bytes += size_bytes
        self._spent[hotkey] = since_s, spent + size_bytes
        self._spent.move_to_end(hotkey)
        while len(self._spent) > MAX_HOTKEYS:
            self._spent.popitem(last=False)
        return BandwidthAnswer(len(request.data), self._noise[: request.answer_bytes])


def bandwidth_route(desk: BandwidthDesk) -> Route:
    async def bandwidth(call: Call) -> web.StreamResponse:
        return answer(desk.probe(call.hotkey, call.decode(BandwidthProbe)))

    return Route("POST", "/v1/bandwidth", bandwidth, body_limit_bytes=LIMIT_BODY_BYTES)


def more_routes(node: ValidatorNode) -> list[Route]:
    """All routes of a validator that leads runs but those of :mod:`validator.http_api` and of its page."""

    async def plan(call: Call) -> web.StreamResponse:
        entry = node.registry.get(call.request.match_info["name"])
        session = node.session
        active = session is not None and session.entry is entry
        return answer(plan_info(entry, session.coordinator.state if session is not None and active else None))

    return [
        *audit_routes(node.audit_desk),
        *score_routes(node.score_desk),
        *policy_routes(node.policy_desk),
        Route("GET", "/v1/runs/{name}/plan", plan, signed=False, body_limit_bytes=0),
        bandwidth_route(BandwidthDesk(node.clock)),
    ]
