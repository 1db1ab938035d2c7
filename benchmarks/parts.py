"""Finished parts of a long benchmark on disk: each is made once, written whole, and found again after an interruption."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Parts:
    """Parts of one benchmark, each a JSON table by name. ``again``: forget those of before."""

    def __init__(self, directory: Path, *, again: bool = False) -> None:
        self.directory, self._again = directory, again

    def part(
        self, name: str, make: Callable[[], dict[str, Any]], say: Callable[[dict[str, Any]], str] = lambda made: ""
    ) -> dict[str, Any]:
        """A finished part from disk, or made now; ``say``: one line about a new one."""
        path = self.directory / f"{name}.json"
        if path.exists() and not self._again:
            return json.loads(path.read_text())
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(made))
        partial.replace(path)
        print(f"{name}: {say(made)}", file=sys.stderr, flush=True)
        return made

    def finished(self, pattern: str) -> list[dict[str, Any]]:
        """Parts that are there, in the order of their names."""
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob(f"{pattern}.json"))]


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---" for _ in head) + "|"]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_section(page: Path, name: str, text: str) -> None:
    """Put a benchmark's table between ``<!-- name: begin -->`` and ``<!-- name: end -->`` of a page, whole."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no section {name}")
    partial = page.with_suffix(".partial")
    partial.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")
    partial.replace(page)


def finish(name: str, figures: dict[str, Any], limits: dict[str, Any], ok: bool) -> int:
    """The one JSON line that every benchmark ends with, and its exit status."""
    print(json.dumps({"name": name, "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1
