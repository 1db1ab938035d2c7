"""Which validator a miner works for: the permit holder with most stake and a served address, or the URL it was given.

Either way the validator is bound to a hotkey that holds a permit on the chain.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from loguru import logger

from miner.settings import MinerSettings
from subnet.chain.base import Chain, Metagraph
from subnet.errors import ConfigError, IotaError, NotFound
from subnet.net.client import SignedClient
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import PROTOCOL_VERSION


@dataclass(frozen=True)
class ValidatorAddress:
    url: str
    hotkey: str


def choose_validator(metagraph: Metagraph, settings: MinerSettings) -> ValidatorAddress:
    """From the metagraph; :class:`NotFound` (retryable by waiting) if no permit holder serves an address."""
    for neuron in metagraph.permit_holders():
        if settings.validator_hotkey and neuron.hotkey != settings.validator_hotkey:
            continue
        if neuron.axon is not None:
            return ValidatorAddress(f"http://{neuron.axon.host}:{neuron.axon.port}", neuron.hotkey)
    raise NotFound("no validator with a permit has announced an address on the chain", hint="or set --validator.url")


async def say_hello(url: str, signer: Signer) -> tuple[SignedClient, Hello]:
    """A client bound to the hotkey that hello names, with its clock learnt."""
    client = SignedClient(url, signer)
    try:
        hello = await client.request(
            "GET", "/v1/hello", None, Hello, deadline=Deadline.after(TIMEOUTS.http_request_s), signed=False
        )
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            raise ConfigError(
                f"{url} speaks protocol {hello.protocol_min} to {hello.protocol_max}, this miner {PROTOCOL_VERSION}",
                hint="update the older of the two",
            )
        client.receiver = hello.hotkey
        client.learn_clock(hello.time_ns)
    except BaseException:
        await client.close()
        raise
    return client, hello


async def find_validator(settings: MinerSettings, signer: Signer, chain: Chain) -> tuple[SignedClient, Hello]:
    """Until one answers; configuration errors end it, everything else is retried with growing waits."""
    backoff = Backoff(0.2, 5.0)
    said = ""
    while True:
        try:
            metagraph = await chain.metagraph(settings.netuid)
            _check_registered(metagraph, settings, signer)
            if settings.validator_url:
                client, hello = await say_hello(settings.validator_url, signer)
                await _check_permit(client, hello, metagraph, settings)
                return client, hello
            address = choose_validator(metagraph, settings)
            client, hello = await say_hello(address.url, signer)
            if hello.hotkey == address.hotkey:
                return client, hello
            await client.close()
            raise NotFound(f"{address.url} answers as {hello.hotkey}, the chain says {address.hotkey}")
        except ConfigError:
            raise
        except IotaError as error:
            if str(error) != said:
                said = str(error)
                logger.info("no validator yet: {}", error)
        await asyncio.sleep(backoff.next_s())


def _check_registered(metagraph: Metagraph, settings: MinerSettings, signer: Signer) -> None:
    if metagraph.neuron(signer.hotkey) is None:
        raise ConfigError(
            f"hotkey {signer.hotkey} isn't registered on subnet {settings.netuid}",
            hint=f"iota chain register --netuid {settings.netuid} --wallet.name {settings.wallet_name} "
            f"--wallet.hotkey {settings.wallet_hotkey} --wallet.path {settings.wallet_path}",
        )


async def _check_permit(client: SignedClient, hello: Hello, metagraph: Metagraph, settings: MinerSettings) -> None:
    """A URL from the operator is still bound to a hotkey: the one given, or one with a permit."""
    neuron = metagraph.neuron(hello.hotkey)
    if settings.validator_hotkey and hello.hotkey != settings.validator_hotkey:
        await client.close()
        raise ConfigError(
            f"{settings.validator_url} answers as {hello.hotkey}, not {settings.validator_hotkey}",
            hint="check --validator.url and --validator.hotkey",
        )
    if neuron is None or not neuron.validator_permit:
        await client.close()
        raise NotFound(f"{hello.hotkey} at {settings.validator_url} holds no validator permit (yet)")
