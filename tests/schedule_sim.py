"""Random schedules of a run: crashes, pauses, lost, late and doubled messages, takeovers, outages, liars; then calm.

``Sim(seed).run()`` raises :class:`Bad` unless the run finishes, every state equals the reference's, each microbatch is in
each sum exactly once, no step is sealed twice, and no honest member is convicted. A run in which some seal was checked by
no honest replica is *tainted*: there nothing is promised of the numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import schedule_toy as toy
from schedule_miner import Miner
from schedule_nodes import Bad, Coordinator, Log, Trouble
from schedule_world import World

from subnet.run import events as ev
from subnet.run.invariants import check

LIES = [
    "slice",
    "fp",
    "withhold",
    "owner",
    "nopub",
    "accuse",
    "nocommit",
    "nofp",
    "noown",
    "nocheck",
    "mute",
    "crafty",
    "square",
    "yes",
    "nosnap",
]

MAX_PASSES = 400
"""Units of time after which a run that isn't finished counts as stuck: mute members run every deadline down."""
MAX_ROUNDS = 6000


class Sim(World):
    """One schedule, all of it decided by ``seed``."""

    max_passes, max_members = MAX_PASSES, 14

    def __init__(
        self,
        seed: int,
        *,
        profile: str = "",
        lie: str = "",
        checks_all: bool = True,
        ahead: bool = True,
        delay: int = 0,
        lanes: bool = False,
        owners: int = 1,
    ) -> None:
        self.rng = random.Random(seed)
        self.seed, self.profile, self.delay, self.lanes, self.owners = seed, profile, delay, lanes, owners
        self.liars: dict[str, str] = {}
        self.slow: dict[str, int] = {}
        self.poison: tuple[int, int, int, bool] | None = None
        count = self._choose(lie)
        self.reference = toy.Reference(self.run_planned)
        self.checks_all = checks_all
        self.ahead = ahead
        """Whether members begin with a merge before they are asked to."""
        self.repeats = True
        self.demands_effect = True
        self.leads_on_acknowledged = True
        self.now, self.num_events, self.num_sent, self.passes, self._unique = 0.0, 0, 0, 0, 0
        self.chaos = self.up = True
        self.tainted = self.wrong = self.progress = self.busy = False
        self.counts: Counter[str] = Counter()
        self.store: dict[str, Any] = {}
        self.addresses: dict[Any, Miner] = {}
        self.bag: list[tuple[Any, Any, str, tuple[Any, ...], Any]] = []
        self.flying: set[Any] = set()
        self.signed: set[Any] = set()
        self.history: dict[bool, list[tuple[Any, str, tuple[Any, ...]]]] = {False: [], True: []}
        """Claims and hellos that were sent: of merges, and others."""
        self.steps: dict[int, ev.StepSealed] = {}
        self.skipped: set[tuple[int, int]] = set()
        self.seals: dict[tuple[int, int], tuple[str, ...]] = {}
        self.audits: list[ev.StageSealed] = []
        self.finished: ev.RunFinished | None = None
        self.log = Log(self)
        planned = ev.Record(0, 0, self.run_planned)
        self.log.segments.append((planned,))
        self.coordinators: list[Coordinator] = []
        self.coordinator: Any = None
        self.lead()
        self.miners = [self.new_miner(f"hot{i}") for i in range(count)]
        if profile == "rivals":
            self._new_rival()

    def _choose(self, lie: str) -> int:
        """Shape of the run, liars, slow members and poison; returns the number of members."""
        rng = self.rng
        self.num_stages = rng.choice([1, 2, 2, 2, 3])
        self.num_microbatches = rng.choice([3, 4, 4, 5])
        self.num_steps = rng.choice([2, 3, 4] if self.delay else [1, 1, 2])
        items = rng.choice([0, 0, 1, 2])
        inner = rng.choice([1, 2, 2]) if self.lanes else 1
        self.run_planned = toy.plan_run(
            self.num_stages,
            rng.choice([1, 2, 3]) if self.lanes else self.num_microbatches,
            self.num_steps,
            tied=rng.random() < 0.35,
            evaluation_items=items,
            evaluation_every=rng.choice([0, 1]),
            snapshot_every=rng.choice([1, 2, 50]),
            owners=self.owners,
            update_delay=self.delay,
            lanes=self.num_microbatches if self.lanes else 0,
            inner_steps=inner,
        )
        count = rng.randint(max(2, self.num_stages), 6)
        if rng.random() < 0.5:
            names = rng.sample(range(count), rng.choice([1, 1, 2]) if count > 2 else 1)
            self.liars = {f"hot{i}": rng.choice(LIES) for i in names}
        if lie:
            count = max(count, 2 * self.num_stages)
            self.liars = {"hot0": lie}
        self.slow = {f"hot{i}": rng.choice([1, 2, 5]) for i in range(count) if rng.random() < 0.15}
        if rng.random() < 0.3:
            stage = rng.randrange(self.num_stages)
            backward = stage == self.num_stages - 1 or rng.random() < 0.5
            step = rng.randrange(-1, self.num_steps)
            self.poison = (step, rng.randrange(self.num_microbatches), stage, backward)
        return count

    def new_miner(self, hotkey: str) -> Miner:
        """With lanes some have room for one at a time, some for all."""
        miner = super().new_miner(hotkey)
        if self.lanes:
            miner.local.lane_slots = self.rng.choice([1, 2, 8])
        return miner

    # --- the schedule

    def nodes(self) -> list[Any]:
        return [node for node in [*self.miners, *self.coordinators] if not node.dead and not node.paused]

    def fault(self) -> None:
        rng, x = self.rng, self.rng.random()
        miner = rng.choice(self.miners)
        if self.profile == "takeover" and x < 0.4:
            self.lead()
        elif x < 0.3:
            miner.dead = True
        elif x < 0.5:
            if miner.dead:
                self.miners[self.miners.index(miner)] = self.new_miner(miner.hotkey)
        elif x < 0.75:
            miner.paused = not miner.paused
        elif x < 0.83:
            self.coordinator.dead = True
        elif x < 0.93:
            self.up = not self.up
        elif x < 0.97:
            self.lead()
        elif len(self.coordinators) > 1:
            rng.choice(self.coordinators[:-1]).dead = True

    def run(self) -> Sim:
        self._chaos()
        self._calm()
        self.audit()
        if self.finished is None:
            raise Bad("stuck")
        if not self.tainted:
            self.audit_evaluation(self.num_steps, self.finished.evaluation)
        if self.checks_all:
            check(self.coordinator.state)
        return self

    def _chaos(self) -> None:
        """Rounds in which some messages arrive, some nodes act, and something goes wrong."""
        if self.profile == "calm":
            return
        rng = self.rng
        trouble = Trouble.of(self.profile, rng)
        for _ in range(rng.choice([30, 80, 150, 220])):
            self.now += rng.random() * 0.1
            if rng.random() < trouble.faults:
                self.fault()
            if self.profile == "rivals" and rng.random() < 0.06:
                self._new_rival()
            self._deliver_some(trouble)
            for node in self.nodes():
                if rng.random() < 0.8:
                    node.tick()
            if rng.random() < trouble.haste:
                nodes = self.nodes()
                if self.profile == "stale" and rng.random() < 0.6:
                    nodes = [node for node in nodes if node is self.coordinator]
                if nodes:
                    rng.choice(nodes).tick(True)
            for _ in range(trouble.echoes):
                self.echo()
            if self.coordinator.dead and rng.random() < 0.3 and self.coordinator in self.coordinators:
                self.restart(self.coordinator)

    def _calm(self) -> None:
        rng = self.rng
        self.chaos, self.up = False, True
        for index, miner in enumerate(self.miners):
            miner.paused = False
            if miner.dead:
                self.miners[index] = self.new_miner(miner.hotkey)
        for old in self.coordinators[:-1]:
            old.dead = old.dead or rng.random() < 0.5
        if self.coordinator.dead:
            self.restart(self.coordinators[-1])
        self.coordinator = self.coordinators[-1]
        idle = 0
        for _ in range(MAX_ROUNDS):
            self.progress = self.busy = False
            before = sum(len(c.journal) for c in self.coordinators)
            if self.coordinator.dead:
                self.lead()
            for miner in self.miners:
                self.send(miner, self.coordinator, "announce", self.coordinator.core.term)
            self._deliver_all()
            for node in self.nodes():
                node.tick()
            if self.finished is not None and all(self._done(miner) for miner in self.miners):
                return
            moved = self.progress or sum(len(c.journal) for c in self.coordinators) != before
            idle = 0 if moved else idle + 1
            if idle > 2:
                idle = 0
                if not self._pass_time():
                    return

    def _done(self, miner: Miner) -> bool:
        state = miner.state
        return state.finished is not None or miner.hotkey in state.convicted

    def _pass_time(self) -> bool:
        self.now += 1
        self.passes += 1
        if self.passes > self.max_passes:
            return False
        state = self.coordinator.state
        served = {info.stage for member, info in state.members.items() if member.hotkey not in self.liars}
        if len(served) < self.num_stages and self.passes % 4 == 0 and len(self.miners) < self.max_members:
            self.miners.append(self.new_miner(f"hot{len(self.miners)}"))
        for node in self.nodes():
            node.tick(True)
        return True


def run_many(seeds: range, **options: Any) -> tuple[Counter[str], dict[str, int]]:
    """Outcomes of many schedules, and the first seed of each kind of failure."""
    outcomes: Counter[str] = Counter()
    examples: dict[str, int] = {}
    for seed in seeds:
        sim = Sim(seed, **options)
        try:
            sim.run()
            outcomes["ok"] += 1
            outcomes["tainted"] += sim.tainted
            outcomes["wrong but tainted"] += sim.wrong
            outcomes["passes"] += sim.passes
            outcomes["events"] += sim.num_events
            for kind in (
                "Voided",
                "Revoking",
                "Leased",
                "Gone",
                "ReplayLeased",
                "MicrobatchSkipped",
                "StoreRouted",
                "Joined",
            ):
                outcomes[kind] += sim.counts[kind]
        except Exception as error:  # noqa: BLE001  every failure is counted by its kind
            what = f"{type(error).__name__}: {error}"[:90]
            outcomes[what] += 1
            examples.setdefault(what, seed)
    return outcomes, examples


if __name__ == "__main__":
    import sys
    import time

    started, mode = time.perf_counter(), "".join(sys.argv[4:5]) or "0"
    seeds = range(int(sys.argv[1]), int(sys.argv[2]))
    delay = int(mode) if mode.isdigit() else 0
    options = {"delay": delay, "lanes": mode == "lanes", "owners": 1 + (mode == "owners")}
    print(*run_many(seeds, profile="".join(sys.argv[3:4]), **options), sep="\n")
    print(f"{time.perf_counter() - started:.1f} s")
