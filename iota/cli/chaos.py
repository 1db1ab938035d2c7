"""``iota chaos``: faults on a swarm by a seeded plan, with a journal and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_FAULTS = "kill,preempt,pause,slow,partition,corrupt,store-outage"


def add_to(app: typer.Typer) -> None:
    app.command("chaos")(chaos)


def chaos(
    mtbf: Annotated[str, typer.Option(help="Mean time between disruptions, such as 20s or 1m.")] = "20s",
    faults: Annotated[
        str, typer.Option(help="Comma-separated; also validator-kill, rejoin, join, leave.")
    ] = DEFAULT_FAULTS,
    seed: Annotated[int, typer.Option(help="The plan is a function of it.")] = 0,
    duration: Annotated[str, typer.Option(help="Nothing is disrupted after that time.")] = "10m",
    run: Annotated[Path | None, typer.Option("--run", help="Run file; without it the demo's.")] = None,
    miners: Annotated[int, typer.Option(help="Miners at the start.")] = 12,
    directory: Annotated[Path, typer.Option("--dir", help="A new directory for everything.")] = Path("iota-chaos"),
    attach: Annotated[
        Path | None, typer.Option(help="Act on the swarm of an `iota up` with this --dir; faults of processes only.")
    ] = None,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="Go on until the run has finished (implied by the next two).")
    ] = False,
    expect: Annotated[str | None, typer.Option(metavar="ROOT", help="The run root must be this one.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Run it again undisturbed; the root must be the same.")
    ] = False,
    limit: Annotated[str, typer.Option(help="Give up after that time.")] = "2h",
    keep_last_replica: Annotated[
        bool, typer.Option("--keep-last-replica", help="Never take the only member of a stage.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The verdict as JSON on stdout, all else on stderr.")] = False,
    plain: Annotated[bool | None, typer.Option("--plain/--live", help="Lines instead of the live view.")] = None,
) -> int:
    """Disturb a swarm by a seeded plan and say what came of it; exit status 0 if nothing was lost."""
    from iota.chaos.command import ChaosSettings, parse_seconds, run_command
    from iota.chaos.plan import parse_kinds

    settings = ChaosSettings(
        mtbf_s=parse_seconds(mtbf, "--mtbf"),
        faults=parse_kinds(faults),
        seed=seed,
        duration_s=parse_seconds(duration, "--duration"),
        run_file=run,
        num_miners=miners,
        directory=directory,
        attach=attach,
        until_finished=until_finished,
        expect=expect,
        reference=reference,
        limit_s=parse_seconds(limit, "--limit"),
        keep_last_replica=keep_last_replica,
        device=device,
        as_json=as_json,
        plain=plain,
    )
    return run_command(settings)
