"""``iota doctor``: whether this machine, a wallet, the network and a store are fit for a role; the exit status says it too."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import DEFAULT_WALLETS, Endpoint, Netuid, Network

if TYPE_CHECKING:
    from iota.doctor.report import Report

CHECK_S, WAY_S = 120.0, 60.0


class Role(StrEnum):
    MINER, VALIDATOR, BUILDER = "miner", "validator", "builder"


DIRECTORIES = {Role.MINER: "~/.iota/miner", Role.VALIDATOR: "~/.iota/validator", Role.BUILDER: "."}


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    role: Annotated[
        Role | None,
        typer.Argument(help="What this machine is to be; without it only what the options name is looked at."),
    ] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Look at the chain, the subnet, and a wallet's place on it.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The role's directory; without it the usual one.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N (miner).")] = "auto",
    validator_url: Annotated[
        str | None, typer.Option("--validator.url", help="Look at the way to this validator.")
    ] = None,
    host: Annotated[str, typer.Option("--peer.host", help="Address at which others reach this miner.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--peer.port", help="Its port; 0: any free one.")] = 0,
    store_url: Annotated[str | None, typer.Option("--store.url", help="Try out this store (validator).")] = None,
    store_endpoint: Annotated[str, typer.Option("--store.endpoint", help="Of an S3 server.")] = "",
    store_secret: Annotated[Path, typer.Option("--store.secret", help="File shared with the store.")] = Path(
        "~/.iota/store/secret"
    ),
    netuid: Netuid = 1,
    network: Network = "local",
    endpoint: Endpoint = None,
    wallet_name: Annotated[
        str | None, typer.Option("--wallet.name", help="Wallet to look at; without it none.")
    ] = None,
    wallet_hotkey: Annotated[str, typer.Option("--wallet.hotkey", help="Name of its hotkey.")] = "default",
    wallet_path: Annotated[Path, typer.Option("--wallet.path", help="Where wallets lie.")] = DEFAULT_WALLETS,
    version_key: Annotated[int, typer.Option("--weights.version_key", help="The one your validator sets.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Say whether this machine, a wallet, the network and a store are fit, and what to do where not. Nothing is changed.

    Examples: iota doctor miner --validator.url http://203.0.113.7:8091 --wallet.name miner

    iota doctor validator --chain --subtensor.network finney --netuid 9 --wallet.name validator --store.url s3://bucket/prefix

    iota doctor --chain
    """
    from iota.doctor.report import Report, lines
    from iota.doctor.report import as_json as json_of
    from iota.doctor.wallet import wallet_files

    report, path = Report(), wallet_path.expanduser()
    if role is None and not (chain or validator_url or store_url or wallet_name):
        role = Role.MINER
    if role is not None:
        _machine(report, role, (directory or Path(DIRECTORIES[role])).expanduser(), device)
    signer = None
    if wallet_name is not None:
        signer = wallet_files(report.part("wallet"), wallet_name, wallet_hotkey, path)
    if chain:
        hotkey = signer.hotkey if signer is not None else ""
        _chain(report, netuid, network, endpoint, hotkey, (wallet_name or "", wallet_hotkey, path), version_key)
    if validator_url is not None:
        from iota.doctor.network import run_now, validator_way

        way = report.part("validator")
        run_now(lambda: validator_way(way, validator_url, signer, host=host, port=port), WAY_S)
    if store_url is not None:
        _store(report, store_url, store_endpoint, store_secret)
    print(json_of(report) if as_json else "\n".join([*lines(report), *_verdict(report)]))
    return 0 if report.fits else 1


def _verdict(report: Report) -> list[str]:
    return ["fits" if report.fits else f"doesn't fit: see the {len(report.bad)} lines marked BAD"]


def _machine(report: Report, role: Role, directory: Path, device: str) -> None:
    from iota.doctor import machine
    from iota.doctor.spec import load_spec

    spec = load_spec().of("validator" if role is Role.VALIDATOR else "miner")
    machine.software(report.part("software"))
    machine.processor(report.part("processor"), spec)
    machine.memory(report.part("memory"), spec)
    machine.disk(report.part("disk"), directory, spec)
    if role is Role.MINER:
        machine.device(report.part("device"), device, spec)


def _chain(
    report: Report,
    netuid: int,
    network: str,
    endpoint: str | None,
    hotkey: str,
    wallet: tuple[str, str, Path],
    version_key: int,
) -> None:
    from iota.onchain import on_chain
    from subnet.chain.connect import register_command
    from subnet.chain.fit import Operator, check_chain
    from subnet.timing import Deadline

    operator = Operator(version_key=version_key)
    if hotkey:
        name, hotkey_name, path = wallet
        command = register_command(network, endpoint, netuid, name, hotkey_name, str(path))
        operator = Operator(hotkey, command, version_key)
    findings = on_chain(
        network, endpoint, lambda connected: check_chain(connected, netuid, operator, Deadline.after(CHECK_S))
    )
    report.parts["chain"] = findings


def _store(report: Report, url: str, endpoint: str, secret: Path) -> None:
    import asyncio

    from iota.store_check import StoreAddress, check_store

    part = report.part("store")
    for found in asyncio.run(check_store(StoreAddress(url, endpoint=endpoint, secret=secret))):
        what = f"{found.name}: {found.said}"
        if found.ok:
            part.ok(what)
        else:
            (part.bad if found.needed else part.note)(what, found.means)
