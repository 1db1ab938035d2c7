"""``iota run pause``, ``resume``, ``stop``: what whoever submitted a run may say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli.options import (
    DEFAULT_VALIDATOR,
    DEFAULT_WALLETS,
    ValidatorHotkey,
    ValidatorUrl,
    WalletHotkey,
    WalletName,
    WalletPath,
)

Name = Annotated[str, typer.Argument(help="The run.")]
CALL_S = 15.0


def add_to(run: typer.Typer) -> None:
    run.command("pause")(pause)
    run.command("resume")(resume)
    run.command("stop")(stop)


def pause(
    name: Name,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
) -> None:
    """Begin no new step of your run; the open one is finished, miners stay."""
    _say("pause", name, url, hotkey, wallet_name, wallet_hotkey, wallet_path)


def resume(
    name: Name,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
) -> None:
    """Go on with your paused run."""
    _say("resume", name, url, hotkey, wallet_name, wallet_hotkey, wallet_path)


def stop(
    name: Name,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
) -> None:
    """End your run after the open step, for good: evaluated, stored and rooted as a run of so many steps."""
    _say("stop", name, url, hotkey, wallet_name, wallet_hotkey, wallet_path)


def _say(
    action: str, name: str, url: str, hotkey: str | None, wallet_name: str, wallet_hotkey: str, wallet_path: Path
) -> None:
    from iota.remote import Remote
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    signer = load_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    summary = Remote(url, signer, hotkey=hotkey).control(name, action, Deadline.after(CALL_S))
    print(f"{summary.name} · {summary.state} · step {max(0, summary.step)} of {summary.steps}")
