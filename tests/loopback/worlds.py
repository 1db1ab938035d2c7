"""The same small subnet on three chains: the local one, and the loopback node through each of the two libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest

from loopback.metadata import MISSING, RecordedRuntime, recorded_file, recorded_runtime
from loopback.node import LoopbackNode
from loopback.server import LoopbackServer
from subnet.chain.base import Chain
from subnet.chain.genesis import Genesis, GenesisNeuron, SubnetGenesis
from subnet.chain.local_client import LocalChain
from subnet.chain.local_server import ChainServer
from subnet.chain.local_state import ChainState
from subnet.protocol.signing import Signer
from subnet.timing import ManualClock

OWNER, VALIDATOR, MINER, OTHER = (Signer.from_uri(f"//{name}") for name in ("Own", "Val", "Min", "Other"))
COLD, POOR, STRANGER = (Signer.from_uri(f"//{name}") for name in ("Cold", "Poor", "Stranger"))
KINDS = ("local", "bittensor", "substrate")


def genesis(*, stake_threshold: float = 0.0, **changes: Any) -> Genesis:
    """uid 0 owner, 1 validator with stake and permit, 2 miner, 3 other."""
    rules: dict[str, Any] = {
        "owner_hotkey": OWNER.hotkey,
        "owner_coldkey": COLD.hotkey,
        "tempo": 20,
        "weights_rate_limit": 5,
        "neurons": (
            GenesisNeuron(OWNER.hotkey, COLD.hotkey),
            GenesisNeuron(VALIDATOR.hotkey, COLD.hotkey, 1000.0),
            GenesisNeuron(MINER.hotkey, COLD.hotkey),
            GenesisNeuron(OTHER.hotkey, COLD.hotkey),
        ),
    }
    return Genesis(
        block_time_s=0.25,
        allow_loopback_addresses=False,
        stake_threshold=stake_threshold,
        balances={COLD.hotkey: 100.0},
        subnets=(SubnetGenesis(**(rules | changes)),),
    )


class World(Protocol):
    kind: str

    def chain(self, signer: Signer | None = VALIDATOR) -> Chain: ...

    async def advance(self, blocks: int) -> None: ...

    @property
    def state(self) -> ChainState: ...

    async def close(self) -> None: ...


class LocalWorld:
    kind = "local"

    def __init__(self, directory: Path, start: Genesis) -> None:
        self._clock, self._genesis = ManualClock(), start
        self._server = ChainServer(directory, port=0, genesis=start, clock=self._clock)
        self._chains: list[LocalChain] = []

    async def start(self) -> LocalWorld:
        await self._server.start()
        await self.advance(3)
        return self

    @property
    def url(self) -> str:
        return self._server.url

    def chain(self, signer: Signer | None = VALIDATOR) -> Chain:
        self._chains.append(LocalChain(self._server.url, signer))
        return self._chains[-1]

    async def advance(self, blocks: int) -> None:
        self._clock.advance(blocks * self._genesis.block_time_s)
        async with LocalChain(self._server.url) as look:
            await look.info()

    @property
    def state(self) -> ChainState:
        assert self._server._node is not None
        return self._server._node.state

    async def close(self) -> None:
        for chain in self._chains:
            await chain.close()
        await self._server.stop()


class LoopbackWorld:
    def __init__(self, kind: str, start: Genesis, recorded: RecordedRuntime, spec_version: int | None = None) -> None:
        self.kind = kind
        if kind == "substrate":  # takes seconds; not within the deadline of a call that is tested
            substrate().decoded_metadata("0x" + recorded.v14.hex())
        self.node = LoopbackNode(recorded, start, spec_version=spec_version)
        self.server = LoopbackServer(self.node)
        self._chains: list[Chain] = []

    async def start(self) -> LoopbackWorld:
        await self.server.__aenter__()
        await self.advance(3)
        return self

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def faults(self) -> Any:
        return self.server.faults

    def chain(self, signer: Signer | None = VALIDATOR) -> Any:
        self._chains.append(connect(self.kind, self.url, signer))
        return self._chains[-1]

    async def advance(self, blocks: int) -> None:
        self.node.advance(blocks)

    @property
    def state(self) -> ChainState:
        return self.node.state

    async def close(self) -> None:
        for chain in self._chains:
            await chain.close()
        await self.server.__aexit__()


def connect(kind: str, url: str, signer: Signer | None) -> Chain:
    if kind == "bittensor":
        from subnet.chain.bittensor_sdk import BittensorChain

        return BittensorChain(url, signer)
    return substrate().SubstrateChain(url, signer)


def substrate() -> Any:
    pytest.importorskip("substrateinterface", reason="install the extra: pip install -e '.[chain]'")
    from subnet.chain import substrate

    return substrate


def recorded_or_skip() -> RecordedRuntime:
    if recorded_file() is None:
        pytest.skip(MISSING)
    return recorded_runtime()


class Worlds:
    """Makes worlds and closes them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[World] = []

    async def make(self, kind: str, start: Genesis | None = None, **how: Any) -> Any:
        world: Any
        if kind == "local":
            world = LocalWorld(self._directory / f"chain{len(self._made)}", start or genesis())
        else:
            recorded = how.pop("recorded", None) or recorded_or_skip()
            world = LoopbackWorld(kind, start or genesis(), recorded, **how)
        self._made.append(await world.start())
        return world

    async def close(self) -> None:
        for world in self._made:
            await world.close()
