"""What was done, one JSON line for each thing, on disk before the next thing is done."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from subnet.errors import ConfigError


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """``what``: plan, started, began, ended, skipped, died, step, finished, verdict."""

    time: float
    """Wall clock, seconds."""
    what: str
    number: int | None = None
    kind: str = ""
    target: str = ""
    hotkey: str = ""
    pid: int | None = None
    outcome: str = ""
    more: dict[str, Any] | None = None


class ChaosJournal:
    """Appends; an existing file is continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}", hint="choose another --dir") from error

    def __enter__(self) -> ChaosJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> list[Entry]:
    """All whole lines; a torn last one is left out."""
    *lines, _ = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Entry) for line in lines if line]
