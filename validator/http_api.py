"""The validator's HTTP interface: thin handlers that decode, hand over to the node, and answer; every refusal has a code.

Public: hello, status, runs, run, export. Signed by a registered hotkey: join, reports, heartbeat, directives, grants, reach.
Signed by an allow-listed submitter: runs (POST), uploads. Audits and cases: :mod:`validator.http_audits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from subnet.errors import InputError
from subnet.net.border import HandlerFactory
from subnet.net.http import Call, FrameWriter, Route, answer, create_app
from subnet.net.limits import RequestLimits
from subnet.net.quick import QuickRoute, QuickRoutes, handler_factory
from subnet.protocol import wire
from subnet.protocol.api import ControlRequest, ExportInfo, RunStatus, RunSubmission, RunSummary
from subnet.protocol.messages import (
    LIMIT_JOIN_BYTES,
    LIMIT_REPORT_BYTES,
    LIMIT_SUBMISSION_BYTES,
    GrantRequest,
    Heartbeat,
    Hello,
    JoinAnswer,
    JoinRequest,
    Report,
    ReportAnswer,
)
from subnet.protocol.reach import LIMIT_REACH_BYTES, ReachAnswer, ReachRequest
from subnet.protocol.signing import RequestVerifier
from subnet.store.base import Grant
from subnet.words import Cursor
from validator.directive_stream import DirectiveFeed, checked_kind
from validator.ration import Ration

QUICK_REPORT_BYTES = 256 << 10
"""A report of more bytes is read piece by piece."""


class Backend(Protocol):
    """What the handlers need of the node."""

    def hello(self) -> Hello: ...

    def status(self, run: str | None, num_steps: int) -> RunStatus: ...

    def runs(self) -> tuple[RunSummary, ...]: ...

    async def export(self, run: str, step: int | None) -> ExportInfo: ...

    async def submit(self, hotkey: str, submission: RunSubmission) -> RunSummary: ...

    async def control(self, hotkey: str, run: str, request: ControlRequest) -> RunSummary: ...

    async def join(self, hotkey: str, request: JoinRequest) -> JoinAnswer: ...

    def report(self, hotkey: str, report: Report) -> ReportAnswer: ...

    def heartbeat(self, hotkey: str, beat: Heartbeat) -> None: ...

    async def grants(self, hotkey: str, request: GrantRequest) -> tuple[Grant, ...]: ...

    async def reach(self, hotkey: str, source: str, request: ReachRequest) -> ReachAnswer: ...

    def follow(self, run: str, after: Cursor) -> tuple[DirectiveFeed, int]:
        """The feed and the position at which a reader at ``after`` goes on."""
        ...

    def stream_opened(self, hotkey: str) -> None: ...

    def stream_lost(self, hotkey: str) -> None: ...


MAX_STATUS_STEPS, FREE_STATUS_STEPS = 100_000, 2_000
"""Of ``/v1/status``, which is public: so many at once, and so many whoever asks whenever."""


class HttpApi:
    """``more``: routes of parts that have handlers of their own."""

    def __init__(
        self,
        backend: Backend,
        verifier: RequestVerifier,
        limits: RequestLimits | None = None,
        more: Sequence[Route] = (),
    ) -> None:
        self._backend = backend
        self._steps = Ration("steps of a run", 20_000, MAX_STATUS_STEPS, free=FREE_STATUS_STEPS)
        limits = limits or RequestLimits()
        self.app = create_app([*self._routes(), *more], verifier, limits)
        quick = QuickRoutes(self._quick_routes(), verifier, limits)
        self.handlers: HandlerFactory = lambda server: handler_factory(server, quick)
        """What every member sends each second is answered the short way: to be given to ``listen``."""

    def _routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/hello", self._hello, signed=False),
            Route("GET", "/v1/status", self._status, signed=False),
            Route("GET", "/v1/runs", self._runs, signed=False),
            Route("GET", "/v1/runs/{name}/export", self._export, signed=False),
            Route("POST", "/v1/runs", self._submit, body_limit_bytes=LIMIT_SUBMISSION_BYTES),
            Route("POST", "/v1/runs/{name}/control", self._control, body_limit_bytes=4096),
            Route("POST", "/v1/join", self._join, body_limit_bytes=LIMIT_JOIN_BYTES),
            Route("POST", "/v1/reports", self._report, body_limit_bytes=LIMIT_REPORT_BYTES),
            Route("POST", "/v1/heartbeat", self._heartbeat, body_limit_bytes=4096),
            Route("POST", "/v1/grants", self._grants),
            Route("POST", "/v1/reach", self._reach, body_limit_bytes=LIMIT_REACH_BYTES),
            Route("GET", "/v1/directives", self._directives),
        ]

    def _quick_routes(self) -> list[QuickRoute]:
        return [
            QuickRoute("/v1/reports", self._quick_report, QUICK_REPORT_BYTES),
            QuickRoute("/v1/heartbeat", self._quick_heartbeat, 4096),
        ]

    def _quick_report(self, hotkey: str, body: bytes) -> object:
        report = wire.decode(body, Report, limit_bytes=QUICK_REPORT_BYTES, what="POST /v1/reports")
        return self._backend.report(hotkey, report)

    def _quick_heartbeat(self, hotkey: str, body: bytes) -> object:
        beat = wire.decode(body, Heartbeat, limit_bytes=4096, what="POST /v1/heartbeat")
        return self._backend.heartbeat(hotkey, beat)

    async def _hello(self, call: Call) -> web.StreamResponse:
        return answer(self._backend.hello())

    async def _status(self, call: Call) -> web.StreamResponse:
        run, steps = call.request.query.get("run"), min(number_of(call, "steps", 20), MAX_STATUS_STEPS)
        self._steps.take(steps)
        return answer(self._backend.status(run, steps))

    async def _runs(self, call: Call) -> web.StreamResponse:
        return answer(self._backend.runs())

    async def _export(self, call: Call) -> web.StreamResponse:
        step = number_of(call, "step", -1)
        return answer(await self._backend.export(call.request.match_info["name"], step if step >= 0 else None))

    async def _submit(self, call: Call) -> web.StreamResponse:
        return answer(await self._backend.submit(call.hotkey, call.decode(RunSubmission)))

    async def _control(self, call: Call) -> web.StreamResponse:
        name = call.request.match_info["name"]
        return answer(await self._backend.control(call.hotkey, name, call.decode(ControlRequest)))

    async def _join(self, call: Call) -> web.StreamResponse:
        return answer(await self._backend.join(call.hotkey, call.decode(JoinRequest)))

    async def _report(self, call: Call) -> web.StreamResponse:
        return answer(self._backend.report(call.hotkey, call.decode(Report)))

    async def _heartbeat(self, call: Call) -> web.StreamResponse:
        self._backend.heartbeat(call.hotkey, call.decode(Heartbeat))
        return web.Response(status=204)

    async def _grants(self, call: Call) -> web.StreamResponse:
        return answer(await self._backend.grants(call.hotkey, call.decode(GrantRequest)))

    async def _reach(self, call: Call) -> web.StreamResponse:
        source = call.request.remote or ""
        return answer(await self._backend.reach(call.hotkey, source, call.decode(ReachRequest)))

    async def _directives(self, call: Call) -> web.StreamResponse:
        after = Cursor(number_of(call, "term", 0), number_of(call, "after", 0))
        has = checked_kind(call.request.query.get("view"))
        feed, position = self._backend.follow(call.request.query.get("run", ""), after)
        self._backend.stream_opened(call.hotkey)
        writer = FrameWriter(call)
        try:
            async with writer as out:
                await feed.serve(out, call.hotkey, position, has)
        finally:
            self._backend.stream_lost(call.hotkey)
        return writer.response


def number_of(call: Call, name: str, default: int) -> int:
    text = call.request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InputError(f"query parameter {name}={text!r} is not a whole number")
    return int(text)
