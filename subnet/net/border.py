"""The border to aiohttp: its errors become ours here, and our errors become answers here, never a 200 around an error.

Server: :func:`refusing` turns every error of a handler, an unknown route and an unknown method into a ``Refusal`` with
its status; :func:`read_body` limits before it reads; :func:`listen` opens the port. Client: :func:`translated` maps
what aiohttp raises, :func:`refusal_error` what a server answered, :func:`retrying` tries again while that can help.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from loguru import logger

from subnet.errors import (
    ConfigError,
    DeadlinePassed,
    InputError,
    IotaError,
    NotFound,
    Refusal,
    Refused,
    TooLarge,
    Unreachable,
)
from subnet.protocol import wire
from subnet.timing import TIMEOUTS, Backoff, Deadline

T = TypeVar("T")

TIME_HEADER = "X-Iota-Time-Ns"
"""On every answer of an authenticating server: its wall clock, so that a client can correct its own."""
MAX_REFUSAL_BYTES = 64 << 10
BACKLOG = 1024
"""Connections that wait to be accepted: a fleet comes back all at once."""
_GATEWAY_STATUSES = (502, 503, 504)


class NoSuchMethod(IotaError):
    code, http_status = "no_such_method", 405


class NoSuchRoute(NotFound):
    code = "no_such_route"


# --- server -----------------------------------------------------------------------------------------------------------


def answer(value: object, *, status: int = 200) -> web.Response:
    """A struct as msgpack."""
    return web.Response(status=status, body=wire.encode(value), content_type=wire.CONTENT_TYPE)


def refusal_response(request: web.BaseRequest, refusal: Refusal, status: int) -> web.Response:
    """msgpack for our own clients, JSON for everybody else."""
    ours = wire.CONTENT_TYPE in request.headers.get("Accept", "")
    body = wire.encode(refusal) if ours else msgspec.json.encode(refusal)
    response = web.Response(status=status, body=body, content_type=wire.CONTENT_TYPE if ours else "application/json")
    if refusal.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(refusal.retry_after)))
    if request.can_read_body and not request.content.is_eof():
        response.force_close()  # the rest of an unread body must not be taken for the next request
    return response


@web.middleware
async def refusing(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Outermost middleware: whatever goes wrong leaves as a ``Refusal``; our own crash is a 500 and a log line."""
    try:
        return await handler(request)
    except IotaError as error:
        return refusal_response(request, error.refusal(), error.http_status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refusal, status = _http_refusal(request, error)
        return refusal_response(request, refusal, status)
    except (ConnectionError, asyncio.CancelledError):
        raise  # the client is gone
    except Exception as error:  # noqa: BLE001 - the outermost border: logged, and answered as ours
        logger.opt(exception=error).error("{} {} failed", request.method, request.path)
        return refusal_response(request, Refusal("internal", "an internal error; the operator's log says more"), 500)


async def expecting(request: web.Request) -> web.StreamResponse | None:
    """The ``expect_handler`` of our routes: aiohttp's own answers in plain text, before any middleware."""
    expected = request.headers.get("Expect", "")
    if expected.lower() != "100-continue":
        refusal = Refusal("bad_request", f"Expect: {expected[:80]!r} isn't understood", hint="100-continue, or none")
        return refusal_response(request, refusal, 417)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the head is not part of the answer
    return None


def _http_refusal(request: web.Request, error: web.HTTPException) -> tuple[Refusal, int]:
    if error.status == 404:
        mine: IotaError = NoSuchRoute(f"nothing at {request.path}", hint="check the URL and the version")
        return mine.refusal(), mine.http_status
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        mine = NoSuchMethod(f"{request.method} isn't allowed at {request.path}", hint=f"allowed: {allowed}")
        return mine.refusal(), mine.http_status
    if error.status == 413:
        return TooLarge("the body is too large").refusal(), 413
    return Refusal("bad_request", error.reason or "bad request"), error.status


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The body, or :class:`TooLarge`: from its announced length where there is one, else once the limit is passed."""
    too_large = TooLarge(f"{request.method} {request.path}: the body has more than {limit_bytes} bytes")
    if request.content_length is not None and request.content_length > limit_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


@dataclass(frozen=True)
class Listener:
    """A server that accepts connections until :meth:`close`."""

    host: str
    port: int
    runner: web.AppRunner
    server: asyncio.AbstractServer | None = None
    """Accepts the connections, where that isn't a site of the runner's."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        await self.runner.cleanup()


HandlerFactory = Callable[["web.Server"], Callable[[], asyncio.Protocol]]


async def listen(
    app: web.Application, host: str, port: int, *, shutdown_s: float = 1.0, handlers: HandlerFactory | None = None
) -> Listener:
    """Serve ``app`` (port 0: any free one); a port in use is a :class:`ConfigError`.

    ``handlers``: makes what makes the connections' protocols, where they aren't aiohttp's own.
    """
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, shutdown_timeout=shutdown_s, logger=_server_log()
    )
    await runner.setup()
    try:
        if handlers is not None and runner.server is not None:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(handlers(runner.server), host, port, backlog=BACKLOG)
            return Listener(host, server.sockets[0].getsockname()[1], runner, server)
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
    except OSError as error:
        await runner.cleanup()
        raise port_error(host, port, error) from error
    addresses: list[tuple[str, int]] = runner.addresses
    return Listener(host=host, port=addresses[0][1], runner=runner)


class _ToOurLog(logging.Handler):
    """What aiohttp says of requests that reach no handler: one line each; bytes that are no HTTP aren't our failure."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            logger.info("{}: {}", record.getMessage(), " ".join(str(error).split()))
        else:
            logger.opt(exception=error).log("ERROR" if record.levelno >= logging.ERROR else "INFO", record.getMessage())


def _server_log() -> logging.Logger:
    log = logging.getLogger("iota.http")
    log.propagate = False
    if not log.handlers:
        log.addHandler(_ToOurLog())
    return log


def os_reason(error: OSError) -> str:
    """``Connection refused`` rather than asyncio's longer words."""
    return os.strerror(error.errno) if error.errno is not None else str(error)


def port_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't listen on {host}:{port}: {os_reason(error)}", hint="stop what holds the port, or choose another"
    )


# --- client -----------------------------------------------------------------------------------------------------------


@contextmanager
def translated(what: str) -> Generator[None]:
    """aiohttp's errors as ours; ``what`` names the request in the message."""
    try:
        yield
    except TimeoutError as error:
        raise DeadlinePassed(f"{what}: no answer in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        mine = client_error(what, error)
        if mine is None:
            raise
        raise mine from error


def client_error(what: str, error: Exception) -> IotaError | None:
    """Our error for one of aiohttp's (or of the sockets below it); None for anything else."""
    text = " ".join(str(error).split()) or type(error).__name__
    match error:
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return ConfigError(f"{what}: not an http URL", hint="such as http://127.0.0.1:8091")
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError() | aiohttp.ServerFingerprintMismatch():
            return ConfigError(f"{what}: no TLS connection: {text}", hint="http:// or https://?")
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            return Unreachable(f"{what}: {text}")
        case aiohttp.ClientResponseError():
            return not_ours(
                what, f"an answer that isn't HTTP as we speak it ({' '.join(error.message.split()) or text})"
            )
        case aiohttp.ClientError() | OSError():
            return Unreachable(f"{what}: {text}")
        case _:
            return None


def not_ours(what: str, came: str) -> ConfigError:
    return ConfigError(f"{what}: {came}", hint="check the URL: something else seems to listen there")


def describe_answer(status: int, content_type: str, body: bytes) -> str:
    head = " ".join(body[:80].decode("utf-8", "replace").split())
    return f"answered {status} {content_type or 'without a type'}, starting {head!r}"


def refusal_error(what: str, status: int, content_type: str, body: bytes) -> IotaError:
    """What an answer of 300 or more means: the refusal in it, a gateway's trouble, or somebody else's server."""
    try:
        if content_type == wire.CONTENT_TYPE:
            refusal = wire.decode(body, Refusal, limit_bytes=MAX_REFUSAL_BYTES, what=what)
            return Refused(refusal, status=status, who=what)
        if content_type == "application/json":
            return Refused(msgspec.json.decode(body[:MAX_REFUSAL_BYTES], type=Refusal), status=status, who=what)
    except (InputError, msgspec.DecodeError) as error:
        return not_ours(what, f"answered {status} with a refusal that isn't ours ({error})")
    if status in _GATEWAY_STATUSES:
        return Unreachable(f"{what}: {describe_answer(status, content_type, body)}")
    return not_ours(what, describe_answer(status, content_type, body))


async def read_answer(response: aiohttp.ClientResponse, limit_bytes: int, what: str) -> bytes:
    """The answer's body, never more than ``limit_bytes``."""
    if response.content_length is not None and response.content_length > limit_bytes:
        raise TooLarge(f"{what}: an answer of {response.content_length} bytes, more than {limit_bytes}")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise TooLarge(f"{what}: an answer of more than {limit_bytes} bytes")
    return bytes(body)


async def retrying(
    attempt: Callable[[Deadline], Awaitable[T]],
    deadline: Deadline,
    *,
    try_s: float = TIMEOUTS.http_request_s,
    stop_at: tuple[type[IotaError], ...] = (),
    rng: random.Random | None = None,
) -> T:
    """Try until it works, the error is permanent (or one of ``stop_at``), or the next wait would pass the deadline."""
    backoff = Backoff(rng=rng)
    while True:
        try:
            return await attempt(deadline.sooner(try_s))
        except IotaError as error:
            if not error.retryable or isinstance(error, stop_at):
                raise
            wait_s = backoff.next_s()
            if error.retry_after_s is not None and not isinstance(error, Unreachable):
                wait_s = max(wait_s, error.retry_after_s)
            if wait_s >= deadline.remaining_s():
                raise
        await asyncio.sleep(wait_s)
