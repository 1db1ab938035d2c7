"""The ``iota`` command: quick to start (heavy imports are inside the commands), one line for each error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from iota.cli import (
    audits,
    backups,
    chaos,
    doctor,
    examples,
    incentives,
    journal,
    looking,
    miners,
    policy,
    runs,
    scores,
    services,
    simulate,
    swarms,
    validators,
)
from iota.cli.options import AsJson, print_json
from neurons.entry import INTERRUPTED, guarded, one_line

_USAGE_ERROR = typer.BadParameter.__mro__[2]
"""The base of all usage errors; the library that defines it differs between versions of typer."""

app = typer.Typer(
    name="iota",
    help="Train one language model on many unreliable machines, to the bit.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
swarms.add_to(app)
services.add_to(app)
runs.add_to(app)
chaos.add_to(app)
scores.add_to(app)
policy.add_to(app)
incentives.add_to(app)
audits.add_to(app)
doctor.add_to(app)
simulate.add_to(app)
miners.add_to(app)
validators.add_to(app)
backups.add_to(app)
journal.add_to(app)
looking.add_to(app)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions that a run depends on."""
    from importlib.metadata import PackageNotFoundError, version

    from subnet.words import PROTOCOL_VERSION

    found: dict[str, str | int | None] = {"protocol": PROTOCOL_VERSION}
    for package in ("iota-open", "torch", "transformers", "bittensor"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if as_json:
        print_json(found)
        return
    for name, number in found.items():
        print(f"{name} isn't installed" if number is None else f"{name} {number}")


examples.add_to(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["miner"] and not set(arguments[1:2]) & set(miners.COMMANDS):
        from neurons import miner

        return miner.main(arguments[1:])
    if arguments[:1] == ["validator"] and not set(arguments[1:2]) & set(validators.COMMANDS):
        from neurons import validator

        return validator.main(arguments[1:])
    return guarded(lambda: _typed(arguments))


def _typed(arguments: list[str]) -> int:
    try:
        status = app(arguments, prog_name="iota", standalone_mode=False)
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:  # usage errors of typer; all others pass
        if not isinstance(error, _USAGE_ERROR):
            raise
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            return 2
        where = context.command_path if context is not None else "iota"
        print(f"error: {one_line(error.format_message())} (see {where} --help)", file=sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
        return 2
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
