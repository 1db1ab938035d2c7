"""Notices a leader that tells others more than it puts into the log store: what isn't there can be checked by nobody.

Nothing at or behind a seal leaves a leader before the log store has it, so a leader says at most one step more than its journal
there, with a delayed update two. What it says is unsigned and proves nothing; the finding is told, and counts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from loguru import logger

from subnet.errors import IotaError
from subnet.run.state import update_delay
from subnet.timing import Clock
from validator.follow_run import FollowedRun

EVERY_S = 15.0
PATIENCE_S = 60.0
"""For so long the log store may lag behind what its leader says."""


class Line(Protocol):
    """:class:`validator.follow_leader.LeaderLine`."""

    async def step_of(self, leader: str, run: str) -> int: ...


class Lag:
    """Of one run: since when its leader has been too far ahead of its journal."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def look(self, now_s: float, theirs: int, ours: int, delay: int) -> str:
        """What is to be said; empty where nothing is."""
        if theirs <= ours + 1 + delay:
            self._since_s = None
            return ""
        self._since_s = now_s if self._since_s is None else self._since_s
        lag_s = now_s - self._since_s
        if lag_s < PATIENCE_S:
            return ""
        return f"the leader is at step {theirs}, its journal in the log store for {lag_s:.0f} s only at step {ours}"


class WithheldWatch:
    """``runs``: those that are followed; ``away``: whether the log store can't be read, which excuses any lag."""

    def __init__(
        self, line: Line, runs: Callable[[], Iterable[FollowedRun]], away: Callable[[], str], clock: Clock
    ) -> None:
        self._line, self._runs, self._away, self._clock = line, runs, away, clock
        self._lags: dict[str, Lag] = {}

    async def run(self, every_s: float = EVERY_S) -> NoReturn:
        """Forever."""
        while True:
            for run in list(self._runs()):
                await self.look(run)
            await asyncio.sleep(every_s)

    async def look(self, run: FollowedRun) -> None:
        if run.finished or run.state.run is None or not run.caught_up or run.trouble or self._away():
            self._lags.pop(run.run_id, None)
            run.withheld = ""
            return
        try:
            theirs = await self._line.step_of(run.state.leader, run.run_id)
        except IotaError as error:
            logger.debug("run {}: its leader can't be asked where it is: {}", run.name, error)
            return
        lag, delay = self._lags.setdefault(run.run_id, Lag()), update_delay(run.state)
        said = lag.look(self._clock.now_s(), theirs, run.state.next_step, delay)
        if said and not run.withheld:
            logger.warning("run {}: {}", run.name, said)
        run.withheld = said
