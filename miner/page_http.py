"""The miner's page on a port of this machine alone. Reading is free to whoever is on the machine; changing takes the token.

``GET /``, ``/page/FILE``, ``/v1/miner``, ``/v1/miner/score``, ``/v1/miner/logs?after=N``; ``POST /v1/miner/caps`` and
``/v1/miner/work`` with ``Authorization: Bearer TOKEN``. Other names than this machine's own (a stranger's that leads here)
and other sites are refused.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from miner.log_tail import LogLine
from miner.page_view import CapsChange, MinerView, WorkChange, check_caps
from subnet.errors import AuthFailed, InputError
from subnet.net.http import Call, Handler, Route, create_app
from subnet.net.pages import Assets, json_answer, require_same_origin
from subnet.protocol.signing import RequestVerifier
from subnet.score.api import ScoreDetail
from subnet.store.disk import atomic_write

T = TypeVar("T")
PAGES = Path(__file__).parent / "pages"
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
TOKEN_FILE = "page-token"
LIMIT_BODY_BYTES = 1 << 10


class TokenNeeded(AuthFailed):
    """What changes something takes the token that is in a file of this miner's."""

    code = "token_needed"


class MinerDesk(Protocol):
    """What the page needs of the node."""

    def look(self) -> MinerView: ...

    async def own_score(self) -> ScoreDetail:
        """As the validator tells it; its refusal, or Unreachable."""
        ...

    def logs(self, after: int) -> tuple[LogLine, ...]:
        """The log's last lines that came after this one."""
        ...

    def change_caps(self, change: CapsChange) -> None: ...

    async def set_working(self, working: bool) -> None: ...


def page_token(directory: Path) -> str:
    """Made at the first start, readable by this user alone."""
    path = directory / TOKEN_FILE
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    token = secrets.token_urlsafe(24)
    atomic_write(path, f"{token}\n".encode(), mode=0o600)
    return token


class MinerPage:
    def __init__(self, desk: MinerDesk, token: str, token_path: Path) -> None:
        self._desk, self._token, self._token_path = desk, token, token_path
        self._assets = Assets(PAGES)

    def app(self, hotkey: str) -> web.Application:
        reads: dict[str, Handler] = {
            "/": self._index,
            "/page/{file}": self._file,
            "/v1/miner": self._view,
            "/v1/miner/score": self._score,
            "/v1/miner/logs": self._logs,
        }
        writes: dict[str, Handler] = {"/v1/miner/caps": self._caps, "/v1/miner/work": self._work}
        routes = [
            Route("GET", path, _local(handler), signed=False, body_limit_bytes=0) for path, handler in reads.items()
        ]
        for path, handler in writes.items():
            kept = _local(self._with_token(handler))
            routes.append(Route("POST", path, kept, signed=False, body_limit_bytes=LIMIT_BODY_BYTES))
        return create_app(routes, RequestVerifier(hotkey, is_known=lambda _: False))

    def _with_token(self, handler: Handler) -> Handler:
        async def handle(call: Call) -> web.StreamResponse:
            kind, _, token = call.request.headers.get("Authorization", "").partition(" ")
            if kind != "Bearer" or not hmac.compare_digest(token.encode(), self._token.encode()):
                said = "another token" if token else "no token"
                raise TokenNeeded(f"{said}: this would change something", hint=f"it is in {self._token_path}")
            return await handler(call)

        return handle

    async def _index(self, call: Call) -> web.StreamResponse:
        return self._assets.answer(call, "index.html")

    async def _file(self, call: Call) -> web.StreamResponse:
        return self._assets.answer(call, call.request.match_info["file"])

    async def _view(self, call: Call) -> web.StreamResponse:
        return await json_answer(call, self._desk.look())

    async def _score(self, call: Call) -> web.StreamResponse:
        return await json_answer(call, await self._desk.own_score())

    async def _logs(self, call: Call) -> web.StreamResponse:
        after = call.request.query.get("after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 18:
            raise InputError(f"after={after[:40]!r} is no line's number", hint="-1: all that are kept")
        return await json_answer(call, self._desk.logs(int(after)))

    async def _caps(self, call: Call) -> web.StreamResponse:
        change = _decoded(call, CapsChange)
        check_caps(change)
        self._desk.change_caps(change)
        return await json_answer(call, self._desk.look())

    async def _work(self, call: Call) -> web.StreamResponse:
        await self._desk.set_working(_decoded(call, WorkChange).working)
        return await json_answer(call, self._desk.look())


def _local(handler: Handler) -> Handler:
    async def handle(call: Call) -> web.StreamResponse:
        name = urlsplit(f"//{call.request.headers.get('Host', '')}").hostname
        if name not in LOCAL_NAMES:
            raise AuthFailed(f"asked for as {name!r}", hint="open http://127.0.0.1 with the page's port")
        require_same_origin(call.request.headers)
        return await handler(call)

    return handle


def _decoded(call: Call, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(call.body, type=kind)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{call.request.method} {call.request.path}: {error}", hint="JSON, see docs/page.md"
        ) from error
