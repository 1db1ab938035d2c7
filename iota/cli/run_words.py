"""What whoever submitted a run may say of it: ``iota run pause, resume, stop, set-lr, extend, rollback``; and ``fork``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import (
    DEFAULT_VALIDATOR,
    DEFAULT_WALLETS,
    ValidatorHotkey,
    ValidatorUrl,
    WalletHotkey,
    WalletName,
    WalletPath,
    print_json,
    to_stderr,
)

if TYPE_CHECKING:
    from iota.fork import Fork
    from iota.submit_settings import SubmitSettings

Name = Annotated[str, typer.Argument(help="The run.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
CALL_S = 30.0


def add_to(run: typer.Typer) -> None:
    run.command("pause")(pause)
    run.command("resume")(resume)
    run.command("stop")(stop)
    run.command("set-lr")(set_lr)
    run.command("extend")(extend)
    run.command("rollback")(rollback)
    run.command("fork")(fork)


def pause(
    name: Name,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Json = False,
) -> None:
    """Begin no new step of your run; the open one is finished, miners stay."""
    _say(_Who(url, hotkey, wallet_name, wallet_hotkey, wallet_path), "pause", name, json=json)


def resume(
    name: Name,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Json = False,
) -> None:
    """Go on with your paused run."""
    _say(_Who(url, hotkey, wallet_name, wallet_hotkey, wallet_path), "resume", name, json=json)


def stop(
    name: Name,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Json = False,
) -> None:
    """End your run after the open step, for good: evaluated, stored and rooted as a run of so many steps."""
    _say(_Who(url, hotkey, wallet_name, wallet_hotkey, wallet_path), "stop", name, json=json)


def set_lr(
    name: Name,
    factor: Annotated[float | None, typer.Option(help="Times the run file's schedule; 1 takes it back.")] = None,
    value: Annotated[float | None, typer.Option(help="This learning rate, instead of the schedule.")] = None,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Json = False,
) -> None:
    """Change the learning rate from the next step on that isn't planned yet.

    iota run set-lr my-run --factor 0.5      half of what the schedule says
    iota run set-lr my-run --value 2e-4      2e-4, until you say otherwise
    """
    from iota.words import rate_argument

    argument = rate_argument(factor, value)
    _say(_Who(url, hotkey, wallet_name, wallet_hotkey, wallet_path), "set-lr", name, argument, json=json)


def extend(
    name: Name,
    steps: Annotated[int, typer.Option(help="Steps in all, more or fewer than now.")],
    keep_schedule: Annotated[
        bool, typer.Option("--keep-schedule", help="The learning rate's schedule stays as long as it is.")
    ] = False,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Json = False,
) -> None:
    """Let your run end later, or earlier; the schedule is as long as the run.

    iota run extend my-run --steps 2000
    """
    from iota.words import length_argument

    argument = length_argument(steps, keep_schedule=keep_schedule)
    _say(_Who(url, hotkey, wallet_name, wallet_hotkey, wallet_path), "extend", name, argument, json=json)


def rollback(
    name: Name,
    step: Annotated[int, typer.Option(help="The number of updates to go back to.")],
    go_on: Annotated[bool, typer.Option("--resume", help="Go on at once; else the run is paused there.")] = False,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Json = False,
) -> None:
    """Take your run back to the state after so many updates, on a new branch; what you have set since is forgotten.

    iota run rollback my-run --step 400      then, say: set-lr my-run --factor 0.5, and: resume my-run
    """
    who = _Who(url, hotkey, wallet_name, wallet_hotkey, wallet_path)
    _say(who, "rollback", name, str(step), json=json, quiet=go_on)
    if go_on:
        _say(who, "resume", name, json=json)


def fork(
    name: Name,
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The new run's file, with a name of its own.")],
    step: Annotated[int | None, typer.Option(help="Its state after so many updates; else the newest stored.")] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="New moments, and data and schedule from their beginning.")
    ] = False,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    work_dir: Annotated[Path, typer.Option(help="Prepared data is kept here.")] = Path("~/.iota/submissions"),
    same_class: Annotated[
        bool, typer.Option("--same-class", help="The miners run on machines like this one: report its class.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where the class is measured: auto, cpu, cuda.")] = "auto",
    json: Json = False,
) -> int:
    """Submit a new run that begins where another one was, with other settings: RUN.toml says which.

    iota run fork my-run half-rate.toml --step 400
    """
    from iota.fork import Fork
    from iota.submit import run_submit
    from iota.submit_settings import SubmitSettings

    settings = SubmitSettings(
        run_file=run_file,
        work_dir=work_dir,
        validator_url=url,
        validator_hotkey=hotkey,
        wallet_name=wallet_name,
        wallet_hotkey=wallet_hotkey,
        wallet_path=wallet_path,
        device=device,
        hardware_class=same_class,
    )
    parent = Fork(name, step, weights_only)
    return submit_as_json(settings, parent) if json else run_submit(settings, fork=parent)


class _Who:
    """Whose word it is, and to whom."""

    def __init__(self, url: str, hotkey: str | None, wallet: str, wallet_hotkey: str, wallets: Path) -> None:
        self.url, self.hotkey, self.wallet, self.wallet_hotkey, self.wallets = (
            url,
            hotkey,
            wallet,
            wallet_hotkey,
            wallets.expanduser(),
        )


def _say(who: _Who, action: str, name: str, argument: str = "", *, json: bool, quiet: bool = False) -> None:
    import msgspec

    from iota.remote import Remote
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    signer = load_wallet(who.wallet, who.wallet_hotkey, who.wallets)
    summary = Remote(who.url, signer, hotkey=who.hotkey).control(name, action, Deadline.after(CALL_S), argument)
    if quiet:
        return
    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        print(f"{summary.name} · {summary.state} · step {max(0, summary.step)} of {summary.steps}")


def submit_as_json(settings: SubmitSettings, fork: Fork | None = None) -> int:
    """Submit, with the run's summary as JSON on stdout and all else on stderr."""
    from iota.submit import submit

    print_json(submit(settings, to_stderr, fork))
    return 0
