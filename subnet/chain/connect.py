"""From ``--subtensor.network`` and ``--subtensor.chain_endpoint`` to a chain."""

from __future__ import annotations

from subnet.chain.base import Chain, KeySigner
from subnet.chain.local_client import LocalChain
from subnet.errors import ConfigError

LOCAL_ENDPOINT = "http://127.0.0.1:9944"


def connect_chain(network: str, endpoint: str | None = None, *, hotkey: KeySigner | None = None) -> Chain:
    """``local`` (at ``endpoint`` or the usual port) or the URL of a local chain; nothing is sent yet."""
    target = endpoint or (LOCAL_ENDPOINT if network == "local" else network)
    if target.startswith(("http://", "https://")) and network in ("local", target):
        return LocalChain(target, hotkey)
    raise ConfigError(
        f"--subtensor.network {network!r}: real networks come with the Bittensor adapter, which isn't part of this yet",
        hint="use --subtensor.network local (start one with: iota chain serve) or the http:// URL of a local chain",
    )
