"""The local chain over HTTP on this machine: reads as JSON, signed extrinsics as msgpack, refusals as ``Refusal``.

    GET  /v1/chain                                    which chain, and its newest block
    GET  /v1/blocks/{number}                          its hash
    GET  /v1/accounts/{address}                       next nonce, balance
    GET  /v1/subnets/{netuid}/metagraph | hyperparameters | commitments
    GET  /v1/subnets/{netuid}/weights/{uid}?mechanism=0
    POST /v1/extrinsics                               include one

All use of the chain happens on one thread, in the order of arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web
from loguru import logger

from subnet.chain.extrinsics import SignedExtrinsic
from subnet.chain.genesis import DEFAULT_LOCAL_GENESIS, Genesis
from subnet.chain.local import LocalNode
from subnet.errors import ConfigError, InputError, IotaError, NotFound, TooLarge
from subnet.timing import SYSTEM_CLOCK, Clock

T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9944
MAX_BODY_BYTES = 1 << 20
"""Weights for every uid there can be fit in."""


class ChainServer:
    """A local chain being served. ``start`` opens directory and port, ``stop`` leaves both tidy."""

    def __init__(
        self,
        directory: Path,
        *,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        genesis: Genesis = DEFAULT_LOCAL_GENESIS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._directory, self._genesis, self._clock = directory, genesis, clock
        self._host, self._port = host, port
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chain")
        self._node: LocalNode | None = None
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.url = ""
        """Where it is served, once started; with port 0 the port that was free."""

    async def start(self) -> None:
        try:
            self._node = await self._run(lambda: LocalNode.open(self._directory, self._genesis, clock=self._clock))
            self._runner = web.AppRunner(
                self._application(), access_log=None, handle_signals=False, shutdown_timeout=2.0
            )
            await self._runner.setup()
            site = web.TCPSite(self._runner, self._host, self._port)
            try:
                await site.start()
            except OSError as error:
                hint = "another chain is running, or give another port"
                raise ConfigError(f"can't listen on {self._host}:{self._port}: {error.strerror}", hint=hint) from error
        except BaseException:
            await self.stop()
            raise
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"
        self._ticker = asyncio.create_task(self._tick_forever(), name="chain-ticker")
        logger.info("chain served at {} from {}", self.url, self._directory)

    async def stop(self) -> None:
        """The port first, then the clock, then the database."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        if self._node is not None:
            await self._run(self._node.close)
        self._runner = self._ticker = self._node = None
        self._thread.shutdown(wait=True)

    async def run_forever(self) -> None:
        """Until cancelled, or until the clock's task fails."""
        if self._ticker is None:
            raise ConfigError("the chain server isn't started")
        await asyncio.shield(self._ticker)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _tick_forever(self) -> None:
        """Blocks pass even when nobody asks, so that a restart finds where the chain was."""
        while True:
            await asyncio.sleep(max(0.2, self._genesis.block_time_s))
            try:
                await self._read(lambda node: node.tick())
            except IotaError as error:
                logger.warning("chain: block not recorded: {}", error)

    async def _read(self, call: Callable[[LocalNode], T]) -> T:
        node = self._node
        if node is None:
            raise NotFound("the chain is stopping")
        return await self._run(lambda: call(node))

    # ---- HTTP

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[_refusals], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/chain", self._answer(lambda node, _: node.info())),
                web.get("/v1/blocks/{number}", self._answer(lambda node, r: node.block_hash(_int(r, "number")))),
                web.get("/v1/accounts/{address}", self._answer(lambda node, r: node.account(r.match_info["address"]))),
                web.get(
                    "/v1/subnets/{netuid}/metagraph", self._answer(lambda node, r: node.metagraph(_int(r, "netuid")))
                ),
                web.get(
                    "/v1/subnets/{netuid}/hyperparameters",
                    self._answer(lambda node, r: node.hyperparameters(_int(r, "netuid"))),
                ),
                web.get(
                    "/v1/subnets/{netuid}/commitments",
                    self._answer(lambda node, r: node.commitments(_int(r, "netuid"))),
                ),
                web.get("/v1/subnets/{netuid}/weights/{uid}", self._answer(_weights)),
                web.post("/v1/extrinsics", self._submit),
            ]
        )
        return app

    def _answer(
        self, call: Callable[[LocalNode, web.Request], object]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            return _json(await self._read(lambda node: call(node, request)))

        return handler

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            signed = msgspec.msgpack.decode(body, type=SignedExtrinsic)
        except msgspec.MsgspecError as error:
            raise InputError(f"not a signed extrinsic: {error}") from error
        return _json(await self._read(lambda node: node.submit(signed)))


def _weights(node: LocalNode, request: web.Request) -> object:
    mechanism = request.query.get("mechanism", "0")
    return node.weights(_int(request, "netuid"), _int(request, "uid"), _whole(mechanism, "mechanism"))


def _int(request: web.Request, name: str) -> int:
    return _whole(request.match_info[name], name)


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InputError(f"{name} = {text!r} isn't a whole number")
    return int(text)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal has a body that says why; what isn't foreseen is a 500 with its trace in the log."""
    try:
        return await handler(request)
    except IotaError as error:
        refused = error
    except web.HTTPRequestEntityTooLarge:
        refused = TooLarge(f"more than {MAX_BODY_BYTES} bytes")
    except web.HTTPException as error:
        refused = NotFound(f"{request.method} {request.path}: {error.reason}")
    return _json(refused.refusal(), refused.http_status)


async def serve_chain(
    directory: Path,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    genesis: Genesis = DEFAULT_LOCAL_GENESIS,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the chain in ``directory`` until cancelled; ``on_ready`` is told the URL once it answers."""
    server = ChainServer(directory, host=host, port=port, genesis=genesis)
    await server.start()
    try:
        if on_ready is not None:
            on_ready(server.url)
        await server.run_forever()
    finally:
        await server.stop()
