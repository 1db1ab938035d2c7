"""``iota top`` and ``iota logs``: a run on a terminal, and its journal as lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import DEFAULT_VALIDATOR, ValidatorUrl

if TYPE_CHECKING:
    from validator.journal_text import JournalLine

CALL_S = 15.0
Run = Annotated[str | None, typer.Argument(help="The run; without it the active one.")]


def add_to(app: typer.Typer) -> None:
    app.command("top")(top)
    app.command("logs")(logs)


def top(
    name: Run = None,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    miner: Annotated[
        int | None, typer.Option("--miner", min=1, max=65535, help="A miner of this machine instead: its --page.port.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="With --miner: print it once.")] = False,
) -> None:
    """Watch a run: step, loss, members by stage, what it waits for; or a miner of this machine. Ctrl-C leaves it running.

    Examples: iota top --validator.url http://203.0.113.7:8091

    iota top --miner 8192
    """
    if miner is not None:
        from iota.miner_top import miner_top

        return miner_top(miner, once=once)
    from iota.cli.runs import run_status

    run_status(name, url=url, watch=True, as_json=False, steps=200)


def logs(
    name: Run = None,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    count: Annotated[int, typer.Option("--lines", "-n", min=1, max=100_000, help="How many of the newest.")] = 50,
    query: Annotated[str, typer.Option("--search", "-s", help="Only lines with all these words.")] = "",
    stay: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and print what comes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print a run's journal: who joined and went, leases, merges, seals, audits, cases.

    Examples: iota logs -f

    iota logs --search "gone" -n 20
    """
    import msgspec

    from iota import journal_tail as tail

    def show(line: JournalLine) -> None:
        print(msgspec.json.encode(line).decode() if as_json else text_of(line), flush=True)

    run = name or tail.active_run(url, CALL_S)
    last = -1
    for line in tail.newest(url, run, CALL_S, count=count, query=query):
        show(line)
        last = line.number
    if stay:
        for line in tail.follow(url, run, CALL_S, last, query=query):
            show(line)


def text_of(line: JournalLine) -> str:
    """``12:03:44.210       17  StepSealed          step 3 ...``, in this machine's time zone."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.time_s))
    return f"{clock}.{int(line.time_s * 1000) % 1000:03d} {line.number:8d}  {line.kind:<18}  {line.text}"
