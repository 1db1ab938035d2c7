"""A run in virtual time: the real coordinator code, and simulated members, links and outages; the same seed, the same bytes.

Real: intake, decisions with their index, fold, journal core (what may leave when), placement, dealing, merge protocol, deadlines.
Simulated: how long computing and sending takes, and that it gives the right result. No audits are simulated: a run that has
them is simulated without (the report says so).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from iota.simulate_coordinator import SimCoordinator
from iota.simulate_faults import Faults
from iota.simulate_member import SimMember
from iota.simulate_merge import SimMerges
from iota.simulate_tally import Tally
from subnet.errors import IotaError
from subnet.model.plan import ModelPlan
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.config import NO_AUDITS, RunConfig
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet
from subnet.simulate.links import Link
from validator.policy import Policy
from validator.run_registry import group_shapes

SWEEP_S = 1.0
"""Heartbeats, and what has to be said or asked again."""
JOIN_SPREAD_S = 2.0
BoundaryKey = tuple[int, int, int, bool]
"""(step, microbatch, producing stage, backward)."""


class Stuck(IotaError):
    """The simulated run made no step in the time it was given."""

    code = "stuck"


class World:
    """One simulated run. :meth:`run` drives it to its end."""

    def __init__(
        self,
        plan: ModelPlan,
        fleet: Fleet,
        *,
        num_steps: int,
        seed: int = 0,
        unit_s: Sequence[float] | None = None,
        policy: Policy | None = None,
        picture_step: int | None = None,
        patience_s: float = 12 * 3600.0,
    ) -> None:
        config = simulated_config(plan.config, num_steps)
        self.plan = ModelPlan(config, plan.model_config, plan.units, plan.cuts)
        self.fleet, self.seed, self.num_steps, self.patience_s = fleet, seed, num_steps, patience_s
        self.costs = StageCosts(self.plan, unit_s)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.num_handled = 0
        store = fleet.store
        self.store = Link.of(store.up_mbit, store.down_mbit, store.rtt_ms)
        self.store_down_until_s = 0.0
        self.boundaries: dict[BoundaryKey, list[SimMember]] = {}
        """Who has its bytes."""
        self.stored: set[BoundaryKey] = set()
        """What is in the store,"""
        self.storing: dict[BoundaryKey, float] = {}
        """or on its way there, and until when."""
        self.nodes = self._make_nodes()
        self.by_hotkey = {node.hotkey: node for node in self.nodes}
        self.tally = Tally(self, picture_step)
        self.coordinator = SimCoordinator(self, planned_event(self.plan), policy or Policy(), random.Random(seed))
        self.merges = SimMerges(self)
        self.faults = Faults(self)

    def _make_nodes(self) -> list[SimMember]:
        nodes: list[SimMember] = []
        for number, group in enumerate(self.fleet.group):
            link: Link | None = None
            for index in range(group.count):
                if link is None or index % group.per_link == 0:
                    rtt_ms = group.rtt_ms + self.fleet.validator.rtt_ms
                    link = Link.of(group.up_mbit, group.down_mbit, rtt_ms)
                nodes.append(SimMember(self, f"g{number}-{index:05}", group, link))
        return nodes

    @property
    def state(self) -> st.RunState:
        return self.coordinator.state

    # --- time

    def at(self, when_s: float, work: Callable[..., None], *args: Any) -> None:
        """Call ``work(*args)`` then; of equal times the first asked comes first."""
        self._count += 1
        heapq.heappush(self._events, (max(when_s, self.now_s), self._count, work, args))

    def run(self) -> World:
        """Until the run is finished; raises :class:`Stuck` if no step is sealed for too long."""
        spread = random.Random(f"{self.seed}/joins")
        for node in self.nodes:
            self.at(spread.uniform(0, JOIN_SPREAD_S), node.start)
        self.at(SWEEP_S, self._sweep)
        self.faults.begin()
        while self._events and self.state.finished is None:
            self.now_s, _, work, args = heapq.heappop(self._events)
            self.num_handled += 1
            work(*args)
            if self.now_s - self.tally.progress_s > self.patience_s:
                raise Stuck(
                    f"no step in {self.patience_s / 3600:.1f} simulated hours, at step {self.state.next_step}: "
                    f"it waits for {self.coordinator.waiting_for()}",
                    hint="faster links, fewer faults, or smaller merges (more stages)",
                )
        self.tally.close()
        return self

    def _sweep(self) -> None:
        self.coordinator.heartbeats()
        for node in self.nodes:
            node.sweep()
        self.at(self.now_s + SWEEP_S, self._sweep)

    # --- the store

    def store_start_s(self, now_s: float | None = None) -> float:
        """When the store takes a request made now."""
        return max(self.now_s if now_s is None else now_s, self.store_down_until_s)

    # --- who has what

    def holders_of(self, key: BoundaryKey) -> list[SimMember]:
        return [node for node in self.boundaries.get(key, ()) if node.online and key in node.has]

    def lease_holder(self, step: int, microbatch: int, stage: int) -> SimMember | None:
        found = st.item(self.state, step, microbatch, stage)
        if found is None or found.member is None or found.status not in (st.LIVE, st.REVOKING):
            return None
        node = self.by_hotkey[found.member.hotkey]
        return node if node.member == found.member else None

    def forget_step(self, step: int) -> None:
        """Boundaries of steps that are over."""
        self.boundaries = {key: held for key, held in self.boundaries.items() if key[0] > step}
        self.stored = {key for key in self.stored if key[0] > step}


def simulated_config(config: RunConfig, num_steps: int) -> RunConfig:
    """The run as it is simulated: so many steps, no audits, its snapshots as often as they were."""
    run = msgspec.structs.replace(config.run, steps=num_steps)
    return msgspec.structs.replace(config, run=run, audit=NO_AUDITS)


def planned_event(plan: ModelPlan) -> ev.RunPlanned:
    """As the validator's registry makes it from a submission; hashes are names."""
    units = plan.units
    return ev.RunPlanned(
        run_id=plan.config.run.name,
        config=plan.config,
        model_config=dict(plan.model_config),
        unit_tensors=units.units,
        unit_flops_per_token=units.unit_flops_per_token,
        tied=units.tied,
        cuts=plan.cuts,
        groups=group_shapes(plan.layout),
        data="data",
        snapshot="snapshot",
        tokenizer="tokenizer",
        submitter="submitter",
    )
