"""``iota doctor``: whether what is installed and the network fit, one line each; the exit status says it too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli.options import DEFAULT_WALLETS, Endpoint, Netuid, Network

CHECK_S = 120.0
MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    chain: Annotated[
        bool, typer.Option("--chain", help="Look at the chain, the subnet, and a wallet's place on it.")
    ] = False,
    netuid: Netuid = 1,
    network: Network = "local",
    endpoint: Endpoint = None,
    wallet_name: Annotated[
        str | None, typer.Option("--wallet.name", help="Wallet to look up; without it none.")
    ] = None,
    wallet_hotkey: Annotated[str, typer.Option("--wallet.hotkey", help="Name of its hotkey.")] = "default",
    wallet_path: Annotated[Path, typer.Option("--wallet.path", help="Where wallets lie.")] = DEFAULT_WALLETS,
    version_key: Annotated[int, typer.Option("--weights.version_key", help="The one your validator sets.")] = 0,
) -> int:
    """Say whether this software and a network fit, before it costs a place on the subnet. Nothing is sent."""
    from subnet.errors import ConfigError

    if not chain:
        raise ConfigError("iota doctor: nothing to look at", hint="give --chain")
    return _doctor_chain(netuid, network, endpoint, wallet_name, wallet_hotkey, wallet_path.expanduser(), version_key)


def _doctor_chain(
    netuid: int,
    network: str,
    endpoint: str | None,
    wallet_name: str | None,
    wallet_hotkey: str,
    wallet_path: Path,
    version_key: int,
) -> int:
    from iota.onchain import on_chain
    from subnet.chain.connect import register_command
    from subnet.chain.fit import Operator, check_chain
    from subnet.timing import Deadline

    operator = Operator(version_key=version_key)
    if wallet_name is not None:
        from subnet.protocol.signing import load_wallet

        signer = load_wallet(wallet_name, wallet_hotkey, wallet_path)
        command = register_command(network, endpoint, netuid, wallet_name, wallet_hotkey, str(wallet_path))
        operator = Operator(signer.hotkey, command, version_key)
    findings = on_chain(
        network, endpoint, lambda connected: check_chain(connected, netuid, operator, Deadline.after(CHECK_S))
    )
    for finding in findings.found:
        print(f"{MARKS[finding.level]}  {finding}")
    print("fits" if findings.fits else "doesn't fit: see the lines marked BAD")
    return 0 if findings.fits else 1
