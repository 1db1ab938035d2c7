"""The audits of an active run: runner and worker, the chain's blocks, the windows that others may ask about, and what it costs."""

from __future__ import annotations

import shutil
from pathlib import Path

from subnet.audit.process import AuditProcess
from subnet.protocol.audit_api import AuditCosts
from subnet.run.config import RunConfig
from subnet.run.events import Record, Rewound, WindowClosed
from subnet.run.state import RunState
from subnet.store.base import OwnerStore
from subnet.timing import Clock
from validator.audit_blocks import Blocks, follow_blocks
from validator.audit_cases import CaseShelf
from validator.audit_runner import AuditRunner
from validator.audit_words import waited_audit
from validator.coordinator import Coordinator
from validator.journal_store import JournalStore
from validator.settings import ValidatorSettings

KEPT_WINDOWS = 64
"""Closed windows that other validators may still ask about."""


class SessionAudits:
    """Made before the coordinator (which feeds :meth:`note` as it replays), attached to it afterwards."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        store: OwnerStore,
        journal: JournalStore,
        directory: Path,
        settings: ValidatorSettings,
    ) -> None:
        self.on, self._directory = config.audit.on, directory
        self.shelf = CaseShelf(store, run_id)
        self.windows: dict[int, WindowClosed] = {}
        self._coordinator: Coordinator | None = None
        self.runner = AuditRunner(
            run_id,
            store,
            directory,
            AuditProcess(settings.audit_memory_bytes, tolerant=True),
            journal.receipts_between,
            disk_bytes=settings.audit_disk_bytes,
            shelf=self.shelf,
        )

    def attach(self, coordinator: Coordinator, clock: Clock) -> None:
        self._coordinator = coordinator
        self.runner.bind(coordinator.watch, clock, coordinator.policy.audit.evidence_s)

    def note(self, record: Record) -> None:
        event = record.event
        if isinstance(event, WindowClosed):
            self.windows[event.window] = event
            while len(self.windows) > KEPT_WINDOWS:
                del self.windows[next(iter(self.windows))]
        elif isinstance(event, Rewound):
            self.windows = {number: window for number, window in self.windows.items() if window.last_step < event.step}

    async def follow_chain(self, chain: Blocks) -> None:
        """Forever: the blocks that draws need."""
        coordinator = self._coordinator
        assert coordinator is not None
        await follow_blocks(chain, coordinator.watch.audits, lambda: wanted_blocks(coordinator.state), coordinator.wake)

    def waiting_for(self, state: RunState) -> str:
        """What the audit that the run waits for is at, or why it can't be done; empty where it waits for none."""
        number = waited_audit(state) if self.on and state.finished is None else None
        words = self.runner.doing.get(number) if number is not None else None
        return f"audit {number} {words}" if words else ""

    def costs(self, state: RunState, receipted_s: float) -> AuditCosts | None:
        if not self.on:
            return None
        counts, cases = self.runner.counts, state.audits.cases.values()
        return AuditCosts(
            done=counts.done,
            repeated=counts.repeated,
            troubled=counts.troubled,
            compute_s=counts.compute_s,
            state_s=counts.state_s,
            receipted_s=receipted_s,
            read_bytes=counts.read_bytes,
            evidence_bytes=counts.evidence_bytes,
            open=len(state.audits.open),
            cases=len(cases),
            convicted=sum(case.outcome == "convicted" for case in cases),
        )

    async def close(self) -> None:
        await self.runner.close()

    def clear(self) -> None:
        """The run has finished: what audits have fetched isn't needed any more. Blocks."""
        shutil.rmtree(self._directory, ignore_errors=True)


def wanted_blocks(state: RunState) -> set[int]:
    """Blocks whose hashes draw the audits of windows that aren't audited yet."""
    return {window.block for window in state.audits.windows.values()}
