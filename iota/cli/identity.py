"""``iota wallet export`` and ``import``: a miner's identity carried between machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli.options import DEFAULT_WALLETS, AsJson, WalletHotkey, WalletName, WalletPath, print_json


def add_to(wallet: typer.Typer) -> None:
    wallet.command("export")(wallet_export)
    wallet.command("import")(wallet_import)


def wallet_export(
    file: Annotated[Path, typer.Argument(help="A new file; only you may read it.")],
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    with_coldkey: Annotated[bool, typer.Option("--coldkey", help="The coldkey too, where it lies here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a hotkey (and its coldkey's address) to one file, to be imported on another machine.

    Example: iota wallet export ~/miner.identity --wallet.name miner
    """
    from iota.home.identity import export_identity

    signer = export_identity(
        wallet_name, wallet_hotkey, wallet_path.expanduser(), file.expanduser(), with_coldkey=with_coldkey
    )
    if as_json:
        print_json({"file": str(file), "hotkey": signer.hotkey, "with_coldkey": with_coldkey})
        return
    print(
        f"{file}: hotkey {signer.hotkey}{' and its coldkey' if with_coldkey else ''}; whoever has it can act as this miner"
    )


def wallet_import(
    file: Annotated[Path, typer.Argument(help="Of iota wallet export.")],
    wallet_name: Annotated[str | None, typer.Option("--wallet.name", help="Another name than the file's.")] = None,
    wallet_hotkey: Annotated[str | None, typer.Option("--wallet.hotkey", help="Another name than the file's.")] = None,
    wallet_path: WalletPath = DEFAULT_WALLETS,
    as_json: AsJson = False,
) -> None:
    """Put an exported identity into the wallets of this machine. Nothing is overwritten."""
    from iota.home.identity import import_identity

    signer, name, hotkey = import_identity(file.expanduser(), wallet_path.expanduser(), wallet_name, wallet_hotkey)
    if as_json:
        print_json({"wallet": name, "name": hotkey, "hotkey": signer.hotkey})
        return
    print(f"wallet {name}/{hotkey}: hotkey {signer.hotkey}")
