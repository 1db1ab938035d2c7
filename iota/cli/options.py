"""Options that several commands share, named like the flags every subnet has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_WALLETS = Path("~/.bittensor/wallets")
DEFAULT_VALIDATOR = "http://127.0.0.1:8091"

WalletName = Annotated[str, typer.Option("--wallet.name", help="Name of the coldkey's wallet.")]
WalletHotkey = Annotated[str, typer.Option("--wallet.hotkey", help="Name of the hotkey.")]
WalletPath = Annotated[Path, typer.Option("--wallet.path", help="Where wallets lie.")]
Network = Annotated[
    str, typer.Option("--subtensor.network", help="Chain: local, finney, test, or a URL (docs/chain.md).")
]
Endpoint = Annotated[str | None, typer.Option("--subtensor.chain_endpoint", help="Endpoint; overrides the network.")]
Netuid = Annotated[int, typer.Option("--netuid", help="Subnet number.")]
ValidatorUrl = Annotated[str, typer.Option("--validator.url", help="Base URL of the validator.")]
ValidatorHotkey = Annotated[str | None, typer.Option("--validator.hotkey", help="Hotkey that must answer there.")]
