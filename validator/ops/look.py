"""Looks at a running validator, leader or follower, and says what it sees; cheap enough for every scrape."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from subnet.errors import NotFound
from subnet.protocol.api import RunStatus, StepView
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from validator.chain_side import ChainSide
from validator.ops.idle_store import IdleStore
from validator.ops.problems import Look
from validator.settings import ValidatorSettings

if TYPE_CHECKING:
    from validator.follow_node import FollowerNode
    from validator.node import ValidatorNode

LAG_EVERY_S, LAG_KEPT = 1.0, 60
TEMPO_S = 4320.0
"""Until the chain has said: 360 blocks of 12 s."""


class LoopLag:
    """How late the event loop wakes a sleeper: the worst of the last minute."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lags: deque[float] = deque(maxlen=LAG_KEPT)

    @property
    def worst_s(self) -> float:
        return max(self._lags, default=0.0)

    async def run(self) -> NoReturn:
        while True:
            due_s = self._clock.now_s() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._lags.append(max(0.0, self._clock.now_s() - due_s))


RECENT_STEPS = 20
"""A spike is a problem for so many steps."""


class Watched(Protocol):
    """What leaders and followers both can say of themselves."""

    def look(self) -> Look: ...

    def status(self) -> RunStatus | None:
        """The active run, without its steps' history; None where there is none."""
        ...

    def followed(self) -> tuple[tuple[str, int, int, int], ...]:
        """Of a follower, by run: name, steps sealed, records folded, breaches found."""
        ...


class _Base:
    def __init__(self, settings: ValidatorSettings, side: ChainSide, lag: LoopLag, clock: Clock) -> None:
        self._settings, self._side, self._lag, self._clock = settings, side, lag, clock
        self._started_s = clock.now_s()

    def _look(self, *, leads: bool, hotkey: str, **more: object) -> Look:
        side, settings, now_s = self._side, self._settings, self._clock.now_s()
        neuron = side.metagraph.neuron(hotkey) if side.metagraph is not None else None
        free, whole = disk_of(settings.directory.expanduser())
        return Look(
            leads=leads,
            hotkey=hotkey,
            started_s_ago=now_s - self._started_s,
            loop_lag_s=self._lag.worst_s,
            metagraph_age_s=None if side.metagraph_s is None else now_s - side.metagraph_s,
            chain_trouble=side.trouble,
            registered=neuron is not None or side.metagraph is None,
            permit=neuron is None or neuron.validator_permit,
            sets_weights=settings.set_weights,
            tempo_s=side.tempo_s or TEMPO_S,
            weights=side.weights_report,
            weights_set_s_ago=None if side.weights_set_s is None else now_s - side.weights_set_s,
            disk_free_bytes=free,
            disk_bytes=whole,
            **more,  # pyright: ignore[reportArgumentType]
        )


class LeaderView(_Base):
    def __init__(self, node: ValidatorNode, lag: LoopLag) -> None:
        super().__init__(node.settings, node.side, lag, node.clock)
        self._node = node
        self.idle_store = IdleStore(self._ask_store, self._active)

    def _active(self) -> bool:
        return self._node.session is not None and not self._node.session.over

    async def _ask_store(self) -> object:
        return await self._node.store.usage(deadline=Deadline.after(TIMEOUTS.store_probe_s))

    def look(self) -> Look:
        node, status = self._node, self.status()
        session = node.session if self._active() else None
        trouble, unacknowledged = self.idle_store.trouble, 0
        if session is not None:
            core = session.coordinator.core
            trouble = session.coordinator.watch.store.trouble
            unacknowledged = core.length - core.acknowledged if core.quorum else 0
        return self._look(
            leads=True,
            hotkey=node.signer.hotkey,
            may_speak=session is None or session.coordinator.core.may_speak,
            store_trouble=trouble,
            journal_trouble="" if session is None else session.journal.trouble,
            unacknowledged_records=unacknowledged,
            run=None if status is None else status.summary,
            spikes=() if session is None else spikes_of(session.coordinator.history.steps),
        )

    def status(self) -> RunStatus | None:
        try:
            return self._node.status("", 1)
        except NotFound:
            return None

    def followed(self) -> tuple[tuple[str, int, int, int], ...]:
        return ()


class FollowerView(_Base):
    def __init__(self, node: FollowerNode, lag: LoopLag) -> None:
        super().__init__(node.settings, node.side, lag, node.clock)
        self._node = node

    def look(self) -> Look:
        runs = self._node.reader.runs.values()
        return self._look(
            leads=False,
            hotkey=self._node.signer.hotkey,
            store_trouble=self._node.reader.away,
            follow_troubles=tuple(f"run {run.name}: {run.trouble}" for run in runs if run.trouble),
        )

    def status(self) -> RunStatus | None:
        return None

    def followed(self) -> tuple[tuple[str, int, int, int], ...]:
        runs = self._node.reader.runs.values()
        return tuple((run.name, max(0, run.state.next_step), run.number, len(run.breaches.items)) for run in runs)


def spikes_of(steps: Sequence[StepView]) -> tuple[str, ...]:
    """The alarms of the last steps."""
    recent = [steps[-back] for back in range(min(RECENT_STEPS, len(steps)), 0, -1)]
    return tuple(f"step {step.step}: {step.alarm}" for step in recent if step.alarm)


def disk_of(directory: Path) -> tuple[int, int]:
    """(free, whole) bytes of the disk that the directory, or the nearest parent that is there, lies on."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
