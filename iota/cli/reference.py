"""docs/cli.md from the commands themselves: what each does, takes, prints as JSON, and how it is called.

``python -m iota.cli.reference > docs/cli.md`` writes it, ``--check`` says whether it is as the code says (exit status 1: not).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from iota.cli.examples import EXAMPLES
from iota.cli.main import app
from neurons.entry import EXIT_STATUS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "cli.md"
WITHOUT_JSON = {
    "demo": "a show of some minutes; what it made is in its directory",
    "up": "it stays; `iota run status --json` says how the run is",
    "top": "a live view; `iota run status --json`, `iota miner status --json`",
    "chain serve": "it stays",
    "store serve": "it stays",
    "miner setup": "a conversation; `iota miner status --json` afterwards",
    "miner start": "it stays; `iota miner status --json`",
    "miner stop": "nothing to say but that it stopped; `iota miner status --json`",
    "miner remove": "it asks before it deletes",
}
"""Commands that print no result of their own, and why."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by the words that call it."""
    for name, inner in getattr(command, "commands", {}).items():
        if getattr(inner, "commands", None):
            yield from leaves(inner, (*path, name))
        else:
            yield " ".join((*path, name)), inner


def render() -> str:
    root = get_command(app)
    lines = [
        "# The command line",
        "",
        "Made from the code by `python -m iota.cli.reference > docs/cli.md`; a test compares the two.",
        "",
        "`iota COMMAND --help` says the same. `iota --install-completion` makes the shell complete commands and options. The "
        "flags of `iota miner` and `iota validator` are those of the neurons: `iota miner --help`, `iota validator --help`.",
        "",
        "## Exit status",
        "",
        "| status | means |",
        "|---|---|",
        *(f"| {status} | {words} |" for status, words in sorted(EXIT_STATUS.items())),
        "",
        "An error is one line on stderr that begins with `error: ` and ends with the remedy in brackets.",
        "",
        "## JSON",
        "With `--json` there is one JSON value on stdout and nothing else (`iota logs`: one object a line); progress and errors "
        "go to stderr, and a command that fails prints no JSON. Fields are added in later versions, none is renamed or taken "
        "away while the protocol version is the same (`iota version --json`). Times end in `_s` or `_ns`, sizes in `_bytes`. "
        "These have no `--json`:",
        "",
        "| command | why |",
        "|---|---|",
        *(f"| `iota {path}` | {why} |" for path, why in WITHOUT_JSON.items()),
    ]
    group = ""
    for path, command in sorted(leaves(root), key=lambda item: (" " in item[0], item[0])):
        first = path.split(" ")[0] if " " in path else ""
        if first != group:
            group = first
            lines += ["", f"## iota {group}", "", str(root.commands[group].help or "")]  # type: ignore[attr-defined]
        elif not group and "## Commands" not in lines:
            lines += ["", "## Commands"]
        lines += _command(path, command)
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    words = " ".join(_argument(argument) for argument in arguments)
    yield from (
        "",
        f"### iota {path}",
        "",
        f"`iota {path}{' ' + words if words else ''}{' [OPTIONS]' if options else ''}`",
        "",
    )
    text, own = split_help(command.help or "")
    yield " ".join(_escaped(text).split())
    lines = (*EXAMPLES.get(path, ()), *own)
    if lines:
        yield from ("", *(f"    {line}" for line in lines))
    if arguments or options:
        yield from ("", "| | default | what |", "|---|---|---|")
    for argument in arguments:
        yield f"| `{_argument(argument)}` | {_default(argument)} | {_escaped(argument.help or '')} |"
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        yield f"| {names} | {_default(option)} | {_escaped(option.help or '')} |"


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def split_help(text: str) -> tuple[str, tuple[str, ...]]:
    """A command's help without the lines that are examples, and those without what is said behind them."""
    words: list[str] = []
    examples: list[str] = []
    for line in text.splitlines():
        stripped = re.sub(r"^Examples?: ", "", line.strip())
        if stripped.startswith("iota "):
            examples.append(re.split(r" {3,}", stripped)[0])
        else:
            words.append(line)
    return "\n".join(words), tuple(examples)


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required or value is None or value == "" or value is False or callable(value):
        return ""
    return f"`{value}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").strip()


def main(argv: list[str]) -> int:
    if argv == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == render():
            return 0
        print("docs/cli.md isn't as the code says: python -m iota.cli.reference > docs/cli.md", file=sys.stderr)
        return 1
    sys.stdout.write(render())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
