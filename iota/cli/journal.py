"""``iota journal``: where a validator's journals lie, and moving them between files and PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import AsJson, Journal, print_json

if TYPE_CHECKING:
    from validator.journals import Journals

Directory = Annotated[Path, typer.Option("--dir", help="The validator's directory.")]
DEFAULT = Path("~/.iota/validator")
FROM = "Where the journals are: file, or postgresql://USER@HOST/DATABASE."


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="A validator's journals: where they lie, and moving them.", no_args_is_help=True)
    group.command("move")(move)
    group.command("show")(show)
    app.add_typer(group, name="journal")


def move(
    source: Annotated[str, typer.Argument(metavar="FROM", help=FROM)],
    target: Annotated[str, typer.Argument(metavar="TO", help="Where they are to be, in the same words.")],
    directory: Directory = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Move all runs' journals. The validator must not run; done again after it broke off, it goes on.

    Every row is read back and compared before a run counts as moved. Then start the validator with the new --journal.

    Example: iota journal move file postgresql://iota@db.example/iota
    """
    from validator import journal_move

    moved = journal_move.move(directory, _place(source), _place(target))
    if as_json:
        print_json(moved)
        return
    for run in moved:
        print(f"{run.run}: {run.what}" + (f", {run.records} records, head {run.head[:12]}" if run.head else ""))
    flag = "without --journal" if target == "file" else "with --journal and that address"
    print(f"start the validator {flag}")


def show(directory: Directory = DEFAULT, journal: Journal = "", as_json: AsJson = False) -> None:
    """Where each run's journal lies, how many records it has, and its head. Also while the validator runs.

    Example: iota journal show --journal postgresql://iota@db.example/iota
    """
    from validator import journal_move
    from validator.journals import Journals

    found = journal_move.show(directory, Journals(journal))
    if as_json:
        print_json(found)
        return
    for run in found:
        state = "finished" if run.finished else "unfinished"
        there = run.trouble or f"{run.records} records, head {run.head[:12] or 'none'}"
        print(f"{run.run} ({run.run_id}): {state}, {run.place}: {there}")


def _place(where: str) -> Journals:
    from validator.journals import FILE, Journals

    return Journals("" if where == FILE else where)
