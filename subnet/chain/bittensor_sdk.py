"""A Bittensor network through its SDK, ``bittensor`` 11: the field's own client, which follows the runtime's changes.

Imported only where a real network is configured. The SDK asks for some storage that older runtimes lack; what is in
:data:`NEWER_STORAGE` then counts as its absence, anything else is a ``RuntimeMismatch``: the other adapter, which
composes from the live metadata, may do. One endpoint, the one configured: the SDK's own fallbacks are switched off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import bittensor as bt
from bittensor.sp_core import ss58_decode
from loguru import logger

from subnet.chain import subtensor_view as view
from subnet.chain.base import Axon, KeySigner, Metagraph, Neuron
from subnet.chain.pool_errors import SIGN_ANEW, refusal_named
from subnet.chain.refusals import ChainRefused
from subnet.chain.subtensor import SubtensorChain
from subnet.chain.subtensor_link import Head, Inclusion, Item, RawCall, RuntimeMismatch, RuntimeVersion
from subnet.chain.subtensor_weights import Compose, WeightsCall
from subnet.errors import ConfigError, InputError, Unreachable
from subnet.timing import TIMEOUTS, Deadline

NEWER_STORAGE: Mapping[tuple[str, str], object] = {
    ("SubtensorModule", "SubnetEpochConsensus"): None,  # which consensus a subnet runs; without it: Yuma
    ("SubtensorModule", "CollateralLockShare"): 0,  # the part of a registration's cost that is locked; none
}
"""Storage the SDK reads that runtimes of this year may lack, and what its absence means."""
PREFLIGHT_NAMES: Mapping[str, str] = {
    "rate_limited": "RateLimitExceeded",
    "not_registered": "HotKeyNotRegisteredInSubNet",
    "not_authorized": "NeuronNoValidatorPermit",
    "subnet_not_exists": "SubnetNotExists",
}
"""The runtime's name for what the SDK refuses before it sends anything, by the SDK's code."""
SIGN_TRIES = 3
CLOSE_TRIES = 2


class _Key(NamedTuple):
    """A key as the SDK wants a signer."""

    signer: KeySigner
    ss58_address: str
    public_key: bytes
    crypto_type: int = 1

    def sign(self, payload: bytes) -> bytes:
        return self.signer.sign(payload)


def _key(signer: KeySigner) -> _Key:
    try:
        public_key = bytes(ss58_decode(signer.hotkey))
    except ValueError as error:
        raise ConfigError(f"{signer.hotkey!r} isn't an address: {error}") from error
    return _Key(signer, signer.hotkey, public_key)


class _Substrate(bt.RpcSubstrate):
    """The SDK's own connection, but storage that only newer runtimes have counts as absent."""

    opened: Any = None

    def _interface(self, endpoint: str, fallbacks: list[str]) -> Any:
        self.opened = super()._interface(endpoint, fallbacks)
        return self.opened

    async def abandon(self) -> None:
        """Close what a connect that was broken off has left behind."""
        opened, self.opened = self.opened, None
        if opened is not None:
            await closed(opened.close(), self.endpoint)

    async def query(
        self,
        module: str,
        storage_function: str,
        params: list[Any] | None = None,
        block_hash: str | None = None,
    ) -> Any:
        try:
            return await super().query(module, storage_function, params, block_hash)
        except ValueError:
            if (module, storage_function) not in NEWER_STORAGE:
                raise
            return NEWER_STORAGE[module, storage_function]


async def closed(closing: Coroutine[Any, Any, None], endpoint: str, each_s: float = TIMEOUTS.chain_close_s) -> None:
    """Await the SDK's own ``close()``, but not forever.

    It cancels its receiving task and awaits it without limit. That task may swallow one cancellation: Python 3.11's
    ``asyncio.wait_for`` does when what it waits for comes at the same moment. Cancelling ``closing`` cancels the task
    a second time. What still doesn't end after :data:`CLOSE_TRIES` times ``each_s`` seconds is left, with a warning.
    """
    task = asyncio.ensure_future(closing)
    try:
        for _ in range(CLOSE_TRIES):
            done, _ = await asyncio.wait({task}, timeout=each_s)
            if done:
                break
            task.cancel()
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        logger.warning("{}: the connection doesn't close; left as it is", endpoint)
    elif not task.cancelled() and task.exception() is not None:
        logger.warning("{}: closing the connection: {!r}", endpoint, task.exception())


class SdkLink:
    """:class:`~subnet.chain.subtensor_link.SubtensorLink` over one SDK client, connected on first use."""

    def __init__(self, endpoint: str) -> None:
        self.library = f"bittensor {bt.__version__}"
        self.endpoint = endpoint
        self._substrate = _Substrate(endpoint)
        self._client: bt.Client | None = None
        self._connecting = asyncio.Lock()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await closed(client.close(), self.endpoint)

    @asynccontextmanager
    async def client(self, what: str, deadline: Deadline) -> AsyncGenerator[bt.Client]:
        """The connected client, with the deadline and this project's errors around whatever is done with it."""
        with _translated(self.endpoint, what):
            async with deadline.limit(f"{self.endpoint}: {what}"):
                yield await self._connected()

    async def _connected(self) -> bt.Client:
        async with self._connecting:
            if self._client is None:
                self._substrate = _Substrate(self.endpoint)
                substrate: Any = self._substrate  # the SDK's own class misses its own protocol in one type
                client = bt.Client(self.endpoint, substrate=substrate)
                try:
                    await self._substrate.connect()
                except BaseException:
                    await self._substrate.abandon()
                    raise
                self._client = client
            return self._client

    async def runtime(self, deadline: Deadline) -> RuntimeVersion:
        async with self.client("runtime version", deadline):
            shown = await self._substrate.raw.rpc_request("state_getRuntimeVersion", [])
            found = view.fields(shown, "state_getRuntimeVersion")
            spec, transaction = found.get("specVersion"), found.get("transactionVersion")
            name = str(found.get("specName"))
            return RuntimeVersion(name, view.whole(spec, "specVersion"), view.whole(transaction, "transactionVersion"))

    async def head(self, deadline: Deadline) -> Head:
        async with self.client("best block", deadline):
            number = await self._substrate.block_number()
            return Head(number, await self._substrate.block_hash(number))

    async def finalized(self, deadline: Deadline) -> Head:
        async with self.client("finalized block", deadline):
            number = await self._substrate.finalized_block_number()
            return Head(number, await self._substrate.block_hash(number))

    async def hash_of(self, number: int, deadline: Deadline) -> str:
        async with self.client(f"hash of block {number}", deadline):
            return await self._substrate.block_hash(number)

    async def constant(self, pallet: str, name: str, deadline: Deadline) -> object:
        async with self.client(f"constant {pallet}.{name}", deadline):
            return await self._substrate.constant(pallet, name)

    async def read(self, items: Sequence[Item], at: str, deadline: Deadline) -> list[object]:
        """Runs of one storage item travel as one request; different items go side by side."""
        runs: list[list[Item]] = []
        for item in items:
            if runs and runs[-1][0][:2] == item[:2]:
                runs[-1].append(item)
            else:
                runs.append([item])
        async with self.client(f"storage {', '.join(str(run[0]) for run in runs)}", deadline):
            found = await asyncio.gather(*(self._read_run(run, at) for run in runs))
        return [value for values in found for value in values]

    async def _read_run(self, run: Sequence[Item], at: str) -> list[Any]:
        pallet, name, keys = run[0]
        if len(run) == 1:
            return [await self._substrate.query(pallet, name, list(keys), at)]
        return await self._substrate.query_batch(pallet, name, [list(item.keys) for item in run], at)

    async def read_map(
        self, pallet: str, name: str, prefix: Sequence[int | str], at: str, deadline: Deadline
    ) -> list[tuple[object, object]]:
        async with self.client(f"storage {pallet}.{name}", deadline):
            return list(await self._substrate.query_map(pallet, name, list(prefix), at))

    async def lacking(self, items: Sequence[Item], calls: Sequence[RawCall], deadline: Deadline) -> list[str]:
        async with self.client("metadata", deadline):
            at = await self._substrate.block_hash()
            missing: list[str] = []
            for item in items:
                try:
                    await bt.RpcSubstrate.query(self._substrate, item.pallet, item.name, list(item.keys), at)
                except ValueError:
                    missing.append(f"storage {item}")
            for call in calls:
                try:
                    await self._substrate.compose(tuple(call))
                except ValueError as error:
                    missing.append(f"call {call} ({error})")
            return missing

    async def submit(self, call: RawCall, signer: KeySigner, deadline: Deadline) -> Inclusion:
        key = _key(signer)

        async def once(client: bt.Client) -> Any:
            return await client.submit_call(tuple(call), key, signer="hotkey", wait_for_finalization=False)

        return await self.include(str(call), once, deadline)

    async def include(self, what: str, send: Any, deadline: Deadline) -> Inclusion:
        """Run ``send(client)`` until it is included; what a fresh nonce or runtime version cures is signed anew."""
        for tries_left in range(SIGN_TRIES - 1, -1, -1):
            try:
                async with self.client(what, deadline) as client:
                    result = await send(client)
                    result.raise_for_failure()
                    block = int(str(result.extrinsic_id).partition("-")[0])
                    return Inclusion(block, str(result.block_hash), dict(result.data))
            except ChainRefused as refused:
                if refused.code not in SIGN_ANEW or tries_left == 0:
                    raise
                if refused.code == "BadProof":  # signed for another runtime version: read it again
                    await self.close()
        raise Unreachable(f"{what}: not included")


@contextmanager
def _translated(endpoint: str, what: str) -> Generator[None]:
    """The SDK's exceptions as this project's, at one border; a test has every class of them."""
    try:
        yield
    except Exception as error:
        translated = translate(error, endpoint, what)
        if translated is None:
            raise
        raise translated from error


def translate(error: Exception, endpoint: str, what: str) -> Exception | None:
    """None where the error is nothing of the SDK's: it passes as it is."""
    if isinstance(error, bt.ChainError):
        name = error.name or PREFLIGHT_NAMES.get(error.code.value)
        if name:
            return refusal_named(name, error.message, 1.0)
        return Unreachable(f"{endpoint}: {what}: {error.message}")
    if isinstance(error, bt.BittensorError) or _is_the_transports(error):
        return Unreachable(f"{endpoint}: {what}: {error}")
    if isinstance(error, (ConnectionError, OSError)):
        return Unreachable(f"no node at {endpoint}: {error}", hint="check --subtensor.chain_endpoint")
    if isinstance(error, (InputError, ConfigError, Unreachable, ChainRefused)):
        return None
    if isinstance(error, (ValueError, KeyError, TypeError)):  # the codec: not in this runtime, or of another type
        return RuntimeMismatch(f"{endpoint}: {what}: {error}")
    return None


def _is_the_transports(error: Exception) -> bool:
    """Whether the SDK's private transport raised it: no verdict. Its ``ValueError``s are about the runtime instead."""
    return type(error).__module__.startswith("bittensor.") and not isinstance(error, ValueError)


class BittensorChain(SubtensorChain):
    """Metagraphs and weights as the SDK makes them; the rest as in :class:`SubtensorChain`."""

    def __init__(self, endpoint: str, hotkey: KeySigner | None = None) -> None:
        self._sdk = SdkLink(endpoint)
        super().__init__(self._sdk, hotkey)

    async def metagraph_at(self, netuid: int, head: Head, deadline: Deadline) -> Metagraph:
        """From the runtime's own report, in which stake is what the chain counts."""
        async with self._sdk.client(f"metagraph of subnet {netuid}", deadline) as client:
            snapshot = await client.at(head.number)
            shown = await bt.metagraph.fetch(snapshot, netuid, commitments=False)
        if shown is None:
            raise ChainRefused("SubnetNotExists", f"there is no subnet {netuid} on {self._sdk.endpoint}")
        neurons = tuple(_neuron(neuron) for neuron in shown.neurons)
        return view.view_metagraph(netuid, shown.block, shown.tempo, shown.owner_hotkey, neurons)

    async def submit_weights(
        self, call: WeightsCall, compose: Compose, signer: KeySigner, deadline: Deadline
    ) -> tuple[Head, int | None]:
        """The SDK's ``SetWeights``: it chooses between setting and committing as the subnet runs, and seals."""
        del compose
        intent = bt.SetWeights(
            netuid=call.netuid,
            uids=list(call.uids),
            weights=[float(value) for value in call.values],
            mechid=call.mechanism,
            version_key=call.version_key,
        )
        key = _key(signer)

        async def once(client: bt.Client) -> Any:
            return await client.execute(intent, key, wait_for_finalization=False)

        included = await self._sdk.include("set_weights", once, deadline)
        reveal_round = included.extras.get("reveal_round")
        chosen = view.whole(reveal_round, "reveal_round") if reveal_round is not None else None
        return Head(included.block, included.hash), chosen


def _neuron(shown: Any) -> Neuron:
    return Neuron(
        uid=shown.uid,
        hotkey=shown.hotkey,
        coldkey=shown.coldkey,
        stake=shown.total_stake.rao / view.RAO_PER_TAO,
        validator_permit=shown.validator_permit,
        last_update=shown.last_update,
        registered_at_block=shown.block_at_registration,
        axon=_axon(shown.axon),
        incentive=shown.incentive,
        dividends=shown.dividends,
        emission=shown.emission.rao / view.RAO_PER_TAO,
    )


def _axon(shown: str | None) -> Axon | None:
    if shown is None:
        return None
    host, _, port = shown.rpartition(":")
    return Axon(host=host.strip("[]"), port=int(port))
