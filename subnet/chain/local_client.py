"""A :class:`~subnet.chain.base.Chain` over a local chain's HTTP: each call has a deadline, each refusal its own class.

Writes are signed here, wait for inclusion, and are signed anew when another process with the same key was faster.
A write whose answer is lost raises ``Unreachable`` and may have been included: read back before writing again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar, cast

import aiohttp
import msgspec

from subnet.chain.base import (
    CALL_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    Axon,
    Commitment,
    Hyperparameters,
    KeySigner,
    Metagraph,
    WeightsReceipt,
    to_u16,
)
from subnet.chain.extrinsics import (
    Account,
    AddStake,
    BurnedRegister,
    Call,
    ChainInfo,
    CommitWeights,
    Faucet,
    Outcome,
    ServeAxon,
    SetCommitment,
    SetWeights,
    sign_extrinsic,
)
from subnet.chain.genesis import RAO_PER_TAO, to_rao
from subnet.chain.refusals import CHAIN_ERRORS, ChainRefused
from subnet.chain.sealed import SealedWeights, seal
from subnet.chain.subtensor_calls import COMMIT_REVEAL_VERSION
from subnet.errors import ConfigError, DeadlinePassed, InputError, NotFound, Refusal, Refused, TooLarge, Unreachable
from subnet.timing import Deadline

T = TypeVar("T")

MAX_ANSWER_BYTES = 64 << 20
NONCE_TRIES = 4


class LocalChain:
    """Reads need no key; ``serve``, ``set_weights`` and ``set_commitment`` are signed by ``hotkey``."""

    def __init__(self, url: str, hotkey: KeySigner | None = None) -> None:
        self.url = url.rstrip("/")
        self._hotkey = hotkey
        self._session: aiohttp.ClientSession | None = None
        self._info: ChainInfo | None = None
        self._writing = asyncio.Lock()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> LocalChain:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- reading

    async def info(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ChainInfo:
        self._info = await self._call("GET", "/v1/chain", ChainInfo, Deadline.after(timeout_s))
        return self._info

    async def block(self, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        return (await self.info(timeout_s=timeout_s)).block

    async def block_time_s(self, *, timeout_s: float = CALL_TIMEOUT_S) -> float:
        known = self._info or await self.info(timeout_s=timeout_s)
        return known.block_time_s

    async def block_hash(self, number: int, *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        return await self._call("GET", f"/v1/blocks/{number}", str, Deadline.after(timeout_s))

    async def metagraph(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Metagraph:
        return await self._call("GET", f"/v1/subnets/{netuid}/metagraph", Metagraph, Deadline.after(timeout_s))

    async def hyperparameters(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Hyperparameters:
        path = f"/v1/subnets/{netuid}/hyperparameters"
        return await self._call("GET", path, Hyperparameters, Deadline.after(timeout_s))

    async def weights(
        self, netuid: int, uid: int, *, mechanism: int = 0, timeout_s: float = CALL_TIMEOUT_S
    ) -> WeightsReceipt | None:
        path = f"/v1/subnets/{netuid}/weights/{uid}?mechanism={mechanism}"
        kind = cast("type[WeightsReceipt | None]", WeightsReceipt | None)
        return await self._call("GET", path, kind, Deadline.after(timeout_s))

    async def commitments(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Commitment]:
        path = f"/v1/subnets/{netuid}/commitments"
        return await self._call("GET", path, dict[str, Commitment], Deadline.after(timeout_s))

    async def balance(self, address: str, *, timeout_s: float = CALL_TIMEOUT_S) -> float:
        """TAO on an account."""
        return (await self._account(address, Deadline.after(timeout_s))).balance / RAO_PER_TAO

    # ---- writing

    async def register(
        self, netuid: int, *, coldkey: KeySigner, hotkey: str, timeout_s: float = WRITE_TIMEOUT_S
    ) -> int:
        call = BurnedRegister(netuid=netuid, hotkey=hotkey)
        return (await self._submit(coldkey, call, Deadline.after(timeout_s))).uid

    async def add_stake(
        self, netuid: int, *, coldkey: KeySigner, hotkey: str, amount: float, timeout_s: float = WRITE_TIMEOUT_S
    ) -> None:
        """Move ``amount`` TAO from the coldkey to the hotkey's stake; a permit follows with the next tempo."""
        call = AddStake(netuid=netuid, hotkey=hotkey, amount=to_rao(amount))
        await self._submit(coldkey, call, Deadline.after(timeout_s))

    async def faucet(self, *, coldkey: KeySigner, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Take the funds that a local chain gives each account once."""
        await self._submit(coldkey, Faucet(), Deadline.after(timeout_s))

    async def serve(self, netuid: int, host: str, port: int, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        deadline, signer = Deadline.after(timeout_s), self._signer()
        shown = (await self.metagraph(netuid, timeout_s=deadline.remaining_s())).neuron(signer.hotkey)
        if shown is None or shown.axon != Axon(host=host, port=port):
            await self._submit(signer, ServeAxon(netuid=netuid, host=host, port=port), deadline)

    async def set_weights(
        self,
        netuid: int,
        weights: Mapping[str, float] | Mapping[int, float],
        *,
        version_key: int = 0,
        mechanism: int = 0,
        timeout_s: float = WRITE_TIMEOUT_S,
    ) -> WeightsReceipt:
        deadline, signer = Deadline.after(timeout_s), self._signer()
        uids, values = to_u16(await self._by_uid(netuid, weights, deadline))
        rules = await self.hyperparameters(netuid, timeout_s=deadline.remaining_s())
        if rules.commit_reveal:
            return await self._commit_weights(netuid, mechanism, uids, values, version_key, deadline)
        call = SetWeights(netuid=netuid, mechanism=mechanism, uids=uids, values=values, version_key=version_key)
        outcome = await self._submit(signer, call, deadline)
        return WeightsReceipt(block=outcome.block, uids=outcome.uids, values=outcome.values)

    async def _commit_weights(
        self,
        netuid: int,
        mechanism: int,
        uids: tuple[int, ...],
        values: tuple[int, ...],
        version_key: int,
        deadline: Deadline,
    ) -> WeightsReceipt:
        """Sealed to the chain; the receipt says at which block it opens them."""
        signer, info = self._signer(), await self.info(timeout_s=deadline.remaining_s())
        content = SealedWeights(hotkey=signer.hotkey, uids=uids, values=values, version_key=version_key)
        commit = seal(content, info.seal_key)
        call = CommitWeights(netuid=netuid, mechanism=mechanism, commit=commit, version=COMMIT_REVEAL_VERSION)
        outcome = await self._submit(signer, call, deadline)
        return WeightsReceipt(block=outcome.block, uids=uids, values=values, reveal_round=outcome.reveal_block)

    async def set_commitment(self, netuid: int, data: bytes, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        call = SetCommitment(netuid=netuid, data=data)
        await self._submit(self._signer(), call, Deadline.after(timeout_s))

    # ---- how

    def _signer(self) -> KeySigner:
        if self._hotkey is None:
            raise ConfigError("this chain client holds no hotkey", hint="connect with one to write")
        return self._hotkey

    async def _by_uid(
        self, netuid: int, weights: Mapping[str, float] | Mapping[int, float], deadline: Deadline
    ) -> dict[int, float]:
        if not any(isinstance(key, str) for key in weights):
            return {int(key): value for key, value in weights.items()}
        neurons = (await self.metagraph(netuid, timeout_s=deadline.remaining_s())).by_hotkey()
        unknown = [key for key in weights if key not in neurons]
        if unknown:
            raise ChainRefused("UidVecContainInvalidOne", f"{unknown[0]} isn't registered on subnet {netuid}")
        return {neurons[str(key)].uid: value for key, value in weights.items()}

    async def _account(self, address: str, deadline: Deadline) -> Account:
        return await self._call("GET", f"/v1/accounts/{address}", Account, deadline)

    async def _submit(self, signer: KeySigner, call: Call, deadline: Deadline) -> Outcome:
        """Sign with the account's next nonce and wait for inclusion; lost races for a nonce are run again."""
        async with self._writing:
            info = await self.info(timeout_s=deadline.remaining_s())
            for tries_left in range(NONCE_TRIES - 1, -1, -1):
                nonce = (await self._account(signer.hotkey, deadline)).nonce
                body = msgspec.msgpack.encode(sign_extrinsic(signer, info.genesis, nonce, call))
                try:
                    return await self._call("POST", "/v1/extrinsics", Outcome, deadline, body)
                except ChainRefused as refused:
                    if refused.code not in ("Stale", "Future") or tries_left == 0:
                        raise
            raise Unreachable("no nonce was free")

    async def _call(self, method: str, path: str, kind: type[T], deadline: Deadline, body: bytes | None = None) -> T:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        limit = aiohttp.ClientTimeout(total=max(0.001, deadline.remaining_s()))
        try:
            async with self._session.request(method, self.url + path, data=body, timeout=limit) as response:
                data = bytearray()
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > MAX_ANSWER_BYTES:
                        raise TooLarge(f"the chain's answer is above {MAX_ANSWER_BYTES} bytes")
                return self._decode(response, data, kind)
        except TimeoutError as error:
            raise DeadlinePassed(f"the chain at {self.url} didn't answer in time") from error
        except aiohttp.InvalidURL as error:
            raise ConfigError(f"{self.url!r} isn't a URL", hint="give http://host:port") from error
        except aiohttp.ClientError as error:
            hint = "is the chain running? (--subtensor.chain_endpoint)"
            raise Unreachable(f"no chain at {self.url}: {error}", hint=hint) from error

    def _decode(self, response: aiohttp.ClientResponse, data: bytearray, kind: type[T]) -> T:
        try:
            if response.content_type != "application/json":
                raise msgspec.ValidationError(f"it sends {response.content_type}")
            if response.status == 200:
                return msgspec.json.decode(data, type=kind)
            refusal = msgspec.json.decode(data, type=Refusal)
        except msgspec.MsgspecError as error:
            hint = "check --subtensor.chain_endpoint"
            raise InputError(f"{self.url} doesn't answer as a local chain: {error}", hint=hint) from error
        if refusal.code in CHAIN_ERRORS:
            reason = refusal.reason.removeprefix(f"{refusal.code}: ")
            raise ChainRefused(refusal.code, reason, hint=refusal.hint, retry_after_s=refusal.retry_after)
        if refusal.code == NotFound.code:
            raise NotFound(refusal.reason, hint=refusal.hint, retry_after_s=refusal.retry_after)
        raise Refused(refusal, status=response.status, who="chain")
