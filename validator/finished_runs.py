"""Runs that have ended: their cases can still be read and replayed, and what the store holds of them ends in its time.

Evidence goes ``EVIDENCE_S`` after the end, when other validators have had time for their last audits; bundles of cases after
``keep_cases_s``. Snapshots, log and data stay for exports. Nothing here is remembered beyond the process: a hold that has
ended already ends again at no cost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from loguru import logger

from subnet.errors import IotaError, NotFound
from subnet.run.events import WindowClosed
from subnet.run.state import RunState, new_state
from subnet.store.base import MAX_HORIZON, Expiry, OwnerStore
from subnet.timing import TIMEOUTS, Clock, Deadline
from validator.audit_cases import RETENTION as CASE_CLASS
from validator.audit_cases import CaseShelf
from validator.audit_watch import AuditWatch
from validator.run_export import finished_state
from validator.run_registry import RunEntry, RunRegistry

EVIDENCE_S = 3600.0
EVERY_S = 600.0


class ExpiringStore(Protocol):
    """What is asked of a store (:class:`subnet.store.base.OwnerStore`)."""

    async def expire(self, retention: str, label: str, below: int, *, deadline: Deadline) -> Expiry: ...


@dataclass
class FinishedAudits:
    """The cases of a run that has ended, as the desk sees them (:class:`validator.audit_desk.AuditSession`)."""

    audit_state: RunState
    shelf: CaseShelf
    over: bool = True
    audit_watch: AuditWatch = field(default_factory=AuditWatch)
    closed_windows: dict[int, WindowClosed] = field(default_factory=dict[int, WindowClosed])

    def wake(self) -> None:
        """Nobody waits."""


class FinishedRuns:
    def __init__(self, registry: RunRegistry, store: OwnerStore, clock: Clock, keep_cases_s: float) -> None:
        self._registry, self._store, self._clock, self._keep_cases_s = registry, store, clock, keep_cases_s
        self._states: dict[str, RunState] = {}
        self._reading = asyncio.Lock()
        self._ended: set[tuple[str, str]] = set()

    async def audits(self, run: str) -> FinishedAudits:
        """Of a finished run by its name or id (empty: the last one); :class:`NotFound` where there is none."""
        entry = self._find(run)
        async with self._reading:  # anyone may ask, and a journal is read once
            if entry.name not in self._states:
                self._states[entry.name] = _audits_only(await asyncio.to_thread(finished_state, entry))
        return FinishedAudits(self._states[entry.name], CaseShelf(self._store, entry.stored.run_id))

    def _find(self, run: str) -> RunEntry:
        finished = [entry for entry in self._registry.entries.values() if entry.finished]
        for entry in reversed(finished):
            if run in ("", entry.name, entry.stored.run_id):
                return entry
        known = ", ".join(entry.name for entry in finished[-8:]) or "none"
        raise NotFound(f"run {run!r} is neither active nor finished here", hint=f"finished: {known}")

    async def tidy_forever(self) -> None:
        while True:
            try:
                await end_holds(self._registry, self._store, self._clock, self._keep_cases_s, self._ended)
            except IotaError as error:
                logger.warning("what finished runs hold in the store: {}", error)
            await asyncio.sleep(EVERY_S)


async def end_holds(
    registry: RunRegistry, store: ExpiringStore, clock: Clock, keep_cases_s: float, ended: set[tuple[str, str]]
) -> None:
    """End what is due; ``ended``: (run id, class) that were done before."""
    for entry in [entry for entry in registry.entries.values() if entry.finished]:
        age_s = clock.wall_ns() / 1e9 - _finished_s(entry.finished_path)
        for retention, kept_s in (("evidence", EVIDENCE_S), (CASE_CLASS, keep_cases_s)):
            key = (entry.stored.run_id, retention)
            if age_s < kept_s or key in ended:
                continue
            deadline = Deadline.after(TIMEOUTS.store_request_s)
            freed = await store.expire(retention, entry.stored.run_id, MAX_HORIZON, deadline=deadline)
            ended.add(key)
            if freed.num_blobs:
                logger.info(
                    "run {}: {} {} blobs freed, {:.1f} MB",
                    entry.name,
                    freed.num_blobs,
                    retention,
                    freed.freed_bytes / 1e6,
                )


def _finished_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _audits_only(state: RunState) -> RunState:
    """What is asked of a finished run; the rest of its state isn't kept in memory."""
    slim = new_state()
    slim.run, slim.audits, slim.finished = state.run, state.audits, state.finished
    return slim
