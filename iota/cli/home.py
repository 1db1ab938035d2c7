"""``iota miner setup``, ``start``, ``stop``, ``status``, ``remove``: a miner on a machine at home, from nothing to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli.options import DEFAULT_WALLETS, Endpoint, Netuid, Network, WalletPath

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Miners that were set up; without any all.")
]


def add_to(miner: typer.Typer) -> None:
    miner.command("setup")(setup)
    miner.command("start")(start)
    miner.command("stop")(stop)
    miner.command("status")(status)
    miner.command("remove")(remove)


def setup(
    urls: Annotated[
        list[str] | None,
        typer.Option("--validator.url", help="Whom to work for; several times for several. Without it: the chain's."),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What this miner is called here.")] = "miner",
    netuid: Netuid = 1,
    network: Network = "local",
    endpoint: Endpoint = None,
    wallet_name: Annotated[str, typer.Option("--wallet.name", help="Name of its wallet.")] = "miner",
    wallet_hotkey: Annotated[str, typer.Option("--wallet.hotkey", help="Name of its hotkey.")] = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    import_file: Annotated[
        Path | None, typer.Option("--import", help="An identity from another machine (iota wallet export).")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    gpus: Annotated[str | None, typer.Option("--gpus", help="A miner for each: all, or numbers such as 0,1.")] = None,
    idle_only: Annotated[
        bool, typer.Option("--idle.only", help="Work only while the machine is otherwise idle.")
    ] = False,
    host: Annotated[
        str | None, typer.Option("--peer.host", help="Address at which other miners reach this one.")
    ] = None,
    port: Annotated[int, typer.Option("--peer.port", min=0, max=65535, help="Port to listen on; 0: any.")] = 0,
    page_port: Annotated[int, typer.Option("--page.port", min=0, max=65535, help="Of its page; 0: none.")] = 8192,
    upload: Annotated[str | None, typer.Option("--limit.upload", help="12.5MB or 100Mbit a second.")] = None,
    download: Annotated[str | None, typer.Option("--limit.download", help="The same, the other way.")] = None,
    vram: Annotated[str | None, typer.Option("--limit.vram", help="6GiB of the GPU.")] = None,
    service: Annotated[bool, typer.Option("--service", help="Start it now and with every session (systemd).")] = False,
    register: Annotated[bool, typer.Option(help="Register the hotkey, on a local chain.")] = True,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where no run fits, or none answers.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Write its settings anew.")] = False,
) -> int:
    """Check this machine, make (or import) an identity, pick a run that fits the card, write settings. Starts nothing.

    Examples: iota miner setup --validator.url http://203.0.113.7:8091

    iota miner setup --gpus all --idle.only --service
    """
    from iota.home.setup import Setup, run_setup

    limits = {"upload": upload, "download": download, "vram": vram}
    wanted = Setup(
        name=name,
        urls=tuple(urls or ()),
        netuid=netuid,
        network=network,
        endpoint=endpoint,
        wallet_name=wallet_name,
        wallet_hotkey=wallet_hotkey,
        wallet_path=wallet_path,
        import_file=import_file,
        gpus=None if gpus is None else gpu_numbers(gpus),
        device=device,
        idle_only=idle_only,
        host=host,
        port=port,
        page_port=page_port,
        limits={limit: value for limit, value in limits.items() if value is not None},
        service=service,
        register=register,
        anyway=anyway,
        replace=replace,
    )
    return run_setup(wanted, lambda about, what: print(f"{about:<10} {what}", flush=True))


def start(
    names: Names = None,
    gpus: Annotated[str | None, typer.Option("--gpus", help="Only those of these GPUs: all, or 0,1.")] = None,
) -> int:
    """Start miners that were set up, and stay: one in this process, several each in its own, until Ctrl-C.

    Examples: iota miner start

    iota miner start --gpus 0,1
    """
    from iota.home.places import find_miners
    from iota.home.supervise import start_all, start_one
    from subnet.errors import ConfigError

    miners = find_miners(names or [])
    if gpus is not None:
        wanted = {f"cuda:{number}" for number in gpu_numbers(gpus)}
        found = [miner for miner in miners if miner.device in wanted]
        missing = sorted(wanted - {miner.device for miner in found})
        if missing:
            raise ConfigError(f"no miner was set up for {', '.join(missing)}", hint=f"iota miner setup --gpus {gpus}")
        miners = found
    if len(miners) == 1:
        return start_one(miners[0])
    return start_all(miners, lambda line: print(line, flush=True))


def stop(names: Names = None) -> int:
    """Stop miners of this machine; their leases go back first."""
    from iota.home.places import find_miners
    from iota.home.remove import stop as stop_one
    from iota.home.service import Unit

    unit = Unit.of_this_system()
    for miner in find_miners(names or []):
        unit.stop(miner.name)
        print(f"{miner.name}: {'stopped' if stop_one(miner) else 'not running'}")
    return 0


def status(names: Names = None, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> int:
    """Say what the miners of this machine do, what they wait for, and what they were told last, restarts included."""
    import msgspec

    from iota.home.look import status_of, words
    from iota.home.places import find_miners
    from iota.home.service import Unit

    unit = Unit.of_this_system()
    found = [status_of(miner, unit) for miner in find_miners(names or [])]
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(line for one in found for line in words(one)))
    return 0


def remove(
    name: Annotated[str, typer.Argument(help="The miner.")] = "miner",
    identity: Annotated[bool, typer.Option("--identity", help="Its hotkey too. Not to be had back!")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> int:
    """Stop a miner and delete what it left on this machine; first lists all of it and asks. The identity stays.

    Example: iota miner remove miner
    """
    from iota.home.places import find_miners
    from iota.home.remove import carry_out, plan_removal
    from iota.home.service import Unit
    from iota.plan import human_bytes

    unit, miner = Unit.of_this_system(), find_miners([name])[0]
    removal = plan_removal(miner, unit, identity=identity)
    for path, size_bytes in removal.delete:
        print(f"delete   {path} ({human_bytes(size_bytes)})")
    if removal.unit:
        print(f"disable  its unit iota-miner@{name}")
    for kept in removal.keep:
        print(f"keep     {kept}")
    if not yes and not typer.confirm("Delete these?"):
        print("nothing was deleted")
        return 1
    carry_out(miner, removal, unit)
    print(f"{name} is removed")
    return 0


def gpu_numbers(text: str) -> tuple[int, ...]:
    """``all`` or ``0,1``; :class:`~subnet.errors.ConfigError` for what this machine hasn't."""
    from miner.nvml import count_cards
    from subnet.errors import ConfigError

    there = count_cards()
    if there == 0:
        raise ConfigError(
            "--gpus: no NVIDIA driver answers on this machine", hint="leave --gpus out: one miner on --device auto"
        )
    if text == "all":
        return tuple(range(there))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) < there for part in parts) or len(set(parts)) != len(parts):
        raise ConfigError(f"--gpus {text!r} is not allowed", hint=f"all, or numbers from 0 to {there - 1}, such as 0,1")
    return tuple(int(part) for part in parts)
