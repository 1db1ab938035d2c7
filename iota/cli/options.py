"""Options that several commands share, named like the flags every subnet has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

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
Journal = Annotated[
    str,
    typer.Option(
        "--journal", help="postgresql://USER@HOST/DATABASE, where the validator has one; without it files in --dir."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON on stdout; its fields only ever grow.")]


def print_json(what: Any) -> None:
    """One JSON value on stdout, indented; structs by their fields, paths as text."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(what, enc_hook=str), indent=2).decode(), flush=True)


def to_stderr(text: str) -> None:
    """What is said beside a JSON value."""
    print(text, file=sys.stderr, flush=True)
