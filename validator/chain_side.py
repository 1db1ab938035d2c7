"""What any validator has to do with the chain: who is registered, its own address, its own weights. Leading or not.

The metagraph is read again and again; a chain that is away leaves the last one in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

from loguru import logger

from subnet.chain.base import Chain, Metagraph
from subnet.chain.connect import register_command
from subnet.errors import InputError, IotaError
from subnet.policy.policy import SubnetPolicy, WeightsRules
from subnet.protocol.signing import Signer
from subnet.timing import SYSTEM_CLOCK
from validator.scoring import Score
from validator.settings import ValidatorSettings
from validator.weights import WeightPolicy, WeightSetter, WeightsReport

METAGRAPH_EVERY_S = 5.0


def weight_policy(rules: WeightsRules) -> WeightPolicy:
    return WeightPolicy(burn_share=rules.burn_share, version_key=rules.version_key)


class ChainSide:
    """``scores`` and ``policy``: this validator's own, asked for whenever weights are set."""

    def __init__(
        self,
        settings: ValidatorSettings,
        signer: Signer,
        chain: Chain,
        scores: Callable[[], Mapping[str, Score]],
        on_metagraph: Callable[[Metagraph], None] = lambda metagraph: None,
        *,
        policy: Callable[[], SubnetPolicy] = SubnetPolicy,
    ) -> None:
        self._settings, self._signer, self._chain, self._on_metagraph = settings, signer, chain, on_metagraph
        self.metagraph: Metagraph | None = None
        self.coldkeys: Mapping[str, str] = {}
        """By registered hotkey."""
        self.metagraph_s: float | None = None
        """When it was last read, by the monotonic clock."""
        self.trouble = ""
        """Why the last read failed; empty when it didn't."""
        self.tempo_s = 0.0
        """From one settlement to the next, as far as it is known."""
        self.weights_report: WeightsReport | None = None
        """How the last try to set weights ended."""
        self.weights_set_s: float | None = None
        self._setter = WeightSetter(
            chain,
            settings.netuid,
            signer.hotkey,
            scores,
            lambda: weight_policy(policy().weights),
            on_metagraph=self.take,
        )

    @property
    def weights_said(self) -> str:
        """How the last try to set weights ended, in words."""
        return "" if self.weights_report is None else str(self.weights_report)

    def take(self, metagraph: Metagraph) -> None:
        self.metagraph, self.metagraph_s, self.trouble = metagraph, SYSTEM_CLOCK.now_s(), ""
        self.coldkeys = {neuron.hotkey: neuron.coldkey for neuron in metagraph.neurons}
        self._on_metagraph(metagraph)

    @property
    def permits(self) -> Mapping[str, bool]:
        """By registered hotkey, whether it holds a validator permit now."""
        neurons = self.metagraph.neurons if self.metagraph is not None else ()
        return {neuron.hotkey: neuron.validator_permit for neuron in neurons}

    def is_known(self, hotkey: str) -> bool:
        return hotkey in self.coldkeys

    async def begin(self) -> Metagraph:
        """Read the metagraph for the first time; :class:`InputError` where this hotkey isn't in it."""
        settings = self._settings
        metagraph = await self._chain.metagraph(settings.netuid)
        self.take(metagraph)
        if self._signer.hotkey not in self.coldkeys:
            raise InputError(
                f"hotkey {self._signer.hotkey} isn't registered on subnet {settings.netuid}",
                hint=register_command(
                    settings.chain,
                    settings.chain_endpoint,
                    settings.netuid,
                    settings.wallet_name,
                    settings.wallet_hotkey,
                    str(settings.wallet_path),
                ),
            )
        return metagraph

    async def announce(self) -> None:
        """Put the address on the chain, so that others find it; a refusal is said and not fatal (they may use a URL)."""
        settings = self._settings
        try:
            await self._chain.serve(settings.netuid, settings.host, settings.port)
        except IotaError as error:
            logger.warning("address not announced on the chain: {}", error)

    async def watch(self) -> NoReturn:
        every_s = METAGRAPH_EVERY_S
        while True:
            try:
                self.take(await self._chain.metagraph(self._settings.netuid))
                block_s = await self._chain.block_time_s()
                every_s = max(METAGRAPH_EVERY_S, block_s)
                self.tempo_s = block_s * (self.metagraph.tempo + 1) if self.metagraph is not None else 0.0
            except IotaError as error:
                self.trouble = str(error)
                logger.warning("metagraph: {}", error)
            await asyncio.sleep(every_s)

    async def set_weights(self) -> None:
        """Forever."""
        await self._setter.run(self._note_weights)

    def _note_weights(self, report: WeightsReport) -> None:
        self.weights_report = report
        if report.status == "set":
            self.weights_set_s = SYSTEM_CLOCK.now_s()
