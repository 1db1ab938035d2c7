"""Whether the store is there while no run is active: a validator that is ready is ready for the next run.

While one is active its coordinator looks (:mod:`validator.store_health`), and this does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from loguru import logger

from subnet.errors import IotaError

LOOK_EVERY_S = 5.0


class IdleStore:
    """``probe``: asks the store something cheap, and raises. ``active``: whether a run is."""

    def __init__(self, probe: Callable[[], Awaitable[object]], active: Callable[[], bool]) -> None:
        self._probe, self._active = probe, active
        self.trouble = ""
        """Why the store didn't answer last; empty while it does, and while somebody else looks."""

    async def run(self) -> NoReturn:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        if self._active():
            self.trouble = ""
            return
        before = self.trouble
        try:
            await self._probe()
            self.trouble = ""
        except IotaError as error:
            self.trouble = f"{error.code}: {error.reason}"
        if self.trouble != before:
            logger.log("WARNING" if self.trouble else "INFO", "the store: {}", self.trouble or "well again")
