"""``iota miner setup``: looks at the machine, makes or imports the identity, picks a run that fits, writes settings.

Asks nothing and starts nothing but a unit, and that only where it was asked for. What is there already stays: an identity is
used, a settings file is refused unless it is to be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from iota.home import pick
from iota.home.identity import import_identity
from iota.home.places import checked_name, data_folder, settings_folder, write_settings
from iota.home.service import Unit
from subnet.chain.connect import is_local, register_command
from subnet.errors import ConfigError, IotaError
from subnet.protocol.signing import Signer, create_wallet, load_wallet
from subnet.timing import Deadline

CALL_S = 60.0
Say = Callable[[str, str], None]
"""(what it is about, what is said)."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; ``gpus`` None: one miner on ``device``."""

    name: str = "miner"
    urls: tuple[str, ...] = ()
    netuid: int = 1
    network: str = "local"
    endpoint: str | None = None
    wallet_name: str = "miner"
    wallet_hotkey: str = "default"
    wallet_path: Path = Path("~/.bittensor/wallets")
    import_file: Path | None = None
    gpus: tuple[int, ...] | None = None
    device: str = "auto"
    idle_only: bool = False
    host: str | None = None
    port: int = 0
    page_port: int = 8192
    limits: dict[str, str] = {}
    """``upload``, ``download``, ``vram``."""
    service: bool = False
    register: bool = True
    anyway: bool = False
    replace: bool = False


class Part(msgspec.Struct, frozen=True):
    """One process to be: its name, its hotkey, its device, its ports."""

    name: str
    hotkey: str
    device: str
    port: int
    page_port: int


def parts_of(setup: Setup) -> list[Part]:
    """One process for each GPU that was named, each with a hotkey of its own: a hotkey is one member at a time."""
    if setup.gpus is None:
        return [Part(checked_name(setup.name), setup.wallet_hotkey, setup.device, setup.port, setup.page_port)]
    return [
        Part(
            checked_name(f"{setup.name}-{gpu}"),
            str(gpu),
            f"cuda:{gpu}",
            setup.port + gpu if setup.port else 0,
            setup.page_port + gpu if setup.page_port else 0,
        )
        for gpu in setup.gpus
    ]


def run_setup(setup: Setup, say: Say) -> int:
    """Exit status: 0 written, 1 no run fits (nothing is written)."""
    parts = parts_of(setup)
    for part in parts:
        path = settings_folder() / f"{part.name}.toml"
        if path.exists() and not setup.replace:
            raise ConfigError(
                f"{path} exists: this miner was set up",
                hint=f"iota miner start {part.name}; or setup --replace, or iota miner remove",
            )
    look_at_machine(parts, say)
    signers = [identity(setup, part, say) for part in parts]
    chosen, urls = choose(setup, parts[0].device, say)
    if chosen is None and urls is None:
        return 1
    for part, signer in zip(parts, signers, strict=True):
        registered(setup, part, signer, say)
        path = settings_folder() / f"{part.name}.toml"
        write_settings(path, values_of(setup, part, urls or ()))
        say("settings", f"{path}")
    start(setup, parts, say)
    return 0


def look_at_machine(parts: Sequence[Part], say: Say) -> None:
    """:class:`ConfigError` with everything that would fail."""
    from iota.doctor import machine
    from iota.doctor.report import Report
    from iota.doctor.spec import load_spec

    report, spec = Report(), load_spec().of("miner")
    machine.software(report.part("software"))
    machine.processor(report.part("processor"), spec)
    machine.memory(report.part("memory"), spec)
    machine.disk(report.part("disk"), data_folder(parts[0].name), spec, measure=False)
    for part in parts:
        machine.device(report.part("device" if len(parts) == 1 else f"device of {part.name}"), part.device, spec)
    for name, findings in report.parts.items():
        for finding in findings.found:
            say(name, f"{'BAD: ' if finding.level == 'bad' else ''}{finding}")
    if not report.fits:
        raise ConfigError("; ".join(map(str, report.bad)), hint="iota doctor miner says more")


def identity(setup: Setup, part: Part, say: Say) -> Signer:
    """Imported, found, or (on a local chain) made."""
    wallets = setup.wallet_path.expanduser()
    what = f"{setup.wallet_name}/{part.hotkey}"
    if setup.import_file is not None:
        if setup.gpus is not None:
            raise ConfigError("--import with --gpus is not allowed", hint="iota wallet import each of them first")
        signer, *_ = import_identity(setup.import_file.expanduser(), wallets, setup.wallet_name, part.hotkey)
        say("identity", f"{what} imported into {wallets}: hotkey {signer.hotkey}")
        return signer
    if (wallets / setup.wallet_name / "hotkeys" / part.hotkey).exists():
        signer = load_wallet(setup.wallet_name, part.hotkey, wallets)
        say("identity", f"{what} in {wallets} is there already: hotkey {signer.hotkey}")
        return signer
    if not is_local(setup.network, setup.endpoint):
        raise ConfigError(
            f"wallet {what} isn't in {wallets}, and one for {setup.endpoint or setup.network} isn't made here: its coldkey"
            " would lie on this machine unencrypted",
            hint="make it with btcli where your coldkey is and bring the hotkey: iota wallet import FILE",
        )
    signer = create_wallet(setup.wallet_name, part.hotkey, wallets)
    say("identity", f"{what} made in {wallets}: hotkey {signer.hotkey}")
    say(
        "identity",
        f"keep a copy: iota wallet export FILE --wallet.name {setup.wallet_name} --wallet.hotkey {part.hotkey}",
    )
    return signer


def choose(setup: Setup, device: str, say: Say) -> tuple[pick.Offer | None, tuple[str, ...] | None]:
    """The run, and whom to ask for work, the run's validator first; (None, None) where runs are there and none fits."""
    from miner.hardware import choose_device, free_memory

    urls = setup.urls or addresses(setup)
    if not urls:
        say("run", "no validator has announced an address on the chain yet: the miner looks for one when it starts")
        return None, ()
    chosen_device = choose_device(device)
    free = free_memory(chosen_device)
    offers: list[pick.Offer] = []
    for url in urls:
        try:
            offers += pick.offers_of(url, free, pick.stage_bytes_of, pick.hardware_check(chosen_device))
        except IotaError as error:
            say("run", f"{url}: {error.reason}")
            if len(urls) == 1 and not setup.anyway:
                raise
    for offer in offers:
        verdict = {True: "fits", False: "doesn't fit", None: "not known yet"}[offer.fits]
        say("run", f"{offer.run} at {offer.url} ({offer.state}): {verdict}: {offer.why}")
    found = pick.best(offers)
    if found is not None:
        say("run", f"chosen: {found.run} at {found.url}")
        return found, (found.url, *(url for url in urls if url != found.url))
    if (
        any(offer.fits is False for offer in offers)
        and all(offer.fits is False for offer in offers)
        and not setup.anyway
    ):
        say("run", "none fits this machine: nothing is written (--anyway writes all the same)")
        return None, None
    say("run", "no run to choose now: the miner takes the next one that its validator leads")
    return None, tuple(urls)


def addresses(setup: Setup) -> tuple[str, ...]:
    """Of permit holders that have announced one, most stake first."""
    from iota.onchain import metagraph_and_weights

    metagraph, _ = metagraph_and_weights(setup.network, setup.endpoint, setup.netuid, deadline=Deadline.after(CALL_S))
    return tuple(f"http://{n.axon.host}:{n.axon.port}" for n in metagraph.permit_holders() if n.axon is not None)


def registered(setup: Setup, part: Part, signer: Signer, say: Say) -> None:
    """Registers where that takes no decision (a local chain pays it), else says how."""
    path = setup.wallet_path.expanduser()
    shown = str(setup.wallet_path) if setup.wallet_path != Path("~/.bittensor/wallets") else ""
    command = register_command(setup.network, setup.endpoint, setup.netuid, setup.wallet_name, part.hotkey, shown)
    if not setup.register or not is_local(setup.network, setup.endpoint):
        say("chain", f"register it, where it isn't yet: {command}")
        return
    from iota.onchain import register
    from subnet.chain.coldkeys import load_coldkey

    try:
        uid, new = register(
            setup.network,
            setup.endpoint,
            setup.netuid,
            coldkey=load_coldkey(setup.wallet_name, path),
            hotkey=signer.hotkey,
            deadline=Deadline.after(CALL_S),
        )
    except IotaError as error:
        say("chain", f"not registered: {error.reason}; once that is mended: {command}")
        return
    say("chain", f"{'registered' if new else 'registered already'} as uid {uid} of subnet {setup.netuid}")


def values_of(setup: Setup, part: Part, urls: Sequence[str]) -> dict[str, object]:
    """The settings file."""
    return {
        "netuid": setup.netuid,
        "dir": str(data_folder(part.name)),
        "device": part.device,
        "subtensor.network": setup.network,
        "subtensor.chain_endpoint": setup.endpoint,
        "wallet.name": setup.wallet_name,
        "wallet.hotkey": part.hotkey,
        "wallet.path": str(setup.wallet_path.expanduser()),
        "validator.url": list(urls) or None,
        "peer.host": setup.host,
        "peer.port": part.port or None,
        "page.port": part.page_port or None,
        "idle.only": True if setup.idle_only else None,
        **{f"limit.{name}": value for name, value in setup.limits.items()},
    }


def start(setup: Setup, parts: Sequence[Part], say: Say) -> None:
    names = " ".join(part.name for part in parts)
    if setup.service:
        unit = Unit.of_this_system()
        for part in parts:
            say("service", unit.install(part.name))
        return
    say("next", f"iota miner start {names}")
    for part in parts[:1]:
        if part.page_port:
            say("next", f"its page then: http://127.0.0.1:{part.page_port}/")
