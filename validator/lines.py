"""A file of facts, one line of JSON each: appended and on the disk before ``append`` returns, read back whole at the start.

A line that a crash cut short is taken off when the file is opened again; any other line that doesn't decode is an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from subnet.errors import Corrupt
from subnet.store.disk import full_disk_is_ours, sync_directory, write_all

T = TypeVar("T", bound=msgspec.Struct)


class DurableLines(Generic[T]):
    """``items``: everything that was ever appended to ``path``, in order."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.path = path
        self.items: list[T] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        decoder = msgspec.json.Decoder(kind)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.items.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise Corrupt(f"line {number} of {path} does not decode: {error}", hint="move the file away") from error
        if len(whole) != len(data):
            os.truncate(path, len(whole))

    def append(self, item: T) -> None:
        new = not self.path.exists()
        with full_disk_is_ours(str(self.path)):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                write_all(descriptor, msgspec.json.encode(item) + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if new:
            sync_directory(self.path.parent)
        self.items.append(item)
