"""``iota validator drain``: have a running one end for an upgrade. ``iota validator FLAGS`` starts one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import (
    DEFAULT_VALIDATOR,
    DEFAULT_WALLETS,
    AsJson,
    ValidatorHotkey,
    ValidatorUrl,
    WalletHotkey,
    WalletName,
    WalletPath,
    print_json,
)

if TYPE_CHECKING:
    from iota.remote import Remote
    from subnet.timing import Deadline

COMMANDS = ("drain",)
"""Of ``iota validator``; with anything else behind it, that starts a validator by the flags of neurons/validator.py."""
CALL_S, LOOK_S, ENDS_S = 30.0, 0.5, 30.0


def add_to(app: typer.Typer) -> None:
    validator = typer.Typer(help="Start a validator (iota validator --help), or drain one.", no_args_is_help=True)
    validator.callback()(_validator)
    validator.command("drain")(drain)
    app.add_typer(validator, name="validator")


def _validator() -> None:
    """Start a validator with the flags of neurons/validator.py, or have a running one end for an upgrade."""


def drain(
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "validator",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    within_s: Annotated[
        float, typer.Option("--within", min=0.0, max=86_400.0, help="Seconds; then it ends with the step still open.")
    ] = 900.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return once it doesn't answer any more.")] = True,
    as_json: AsJson = False,
) -> None:
    """Have a validator seal the open step, begin no other, and end; signed by its own hotkey. Miners wait for the next start.

    Example: iota validator drain --wallet.name validator
    """
    from iota.remote import Remote
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    signer = load_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    remote, began_s = Remote(url, signer, hotkey=hotkey), time.monotonic()
    view = remote.drain(within_s, Deadline.after(CALL_S))
    if not as_json:
        print(
            f"it takes no new step; waits for {view.waits}" if view.waits else "nothing is open: it ends now",
            flush=True,
        )
    if wait:
        _until_gone(remote, Deadline.after(view.within_s + ENDS_S))
    took_s = round(time.monotonic() - began_s, 1)
    if as_json:
        print_json({"within_s": view.within_s, "waited_for": view.waits, "ended": wait, "took_s": took_s})
    elif wait:
        print(f"it has ended after {took_s:g} s: install, and start it again with the same --dir")


def _until_gone(remote: Remote, deadline: Deadline) -> None:
    from subnet.errors import Unreachable
    from subnet.timing import Deadline as Within

    while True:
        try:
            remote.hello(Within.after(2.0))
        except Unreachable:
            return
        deadline.check("the validator's end")
        time.sleep(LOOK_S)
