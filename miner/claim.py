"""A miner's directory belongs to one process at a time; the lock goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from subnet.errors import ConfigError
from subnet.store.disk import full_disk_is_ours

PID_FILE = "miner.pid"


@contextmanager
def claimed(directory: Path) -> Generator[None]:
    """Hold the directory; :class:`ConfigError` where another process does.

    A POSIX lock: children don't inherit it, and it ends with the process. Nobody else in the process may open the file.
    """
    path = directory / PID_FILE
    with full_disk_is_ours(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="ascii")
    with file:
        if not _lock(file.fileno()):
            raise ConfigError(
                f"{directory} is used by another miner (process {_pid(path) or 'unknown'})",
                hint="two miners on one machine need two --dir",
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        file.truncate(0)


def running(directory: Path) -> int | None:
    """Process id of the miner that holds this directory (0: it hasn't said yet); None where nobody does.

    Not to be asked by the holder itself: closing the file would end its lock.
    """
    path = directory / PID_FILE
    try:
        with path.open("r+", encoding="ascii") as file:
            if _lock(file.fileno()):
                return None
    except FileNotFoundError:
        return None
    return _pid(path) or 0


def _lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _pid(path: Path) -> int | None:
    text = path.read_text(encoding="ascii").strip()
    return int(text) if text.isdigit() else None
