"""A Bittensor network through ``substrate-interface``, which knows nothing of Bittensor: every call and every storage
item comes from the metadata of the chain as it runs. For the day the SDK and the runtime disagree.

The library blocks, so it lives on one thread; each of its requests ends by the caller's deadline. It is handed a fresh
connection after an error and after each submission: its queue keeps what nobody asked for. Decoding the metadata
takes seconds of processor time, once per runtime version; the call that meets a new version may run into its deadline,
and the next one finds it decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, TypeVar, cast

from loguru import logger
from scalecodec.base import RuntimeConfigurationObject, ScaleBytes  # pyright: ignore[reportMissingTypeStubs]
from scalecodec.exceptions import RemainingScaleBytesNotEmptyException  # pyright: ignore[reportMissingTypeStubs]
from scalecodec.type_registry import load_type_registry_preset  # pyright: ignore[reportMissingTypeStubs]
from scalecodec.utils.ss58 import ss58_decode  # pyright: ignore[reportMissingTypeStubs]
from substrateinterface import SubstrateInterface  # pyright: ignore[reportMissingTypeStubs]
from substrateinterface.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    BlockNotFound,
    ExtrinsicNotFound,
    SubstrateRequestException,
)
from substrateinterface.transport import WebsocketTransport  # pyright: ignore[reportMissingTypeStubs]
from websocket import WebSocket, WebSocketException  # pyright: ignore[reportMissingTypeStubs]

from subnet.chain import subtensor_view as view
from subnet.chain.base import KeySigner
from subnet.chain.pool_errors import SIGN_ANEW, STATUSES, pool_error_name, refusal_named
from subnet.chain.refusals import ChainRefused
from subnet.chain.subtensor import SubtensorChain
from subnet.chain.subtensor_link import Head, Inclusion, Item, RawCall, RuntimeMismatch, RuntimeVersion
from subnet.errors import DeadlinePassed, IotaError, Unreachable
from subnet.timing import TIMEOUTS, Deadline

T = TypeVar("T")

ERA_BLOCKS = 64
"""Blocks for which a signed call is good."""
SIGN_TRIES = 3
SS58_FORMAT = 42
PAGE = 1000
MAX_DECODED = 3
_DECODED: dict[bytes, Any] = {}
"""Metadata by the digest of its bytes, the newest few. Only read once decoded."""


class _Socket(WebSocket):  # pyright: ignore[reportUntypedBaseClass]
    """Each message comes by the deadline, however many come that nobody asked for."""

    deadline: Deadline | None = None

    def recv(self) -> Any:
        if self.deadline is not None:
            self.settimeout(_remaining_s(self.deadline))
        return super().recv()


class _Connection(SubstrateInterface):  # pyright: ignore[reportUntypedBaseClass]
    """The library's client with a deadline on each request. Used from one thread."""

    def __init__(self, url: str, deadline: Deadline) -> None:
        self.deadline = deadline
        self.pinned: str | None = None
        """Block whose runtime the library goes by where no other is named; without it, it asks for the head each time."""
        timeout_s = _remaining_s(deadline)
        super().__init__(
            url=url,
            ss58_format=SS58_FORMAT,
            auto_discover=False,
            auto_reconnect=False,
            ws_options={"timeout": timeout_s, "class_": _Socket},
        )

    def renew(self) -> None:
        """A fresh connection with an empty queue; what was learnt of the runtime is kept."""
        transport: Any = self.transport
        with suppress(WebSocketException, OSError):  # it may be broken already
            transport.close()
        options = {"timeout": _remaining_s(self.deadline), "class_": _Socket}
        self.transport = WebsocketTransport(url=self.url, ws_options=options, auto_reconnect=False)
        self.block_hash = None

    def init_runtime(self, block_hash: str | None = None, block_id: int | None = None) -> None:
        super().init_runtime(block_hash if block_hash or block_id is not None else self.pinned, block_id)

    def get_block_metadata(self, block_hash: str | None = None, decode: bool = True) -> Any:
        raw: Any = super().get_block_metadata(block_hash, decode=False)
        if not decode or not isinstance(raw.get("result"), str):
            return raw
        return decoded_metadata(raw["result"])

    def rpc_request(self, method: str, params: Any, result_handler: Any = None) -> Any:
        transport: Any = self.transport
        transport.websocket.deadline = self.deadline
        transport.websocket.settimeout(_remaining_s(self.deadline))
        return super().rpc_request(method, params, result_handler)

    def ask(self, method: str, params: Sequence[object]) -> Any:
        return self.rpc_request(method, list(params))["result"]


def decoded_metadata(blob: str) -> Any:
    """Metadata from its hex. Once per process: the same bytes are the same metadata, whoever sends them."""
    digest = blake2b(blob.encode()).digest()
    known = _DECODED.pop(digest, None)
    if known is None:
        config: Any = RuntimeConfigurationObject(ss58_format=SS58_FORMAT)
        config.clear_type_registry()
        for preset in ("core", "legacy"):
            config.update_type_registry(load_type_registry_preset(preset))
        known = config.create_scale_object("MetadataVersioned", data=ScaleBytes(blob))
        known.decode()
        config.implements_scale_info = True
        config.add_portable_registry(known)  # the metadata looks its own types up there
        while len(_DECODED) >= MAX_DECODED:
            del _DECODED[next(iter(_DECODED))]
    _DECODED[digest] = known
    return known


def _remaining_s(deadline: Deadline) -> float:
    deadline.check("the node's answer")
    return max(0.05, deadline.remaining_s())


class _Key:
    """A key as the library wants one."""

    crypto_type = 1

    def __init__(self, signer: KeySigner) -> None:
        self._signer = signer
        self.ss58_address = signer.hotkey
        self.public_key = bytes.fromhex(ss58_decode(signer.hotkey, valid_ss58_format=SS58_FORMAT))

    def sign(self, payload: Any) -> bytes:
        return self._signer.sign(bytes(payload.data))


class SubstrateLink:
    """:class:`~subnet.chain.subtensor_link.SubtensorLink` over one blocking client, connected on first use."""

    def __init__(self, endpoint: str) -> None:
        self.library = f"substrate-interface {version('substrate-interface')}"
        self.endpoint = endpoint
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="substrate")
        self._connection: _Connection | None = None
        self._stale = False

    async def close(self) -> None:
        """Once the thread has done what it is at, which has a deadline; what takes longer ends without us."""
        hanging_up = asyncio.get_running_loop().run_in_executor(self._thread, self._hang_up)
        self._thread.shutdown(wait=False)
        done, _ = await asyncio.wait({hanging_up}, timeout=2 * TIMEOUTS.chain_close_s)
        if not done:
            logger.warning("{}: the connection is still at work; it closes later", self.endpoint)

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(WebSocketException, OSError):  # it may be broken already
                connection.close()

    async def _run(self, what: str, deadline: Deadline, work: Callable[[_Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        async with deadline.limit(f"{self.endpoint}: {what}"):
            return await loop.run_in_executor(self._thread, self._work, what, deadline, work)

    def _work(self, what: str, deadline: Deadline, work: Callable[[_Connection], T]) -> T:
        with _translated(self.endpoint, what):
            try:
                return work(self._connected(deadline))
            except (WebSocketException, OSError, DeadlinePassed):
                self._stale = True
                raise

    def _connected(self, deadline: Deadline) -> _Connection:
        deadline.check(self.endpoint)
        if self._connection is None:
            self._connection = _Connection(self.endpoint, deadline)
        self._connection.deadline = deadline
        if self._stale:
            self._connection.renew()
            self._stale = False
        return self._connection

    async def runtime(self, deadline: Deadline) -> RuntimeVersion:
        def work(node: _Connection) -> RuntimeVersion:
            found = view.fields(node.ask("state_getRuntimeVersion", []), "state_getRuntimeVersion")
            spec, transaction = found.get("specVersion"), found.get("transactionVersion")
            name = str(found.get("specName"))
            return RuntimeVersion(name, view.whole(spec, "specVersion"), view.whole(transaction, "transactionVersion"))

        return await self._run("runtime version", deadline, work)

    async def head(self, deadline: Deadline) -> Head:
        return await self._run("best block", deadline, lambda node: _head(node, node.ask("chain_getHead", [])))

    async def finalized(self, deadline: Deadline) -> Head:
        return await self._run(
            "finalized block", deadline, lambda node: _head(node, node.ask("chain_getFinalizedHead", []))
        )

    async def hash_of(self, number: int, deadline: Deadline) -> str:
        def work(node: _Connection) -> str:
            found = node.ask("chain_getBlockHash", [number])
            if not isinstance(found, str):
                raise Unreachable(f"{self.endpoint} has no block {number}")
            return found

        return await self._run(f"hash of block {number}", deadline, work)

    async def constant(self, pallet: str, name: str, deadline: Deadline) -> object:
        def work(node: _Connection) -> object:
            found: Any = node.get_constant(pallet, name)
            return None if found is None else found.value

        return await self._run(f"constant {pallet}.{name}", deadline, work)

    async def read(self, items: Sequence[Item], at: str, deadline: Deadline) -> list[object]:
        def work(node: _Connection) -> list[object]:
            node.pinned = at
            keys = [node.create_storage_key(item.pallet, item.name, list(item.keys)) for item in items]
            found: Any = node.query_multi(keys, block_hash=at) if keys else []
            by_key = {key.to_hex(): value.value for key, value in found}
            return [by_key.get(key.to_hex()) for key in keys]

        names = dict.fromkeys(str(item) for item in items)
        return await self._run(f"storage {', '.join(names)}", deadline, work)

    async def read_map(
        self, pallet: str, name: str, prefix: Sequence[int | str], at: str, deadline: Deadline
    ) -> list[tuple[object, object]]:
        def work(node: _Connection) -> list[tuple[object, object]]:
            node.pinned = at
            found: Any = node.query_map(pallet, name, list(prefix), block_hash=at, page_size=PAGE)
            return [(key.value, value.value) for key, value in found]

        return await self._run(f"storage {pallet}.{name}", deadline, work)

    async def lacking(self, items: Sequence[Item], calls: Sequence[RawCall], deadline: Deadline) -> list[str]:
        def work(node: _Connection) -> list[str]:
            node.pinned = str(node.ask("chain_getHead", []))
            node.init_runtime()
            missing = [f"storage {item}" for item in items if not _has_storage(node, item)]
            for call in calls:
                try:
                    _compose(node, call)
                except RuntimeMismatch as mismatch:
                    missing.append(f"call {call} ({mismatch.reason})")
            return missing

        return await self._run("metadata", deadline, work)

    async def submit(self, call: RawCall, signer: KeySigner, deadline: Deadline) -> Inclusion:
        """What a fresh nonce, era or runtime version cures is signed anew."""

        def work(node: _Connection) -> Inclusion:
            try:
                return _submit(node, call, _Key(signer))
            finally:
                self._stale = True

        for _ in range(SIGN_TRIES - 1):
            try:
                return await self._run(str(call), deadline, work)
            except ChainRefused as refused:
                if refused.code not in SIGN_ANEW:
                    raise
        return await self._run(str(call), deadline, work)


class SubstrateChain(SubtensorChain):
    def __init__(self, endpoint: str, hotkey: KeySigner | None = None) -> None:
        super().__init__(SubstrateLink(endpoint), hotkey)


# ---- with the library, on its thread


def _head(node: _Connection, block_hash: str) -> Head:
    header = view.fields(node.ask("chain_getHeader", [block_hash]), "chain_getHeader")
    return Head(int(str(header.get("number")), 16), block_hash)


def _has_storage(node: _Connection, item: Item) -> bool:
    pallets: Any = node.get_metadata_module(item.pallet)
    return pallets is not None and node.get_metadata_storage_function(item.pallet, item.name) is not None


def _compose(node: _Connection, call: RawCall) -> Any:
    try:
        return node.compose_call(call.pallet, call.name, dict(call.params))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise RuntimeMismatch(f"{call}: {error}") from error


def _submit(node: _Connection, call: RawCall, key: _Key) -> Inclusion:
    node.pinned = str(node.ask("chain_getHead", []))
    node.init_runtime()
    composed = _compose(node, call)
    nonce = view.whole(node.ask("system_accountNextIndex", [key.ss58_address]), "system_accountNextIndex")
    current = _head(node, node.ask("chain_getFinalizedHead", [])).number
    era = {"period": ERA_BLOCKS, "current": current}
    signed: Any = node.create_signed_extrinsic(composed, cast("Any", key), era=era, nonce=nonce)
    data = bytes(signed.data.data)
    block_hash = _watch(node, data)
    return _outcome(node, data, block_hash)


def _watch(node: _Connection, data: bytes) -> str:
    """The block that includes it; a status after which none will is a refusal."""

    def on_status(message: Any, number: int, subscription: Any) -> str | None:
        del number, subscription
        node.deadline.check("inclusion")
        status = message["params"]["result"]
        named: dict[str, Any] = {status: None} if isinstance(status, str) else dict(status)
        for kind, value in named.items():
            if kind.lower() in STATUSES:
                raise refusal_named(STATUSES[kind.lower()], "", 1.0)
            if kind.lower() in ("inblock", "finalized"):
                return str(value)
        return None

    return node.rpc_request("author_submitAndWatchExtrinsic", ["0x" + data.hex()], result_handler=on_status)


def _outcome(node: _Connection, data: bytes, block_hash: str) -> Inclusion:
    """From the events of the block; a failed dispatch is a refusal by the runtime's name."""
    block: Any = node.ask("chain_getBlock", [block_hash])["block"]
    digests = [blake2b(bytes.fromhex(raw[2:]), digest_size=32).digest() for raw in block["extrinsics"]]
    digest = blake2b(data, digest_size=32).digest()
    if digest not in digests:
        raise Unreachable(f"block {block_hash} doesn't hold the call it was said to hold")
    index = digests.index(digest)
    for event in node.get_events(block_hash):
        shown: Any = event.value
        if shown["extrinsic_idx"] == index and shown["module_id"] == "System":
            if shown["event_id"] == "ExtrinsicFailed":
                raise _dispatch_refusal(node, shown["attributes"]["dispatch_error"])
            if shown["event_id"] == "ExtrinsicSuccess":
                return Inclusion(int(block["header"]["number"], 16), block_hash)
    raise Unreachable(f"block {block_hash} doesn't say what became of the call")


def _dispatch_refusal(node: _Connection, error: Any) -> ChainRefused:
    if isinstance(error, dict) and "Module" in error:
        shown = cast("Mapping[str, Any]", error)["Module"]
        number = int(shown["error"][2:4], 16) if isinstance(shown["error"], str) else int(shown["error"])
        metadata: Any = node.metadata
        named = metadata.get_module_error(module_index=shown["index"], error_index=number)
        return refusal_named(str(named.name), " ".join(named.docs), 1.0)
    name = next(iter(cast("Mapping[str, Any]", error))) if isinstance(error, dict) else str(error)
    return refusal_named(str(name), f"the dispatch failed: {error}", 1.0)


@contextmanager
def _translated(endpoint: str, what: str) -> Generator[None]:
    """The library's exceptions as this project's, at one border; a test has every class of them."""
    try:
        yield
    except Exception as error:
        translated = translate(error, endpoint, what)
        if translated is None:
            raise
        raise translated from error


def translate(error: Exception, endpoint: str, what: str) -> Exception | None:
    """None where the error is nothing of the library's: it passes as it is."""
    if isinstance(error, IotaError):
        return None
    if isinstance(error, SubstrateRequestException):
        said: object = error.args[0] if error.args else error
        name = pool_error_name(said)
        return refusal_named(name, str(said), 1.0) if name else Unreachable(f"{endpoint}: {what}: {said}")
    if isinstance(error, (BlockNotFound, ExtrinsicNotFound)):
        return Unreachable(f"{endpoint}: {what}: {error}")
    if isinstance(error, TimeoutError):
        return DeadlinePassed(f"{endpoint}: {what}: no answer in time")
    if isinstance(error, (WebSocketException, OSError)):
        return Unreachable(f"no node at {endpoint}: {error}", hint="check --subtensor.chain_endpoint")
    if isinstance(error, RemainingScaleBytesNotEmptyException):
        return RuntimeMismatch(f"{endpoint}: {what}: {error}")
    if isinstance(error, (ValueError, KeyError, TypeError, IndexError, AttributeError, NotImplementedError)):
        return RuntimeMismatch(f"{endpoint}: {what}: {type(error).__name__}: {error}")
    return None
