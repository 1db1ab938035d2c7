"""``iota incentives``: what a policy does to those who work and to those who cheat, before it is applied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from subnet.incentives.scenario import Scenario
    from subnet.policy.policy import SubnetPolicy

DEFAULT = "default"
_A_POLICY = "A policy.toml (iota policy show --default makes one), or the word default."
ScenarioName = Annotated[
    str, typer.Option("--scenario", help="Scenario file (TOML), or the name of one that comes along.")
]
Miners = Annotated[
    int | None, typer.Option(help="Machines in all, in the scenario's mixture; emission grows with them.")
]
Days = Annotated[float | None, typer.Option(help="Days, instead of the scenario's.")]
Seeds = Annotated[int, typer.Option(help="Simulated worlds: what the confidence bands are made of.")]
FirstSeed = Annotated[
    int, typer.Option("--first-seed", help="The first of them; the same seeds give the same numbers.")
]
Processes = Annotated[int, typer.Option(help="Worlds at a time, 2 at most.")]
Journal = Annotated[
    str, typer.Option(help="Recorded journal: machines have its members' speeds, outages and late leases.")
]
Report = Annotated[Path | None, typer.Option(help="Write a page with pictures to this file; it needs nothing else.")]
AsJson = Annotated[bool, typer.Option("--json", help="All numbers as JSON.")]


def add_to(app: typer.Typer) -> None:
    incentives = typer.Typer(help="Try a policy out: simulate, replay, compare.", no_args_is_help=True)
    incentives.command("simulate")(simulate)
    incentives.command("compare")(compare)
    incentives.command("replay")(replay)
    app.add_typer(incentives, name="incentives")


def simulate(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help=_A_POLICY)],
    scenario: ScenarioName = "standard",
    miners: Miners = None,
    days: Days = None,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 1,
    processes: Processes = 2,
    journal: Journal = "",
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Thousands of miners, honest and not, over weeks of virtual time under this policy: who earns what, who is found out."""
    from iota.incentives import simulate_policy

    made = _scenario(scenario, miners, days, journal)
    found = simulate_policy(_policy(policy), made, seeds, first_seed=first_seed, processes=processes)
    if report is not None:
        from iota.incentives_report import page_of_result

        _write(report, page_of_result(found))
    if as_json:
        from iota.score_tables import print_json

        print_json(found)
        return
    from iota.incentives_tables import print_result

    print_result(found)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_A_POLICY)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    scenario: ScenarioName = "standard",
    miners: Miners = None,
    days: Days = None,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 1,
    processes: Processes = 2,
    journal: Journal = "",
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Two policies over the same worlds: the same machines, outages and chances, so that what differs is the policies' doing."""
    from iota.incentives import compare_policies

    made = _scenario(scenario, miners, days, journal)
    found = compare_policies(_policy(a), _policy(b), made, seeds, first_seed=first_seed, processes=processes)
    if report is not None:
        from iota.incentives_report import page_of_comparison

        _write(report, page_of_comparison(found))
    if as_json:
        from iota.score_tables import print_json

        print_json(found)
        return
    from iota.incentives_tables import print_comparison

    print_comparison(found)


def replay(
    journal: Annotated[
        str,
        typer.Argument(
            metavar="JOURNAL",
            help="A directory with a journal (a run's, or a validator's), a journal.db, or what iota score recompute --save wrote.",
        ),
    ],
    policy: Annotated[str, typer.Option("--policy", help=f"B: {_A_POLICY}")],
    run: Annotated[str, typer.Option(help="Name of the run, where there are several.")] = "",
    against: Annotated[
        str, typer.Option(help="A: what the run began with; the journal's own changes are followed.")
    ] = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """A recorded run under another policy: who would have earned what, side by side."""
    from iota.incentives_replay import replay as replay_journal

    found = replay_journal(journal, run, _policy(against), _policy(policy))
    if as_json:
        from iota.score_tables import print_json

        print_json(found)
        return
    from iota.incentives_tables import print_replayed

    print_replayed(found)


def _policy(name: str) -> SubnetPolicy:
    from subnet.policy.policy import SubnetPolicy
    from subnet.policy.text import load_policy

    if name == DEFAULT and not Path(name).exists():
        return SubnetPolicy()
    return load_policy(name)


def _scenario(name: str, miners: int | None, days: float | None, journal: str) -> Scenario:
    from iota.incentives import scenario_named
    from subnet.incentives.scenario import scaled

    found = scaled(scenario_named(name), miners=miners, days=days)
    if not journal:
        return found
    from iota.incentives_source import measure, with_measured

    return with_measured(found, measure(journal, ""))


def _write(path: Path, page: str) -> None:
    from subnet.errors import ConfigError
    from subnet.store.disk import atomic_write

    try:
        atomic_write(path.expanduser(), page.encode("utf-8"))
    except OSError as error:
        hint = "check path, rights and room"
        raise ConfigError(f"cannot write {path}: {error.strerror or error}", hint=hint) from error
    typer.echo(f"report: {path}", err=True)
