"""What goes wrong between a Bittensor adapter and its node, through both libraries: each ends in time, with one clear line.

Each test asserts that its fault fired, and what the chain stores afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from loguru import logger
from loopback.worlds import COLD, MINER, STRANGER, VALIDATOR, Worlds, connect, genesis, recorded_or_skip

from subnet.chain.base import Chain
from subnet.chain.refusals import ChainRefused
from subnet.chain.subtensor_link import RuntimeMismatch
from subnet.errors import IotaError, Unreachable

SUBMIT = "author_submitAndWatchExtrinsic"


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    made = Worlds(tmp_path)
    yield made
    await made.close()


@pytest.fixture(params=["bittensor", "substrate"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def said(call: Any) -> IotaError:
    with pytest.raises(IotaError) as caught:
        await call
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_dropped_socket_costs_one_call_at_most(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    before = await chain.metagraph(1)
    for method in ("chain_getHeader", "state_getStorageAt", "state_queryStorageAt"):
        world.faults.at(method, "drop")
        try:
            assert await chain.metagraph(1, timeout_s=10) == before
        except Unreachable:
            assert kind == "substrate", "the SDK connects anew by itself"
        assert await chain.metagraph(1, timeout_s=10) == before
    await world.server.drop_all()
    try:
        await chain.block(timeout_s=10)
    except Unreachable:
        assert kind == "substrate", "the SDK connects anew by itself"
    assert await chain.block(timeout_s=10) == 3
    assert world.faults.fired["drop"] >= 2


async def test_a_submission_whose_answer_is_lost_is_found_on_the_chain(worlds: Worlds, kind: str):
    """It was included: sending it again would only meet the rate limit."""
    world = await worlds.make(kind)
    chain = world.chain()
    world.faults.at(SUBMIT, "drop_after")
    receipt = await chain.set_weights(1, {2: 1.0, 3: 3.0}, timeout_s=20)
    assert (receipt.uids, receipt.values) == ((2, 3), (21845, 65535))
    assert receipt == await chain.weights(1, 1)
    assert world.node.submitted == ["set_mechanism_weights"]
    assert world.faults.fired["drop_after"] == 1


async def test_a_commit_whose_answer_is_lost_is_found_too(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(commit_reveal=True))
    world.faults.at(SUBMIT, "drop_after")
    receipt = await world.chain().set_weights(1, {2: 1.0}, timeout_s=20)
    assert receipt.reveal_round is not None
    assert world.node.submitted == ["commit_timelocked_mechanism_weights"]


async def test_a_submission_that_never_arrived_is_said_to_be_lost(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    world.faults.at(SUBMIT, "drop")
    assert isinstance(await said(chain.set_weights(1, {2: 1.0}, timeout_s=20)), Unreachable)
    assert (world.node.submitted, world.faults.fired["drop"]) == ([], 1)
    assert (await chain.set_weights(1, {2: 1.0}, timeout_s=20)).uids == (2,)


async def test_an_internal_error_is_no_verdict(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    world.faults.at("chain_getFinalizedHead", "internal").at(SUBMIT, "internal")
    lost = await said(chain.block())
    assert isinstance(lost, Unreachable)
    assert "Internal error" in str(lost)
    assert isinstance(await said(chain.set_commitment(1, b"x")), Unreachable)
    await chain.set_commitment(1, b"x")
    assert (await chain.commitments(1))[VALIDATOR.hotkey].data == b"x"
    assert world.faults.fired["internal"] == 2


async def test_a_silent_node_ends_with_the_deadline(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    await chain.metagraph(1)
    world.faults.at("chain_getFinalizedHead", "silent")
    assert isinstance(await said(chain.block(timeout_s=0.3)), Unreachable)
    world.faults.at(SUBMIT, "silent")
    assert isinstance(await said(chain.set_commitment(1, b"x", timeout_s=1.0)), Unreachable)
    assert await chain.block(timeout_s=10) == 3
    assert world.faults.fired["silent"] == 2


async def test_a_stale_nonce_is_signed_anew(worlds: Worlds, kind: str):
    """Another process with the same key was faster than what this one remembers."""
    world = await worlds.make(kind)
    first, second = world.chain(), world.chain()
    await first.set_commitment(1, b"one")
    await second.set_commitment(1, b"two")
    await second.set_commitment(1, b"three")
    await first.set_commitment(1, b"four")
    assert (await first.commitments(1))[VALIDATOR.hotkey].data == b"four"


async def test_a_runtime_that_is_upgraded_meanwhile_is_signed_for_anew(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    await chain.set_commitment(1, b"before")
    world.node.upgrade(world.node.spec_version + 1)
    await chain.set_commitment(1, b"after")
    assert (await chain.commitments(1))[VALIDATOR.hotkey].data == b"after"


async def test_a_newer_spec_version_with_the_same_calls_is_fine(worlds: Worlds, kind: str):
    world = await worlds.make(kind, spec_version=999)
    chain = world.chain()
    assert (await chain.set_weights(1, {2: 1.0})).values == (65535,)


@pytest.mark.parametrize("status", ["dropped", "invalid"])
async def test_a_call_that_the_pool_throws_out_is_refused_by_name(worlds: Worlds, kind: str, status: str):
    world = await worlds.make(kind)
    chain = world.chain()
    world.faults.at(SUBMIT, status)
    refused = await said(chain.set_commitment(1, b"x", timeout_s=10))
    assert isinstance(refused, ChainRefused)
    assert refused.code == status.capitalize()
    assert refused.retryable
    await chain.set_commitment(1, b"x", timeout_s=10)


@pytest.mark.parametrize(
    ("code", "shown", "retryable"),
    [
        ("NeuronNoValidatorPermit", "NeuronNoValidatorPermit", False),
        ("IncorrectWeightVersionKey", "IncorrectWeightVersionKey", False),
        ("SettingWeightsTooFast", "SettingWeightsTooFast", True),
        ("NotEnoughStakeToSetWeights", "NotEnoughStakeToSetWeights", False),
        ("SubtokenDisabled", "SubtokenDisabled", False),
    ],
)
async def test_the_nodes_own_refusals_keep_their_names(worlds: Worlds, kind: str, code, shown, retryable):
    """Whatever the adapter would have foreseen: what the node says counts, in the pool or in the dispatch."""
    world = await worlds.make(kind)
    world.node.refuse_next.append(code)
    refused = await said(world.chain().set_weights(1, {2: 1.0}))
    assert isinstance(refused, ChainRefused)
    assert (refused.code, refused.retryable) == (shown, retryable)
    assert world.node.refuse_next == []


@pytest.mark.parametrize("name", ["WeightsSetRateLimit", "set_mechanism_weights"])
async def test_a_runtime_without_what_is_asked_for_is_said_so(worlds: Worlds, kind: str, name: str):
    world = await worlds.make(kind, recorded=recorded_or_skip().without(name))
    chain = world.chain()
    mismatch = await said(chain.set_weights(1, {2: 1.0}))
    assert isinstance(mismatch, RuntimeMismatch)
    assert name in str(mismatch)
    assert "iota doctor --chain" in str(mismatch)
    assert world.node.submitted == []


async def test_storage_that_only_newer_runtimes_have_is_no_obstacle(worlds: Worlds):
    """The SDK's own ``SetWeights`` asks for what even its recorded metadata lacks."""
    world = await worlds.make("bittensor")
    chain = world.chain()
    from subnet.chain.bittensor_sdk import NEWER_STORAGE
    from subnet.chain.subtensor_link import Item
    from subnet.timing import Deadline

    newer = [Item(pallet, name, (1,)) for pallet, name in NEWER_STORAGE]
    lacking = await chain.link.lacking(newer, [], Deadline.after(10))
    assert "storage SubtensorModule.SubnetEpochConsensus" in lacking
    assert (await chain.set_weights(1, {2: 1.0})).uids == (2,)


async def test_a_subnet_that_locks_collateral_is_left_to_btcli(worlds: Worlds, kind: str, monkeypatch):
    from loopback import pallets

    world = await worlds.make(kind)
    plain = pallets._subnet

    def with_collateral(netuid, subnet, block):
        yield from plain(netuid, subnet, block)
        yield ("SubtensorModule", "CollateralLockShare", (netuid,), 100)

    monkeypatch.setattr(pallets, "_subnet", with_collateral)
    await world.advance(1)
    refused = await said(world.chain().register(1, coldkey=COLD, hotkey=STRANGER.hotkey))
    assert "collateral" in str(refused)
    assert "btcli subnets register --netuid 1" in refused.hint


async def test_nobody_at_the_endpoint_is_one_line(kind: str):
    chain = connect(kind, "ws://127.0.0.1:1", MINER)
    lost = await said(chain.block(timeout_s=5))
    assert isinstance(lost, Unreachable)
    assert "127.0.0.1:1" in str(lost)
    await chain.close()


async def _receiver(cancellations_swallowed: int) -> None:
    """As the SDK's own, when ``asyncio.wait_for`` swallows a cancellation: it goes on receiving."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancellations_swallowed -= 1
            if cancellations_swallowed < 0:
                raise


async def _with_stubborn_receiver(worlds: Worlds, cancellations_swallowed: int) -> tuple[Any, asyncio.Task[None]]:
    world = await worlds.make("bittensor")
    chain = world.chain()
    await chain.block()
    session = chain._sdk._substrate.raw._session
    session._supervisor.cancel()
    await asyncio.wait({session._supervisor})
    session._supervisor = asyncio.create_task(_receiver(cancellations_swallowed))
    await asyncio.sleep(0)
    return chain, session._supervisor


async def test_a_receiver_that_swallows_a_cancellation_does_not_hold_up_the_close(worlds: Worlds):
    chain, receiver = await _with_stubborn_receiver(worlds, 1)
    await asyncio.wait_for(chain.close(), 60)
    assert receiver.cancelled()


async def test_a_receiver_that_never_ends_is_left_with_a_warning(worlds: Worlds):
    from subnet.chain.bittensor_sdk import closed

    chain, receiver = await _with_stubborn_receiver(worlds, 2)
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}", level="WARNING")
    await asyncio.wait_for(closed(chain._sdk._client.close(), "ws://there", 0.05), 60)
    logger.remove(sink)
    assert lines == ["ws://there: the connection doesn't close; left as it is\n"]
    receiver.cancel()
    await asyncio.wait({receiver})


async def test_a_connect_that_was_broken_off_leaves_no_connection(worlds: Worlds):
    world = await worlds.make("bittensor")
    chain = world.chain()
    world.faults.at("state_getRuntimeVersion", "silent").at("chain_getHeader", "silent").at("chain_getHead", "silent")
    asked = asyncio.create_task(chain.metagraph(1, timeout_s=60))
    while not world.faults.fired["silent"]:
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait({asked})
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "rpc-session"]
    world.faults.clear()
    assert await chain.block() == 3


async def test_a_node_that_talks_without_answering_ends_with_the_deadline(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    await chain.metagraph(1)
    world.faults.at("chain_getFinalizedHead", "chatter")
    assert isinstance(await said(chain.block(timeout_s=0.5)), Unreachable)
    assert await chain.block() == 3
    assert world.faults.fired["chatter"] == 1


async def _web_server() -> tuple[web.AppRunner, str]:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>", content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", page)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"ws://127.0.0.1:{runner.addresses[0][1]}"


async def _chatterer() -> tuple[Any, str]:
    """A websocket that answers everything with something else."""
    from websockets.asyncio.server import serve

    async def talk(connection: Any) -> None:
        async for _ in connection:
            await connection.send("hello, this is a chat")

    server = await serve(talk, "127.0.0.1", 0)
    return server, f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


async def test_an_endpoint_that_speaks_something_else_is_one_line(kind: str):
    runner, url = await _web_server()
    chain: Chain = connect(kind, url, MINER)
    lost = await said(chain.block(timeout_s=5))
    assert "127.0.0.1" in str(lost)
    await chain.close()
    await runner.cleanup()
    server, url = await _chatterer()
    chain = connect(kind, url, MINER)
    assert isinstance(await said(chain.block(timeout_s=1.0)), (Unreachable, RuntimeMismatch))
    await chain.close()
    server.close()
    await server.wait_closed()


async def test_calls_side_by_side_do_not_mix_their_answers(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    chain = world.chain()
    graph, rules, block, _ = await asyncio.gather(
        chain.metagraph(1), chain.hyperparameters(1), chain.block(), chain.set_commitment(1, b"x")
    )
    assert (len(graph.neurons), rules.tempo, block) == (4, 20, 3)
