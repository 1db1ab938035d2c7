"""Marks a run as stalled when it makes no progress, says so once with all who are waited for, and takes it back at a seal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from subnet.protocol.api import StallView, WaitView
from subnet.timing import Clock
from validator.presence import Dumps, task_stacks, thread_stacks
from validator.watchdog import Stall, StallPolicy, stall

if TYPE_CHECKING:
    from validator.coordinator import Coordinator

LOOK_S = 1.0


class ProgressWatch:
    """``sealed`` at each seal; ``view`` is what people see, None while all is well."""

    def __init__(self, clock: Clock, dumps: Dumps, policy: StallPolicy = StallPolicy()) -> None:
        self._clock, self._dumps, self._policy = clock, dumps, policy
        self._stall: Stall | None = None
        self._dump: Path | None = None
        self._last_seal_s, self._last_seal_ns = clock.now_s(), clock.wall_ns()

    def sealed(self) -> None:
        self._last_seal_s, self._last_seal_ns = self._clock.now_s(), self._clock.wall_ns()

    def look(self, coordinator: Coordinator) -> Stall | None:
        """Once now: what is the matter, if anything is. The first look of a stall is said and dumped."""
        core = coordinator.core
        found = stall(
            self._clock.now_s(),
            self._last_seal_s,
            [step.seconds for step in list(coordinator.history.steps)[-self._policy.num_steps :]],
            coordinator.state,
            coordinator.watch,
            log_records=core.length - core.acknowledged if core.quorum else 0,
            policy=self._policy,
        )
        before, self._stall = self._stall, found
        if found is None:
            if before is not None:
                logger.info("the run goes on")
            return None
        if before is None and coordinator.state.members:
            self._say(found)
        return found

    def _say(self, found: Stall) -> None:
        no_seal_s = self._clock.now_s() - found.since_s
        text = f"no seal for {no_seal_s:.0f} s (limit {found.limit_s:.0f} s), waiting for {found.reason}"
        self._dump = self._dumps.write(f"{text}\n\n{task_stacks()}\n\n{thread_stacks()}")
        logger.warning("the run is stalled: {}; stacks: {}", text, self._dump or "enough were written")

    def view(self) -> StallView | None:
        found = self._stall
        if found is None or self._last_seal_s > found.since_s:
            return None
        return StallView(
            since_ns=self._last_seal_ns,
            no_seal_s=self._clock.now_s() - found.since_s,
            limit_s=found.limit_s,
            waits=tuple(WaitView(wait.who, wait.what, wait.waited_s) for wait in found.waits),
            dump=str(self._dump or ""),
        )

    async def look_forever(self, coordinator: Coordinator) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(coordinator)
