"""Wallets of a local swarm and the genesis of its chain: made once, found again when the swarm is started again.

A chain keeps the genesis it began with; who isn't in it (a larger fleet on a later day) registers as anybody would.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from iota.onchain import register
from subnet.chain.coldkeys import load_coldkey
from subnet.chain.genesis import Genesis, GenesisNeuron
from subnet.errors import Corrupt
from subnet.protocol.signing import Signer, create_wallet, load_wallet
from subnet.store.disk import atomic_write
from subnet.timing import Deadline

NETUID = 1
VALIDATOR_STAKE = 10_000.0
OWNER = "owner"


class SwarmWallets:
    """``directory``/wallets and ``directory``/genesis.msgpack."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "wallets"
        self._genesis_path = directory / "genesis.msgpack"
        self._registered: set[str] = set()

    def signer(self, name: str) -> Signer:
        """The hotkey of this name, made if it isn't there."""
        if (self.path / name / "hotkeys" / "default").exists():
            return load_wallet(name, "default", self.path)
        return create_wallet(name, "default", self.path)

    def genesis(self, template: Genesis, validators: Sequence[str], miners: Sequence[str]) -> Genesis:
        """The one this swarm's chain began with, else a new one: all these registered from block 0, validators with stake.

        A coldkey each, so that checks of two miners are independent.
        """
        if self._genesis_path.exists():
            try:
                genesis = msgspec.msgpack.decode(self._genesis_path.read_bytes(), type=Genesis)
            except msgspec.MsgspecError as error:
                raise Corrupt(f"{self._genesis_path} cannot be read: {error}", hint="choose another --dir") from error
        else:
            genesis = self._new_genesis(template, validators, miners)
            atomic_write(self._genesis_path, msgspec.msgpack.encode(genesis))
        self._registered = {neuron.hotkey for neuron in genesis.subnets[0].neurons}
        return genesis

    def _new_genesis(self, template: Genesis, validators: Sequence[str], miners: Sequence[str]) -> Genesis:
        owner = self.signer(OWNER)
        neurons = [GenesisNeuron(owner.hotkey, owner.coldkey)]
        stakes = {name: VALIDATOR_STAKE / (1 + rank) for rank, name in enumerate(validators)}
        for name in (*validators, *miners):
            signer = self.signer(name)
            neurons.append(GenesisNeuron(signer.hotkey, signer.coldkey, stakes.get(name, 0.0)))
        subnet = msgspec.structs.replace(
            template.subnets[0],
            netuid=NETUID,
            owner_hotkey=owner.hotkey,
            owner_coldkey=owner.coldkey,
            neurons=tuple(neurons),
        )
        return msgspec.structs.replace(template, subnets=(subnet, *template.subnets[1:]))

    def register(self, names: Sequence[str], chain_url: str, deadline: Deadline) -> bool:
        """Register who of these isn't yet; whether anybody was."""
        new = False
        for name in names:
            hotkey = self.signer(name).hotkey
            if hotkey in self._registered:
                continue
            coldkey = load_coldkey(name, self.path)
            register("local", chain_url, NETUID, coldkey=coldkey, hotkey=hotkey, deadline=deadline)
            self._registered.add(hotkey)
            new = True
        return new
