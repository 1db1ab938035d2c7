"""Looks after the store from the coordinator's side: does it answer, has it room, does the log store acknowledge seals?

What is wrong is said once, told to the clock of those who owe something (:mod:`validator.store_clock`), and shown as what
the run waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from loguru import logger

from subnet.errors import Unreachable
from subnet.logs import ReasonLog
from subnet.store.base import OwnerStore
from subnet.timing import TIMEOUTS, Clock, Deadline
from validator.store_clock import StoreClock

LOOK_EVERY_S = 1.0
SLOW_LOG_S = 3.0
"""A seal that the log store hasn't acknowledged for so long holds up everything behind it."""


class Prober(Protocol):
    async def probe_store(self) -> str:
        """What is wrong with the store, in words; empty when it is well."""
        ...


class StoreHealth:
    """``unacknowledged``: number of the first record that waits for the log store, or None."""

    def __init__(
        self,
        prober: Prober,
        store: StoreClock,
        clock: Clock,
        unacknowledged: Callable[[], int | None],
        changed: Callable[[], None],
    ) -> None:
        self._prober, self._store, self._clock = prober, store, clock
        self._unacknowledged, self._changed = unacknowledged, changed
        self._waiting: tuple[int, float] | None = None
        self._reasons = ReasonLog(level="WARNING")

    async def run(self) -> None:
        """Forever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        trouble, before = await self._prober.probe_store(), self._store.trouble
        now_s = self._clock.now_s()
        trouble = trouble or self._slow_log(now_s)
        if trouble:
            self._store.failed(trouble, now_s)
            code, _, words = trouble.partition(": ")
            self._reasons.note("store", code, words)
        else:
            self._store.answered(now_s)
            if before:
                self._reasons.note("store", "well again")
        if bool(trouble) != bool(before):
            self._changed()

    def _slow_log(self, now_s: float) -> str:
        number = self._unacknowledged()
        if number is None:
            self._waiting = None
            return ""
        if self._waiting is None or self._waiting[0] != number:
            self._waiting = (number, now_s)
        waited_s = now_s - self._waiting[1]
        return f"log store: record {number} isn't acknowledged after {waited_s:.0f} s" if waited_s >= SLOW_LOG_S else ""


async def first_look(store: OwnerStore, directory: Path) -> None:
    """A store that can't be had is a mistake at the very first start; later its absence is waited out."""
    try:
        await store.usage(deadline=Deadline.after(TIMEOUTS.http_request_s))
    except Unreachable as error:
        if not await asyncio.to_thread(_has_runs, directory):
            raise
        logger.warning("the store is away: {}", error)


def _has_runs(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())
