"""Routes of audits and cases: thin handlers that decode, ask the :class:`~validator.audit_desk.AuditDesk`, and answer."""

from __future__ import annotations

from aiohttp import web

from subnet.errors import InputError
from subnet.net.http import Call, Route, answer
from subnet.protocol.audit_api import LIMIT_AUDIT_REQUEST_BYTES, AppealRequest, AuditsRequest, WitnessRequest
from validator.audit_desk import AuditDesk


def audit_routes(desk: AuditDesk) -> list[Route]:
    async def cases(call: Call) -> web.StreamResponse:
        return answer(await desk.cases(_run(call)))

    async def case(call: Call) -> web.StreamResponse:
        return answer(await desk.case(_run(call), _case(call)))

    async def bundle(call: Call) -> web.StreamResponse:
        start = _number(call.request.query.get("start", "0"), "start")
        return answer(await desk.bundle(_run(call), _case(call), start))

    async def appeal(call: Call) -> web.StreamResponse:
        return answer(await desk.appeal(call.hotkey, call.decode(AppealRequest)))

    async def witness(call: Call) -> web.StreamResponse:
        return answer(await desk.witness(call.hotkey, call.decode(WitnessRequest)))

    async def audits(call: Call) -> web.StreamResponse:
        return answer(await desk.request_audits(call.hotkey, call.decode(AuditsRequest)))

    limit = LIMIT_AUDIT_REQUEST_BYTES
    return [
        Route("GET", "/v1/cases", cases, signed=False),
        Route("GET", "/v1/cases/{case}", case, signed=False),
        Route("GET", "/v1/cases/{case}/bundle", bundle, signed=False),
        Route("POST", "/v1/appeals", appeal, body_limit_bytes=limit),
        Route("POST", "/v1/witness", witness, body_limit_bytes=limit),
        Route("POST", "/v1/audits", audits, body_limit_bytes=limit),
    ]


def _run(call: Call) -> str:
    return call.request.query.get("run", "")


def _case(call: Call) -> int:
    return _number(call.request.match_info["case"], "the case")


def _number(text: str, what: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InputError(f"{what} = {text!r} is not a whole number")
    return int(text)
