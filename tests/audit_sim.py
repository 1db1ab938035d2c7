"""Random schedules of a run with audits: the crashes and delays of the other schedules, and lies that only an audit finds.

``AuditSim(seed, mode=...).run()`` raises :class:`Bad` unless the run finishes, each microbatch is in each final sum exactly
once, no step is sealed twice in a branch, and no honest member is ever accused. ``all``: every partial is redone before its seal,
so every sum, loss and state equals the reference's, whoever lies. ``rewind``: audits after the seal, and a way back: they do where
every liar was convicted. ``probation``: without a way back nothing is said of the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import schedule_toy as toy
from audit_nodes import AUDIT_LIES, AuditCoordinator, AuditMiner
from schedule_nodes import Bad, Coordinator
from schedule_sim import Sim

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.run.state import RunState

MODES = ("all", "rewind", "probation")
UNSEEN = ("stale",)
"""Liars whose hold-out losses are wrong: nobody redoes an evaluation."""


class AuditSim(Sim):
    """One schedule."""

    max_passes, max_members, max_events = 900, 16, 20_000

    def __init__(
        self,
        seed: int,
        *,
        mode: str = "all",
        lie: str = "",
        num_liars: int | None = None,
        audit_ticks: int = 0,
        kinds: Sequence[str] = AUDIT_LIES,
        losses: float = 0.0,
        **options: Any,
    ) -> None:
        self.losses = losses
        """How often a member's disk loses a boundary that it has made."""
        self.kinds = kinds
        """Of which each liar's is drawn."""
        self.mode, self.num_liars, self.audit_ticks = mode, num_liars, audit_ticks
        """An audit takes so many rounds, longer than all that a seal waits for besides."""
        self.shares: dict[str, tuple[int, float]] = {}
        self.families: dict[str, str] = {}
        self.given_up: set[tuple[int, int]] = set()
        """(branch, step) of seals that had their effect before a rewind took them back."""
        """Coldkeys of hotkeys that share one."""
        self.ring = False
        """Whether liars bear false witness for each other."""
        self.tainted_steps: set[int] = set()
        super().__init__(seed, lie=lie, **options)

    def _choose(self, lie: str) -> int:
        """As other schedules, but longer, and with other liars."""
        count = super()._choose("")
        rng, run = self.rng, self.run_planned
        self.num_steps = rng.choice([3, 4, 6])
        config = msgspec.structs.replace(
            run.config,
            run=msgspec.structs.replace(run.config.run, steps=self.num_steps),
            snapshot=msgspec.structs.replace(run.config.snapshot, every_steps=rng.choice([1, 2, 50])),
            audit=self._section(),
        )
        self.run_planned = msgspec.structs.replace(run, config=config)
        count = max(count, self.num_stages + 1, 3)
        hotkeys = [f"hot{i}" for i in range(count)]
        most = self.num_liars if self.num_liars is not None else rng.choice([0, 1, 1, 2, 2, 3])
        chosen = rng.sample(hotkeys, min(most, count - 1))
        self.liars = {hotkey: lie or rng.choice(self.kinds) for hotkey in chosen}
        self.ring = rng.random() < 0.4
        families = [f"hot{i}" for i in range(self.max_members)]
        self.families = {hotkey: f"family{rng.randrange(2)}" for hotkey in families if rng.random() < 0.25}
        self.families |= {hotkey: "liars" for hotkey in chosen if rng.random() < 0.5}
        first = [0, 2, 3] if self.mode == "rewind" else [-1, -1, 0, 2]
        self.shares = {hotkey: (rng.choice(first), rng.choice([1.0, 1.0, 0.5])) for hotkey in chosen}
        return count

    def _section(self) -> AuditSection:
        rng = self.rng
        window, behind = rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
        if self.mode == "all":
            rate = rng.choice([0.0, 0.3])
            return AuditSection(rate=rate, before_seal="all", window_steps=window, open_windows=behind)
        return AuditSection(
            rate=rng.choice([0.2, 0.6, 1.0]),
            before_seal="probation",
            probation_items=rng.choice([1, 1, 4, 8]),
            rewind=self.mode == "rewind",
            window_steps=window,
            open_windows=behind,
            horizon_steps=rng.choice([4, 64]),
        )

    def coldkey_of(self, hotkey: str) -> str:
        return self.families.get(hotkey, super().coldkey_of(hotkey))

    def lies_at(self, hotkey: str, step: int) -> bool:
        first, share = self.shares[hotkey]
        if self.liars[hotkey] == "collude" and step < 0:
            return False
        return step >= first and toy.h("lies", self.seed, hotkey, step) % 1000 < 1000 * share

    def new_coordinator(self, journal: list[ev.Record], term: int, acknowledged: int, segments: int) -> Coordinator:
        return AuditCoordinator(self, journal, term, acknowledged, segments)

    def new_miner(self, hotkey: str) -> AuditMiner:
        return AuditMiner(self, hotkey)

    # --- what is demanded

    def saw(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        self._saw_audits(coordinator, event)
        if isinstance(event, ev.StageSealed) and self.mode != "all":
            self.num_events += 1
            self.counts["StageSealed"] += 1
            return
        if isinstance(event, ev.StageSealed) and len(self.run_planned.groups[event.group].stages) == 1:
            self.num_events += 1
            return  # it was redone: nothing is taken on anybody's word
        kinds = [*self.liars.values()]
        loose = isinstance(event, ev.Gone) and event.why == "checksum" and ("stale" in kinds or kinds.count("root") > 1)
        if self.mode != "all" or loose:
            tainted, self.tainted = self.tainted, self.tainted or loose or self._numbers_may_be_wrong(event)
            super().saw(coordinator, event)
            self.tainted = tainted
        else:
            super().saw(coordinator, event)

    def _numbers_may_be_wrong(self, event: ev.AnyEvent) -> bool:
        return isinstance(event, ev.Gone) and event.why == "checksum"

    def _saw_audits(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        def guard(hotkey: str, what: str) -> None:
            if hotkey not in self.liars:
                raise Bad(f"honest {hotkey} {what}")

        state = coordinator.state
        match event:
            case ev.Gone() if event.why in ("accused", "liar", "contradicts"):
                guard(event.member.hotkey, f"is out: {event.why}")
            case ev.CaseOpened():
                guard(event.hotkey, f"stands accused: {event.charge}")
                self.counts[f"case {event.charge}"] += 1
            case ev.AuditClosed():
                for member in event.failed:
                    guard(member.hotkey, "failed an audit")
                self.counts["passed"] += len(event.passed)
                self.counts["failed"] += len(event.failed)
                self.counts["undecided"] += len(event.undecided)
                self.counts["unopened"] += len(event.unopened)
                self.counts["lost"] += len(event.lost)
            case ev.CaseClosed():
                self.counts[event.outcome] += 1
            case ev.StepPlanned() if au.windows_behind(state, event.step) > au.config(state).audit.open_windows:
                if event.step < self.num_steps:
                    raise Bad("the run runs away from its audits")
            case ev.Rewound():
                self.counts["redone steps"] += 1
            case ev.RunFinished() if state.audits.audited_to < self.num_steps or state.audits.quarantined:
                raise Bad("finished before it was audited")
            case _:
                pass

    def logged(self, records: tuple[ev.Record, ...]) -> None:
        for record in records:
            if isinstance(record.event, ev.Rewound):
                self._rewound(record.event)
            else:
                super().logged((record,))
        self.progress = True

    def has_effect(self, state: RunState, step: int) -> bool:
        """Who hasn't heard of a rewind yet is on the branch that was given up, where the seal had its effect."""
        return super().has_effect(state, step) or (state.audits.branch, step) in self.given_up

    def _rewound(self, event: ev.Rewound) -> None:
        step = event.step
        self.given_up |= {(event.branch - 1, at) for at in self.steps if at >= step}
        self.steps = {at: event for at, event in self.steps.items() if at < step}
        self.seals = {key: hashes for key, hashes in self.seals.items() if key[0] < step}
        self.audits = [seal for seal in self.audits if seal.step < step]
        self.skipped = {entry for entry in self.skipped if entry[0] < step}

    def audit_step(self, event: ev.StepSealed) -> None:
        if self.mode == "all":
            super().audit_step(event)
        elif event.num_counted != len(self.reference.counted(event.step, frozenset(self.skipped))):
            raise Bad("wrong number of microbatches")

    def audit_evaluation(self, step: int, evaluation: tuple[int, ...]) -> None:
        if not any(kind in UNSEEN for kind in self.liars.values()) and (self.mode == "all" or self._must_be_right()):
            super().audit_evaluation(step, evaluation)

    def settled(self, version: int, stage: int, w: int, hotkey: str = "") -> None:
        if self.mode == "all" and hotkey not in self.liars:
            super().settled(version, stage, w)

    def _must_be_right(self) -> bool:
        """In a run that can go back: once everybody who lies is convicted."""
        convicted = self.coordinator.state.convicted
        return self.mode == "rewind" and all(hotkey in convicted for hotkey in self.liars)

    def audit(self) -> None:
        for seal in self.audits:
            if seal.step not in self.steps:
                continue
            for stage in self.run_planned.groups[seal.group].stages:
                covered = sorted(m for e in seal.entries if e.stage == stage for m in e.microbatches)
                if covered != self.reference.counted(seal.step, frozenset(self.skipped)):
                    raise Bad(f"not exactly once: {covered}")
        right = self._must_be_right()
        self.counts["must be right"] += right
        if self.mode == "all" or right:
            if self.mode != "all":
                for event in self.steps.values():
                    super().audit_step(event)
            super().audit()
        else:
            tainted, self.tainted = self.tainted, True
            super().audit()
            self.tainted = tainted
            self.counts["wrong"] += self.wrong

    def run(self) -> AuditSim:
        self.tainted_at_end = False
        super().run()
        if sorted(self.steps) != list(range(-1, self.num_steps)):
            raise Bad(f"steps {sorted(self.steps)} are sealed")
        return self


def run_many(
    seeds: Iterable[int], make: type[AuditSim] = AuditSim, **options: Any
) -> tuple[Counter[str], dict[str, int]]:
    """Outcomes of many schedules, and the first seed of each kind of failure."""
    outcomes: Counter[str] = Counter()
    examples: dict[str, int] = {}
    for seed in seeds:
        sim = make(seed, **options)
        try:
            sim.run()
            outcomes["ok"] += 1
        except Exception as error:  # noqa: BLE001  every failure is counted by its kind
            what = f"{type(error).__name__}: {error}"[:90]
            outcomes[what] += 1
            examples.setdefault(what, seed)
        outcomes["events"] += sim.num_events
        outcomes["passes"] += sim.passes
        outcomes.update({kind: n for kind, n in sim.counts.items() if not kind[0].isupper() or kind in SHOWN})
    return outcomes, examples


SHOWN = ("AuditOpened", "CaseOpened", "Rewound", "WindowAudited", "WitnessAsked", "Voided", "Gone")


if __name__ == "__main__":
    import argparse
    import time

    from audit_store import AuditStoreSim

    parser = argparse.ArgumentParser(description="Run audit schedules FIRST to LAST - 1 and count their outcomes.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--mode", default="all", choices=MODES)
    parser.add_argument("--lie", default="", choices=["", *AUDIT_LIES])
    parser.add_argument("--profile", default="")
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--store", default="", choices=["", "all", "mixed"])
    args, started = parser.parse_args(), time.process_time()
    options: dict[str, Any] = {"mixed": True} if args.store == "mixed" else {}
    kind = AuditStoreSim if args.store else AuditSim
    seeds = range(args.first, args.last)
    found = run_many(seeds, kind, mode=args.mode, lie=args.lie, profile=args.profile, delay=args.delay, **options)
    print(*found, f"{time.process_time() - started:.1f} s of CPU", sep="\n")
