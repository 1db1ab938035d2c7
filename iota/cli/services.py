"""``iota chain``, ``iota store``, ``iota wallet``: what a swarm stands on, each served by a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli import identity
from iota.cli.options import (
    DEFAULT_WALLETS,
    AsJson,
    Endpoint,
    Netuid,
    Network,
    WalletHotkey,
    WalletName,
    WalletPath,
    print_json,
)

CALL_S = 30.0
GIB = 1 << 30


def add_to(app: typer.Typer) -> None:
    chain = typer.Typer(help="A local chain: serve one, register, stake, look.", no_args_is_help=True)
    chain.command("serve")(chain_serve)
    chain.command("register")(chain_register)
    chain.command("stake")(chain_stake)
    chain.command("show")(chain_show)
    store = typer.Typer(help="The object store.", no_args_is_help=True)
    store.command("serve")(store_serve)
    store.command("check")(store_check)
    store.command("prepare")(store_prepare)
    wallet = typer.Typer(
        help="Bittensor wallets: made for local chains, carried between machines.", no_args_is_help=True
    )
    wallet.command("new")(wallet_new)
    identity.add_to(wallet)
    app.add_typer(chain, name="chain")
    app.add_typer(store, name="store")
    app.add_typer(wallet, name="wallet")


def chain_serve(
    directory: Annotated[Path, typer.Option("--dir", help="Where the chain lies.")] = Path("~/.iota/chain"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9944,
    genesis: Annotated[Path | None, typer.Option(help="Genesis file (TOML); without it a local swarm's rules.")] = None,
) -> int:
    """Serve a local chain with the real one's rules and error names, until Ctrl-C."""
    import sys

    from iota.entries import ChainSettings, serve_chain_here
    from subnet.logs import setup

    setup(sys.stderr, "INFO")
    return serve_chain_here(ChainSettings(directory=directory.expanduser(), host=host, port=port, genesis_file=genesis))


def chain_register(
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    netuid: Netuid = 1,
    network: Network = "local",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Register a wallet's hotkey on the subnet; the faucet pays on a local chain."""
    from iota.onchain import register
    from subnet.chain.coldkeys import load_coldkey
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    path = wallet_path.expanduser()
    signer = load_wallet(wallet_name, wallet_hotkey, path)
    coldkey = load_coldkey(wallet_name, path)
    uid, new = register(
        network, endpoint, netuid, coldkey=coldkey, hotkey=signer.hotkey, deadline=Deadline.after(CALL_S)
    )
    if as_json:
        print_json({"hotkey": signer.hotkey, "netuid": netuid, "uid": uid, "new": new})
        return
    print(f"{signer.hotkey} is uid {uid} of subnet {netuid}" + ("" if new else " already"))


def chain_stake(
    amount: Annotated[float, typer.Argument(help="TAO to stake.")],
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    netuid: Netuid = 1,
    network: Network = "local",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Stake to a wallet's hotkey; a validator permit follows at the end of the tempo."""
    from iota.onchain import add_stake
    from subnet.chain.coldkeys import load_coldkey
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    path = wallet_path.expanduser()
    signer = load_wallet(wallet_name, wallet_hotkey, path)
    coldkey = load_coldkey(wallet_name, path)
    add_stake(
        network, endpoint, netuid, coldkey=coldkey, hotkey=signer.hotkey, amount=amount, deadline=Deadline.after(CALL_S)
    )
    if as_json:
        print_json({"hotkey": signer.hotkey, "netuid": netuid, "staked": amount})
        return
    print(f"staked {amount:g} TAO to {signer.hotkey}")


def chain_show(
    netuid: Netuid = 1, network: Network = "local", endpoint: Endpoint = None, as_json: AsJson = False
) -> None:
    """Print the metagraph and the weights that validators set."""
    from rich.console import Console

    from iota.chainview import metagraph_table, weight_lines
    from iota.onchain import metagraph_and_weights
    from subnet.timing import Deadline

    metagraph, weights = metagraph_and_weights(network, endpoint, netuid, deadline=Deadline.after(CALL_S))
    if as_json:
        print_json({"metagraph": metagraph, "weights": weights})
        return
    console = Console()
    console.print(metagraph_table(metagraph))
    for line in weight_lines(metagraph, weights):
        console.print(line, highlight=False)


def store_serve(
    directory: Annotated[Path, typer.Option("--dir", help="Where the blobs lie.")] = Path("~/.iota/store"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9945,
    secret: Annotated[
        Path | None, typer.Option(help="File shared with the validator; made on first use. Default: DIR/secret.")
    ] = None,
    budget_gib: Annotated[float, typer.Option(help="Bytes the store may hold, in GiB.")] = 64.0,
) -> int:
    """Serve a folder as the object store over signed URLs, until Ctrl-C."""
    import sys

    from iota.entries import StoreSettings, serve_store_here
    from subnet.logs import setup

    setup(sys.stderr, "INFO")
    folder = directory.expanduser()
    settings = StoreSettings(
        directory=folder,
        host=host,
        port=port,
        secret=(secret or folder / "secret").expanduser(),
        budget_bytes=round(budget_gib * GIB),
    )
    return serve_store_here(settings)


StoreUrl = Annotated[
    str, typer.Argument(metavar="URL", help="s3://BUCKET or s3://BUCKET/PREFIX, or that of iota store serve.")
]
StoreEndpoint = Annotated[str, typer.Option("--store.endpoint", help="Endpoint of an S3 server; without it AWS's.")]
StoreRegion = Annotated[str, typer.Option("--store.region", help="Region of the bucket.")]
StoreCredentials = Annotated[
    Path | None,
    typer.Option("--store.credentials", help="File like ~/.aws/credentials; without it where AWS's tools look."),
]


def store_check(
    url: StoreUrl,
    endpoint: StoreEndpoint = "",
    region: StoreRegion = "",
    credentials: StoreCredentials = None,
    secret: Annotated[Path, typer.Option("--store.secret", help="Shared with an embedded store.")] = Path(
        "~/.iota/store/secret"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="As one line of JSON.")] = False,
) -> int:
    """Do with a store what runs do with it, and say what it lacks; exit status 1 where that is needed."""
    from iota.store_check import StoreAddress
    from iota.store_check import store_check as check

    return check(StoreAddress(url, endpoint, region, credentials, secret), as_json=as_json)


def store_prepare(
    url: StoreUrl,
    endpoint: StoreEndpoint = "",
    region: StoreRegion = "",
    credentials: StoreCredentials = None,
    as_json: AsJson = False,
) -> None:
    """Make a bucket if there is none, and give it lifecycle rules as a net for what a dead validator leaves."""
    from subnet.store.s3_admin import EVIDENCE_DAYS, UPLOAD_DAYS, ensure_lifecycle, make_bucket
    from subnet.store.s3_place import S3Place, S3Signer, find_credentials

    place = S3Place.parse(url, endpoint=endpoint, region=region)
    signer = S3Signer(place, find_credentials(credentials))
    made, ruled = make_bucket(signer), ensure_lifecycle(signer)
    if as_json:
        days = {"upload_days": UPLOAD_DAYS, "evidence_days": EVIDENCE_DAYS}
        print_json({"bucket": place.bucket, "made": made, "lifecycle_set": ruled, **days})
        return
    print(f"bucket {place.bucket}: {'made' if made else 'there already'}")
    changed = "set" if ruled else "there already"
    print(f"lifecycle: {changed}; unfinished uploads end after {UPLOAD_DAYS} days, evidence after {EVIDENCE_DAYS}")


def wallet_new(
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    as_json: AsJson = False,
) -> None:
    """Make an unencrypted wallet, for local chains. An existing hotkey is never overwritten."""
    from subnet.protocol.signing import create_wallet

    signer = create_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    if as_json:
        print_json({"wallet": wallet_name, "name": wallet_hotkey, "hotkey": signer.hotkey, "coldkey": signer.coldkey})
        return
    print(f"wallet {wallet_name}/{wallet_hotkey}: hotkey {signer.hotkey}, coldkey {signer.coldkey}")
