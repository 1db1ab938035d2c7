"""docs/run_file.md from the run file's own types: each key with its type, default, what is allowed, and what it does.

``python -m subnet.run.reference > docs/run_file.md`` writes it, ``--check`` says whether it is as the code says (exit status 1:
not). What is allowed is what a wrong value is told; the rest are the types' docstrings.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from subnet.errors import ConfigError
from subnet.run.config import RunConfig

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "run_file.md"
KINDS = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true, false",
    "str | None": "text",
    "tuple[str, ...]": "list of texts",
    "tuple[int, ...]": "list of whole numbers",
    "tuple[float, ...]": "list of numbers",
    "tuple[float, float]": "two numbers",
    "dict[str, Any] | None": "table, or path of a config.json",
}
WRONG: tuple[object, ...] = ("?!", -1, -1.0, 0, 1 << 70, 1e300, (-1,), (-1.0,), ("",), ("?!",), (1e300, 1e300), "x")
NEEDED: dict[str, dict[str, Any]] = {"run": {"name": "x"}, "model": {"config": {}}}
"""What a section can't be made without."""


def render() -> str:
    lines = [
        "# The run file",
        "",
        "Made from the code by `python -m subnet.run.reference > docs/run_file.md`; a test compares the two.",
        "",
        "A run is one TOML file: `run` and `model` are needed, everything else has a default. Paths are relative to the file. "
        "An unknown key, a wrong type, a value out of bounds: one line that names the key, the value and what is allowed. All of "
        "it, and the data, determine the result to the bit; who computes it doesn't. `iota plan RUN.toml` says what a run takes.",
    ]
    for section in msgspec.structs.fields(RunConfig):
        lines += _section(section.name, section.type, required=section.required)
    return "\n".join(lines) + "\n"


def _section(name: str, kind: Any, *, required: bool) -> Iterator[str]:
    words, docs = _docstrings(kind)
    yield from ("", f"## [{name}]", "")
    if required or words:
        yield from (" ".join(filter(None, (_text(words), "Needed." if required else ""))), "")
    yield from ("| key | type | default | allowed | what |", "|---|---|---|---|---|")
    for field in msgspec.structs.fields(kind):
        shown = inspect.formatannotation(field.type).replace("typing.", "")
        default = "needed" if field.required else f"`{_toml(field.default)}`"
        told = allowed(name, kind, field.name)
        yield f"| `{field.name}` | {KINDS.get(shown, shown)} | {default} | {_cell(told)} | {_text(docs.get(field.name, ''))} |"


def allowed(section: str, kind: Any, key: str) -> str:
    """What the section says of a wrong value of the key; empty where each value of the type is right."""
    for wrong in WRONG:
        try:
            kind(**{**NEEDED.get(section, {}), key: wrong})
        except ConfigError as error:
            if error.reason.startswith(f"{section}.{key} ="):
                return error.hint.removeprefix("allowed: ")
        except (TypeError, ValueError, AttributeError, OverflowError):
            continue
    return ""


def _docstrings(kind: Any) -> tuple[str, dict[str, str]]:
    """Of the class, and those below its fields."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found: dict[str, str] = {}
    words, last = "", ""
    for number, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if last:
                found[last] = node.value.value
            elif number == 0:
                words = node.value.value
        else:
            last = ""
    return words, found


def _text(words: str) -> str:
    """Of a docstring: one line, its markup as Markdown."""
    return _cell(" ".join(words.split()).replace("``", "`").replace(":func:", ""))


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"  # type: ignore[reportUnknownVariableType]
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main(argv: list[str]) -> int:
    if argv == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == render():
            return 0
        print(
            "docs/run_file.md isn't as the code says: python -m subnet.run.reference > docs/run_file.md",
            file=sys.stderr,
        )
        return 1
    sys.stdout.write(render())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
