"""``iota miner estimate``: what this machine would have earned, before anyone registers. ``iota miner FLAGS`` starts one."""

from __future__ import annotations

from typing import Annotated

import typer

from iota.cli import home
from iota.cli.options import DEFAULT_VALIDATOR, Endpoint, Netuid, Network, ValidatorUrl

CALL_S = 60.0
COMMANDS = ("estimate", "setup", "start", "stop", "status", "remove")
"""Of ``iota miner``; with anything else behind it, that starts a miner by the flags of neurons/miner.py."""


def add_to(app: typer.Typer) -> None:
    miner = typer.Typer(help="Set up, start, look at and remove miners; say what one would earn.", no_args_is_help=True)
    miner.callback()(_miner)
    miner.command("estimate")(estimate)
    home.add_to(miner)
    app.add_typer(miner, name="miner")


def _miner() -> None:
    """Start a miner with the flags of neurons/miner.py, or say what one would earn."""


def estimate(
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    run: Annotated[str | None, typer.Option(help="Name that the active run must have.")] = None,
    netuid: Netuid = 1,
    network: Network = "local",
    endpoint: Endpoint = None,
    without_chain: Annotated[bool, typer.Option("--without-chain", help="Scores alone, no amounts.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    budget_s: Annotated[float, typer.Option("--budget", min=1.0, max=600.0, help="Seconds to measure for.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Say what this machine would have earned on a run in the last day, and why, and whether its hardware class is wanted.

    Needs no wallet and sends nothing. Exit status 1: this hardware class would be refused.
    """
    from iota.miner_estimate import estimate as worked_out
    from iota.miner_look import look_at_chain, look_at_run, measure_machine
    from iota.miner_words import lines_of
    from iota.remote import Remote
    from iota.score_tables import print_json
    from subnet.timing import Deadline

    facts, plan = look_at_run(Remote(url), run, Deadline.after(CALL_S))
    chain = None if without_chain else look_at_chain(network, endpoint, netuid, Deadline.after(CALL_S))
    found = worked_out(facts, measure_machine(plan, device, budget_s), chain)
    if as_json:
        print_json(found)
    else:
        for line in lines_of(found):
            print(line)
    return 1 if found.wanted is False else 0
