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
from subnet.protocol.signing import Signer
from validator.scoring import Score
from validator.settings import ValidatorSettings
from validator.weights import WeightPolicy, WeightSetter, WeightsReport

METAGRAPH_EVERY_S = 5.0


class ChainSide:
    """``scores``: this validator's own, asked for whenever weights are set."""

    def __init__(
        self,
        settings: ValidatorSettings,
        signer: Signer,
        chain: Chain,
        scores: Callable[[], Mapping[str, Score]],
        on_metagraph: Callable[[Metagraph], None] = lambda metagraph: None,
    ) -> None:
        self._settings, self._signer, self._chain, self._on_metagraph = settings, signer, chain, on_metagraph
        self.metagraph: Metagraph | None = None
        self.coldkeys: Mapping[str, str] = {}
        """By registered hotkey."""
        self.weights_said = ""
        """How the last try to set weights ended, in words."""
        self._setter = WeightSetter(
            chain,
            settings.netuid,
            signer.hotkey,
            scores,
            WeightPolicy(burn_share=settings.burn_share, version_key=settings.weights_version_key),
            on_metagraph=self.take,
        )

    def take(self, metagraph: Metagraph) -> None:
        self.metagraph = metagraph
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
        while True:
            try:
                self.take(await self._chain.metagraph(self._settings.netuid))
            except IotaError as error:
                logger.warning("metagraph: {}", error)
            await asyncio.sleep(METAGRAPH_EVERY_S)

    async def set_weights(self) -> None:
        """Forever."""
        await self._setter.run(self._note_weights)

    def _note_weights(self, report: WeightsReport) -> None:
        self.weights_said = str(report)
