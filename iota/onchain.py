"""What an operator does on a local chain, from plain synchronous code: register, stake, look; each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from subnet.chain.base import Chain, Metagraph, WeightsReceipt
from subnet.chain.connect import connect_chain
from subnet.chain.local_client import LocalChain
from subnet.chain.refusals import ChainRefused
from subnet.errors import ConfigError
from subnet.protocol.signing import Signer
from subnet.timing import Deadline

T = TypeVar("T")

REGISTERED_ALREADY = "HotKeyAlreadyRegisteredInSubNet"


def on_chain(network: str, endpoint: str | None, work: Callable[[Chain], Awaitable[T]]) -> T:
    """Run ``work`` with a connected chain, closed afterwards."""

    async def run() -> T:
        chain = connect_chain(network, endpoint)
        try:
            return await work(chain)
        finally:
            await chain.close()

    return asyncio.run(run())


def register(
    network: str, endpoint: str | None, netuid: int, *, coldkey: Signer, hotkey: str, deadline: Deadline
) -> tuple[int, bool]:
    """The hotkey's uid, and whether it is new; an account without funds takes those of the local chain's faucet."""

    async def work(chain: Chain) -> tuple[int, bool]:
        metagraph = await chain.metagraph(netuid, timeout_s=deadline.remaining_s())
        known = metagraph.neuron(hotkey)
        if known is not None:
            return known.uid, False
        rules = await chain.hyperparameters(netuid, timeout_s=deadline.remaining_s())
        await _fund(chain, coldkey, rules.registration_cost, deadline)
        uid = await chain.register(netuid, coldkey=coldkey, hotkey=hotkey, timeout_s=deadline.remaining_s())
        return uid, True

    return on_chain(network, endpoint, work)


def add_stake(
    network: str, endpoint: str | None, netuid: int, *, coldkey: Signer, hotkey: str, amount: float, deadline: Deadline
) -> None:
    async def work(chain: Chain) -> None:
        local = _local(chain)
        await _fund(chain, coldkey, amount, deadline)
        await local.add_stake(netuid, coldkey=coldkey, hotkey=hotkey, amount=amount, timeout_s=deadline.remaining_s())

    on_chain(network, endpoint, work)


def metagraph_and_weights(
    network: str, endpoint: str | None, netuid: int, *, deadline: Deadline
) -> tuple[Metagraph, dict[int, WeightsReceipt]]:
    """The subnet as it is, and what each of its permit holders set."""

    async def work(chain: Chain) -> tuple[Metagraph, dict[int, WeightsReceipt]]:
        metagraph = await chain.metagraph(netuid, timeout_s=deadline.remaining_s())
        found: dict[int, WeightsReceipt] = {}
        for holder in metagraph.permit_holders():
            receipt = await chain.weights(netuid, holder.uid, timeout_s=deadline.remaining_s())
            if receipt is not None:
                found[holder.uid] = receipt
        return metagraph, found

    return on_chain(network, endpoint, work)


async def _fund(chain: Chain, coldkey: Signer, needed: float, deadline: Deadline) -> None:
    local = _local(chain)
    if await local.balance(coldkey.hotkey, timeout_s=deadline.remaining_s()) >= needed:
        return
    try:
        await local.faucet(coldkey=coldkey, timeout_s=deadline.remaining_s())
    except ChainRefused as refused:
        raise ConfigError(
            f"{coldkey.hotkey} has less than {needed:g} TAO and the faucet refused: {refused.reason}",
            hint="give the coldkey a balance in the chain's genesis file",
        ) from refused


def _local(chain: Chain) -> LocalChain:
    if not isinstance(chain, LocalChain):
        raise ConfigError("this command is for local chains", hint="use btcli on a real network")
    return chain
