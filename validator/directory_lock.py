"""One process a validator's directory: a lock that ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from subnet.errors import ConfigError

NAME = ".lock"


@contextmanager
def directory_lock(directory: Path) -> Generator[None]:
    """Held inside of the ``with``. :class:`ConfigError` where another process has it, or the directory can't be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot use the directory {directory}: {error.strerror or error}", hint="check --dir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"a validator runs in {directory}", hint="end it first: one process a directory; --dir names another"
            ) from error
        yield
    finally:
        os.close(descriptor)
