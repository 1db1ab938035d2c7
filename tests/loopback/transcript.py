"""Prints what an operator's first steps look like through each adapter. Run: PYTHONPATH=.:tests python -m loopback.transcript"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable
from typing import Any

from loopback.worlds import COLD, STRANGER, VALIDATOR, LoopbackWorld, genesis, recorded_or_skip
from subnet.chain.connect import register_command
from subnet.errors import IotaError


async def show(call: str, answer: Awaitable[Any]) -> None:
    try:
        said = await answer
    except IotaError as error:
        said = f"{type(error).__name__}: {error}"
    print(f"  {call}\n      {said}")


async def session(kind: str) -> None:
    world = await LoopbackWorld(kind, genesis(registration_cost=2.0, weights_rate_limit=0), recorded_or_skip()).start()
    chain, stranger = world.chain(VALIDATOR), world.chain(STRANGER)
    prefix = "substrate+" if kind == "substrate" else ""
    print(
        f"--subtensor.chain_endpoint {prefix}ws://127.0.0.1:PORT   ({chain.link.library}, spec {world.node.spec_version})"
    )
    graph = await chain.metagraph(1)
    found = graph.neuron(STRANGER.hotkey)
    print(f"  registered? {found}; run:\n      {register_command('finney', None, 1, 'me', 'hot')}")
    await show("register(1, coldkey, hotkey)", chain.register(1, coldkey=COLD, hotkey=STRANGER.hotkey))
    await show("serve(1, '192.0.2.7', 8091)", stranger.serve(1, "192.0.2.7", 8091))
    print(f"      shown: {(await chain.metagraph(1)).neuron(STRANGER.hotkey).axon}")
    await show("set_weights(1, {2: 0.25, 3: 0.75})", chain.set_weights(1, {2: 0.25, 3: 0.75}))
    await show("weights(1, uid 1)", chain.weights(1, 1))
    await show("set_weights with an unknown uid", chain.set_weights(1, {2: 1.0, 44: 1.0}))
    await show("set_weights without a permit", stranger.set_weights(1, {2: 1.0}))
    await show("set_commitment(1, b's3://log-store')", chain.set_commitment(1, b"s3://log-store"))
    await show("commitments(1)", chain.commitments(1))
    await world.close()
    sealed = await LoopbackWorld(kind, genesis(commit_reveal=True), recorded_or_skip()).start()
    chain = sealed.chain(VALIDATOR)
    print("  -- a subnet with commit-reveal")
    await show("set_weights(1, {2: 0.25, 3: 0.75})", chain.set_weights(1, {2: 0.25, 3: 0.75}))
    print(f"      sent: {', '.join(sealed.node.submitted)}")
    await show("weights(1, uid 1), before the reveal", chain.weights(1, 1))
    await show("set_weights again at once", chain.set_weights(1, {2: 1.0}))
    await sealed.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        for kind in ("bittensor", "substrate"):
            asyncio.run(session(kind))


if __name__ == "__main__":
    main()
