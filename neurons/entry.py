"""How a command ends: an error of ours is one line on stderr and an exit status, never a traceback.

Status 2: the person who called can cure it (a flag, a file, a broken file, a full disk). Status 1: the world was against it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, cast

from subnet.errors import ConfigError, Corrupt, InputError, IotaError, OutOfSpace

CURABLE = (ConfigError, Corrupt, InputError, OutOfSpace)
INTERRUPTED = 130
EXIT_STATUS = {
    0: "done; for a check: all is well",
    1: "the world was against it: no answer, refused, a check that failed, something that was claimed is wrong",
    2: "you can cure it: a flag, a file, a value, a broken file, a full disk; the line says how",
    3: "`iota audit replay`: nothing follows (another class of hardware, too little memory)",
    INTERRUPTED: "interrupted (Ctrl-C)",
}


def guarded(work: Callable[[], int]) -> int:
    """Run a command; its exit status, with errors of ours said in one line each."""
    try:
        return work()
    except IotaError as error:
        return say_error(error)
    except ExceptionGroup as group:
        errors = list(flatten(group))
        if not all(isinstance(error, IotaError) for error in errors):
            raise
        return max(say_error(cast("IotaError", error)) for error in errors)
    except KeyboardInterrupt:
        return INTERRUPTED


def say_error(error: IotaError) -> int:
    print(f"error: {one_line(str(error))}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, CURABLE) or error.code == ConfigError.code else 1


def one_line(text: str) -> str:
    return " ".join(text.split())


def flatten(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from flatten(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error


class _Both:
    """A text stream that writes to the terminal and to a file."""

    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._streams = (first, second)

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def start_logging(flags: argparse.Namespace, role: str) -> None:
    """Logs to stderr, and to a file where ``--logging.record_log`` asks for one."""
    from subnet.flags import log_file, log_level
    from subnet.logs import setup

    path = log_file(flags, role)
    if path is None:
        setup(sys.stderr, log_level(flags))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}", hint="choose another --logging.logging_dir"
        ) from error
    setup(cast("TextIO", _Both(sys.stderr, file)), log_level(flags))
