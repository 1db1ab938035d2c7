"""From ``--subtensor.network`` and ``--subtensor.chain_endpoint`` to a chain. The endpoint alone decides which adapter.

    local, http://...              the embedded local chain
    finney, test, ..., ws://...    the Bittensor network through its SDK
    substrate+finney, substrate+ws://...   the same through substrate-interface: calls from the chain's own metadata

Names are the SDK's, so that no host stands in this repository. Nothing is sent before the first call.
"""

from __future__ import annotations

import importlib
from typing import Any

from subnet.chain.base import Chain, KeySigner
from subnet.chain.local_client import LocalChain
from subnet.errors import ConfigError

LOCAL_ENDPOINT = "http://127.0.0.1:9944"
SUBSTRATE = "substrate+"
INSTALL = "pip install 'iota-open[chain]'"


def connect_chain(network: str, endpoint: str | None = None, *, hotkey: KeySigner | None = None) -> Chain:
    """``endpoint``, where given, overrides the network. :class:`ConfigError` for what names no chain."""
    target = endpoint or (LOCAL_ENDPOINT if network == "local" else network)
    if target.startswith(("http://", "https://")):
        if network not in ("local", target):
            raise ConfigError(
                f"--subtensor.network {network!r} with {target}, which is the URL of a local chain",
                hint="give a ws:// or wss:// endpoint, or --subtensor.network local",
            )
        return LocalChain(target, hotkey)
    if target.startswith(SUBSTRATE):
        module: Any = _library("subnet.chain.substrate", "substrate-interface")
        return module.SubstrateChain(resolve(target.removeprefix(SUBSTRATE)), hotkey)
    module = _library("subnet.chain.bittensor_sdk", "bittensor")
    return module.BittensorChain(resolve(target), hotkey)


def is_local(network: str, endpoint: str | None) -> bool:
    target = endpoint or network
    return target == "local" or target.startswith(("http://", "https://"))


def resolve(target: str) -> str:
    """A websocket URL, from a URL or from a name that the SDK knows."""
    if target.startswith(("ws://", "wss://")):
        return target
    networks: dict[str, str] = _library("bittensor.settings", "bittensor").NETWORKS
    if target in networks and target != "local":
        return networks[target]
    names = ", ".join(sorted(name for name in networks if name != "local"))
    raise ConfigError(
        f"--subtensor.network {target!r} names no chain",
        hint=f"local, {names}, a ws:// or wss:// endpoint, or the http:// URL of a local chain (iota chain serve)",
    )


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"this endpoint needs {package}: {error}", hint=INSTALL) from error


def register_command(
    network: str, endpoint: str | None, netuid: int, wallet_name: str, wallet_hotkey: str, wallet_path: str = ""
) -> str:
    """What an operator runs to register a hotkey on this chain."""
    if is_local(network, endpoint):
        where = f" --subtensor.chain_endpoint {endpoint}" if endpoint else ""
        path = f" --wallet.path {wallet_path}" if wallet_path else ""
        return (
            f"iota chain register --netuid {netuid} --wallet.name {wallet_name} --wallet.hotkey {wallet_hotkey}{path}"
            f"{where}"
        )
    target = (endpoint or network).removeprefix(SUBSTRATE)
    path = f" --wallet-path {wallet_path}" if wallet_path else ""
    return (
        f"btcli subnets register --netuid {netuid} --network {target} --wallet {wallet_name} "
        f"--wallet-hotkey {wallet_hotkey}{path}"
    )
