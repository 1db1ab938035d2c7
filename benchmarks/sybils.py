"""Several hotkeys of one coldkey in a local swarm, one of which cheats and, once it is convicted, comes again under a new name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.audit_swarm import Plan
from benchmarks.cheats import cheating
from iota.onchain import register
from iota.swarm import LocalSwarm, SwarmOptions
from iota.swarm_wallets import NETUID, SwarmWallets
from subnet.chain.coldkeys import load_coldkey
from subnet.chain.genesis import Genesis
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.timing import Deadline

METAGRAPH_S = 6.0
"""Until the validator has read the chain again."""


class SybilWallets(SwarmWallets):
    """The hotkeys of ``sybils`` (names) all belong to the first one's coldkey, on the chain and nowhere else."""

    def __init__(self, directory: Path, sybils: Sequence[str]) -> None:
        super().__init__(directory)
        self._sybils = tuple(sybils)

    def _new_genesis(self, template: Genesis, validators: Sequence[str], miners: Sequence[str]) -> Genesis:
        genesis = super()._new_genesis(template, validators, miners)
        coldkey = self.signer(self._sybils[0]).coldkey
        hotkeys = {self.signer(name).hotkey for name in self._sybils}
        subnet = genesis.subnets[0]
        neurons = tuple(
            msgspec.structs.replace(neuron, coldkey=coldkey) if neuron.hotkey in hotkeys else neuron
            for neuron in subnet.neurons
        )
        return msgspec.structs.replace(
            genesis, subnets=(msgspec.structs.replace(subnet, neurons=neurons), *genesis.subnets[1:])
        )

    def register_sybil(self, name: str, chain_url: str, deadline: Deadline) -> None:
        """One more hotkey of the coldkey, registered as anybody would."""
        hotkey, coldkey = self.signer(name).hotkey, load_coldkey(self._sybils[0], self.path)
        register("local", chain_url, NETUID, coldkey=coldkey, hotkey=hotkey, deadline=deadline)
        self._registered.add(hotkey)


def sybil_plan(config: RunConfig, miners: int, notes: Path, *, limit_s: float) -> Plan:
    """The last two miners are one coldkey's; the last one lies, and as soon as it is convicted the coldkey sends another liar."""
    names = (f"miner-{miners - 2}", f"miner-{miners - 1}")

    class SybilSwarm(LocalSwarm):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self._keys = SybilWallets(self.directory, names)

        def come_again(self) -> None:
            """The next number, under a new hotkey of the same coldkey."""
            assert isinstance(self._keys, SybilWallets)
            self._keys.register_sybil(f"miner-{self.num_miners}", self.chain_url, Deadline.after(30.0))
            time.sleep(METAGRAPH_S)
            self._request_miner()

    def during(swarm: LocalSwarm, status: RunStatus) -> None:
        assert isinstance(swarm, SybilSwarm)
        convicted = 0 if status.audits is None else status.audits.convicted
        if convicted and swarm.num_miners == miners:
            swarm.come_again()

    lying = {number: cheating("scaled_gradient", notes) for number in (miners - 1, miners)}
    options = SwarmOptions(measure_costs=False, device="cpu", spare_miners=0)
    return Plan(config, miners, lying, notes, during, SybilSwarm, limit_s, options)
