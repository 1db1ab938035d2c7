"""``iota backup``: a validator's directory in one file, and the rehearsal that it can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli.options import AsJson, Journal, print_json

Directory = Annotated[Path, typer.Option("--dir", help="The validator's directory.")]
Archive = Annotated[Path, typer.Argument(help="The backup.")]
DEFAULT = Path("~/.iota/validator")


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(help="Save, rehearse and restore a validator's directory.", no_args_is_help=True)
    group.command("save")(save)
    group.command("rehearse")(rehearse)
    group.command("restore")(restore)
    app.add_typer(group, name="backup")


def save(
    target: Annotated[Path, typer.Argument(help="File to write.")],
    directory: Directory = DEFAULT,
    journal: Journal = "",
    as_json: AsJson = False,
) -> None:
    """Save the directory, also while the validator runs. Wallets and the store's secret aren't in it.

    Example: iota backup save /backups/validator-monday.tar.zst
    """
    from iota import backup
    from validator.journals import Journals

    manifest = backup.save(directory, target, Journals(journal))
    size = target.stat().st_size
    whole = sum(file.size_bytes for file in manifest.files)
    if as_json:
        print_json({"archive": str(target), "packed_bytes": size, "size_bytes": whole, "files": manifest.files})
        return
    print(f"{len(manifest.files)} files, {whole / 1e6:.1f} MB, packed {size / 1e6:.1f} MB: {target}")


def rehearse(archive: Archive, as_json: AsJson = False) -> None:
    """Restore into a temporary directory, open and fold every journal there, and say what was found.

    Example: iota backup rehearse /backups/validator-monday.tar.zst
    """
    from iota import backup

    _, runs = backup.rehearse(archive)
    if as_json:
        print_json(runs)
        return
    for run in runs:
        state = "finished" if run.finished else "unfinished"
        print(
            f"{run.name} ({run.run_id}): {state}, step {run.step}, {run.records} records, {run.acknowledged} of them in the "
            f"log store, head {run.head[:12] or 'none'}"
        )
    print(f"good: {len(runs)} runs")


def restore(archive: Archive, directory: Directory, as_json: AsJson = False) -> None:
    """Restore into a new directory, every file checked.

    Example: iota backup restore /backups/validator-monday.tar.zst --dir ~/.iota/validator
    """
    from iota import backup

    manifest = backup.restore(archive, directory)
    if as_json:
        print_json({"directory": str(directory), "files": manifest.files})
        return
    print(f"{len(manifest.files)} files restored to {directory}")
    print("if the validator ran on after the backup was saved, start it once with --lead-from STORE")
