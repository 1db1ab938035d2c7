"""``iota simulate`` and what ``iota plan --fleet`` does: a run on a fleet that isn't there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


def simulate(
    fleet_file: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="The fleet file (examples/fleets).")],
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps to simulate.")] = 10,
    seed: Annotated[int, typer.Option(help="Of joins, faults and the coordinator's draws.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    out: Annotated[Path | None, typer.Option(help="A directory for pictures.")] = None,
    legacy: Annotated[bool, typer.Option("--legacy", help="Beside a model of the public IOTA.")] = False,
    legacy_batches: Annotated[int, typer.Option(help="Batches an epoch of the legacy model: its B_min.")] = 10,
    reference: Annotated[bool, typer.Option(help="With faults: also the calm fleet, to say what they cost.")] = True,
) -> None:
    """Drive the real coordinator code with a simulated fleet in virtual time: tokens/s, MFU, where time goes, what churn costs."""
    from subnet.run.runfile import load_run_file
    from subnet.simulate.fleet import load_fleet

    fleet, config = load_fleet(fleet_file), load_run_file(run_file)
    from iota.simulate import model_of, render
    from iota.simulate import simulate as run
    from subnet.simulate.legacy import LegacySettings

    settings = LegacySettings(min_batches=legacy_batches) if legacy else None
    report = run(
        model_of(config), fleet, num_steps=steps, seed=seed, reference=reference, legacy=settings, pictures=out
    )
    if json:
        import msgspec

        print(msgspec.json.encode(report).decode())
        return
    from rich.console import Console

    Console().print(render(report))


def plan_on_fleet(run_file: Path, fleet_file: Path, stages: int | None, *, json: bool) -> None:
    """``iota plan RUN.toml --fleet FLEET.toml``."""
    from subnet.run.runfile import load_run_file
    from subnet.simulate.fleet import load_fleet

    fleet, config = load_fleet(fleet_file), load_run_file(run_file)
    from iota.plan_fleet import propose
    from iota.plan_fleet_text import render
    from iota.submission import load_model

    proposal = propose(config, load_model(config)[0], fleet, stages=stages)
    if json:
        import msgspec

        print(msgspec.json.encode(proposal).decode())
        return
    from rich.console import Console

    Console().print(render(proposal, fleet))
