"""The audit schedules where every boundary goes through the store, or every one of some members."""

from __future__ import annotations

from typing import Any

from audit_nodes import AuditMiner
from audit_sim import AuditSim
from schedule_nodes import Coordinator
from store_cases import ByStore, StoreRules, planned_by_store

from subnet.run import events as ev
from subnet.run import state as st


class AuditedByStore(ByStore, AuditMiner):
    """A member that puts what it makes into the store, and may lie about it."""


class AuditStoreSim(StoreRules, AuditSim):
    """One schedule. ``mixed``: only some members can't be reached."""

    def __init__(self, seed: int, *, mixed: bool = False, **options: Any) -> None:
        self.begin(all_by_store=not mixed)
        super().__init__(seed, **options)

    def _choose(self, lie: str) -> int:
        count = super()._choose(lie)
        if self.all_by_store:
            self.run_planned = planned_by_store(self.run_planned)
        else:
            names = [f"hot{i}" for i in range(self.max_members)]
            self.unreachable = {name for name in names if self.rng.random() < 0.4}
        return count

    def new_miner(self, hotkey: str) -> AuditMiner:
        return AuditedByStore(self, hotkey)

    def saw(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        super().saw(coordinator, event)
        if not isinstance(event, ev.Forwarded | ev.Backwarded):
            return
        found = st.item(coordinator.state, event.step, event.microbatch, event.stage)
        if found is None or found.member is None or found.member.hotkey not in self.liars:
            self.judge_receipt(coordinator, event)

    def fault(self) -> None:
        if self.kept and self.rng.random() < 0.2:
            self.lose(self.rng.choice(self.kept))
        else:
            super().fault()
