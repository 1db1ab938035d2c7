"""The simulated subnet on its chain: registrations, weights, and each tempo's emission, by the local chain's own rules.

:mod:`subnet.chain.local_rules` registers, prunes and takes weights, :mod:`subnet.chain.local_epochs` runs consensus
(:mod:`subnet.chain.yuma`) and pays. Not simulated: signatures, blocks between epochs, a registration price that moves, and the
real network's limits of 256 uids and of registrations per block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from subnet.chain import local_epochs, local_rules
from subnet.chain.base import to_u16
from subnet.chain.extrinsics import BurnedRegister, SetWeights
from subnet.chain.genesis import RAO_PER_TAO, Genesis, GenesisNeuron, SubnetGenesis
from subnet.chain.local_state import genesis_state, view_hyperparameters, view_metagraph
from subnet.chain.refusals import ChainRefused
from subnet.incentives.court import Rules
from subnet.incentives.scenario import BLOCK_S, TEMPO_BLOCKS, Economy
from subnet.score.score import Score

NETUID = 1
WEIGHTS_BEFORE_BLOCKS = 5
"""Weights are set so long before the epoch."""
FUNDS = 1e9


class Market:
    def __init__(
        self, economy: Economy, num_hotkeys: int, coldkeys: list[str], burn_share: float, rules: Rules
    ) -> None:
        self.economy, self._burn_share, self._rules = economy, burn_share, rules
        self.honest = [f"validator-{i}" for i in range(len(economy.validator_stakes))]
        self.copying = [f"copying-{i}" for i in range(len(economy.copying_stakes))]
        stakes = (*economy.validator_stakes, *economy.copying_stakes)
        names = (*self.honest, *self.copying)
        neurons = tuple(GenesisNeuron(n, f"{n}-coldkey", s) for n, s in zip(names, stakes, strict=True))
        self.stakes = dict(zip(names, stakes, strict=True))
        genesis = Genesis(
            block_time_s=BLOCK_S,
            balances=dict.fromkeys(coldkeys, FUNDS),
            subnets=(
                SubnetGenesis(
                    netuid=NETUID,
                    tempo=TEMPO_BLOCKS - 1,
                    immunity_period=4096,
                    max_uids=min(65_535, len(neurons) + 1 + math.ceil(num_hotkeys * (1.0 + economy.spare_uids))),
                    min_allowed_weights=1,
                    weights_rate_limit=100,
                    owner_cut=economy.owner_cut,
                    emission_per_block=economy.emission_per_block,
                    registration_cost=economy.registration_cost,
                    max_registrations_per_block=65_535,
                    neurons=neurons,
                ),
            ),
        )
        self._state = genesis_state(genesis, 0)
        self._subnet = self._state.subnets[NETUID]
        self._hyperparameters = view_hyperparameters(self._state, NETUID)
        self._next_epoch()
        self._advance_to_epoch()  # gives validators their permits, before anybody mines
        ledger = self._subnet.ledger
        self._before = (ledger.emitted, ledger.owner, ledger.burned)

    def _next_epoch(self) -> None:
        self._epoch = local_epochs.next_epoch_after(self._subnet.rules, self._state.block)

    def _advance_to_epoch(self) -> None:
        local_epochs.advance(self._state, self._epoch)
        self._next_epoch()

    def register(self, hotkey: str, coldkey: str) -> int | None:
        """The block of the registration; None where the chain refused."""
        try:
            return local_rules.burned_register(self._state, coldkey, BurnedRegister(netuid=NETUID, hotkey=hotkey)).block
        except ChainRefused:
            return None

    def registered(self) -> dict[str, int]:
        """uid by hotkey."""
        return {slot.hotkey: uid for uid, slot in enumerate(self._subnet.slots)}

    def tempo(self, scores: Mapping[str, Score]) -> dict[str, float]:
        """Validators set weights from these scores, the tempo ends: what each hotkey earned, in tokens."""
        local_epochs.advance(self._state, self._epoch - WEIGHTS_BEFORE_BLOCKS)
        copied = self._rows(self.honest)
        metagraph = view_metagraph(self._state, NETUID)
        weights = self._rules.weigh(metagraph, scores, self.honest[0], self._burn_share, self._hyperparameters)
        meant = to_u16(weights)  # the same for all: they fold one journal with one policy
        for hotkey in self.honest:
            self._set(hotkey, *meant)
        for hotkey in self.copying:
            if copied is not None:
                self._set(hotkey, *copied)
        self._advance_to_epoch()
        return {slot.hotkey: slot.emission / RAO_PER_TAO for slot in self._subnet.slots if slot.emission}

    def _rows(self, hotkeys: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """What the largest of these validators has set, as whoever copies finds it."""
        uid = self._subnet.uid_of(max(hotkeys, key=lambda hotkey: (self.stakes[hotkey], hotkey)))
        stored = self._subnet.slots[uid].weights[0] if uid is not None else None
        return None if stored is None else (stored.uids, stored.values)

    def _set(self, hotkey: str, uids: tuple[int, ...], values: tuple[int, ...]) -> None:
        """A refusal costs the tempo, as it would a validator."""
        if not uids:
            return
        try:
            call = SetWeights(netuid=NETUID, mechanism=0, uids=uids, values=values, version_key=0)
            local_rules.set_weights(self._state, hotkey, call)
        except ChainRefused:
            return

    def paid(self) -> tuple[float, float, float]:
        """Tokens since the first tempo: emitted, the owner's cut, burned."""
        ledger = self._subnet.ledger
        now = (ledger.emitted, ledger.owner, ledger.burned)
        emitted, owner, burned = ((a - b) / RAO_PER_TAO for a, b in zip(now, self._before, strict=True))
        return emitted, owner, burned
