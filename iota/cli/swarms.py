"""``iota demo`` and ``iota up``: local swarms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    app.command("demo")(demo)
    app.command("up")(up)


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="A new directory for everything.")] = Path("iota-demo"),
    steps: Annotated[int | None, typer.Option(help="Optimizer steps instead of the run file's.")] = None,
    miners: Annotated[int, typer.Option(help="Miners at the start.")] = 7,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Leave all miners alive.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="30 steps.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> int:
    """Train a small Llama on Moby-Dick with miners of which one is killed; export it and let it write."""
    from iota.demo import DemoSettings, run_demo

    settings = DemoSettings(
        directory=directory,
        steps=30 if quick and steps is None else steps,
        num_miners=miners,
        kill=not no_kill,
        device=device,
    )
    return run_demo(settings)


def up(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="A run to start with; without it the swarm waits.")
    ] = None,
    miners: Annotated[int, typer.Option(help="Number of miners.")] = 6,
    directory: Annotated[Path, typer.Option("--dir", help="Everything the swarm writes.")] = Path("iota-swarm"),
    chain_port: Annotated[int, typer.Option("--chain.port", help="0: any free one.")] = 0,
    store_port: Annotated[int, typer.Option("--store.port", help="0: any free one.")] = 0,
    validator_port: Annotated[int, typer.Option("--validator.port", help="0: any free one.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    stay: Annotated[bool, typer.Option("--stay", help="Stay up after the run has finished.")] = False,
    export: Annotated[Path | None, typer.Option(help="Export the finished run to this new directory.")] = None,
    restart: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Start miners and the validator again so long after they died."),
    ] = None,
    followers: Annotated[
        int, typer.Option(min=0, max=16, help="More validators, which follow the first one's journal and audit it.")
    ] = 0,
    plain: Annotated[bool | None, typer.Option("--plain/--live", help="Lines instead of the live view.")] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Take runs of your own modules: model.modules of the run file.")
    ] = False,
) -> int:
    """A local swarm: chain, store, validator and miners, each a process of its own, until the run ends or Ctrl-C."""
    from iota.swarm import SwarmOptions, SwarmPorts
    from iota.upcommand import run_up

    ports = SwarmPorts(chain_port, store_port, validator_port)
    options = SwarmOptions(ports=ports, device=device, spare_validators=followers, private=private)
    return run_up(
        directory,
        run_file,
        miners,
        options,
        stay=stay,
        export=export,
        plain=plain,
        restart_s=restart,
        followers=followers,
    )
