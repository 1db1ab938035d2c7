"""One fault, at one role, in one phase: a run of the production state machine in which exactly that goes wrong.

``FaultSim(cell).run()`` raises :class:`Bad` unless the fault fires in its phase and does something, the run finishes, every
sum, loss and state equals the reference's, no honest member is convicted and nobody but the victim is evicted. A stage that
loses its last replica must be named as what the run waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import fault_phases
import schedule_toy as toy
from fault_effects import EFFECTS, Effect
from loguru import logger
from schedule_miner import Miner
from schedule_nodes import Bad, Coordinator, Crash
from schedule_sim import Sim

from miner.owes import MakeSnapshot, Restore
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.invariants import check
from subnet.words import Member
from validator import store_health
from validator.decide import waiting_for
from validator.presence import PresentClock
from validator.store_clock import StoreClock
from validator.store_health import StoreHealth

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 3, 6, 2
GRACE_UNITS = 2.0
MAX_ROUNDS, MAX_UNITS = 4000, 150
STAGE = {"first": 0, "middle": 1, "last": 2, "sole": 1, "owner": 1, "contributor": 1, "maker": 1}
SERVERS = ("coordinator", "log", "store")


@dataclass(frozen=True)
class Cell:
    """``variant``: of a fault that has several forms."""

    role: str
    phase: str
    fault: str
    variant: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.role, self.phase, self.fault, self.variant)))


class NotHit(Bad):
    """The fault fired, and nothing ran into it: another order of joins may do."""


class FaultMiner(Miner):
    """A member that the fault may hold back."""

    sim: FaultSim

    def tick(self, late: bool = False) -> None:
        if self.sim.effect.holds(self):
            self.sim.send(self.coordinator, self, "poll", self.follower.cursor)
            return
        super().tick(late)

    def do(self, me: Member, owe: Any) -> None:
        waits = not self.sim.fired or self.sim.effect.keeps_waiting
        if waits and isinstance(owe, Restore) and self is self.sim.joiner:
            return
        if waits and isinstance(owe, MakeSnapshot) and self.sim.keeps_snapshot(me, owe.step):
            return
        super().do(me, owe)


class FaultCoordinator(Coordinator):
    """With the production's clocks: its own absence is nobody's fault, nor is an outage of the store."""

    def __init__(self, sim: FaultSim, *args: Any) -> None:
        super().__init__(sim, *args)
        self.watch.store = StoreClock(GRACE_UNITS)
        self.clock = PresentClock(SimClock(sim), absent_s=1.0)
        self.health = StoreHealth(
            self, self.watch.store, self.clock, lambda: self.core.first_unacknowledged, lambda: None
        )

    @property
    def now(self) -> float:
        return self.clock.now_s()

    async def probe_store(self) -> str:
        return "" if self.sim.answers(self) and self.sim.takes(self) else "the store is away or full"

    def tick(self, late: bool = False) -> None:
        with contextlib.suppress(StopIteration):
            self.health.look().send(None)
        super().tick(late)


class SimClock:
    def __init__(self, sim: FaultSim) -> None:
        self._sim = sim

    def now_s(self) -> float:
        return self._sim.now

    def wall_ns(self) -> int:
        return 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the production says of the faults is no news here."""
    for name in ("validator", "subnet"):
        logger.disable(name)
    try:
        yield
    finally:
        for name in ("validator", "subnet"):
            logger.enable(name)


class FaultSim(Sim):
    """A run of three stages and two steps under one fault; with ``delay`` of three, and the fault falls into the second."""

    def __init__(self, cell: Cell, seed: int = 1, *, delay: int = 0) -> None:
        self.cell = cell
        self.fired = self.named_pause = self.was_empty = False
        self.fired_at = 0.0
        self.victim: Any = None
        self.victim_member: Member | None = None
        self.joiner: FaultMiner | None = None
        self.effect: Effect = EFFECTS[cell.fault](self)
        self.fates: list[ev.Gone] = []
        super().__init__(seed, delay=delay)
        self.chaos = False

    def _choose(self, lie: str) -> int:
        self.num_stages, self.num_microbatches, self.num_steps = NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS + self.delay
        tied = self.cell.phase == "trace" and self.cell.role == "sole"
        self.run_planned = toy.plan_run(
            NUM_STAGES,
            NUM_MICROBATCHES,
            self.num_steps,
            tied=tied,
            evaluation_items=2,
            evaluation_every=1,
            snapshot_every=1,
            even=True,
            update_delay=self.delay,
        )
        if self.cell.role == "sole":
            return 4 if tied else 3
        crowd = self.cell.role == "contributor" or self.cell.phase == "trace" or self.cell.variant == "claims"
        return 9 if crowd else 6

    @property
    def stage(self) -> int:
        """Where the phase is looked for."""
        if self.cell.role == "joiner":
            me = self.joiner.me if self.joiner else None
            info = self.coordinator.state.members.get(me) if me else None
            return info.stage if info else -1
        if self.cell.role == "sole" and self.cell.phase == "trace":
            return 2
        return STAGE.get(self.cell.role, 1)

    def keeps_snapshot(self, me: Member, version: int) -> bool:
        """The maker's snapshot stays on order until the fault fires."""
        wanted = self.num_steps if self.cell.phase == "run end" else 1
        return self.cell.role == "maker" and version == wanted and self.coordinator.state.orders.get(self.stage) == me

    # --- when it fires

    def saw(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        super().saw(coordinator, event)
        if isinstance(event, ev.Gone):
            self.judge_gone(event)
        if isinstance(event, ev.StepPlanned) and event.step == -1 and self.cell.role == "joiner" and not self.joiner:
            self.joiner = self.new_miner(f"hot{len(self.miners)}")
            self.miners.append(self.joiner)
        if self.cell.phase == "trace" and not self.liars:
            self.choose_accuser(coordinator.state, event)
        if not self.fired and coordinator is self.coordinator:
            found = fault_phases.victim(self.cell, coordinator.state, event, self.stage, self)
            if found is not None:
                self.fire(coordinator, found)

    def choose_accuser(self, state: st.RunState, event: ev.AnyEvent) -> None:
        """A check fails only where somebody lies: another replica of the group accuses honest ones."""
        if not isinstance(event, ev.Frozen) or event.step != fault_phases.step_of(self.cell, self):
            return
        if self.stage < 0 or event.group != st.group_of(state, self.stage):
            return
        stages = st.group_shape(state, event.group).stages
        ready = [k for s in stages for k in st.members_of(state, s) if state.members[k].version is not None]
        if self.cell.role == "sole":
            ready = [k for k in ready if state.members[k].stage == 0]
        chosen = ready[-1]
        self.liars[chosen.hotkey] = "accuse"
        self.addresses[chosen].lie = "accuse"

    def fire(self, coordinator: Coordinator, found: Any) -> None:
        self.fired, self.fired_at = True, self.now
        if isinstance(found, Member):
            self.victim_member, self.victim = found, self.addresses.get(found) or self.joiner
        else:
            self.victim = found
        self.effect.begin(coordinator)

    def judge_gone(self, event: ev.Gone) -> None:
        self.fates.append(event)
        hotkey = event.member.hotkey
        if event.why in ("left", "replaced") or hotkey in self.liars or self.effect.excuses(event):
            return
        if self.victim_member is not None and hotkey == self.victim_member.hotkey:
            if event.why != "liar":
                return
            raise Bad(f"the victim is convicted for {self.cell.fault}")
        raise Bad(f"{event.member} evicted ({event.why}), victim {self.victim_member}")

    # --- what nodes use

    def answers(self, node: Any) -> bool:
        return self.effect.answers(node)

    def takes(self, node: Any) -> bool:
        return self.effect.takes(node)

    def commit_fails(self, coordinator: Coordinator) -> bool:
        return self.fired and self.effect.commit_fails(coordinator)

    def new_coordinator(self, journal: list[ev.Record], term: int, acknowledged: int, segments: int) -> Coordinator:
        return FaultCoordinator(self, journal, term, acknowledged, segments)

    def new_miner(self, hotkey: str) -> FaultMiner:
        return FaultMiner(self, hotkey)

    # --- the schedule

    def run(self) -> Sim:
        with mock.patch.object(store_health, "SLOW_LOG_S", 1.0), quiet():
            self.go()
        self.demand()
        return self

    def go(self) -> None:
        idle = 0
        for _ in range(MAX_ROUNDS):
            self.progress = self.busy = False
            before = sum(len(c.journal) for c in self.coordinators)
            for miner in self.miners:
                self.send(miner, self.coordinator, "announce", self.coordinator.core.term)
            self._deliver_all()
            for node in self.nodes():
                if not self.effect.skips(node):
                    node.tick()
            self.effect.round()
            if self.finished is not None and self.effect.over and all(self._done(m) for m in self.miners if not m.dead):
                break
            moved = self.progress or sum(len(c.journal) for c in self.coordinators) != before
            idle = 0 if moved else idle + 1
            if idle > 3:
                idle = 0
                if not self._pass_time():
                    break

    def demand(self) -> None:
        if not self.fired:
            raise (NotHit if self.delay else Bad)("the fault didn't fire")
        state, watch = self.coordinator.state, self.coordinator.watch
        if self.finished is None:
            raise Bad(f"stuck: {waiting_for(state, watch, self.now)}")
        if not self.effect.hits:
            raise NotHit("nothing ran into the fault")
        if self.tainted:
            raise Bad("a seal without an honest check")
        if self.was_empty and not self.named_pause:
            raise Bad("the pause wasn't named")
        if self.skipped:
            raise Bad("a microbatch was skipped")
        live = [m for m in self.miners if not m.dead and m.hotkey not in state.convicted]
        if any(m.state.finished is None for m in live):
            raise Bad("a member doesn't know that the run is finished")
        self.audit()
        self.audit_evaluation(self.num_steps, self.finished.evaluation)
        check(state)

    def _deliver_all(self) -> None:
        batch, self.bag = self.bag, []
        if self.rng.random() < 0.5:
            self.rng.shuffle(batch)
        for to, source, kind, args, mark in batch:
            if to.paused or self.effect.delays(to, source, kind):
                self.bag.append((to, source, kind, args, mark))
                continue
            self.flying.discard(mark)
            arrives = self.effect.arrives(to, source, kind, args) if self.fired else args
            if arrives is not None and not to.dead:
                with contextlib.suppress(Crash):
                    to.receive(source, kind, *arrives)

    def _pass_time(self) -> bool:
        self.now += 1
        self.passes += 1
        if self.passes > MAX_UNITS:
            return False
        self.effect.unit()
        self.watch_pause()
        for node in self.nodes():
            if not self.effect.skips(node):
                node.tick(True)
        return True

    def watch_pause(self) -> None:
        """A stage with nobody is named; later somebody joins it."""
        state = self.coordinator.state
        if state.finished is not None or self.cell.role != "sole" or state.hardware_class is None or not self.fired:
            return
        empty = [s for s in range(NUM_STAGES) if not st.members_of(state, s)]
        if empty and self.stage in empty:
            self.was_empty = True
            text = waiting_for(state, self.coordinator.watch, self.now)
            if "a miner for stage" in text and str(self.stage) in text:
                self.named_pause = True
            if self.named_pause and self.now >= self.fired_at + 5 and self.effect.needs_help and len(self.miners) < 9:
                self.miners.append(self.new_miner(f"hot{len(self.miners)}"))


def attempt(cell: Cell, *, delay: int = 0) -> FaultSim:
    """Runs the cell; who owns what depends on the order of joins, so another is tried where nothing ran into the fault."""
    for seed in range(1, 9):
        sim = FaultSim(cell, seed, delay=delay)
        try:
            sim.run()
        except NotHit:
            continue
        return sim
    raise NotHit(f"{cell}: nothing ever ran into the fault")
