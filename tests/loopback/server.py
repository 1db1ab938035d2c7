"""The loopback node behind a real websocket on 127.0.0.1, and the faults a test may order."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from loopback.node import Block, LoopbackNode, RpcError

METHODS = (
    "author_submitAndWatchExtrinsic",
    "author_submitExtrinsic",
    "author_unwatchExtrinsic",
    "account_nextIndex",
    "chain_getBlock",
    "chain_getBlockHash",
    "chain_getFinalizedHead",
    "chain_getHead",
    "chain_getHeader",
    "rpc_methods",
    "state_call",
    "state_getKeysPaged",
    "state_getMetadata",
    "state_getRuntimeVersion",
    "state_getStorage",
    "state_getStorageAt",
    "state_queryStorageAt",
    "system_accountNextIndex",
    "system_chain",
    "system_properties",
)

STATUSES = ("dropped", "invalid")
CLOSE_S = 5.0


class Faults:
    """One-shot, counted: each fires at the next request of its method, and says that it did."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, str]] = []
        self.fired: Counter[str] = Counter()

    def at(self, method: str, fault: str, times: int = 1) -> Faults:
        """``fault``: ``drop`` (the socket, before the answer), ``drop_after`` (the request took effect),
        ``internal`` (-32603), ``silent`` (no answer), ``chatter`` (no answer but a second of notes nobody asked for),
        ``garbage`` (no JSON), ``dropped`` and the like (a status of a watched call after which it isn't included)."""
        self._waiting += [(method, fault)] * times
        return self

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, method: str) -> str | None:
        for index, (waiting, fault) in enumerate(self._waiting):
            if waiting == method:
                del self._waiting[index]
                self.fired[fault] += 1
                return fault
        return None


class LoopbackServer:
    """``async with LoopbackServer(node) as server: server.url``"""

    def __init__(self, node: LoopbackNode) -> None:
        self.node, self.faults = node, Faults()
        self.requests: Counter[str] = Counter()
        self.url = ""
        self.spec_name = "node-subtensor"
        self._server: Server | None = None
        self._ids = itertools.count(1)
        self._answers: dict[str, Callable[[list[Any]], Any]] = {
            method: getattr(self, "_" + method) for method in METHODS if not method.startswith("author_submitAnd")
        }

    async def __aenter__(self) -> LoopbackServer:
        self._server = await serve(self._talk, "127.0.0.1", 0, max_size=64 << 20, compression=None)
        port = next(iter(self._server.sockets)).getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Whoever hasn't said goodbye within ``CLOSE_S`` is cut off."""
        if self._server is None:
            return
        self._server.close()
        ending = asyncio.ensure_future(self._server.wait_closed())
        if not (await asyncio.wait({ending}, timeout=CLOSE_S))[0]:
            await self.drop_all()
            await asyncio.wait_for(ending, CLOSE_S)

    async def drop_all(self) -> None:
        """Cut every connection."""
        assert self._server is not None
        for connection in list(self._server.connections):
            connection.transport.abort()

    async def _talk(self, connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            await self._listen(connection)

    async def _listen(self, connection: ServerConnection) -> None:
        async for text in connection:
            frame = json.loads(text)
            batch = frame if isinstance(frame, list) else [frame]
            answers = [answer for request in batch if (answer := await self._answer(connection, request)) is not None]
            if answers:
                await connection.send(json.dumps(answers if isinstance(frame, list) else answers[0]))
            for request in batch:
                await self._notify(connection, request)

    async def _answer(self, connection: ServerConnection, request: dict[str, Any]) -> dict[str, Any] | None:
        method, number = request["method"], request["id"]
        self.requests[method] += 1
        fault = self.faults.take(method)
        if fault == "drop":
            connection.transport.abort()
            return None
        if fault == "silent":
            return None
        if fault == "chatter":
            for _ in range(50):
                await connection.send('{"jsonrpc":"2.0","method":"note","params":{"subscription":"x","result":0}}')
                await asyncio.sleep(0.02)
            return None
        if fault == "garbage":
            await connection.send("<html>this isn't JSON</html>")
            return None
        if fault == "internal":
            return _failed(number, RpcError(-32603, "Internal error"))
        try:
            if method == "author_submitAndWatchExtrinsic" and fault in STATUSES:
                request["status"] = fault
                result = request["subscription"] = f"watch{next(self._ids)}"
            elif method == "author_submitAndWatchExtrinsic":
                request["block"] = self.node.submit(bytes.fromhex(request["params"][0].removeprefix("0x")))
                result = request["subscription"] = f"watch{next(self._ids)}"
            else:
                handler = self._answers.get(method)
                if handler is None:
                    raise RpcError(-32601, f"Method not found: {method}")
                result = handler(request.get("params") or [])
        except RpcError as error:
            return _failed(number, error)
        if fault == "drop_after":
            connection.transport.abort()
            return None
        return {"jsonrpc": "2.0", "id": number, "result": result}

    async def _notify(self, connection: ServerConnection, request: dict[str, Any]) -> None:
        if "subscription" not in request:
            return
        if "status" in request:
            params = {"subscription": request["subscription"], "result": request["status"]}
            body = {"jsonrpc": "2.0", "method": "author_extrinsicUpdate", "params": params}
            await connection.send(json.dumps(body))
            return
        for status in ("ready", {"inBlock": request["block"].hash}, {"finalized": request["block"].hash}):
            params = {"subscription": request["subscription"], "result": status}
            body = {"jsonrpc": "2.0", "method": "author_extrinsicUpdate", "params": params}
            await connection.send(json.dumps(body))
            await asyncio.sleep(0)

    # ---- methods

    def _author_submitExtrinsic(self, params: list[Any]) -> str:
        self.node.submit(bytes.fromhex(params[0].removeprefix("0x")))
        return "0x" + "0" * 64

    def _author_unwatchExtrinsic(self, params: list[Any]) -> bool:
        return True

    def _account_nextIndex(self, params: list[Any]) -> int:
        return self.node.state.nonces.get(params[0], 0)

    _system_accountNextIndex = _account_nextIndex

    def _chain_getHead(self, params: list[Any]) -> str:
        return self.node.head.hash

    def _chain_getFinalizedHead(self, params: list[Any]) -> str:
        return self.node.finalized.hash

    def _chain_getBlockHash(self, params: list[Any]) -> str | None:
        number = params[0] if params else None
        if number is None:
            return self.node.head.hash
        if number == 0:
            return self.node.genesis_hash
        return next((block.hash for block in self.node.blocks if block.number == number), None)

    def _header(self, block: Block) -> dict[str, Any]:
        root = "0x" + "0" * 64
        return {
            "parentHash": block.parent,
            "number": hex(block.number),
            "stateRoot": root,
            "extrinsicsRoot": root,
            "digest": {"logs": []},
        }

    def _chain_getHeader(self, params: list[Any]) -> dict[str, Any]:
        return self._header(self.node.block_at(params[0] if params else None))

    def _chain_getBlock(self, params: list[Any]) -> dict[str, Any]:
        block = self.node.block_at(params[0] if params else None)
        return {"block": {"header": self._header(block), "extrinsics": block.extrinsics}, "justifications": None}

    def _rpc_methods(self, params: list[Any]) -> dict[str, Any]:
        return {"methods": list(METHODS)}

    def _state_getRuntimeVersion(self, params: list[Any]) -> dict[str, Any]:
        return {
            "specName": self.spec_name,
            "implName": "node-subtensor",
            "authoringVersion": 1,
            "specVersion": self.node.spec_version,
            "implVersion": 1,
            "apis": [],
            "transactionVersion": self.node.transaction_version,
            "stateVersion": 1,
        }

    def _state_getMetadata(self, params: list[Any]) -> str:
        return "0x" + self.node.metadata_v14.hex()

    def _state_getStorageAt(self, params: list[Any]) -> str | None:
        return self.node.block_at(params[1] if len(params) > 1 else None).storage.get(params[0])

    _state_getStorage = _state_getStorageAt

    def _state_queryStorageAt(self, params: list[Any]) -> list[Any]:
        block = self.node.block_at(params[1] if len(params) > 1 else None)
        return [{"block": block.hash, "changes": [[key, block.storage.get(key)] for key in params[0]]}]

    def _state_getKeysPaged(self, params: list[Any]) -> list[str]:
        prefix, count, start, block_hash = (params + [None] * 4)[:4]
        storage = self.node.block_at(block_hash).storage
        keys = sorted(key for key in storage if key.startswith(prefix))
        return [key for key in keys if start is None or key > start or start == prefix][:count]

    def _state_call(self, params: list[Any]) -> str:
        name, argument = params[0], bytes.fromhex(params[1].removeprefix("0x"))
        if name == "Metadata_metadata_at_version":
            if int.from_bytes(argument, "little") != 15:
                return "0x00"
            blob = self.node.metadata_v15
            return "0x01" + (_compact(len(blob)) + blob).hex()
        if name == "SubnetInfoRuntimeApi_get_metagraph":
            return "0x" + self.node.metagraph(int.from_bytes(argument, "little")).hex()
        if name == "TransactionPaymentApi_query_info":
            output = self.node.runtime.runtime_api_map()["TransactionPaymentApi"]["query_info"]["output"]
            info = {"weight": {"ref_time": 1, "proof_size": 1}, "class": "Normal", "partial_fee": 0}
            return "0x" + bytes(self.node.runtime.encode(output, info)).hex()
        if name == "AccountNonceApi_account_nonce":
            raise RpcError(4003, "Client error: not served by the loopback node")
        raise RpcError(4003, f"Client error: Execution failed: Exported method {name} is not found")

    def _system_chain(self, params: list[Any]) -> str:
        return "Loopback"

    def _system_properties(self, params: list[Any]) -> dict[str, Any]:
        return {"ss58Format": 42, "tokenDecimals": 9, "tokenSymbol": "TAO"}


def _failed(number: int, error: RpcError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": error.body}


def _compact(value: int) -> bytes:
    return ((value << 2) | 2).to_bytes(4, "little")
