"""The chain side of a validator: an operator's mistakes are one line each; a chain that is away changes nothing that is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loopback.worlds import MINER, OTHER, STRANGER, VALIDATOR, Worlds, connect, genesis

from subnet.chain.local_client import LocalChain
from subnet.chain.refusals import ChainRefused
from subnet.errors import InputError, Unreachable
from subnet.protocol.signing import Signer
from validator import chain_side
from validator.chain_side import ChainSide
from validator.scoring import Score
from validator.settings import ValidatorSettings


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    made = Worlds(tmp_path)
    yield made
    await made.close()


@pytest.fixture(params=["local", "bittensor", "substrate"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def scores() -> dict[str, Score]:
    return {
        OTHER.hotkey: Score(
            hotkey=OTHER.hotkey, registered_at_block=0, total=1.0, work=1.0, sealed_work=1.0, last_sealed_s=0.0
        )
    }


def side_of(world: Any, signer: Signer, netuid: int = 1) -> ChainSide:
    settings = ValidatorSettings(netuid=netuid, chain_endpoint=world.url, wallet_name="me", wallet_hotkey="hot")
    return ChainSide(settings, signer, world.chain(signer), scores)


async def test_a_netuid_that_is_not_there_and_a_hotkey_that_is_not_registered(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    with pytest.raises(ChainRefused, match="there is no subnet 9") as caught:
        await side_of(world, VALIDATOR, netuid=9).begin()
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="isn't registered on subnet 1") as unknown:
        await side_of(world, STRANGER).begin()
    command = "iota chain register" if kind == "local" else "btcli subnets register"
    assert f"{command} --netuid 1" in unknown.value.hint
    assert len((await side_of(world, VALIDATOR).begin()).neurons) == 4


async def test_a_wallet_without_a_permit_is_told_so_and_sends_nothing(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    side = side_of(world, MINER)
    await side.begin()
    setting = asyncio.create_task(side.set_weights())
    while side.weights_report is None:
        await asyncio.sleep(0.01)
    setting.cancel()
    await asyncio.wait({setting})
    assert side.weights_said == (
        "weights nothing: NeuronNoValidatorPermit: uid 2 holds no validator permit "
        "(permits go to the largest stakes once per tempo: add stake and wait)"
    )
    assert side.weights_set_s is None
    assert await world.chain(None).weights(1, 2) is None


async def test_an_endpoint_of_the_wrong_kind_is_one_line(worlds: Worlds):
    """A local chain asked as a node of the network, and a node asked as a local chain."""
    local, node = await worlds.make("local"), await worlds.make("bittensor")
    wrong = connect("bittensor", local.url.replace("http", "ws"), VALIDATOR)
    with pytest.raises(Unreachable) as caught:
        await wrong.metagraph(1, timeout_s=20)
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    await wrong.close()
    async with LocalChain(node.url.replace("ws", "http")) as other:
        with pytest.raises((InputError, Unreachable)) as said:
            await other.metagraph(1, timeout_s=20)
    assert "\n" not in str(said.value)
    assert said.value.hint


async def test_a_chain_that_is_away_leaves_the_last_metagraph_in_force(worlds: Worlds, monkeypatch):
    monkeypatch.setattr(chain_side, "METAGRAPH_EVERY_S", 0.02)
    world = await worlds.make("local", genesis())
    side = side_of(world, VALIDATOR)
    first = await side.begin()
    read_s = side.metagraph_s
    await world._server.stop()
    watching = asyncio.create_task(side.watch())
    while not side.trouble:
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait({watching})
    assert side.metagraph == first
    assert side.metagraph_s == read_s
    assert side.is_known(MINER.hotkey)
    assert side.permits == {n.hotkey: n.validator_permit for n in first.neurons}
