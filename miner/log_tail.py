"""The last lines of this process's log, for its page: cleaned as the log is, bounded in number and length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from loguru import logger

from subnet.logs import render_line

if TYPE_CHECKING:
    from loguru import Message

KEPT_LINES = 1000
AT_ONCE = 200
MAX_CHARACTERS = 2000


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    number: int
    time_s: float
    level: str
    text: str
    """As in the log, with its fields; without time and level."""


class LogTail:
    """A sink of the logger; made and read in any thread."""

    def __init__(self, most: int = KEPT_LINES) -> None:
        self._lines: deque[LogLine] = deque(maxlen=most)
        self._number = 0

    def start(self) -> Callable[[], None]:
        """From now on; the answer ends it."""
        sink = logger.add(self._take, level="INFO", format="{message}")
        return lambda: logger.remove(sink)

    def _take(self, message: Message) -> None:
        record = message.record
        text = render_line(record)[24:].partition(" ")[2].strip()
        text = text.removeprefix("| ")
        self._lines.append(
            LogLine(self._number, record["time"].timestamp(), record["level"].name, text[:MAX_CHARACTERS])
        )
        self._number += 1

    def after(self, number: int) -> tuple[LogLine, ...]:
        """Lines after this one, oldest first; of more than :data:`AT_ONCE` the newest. A number that wasn't given yet is
        that of an earlier process: all lines.
        """
        number = -1 if number >= self._number else number
        return tuple(line for line in list(self._lines) if line.number > number)[-AT_ONCE:]
