"""Carries out a plan: each disruption begins when it is due and a target is free, and ends; all of it is in the journal.

No two disruptions have the same target at once. Time and swarm are arguments, nothing waits here: :meth:`Chaos.tick` is
called again and again, and says when it wants to be. :meth:`Chaos.close` lets go whatever is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from iota.chaos.faults import STORE, VALIDATOR, Ground, NoEffect, Script, script
from iota.chaos.journal import ChaosJournal, Entry
from iota.chaos.plan import MINER_KINDS, Disruption, Kind, describe
from subnet.protocol.api import RunStatus
from subnet.timing import SYSTEM_CLOCK, Clock

TICK_S = 0.1
PATIENCE_S = 60.0
"""A disruption waits so long for a target before it is given up."""
LAST_REPLICA_KINDS = MINER_KINDS - {Kind.SLOW, Kind.CORRUPT}


@dataclass(frozen=True)
class Done:
    """One disruption as it happened. Times are wall-clock seconds."""

    disruption: Disruption
    target: str
    hotkey: str
    pid: int | None
    began_s: float
    ended_s: float | None = None
    """When the process was continued or started again, the link healed; None while it lasts."""
    outcome: str = ""
    happened: bool = True
    """False: its target was gone in that moment, or nothing passed that could be corrupted."""

    @property
    def kind(self) -> Kind:
        return self.disruption.kind


@dataclass
class _Active:
    done: Done
    script: Script
    due_s: float


@dataclass(frozen=True)
class Rules:
    """``keep_last_replica``: never take the only member of a stage (a lost quorum must be survived too: off)."""

    keep_last_replica: bool = False
    min_miners: int = 1
    """``leave`` is left out where fewer would remain, the ones that come back included."""


@dataclass
class Chaos:
    ground: Ground
    plan: Sequence[Disruption]
    journal: ChaosJournal
    rules: Rules = field(default_factory=Rules)
    say: Callable[[str], None] = lambda text: None
    clock: Clock = SYSTEM_CLOCK
    done: list[Done] = field(default_factory=lambda: list[Done]())
    """In the order of their ends."""
    skipped: list[tuple[Disruption, str]] = field(default_factory=lambda: list[tuple[Disruption, str]]())

    def __post_init__(self) -> None:
        self._waiting = list(self.plan)
        self._active: dict[int, _Active] = {}
        self._started_s: float | None = None
        self._seen_step: dict[int, float] = {}
        self._due_since: dict[int, float] = {}
        self.firing = True
        """False: nothing new begins."""

    def __enter__(self) -> Chaos:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def active(self) -> list[Done]:
        return [active.done for active in self._active.values()]

    @property
    def over(self) -> bool:
        """Nothing is under way, and nothing will begin."""
        return not self._active and not (self._waiting and self.firing)

    def start(self) -> None:
        """The plan's clock starts."""
        self._started_s = self.clock.now_s()
        self._write("started")

    def tick(self, status: RunStatus | None) -> float:
        """Do what is due; seconds until there may be more to do, at most ``TICK_S``."""
        now_s = self.clock.now_s()
        for number, active in sorted(self._active.items()):
            if now_s >= active.due_s:
                self._step(number, active)
        if self.firing and self._started_s is not None:
            self._fire(now_s, status)
        dues = [active.due_s for active in self._active.values()]
        return max(0.0, min([TICK_S, *(due - self.clock.now_s() for due in dues)]))

    def release(self) -> None:
        """Begin nothing more, let miners go; what concerns validator and store goes on to its end."""
        self.firing = False
        self._let_go(keep=(VALIDATOR, STORE))

    def close(self) -> None:
        """Resume and heal at once; processes that were ended stay ended."""
        self.firing = False
        self._let_go()

    def _let_go(self, keep: Sequence[str] = ()) -> None:
        for number, active in sorted(self._active.items()):
            if active.done.target not in keep:
                active.script.close()
                self._end(number, active, "let go at the end")

    # ---- beginning

    def _fire(self, now_s: float, status: RunStatus | None) -> None:
        step = status.summary.step if status is not None else -1
        for disruption in list(self._waiting):
            if disruption.at_step is None:
                trigger_s = self._started_s
            elif step >= disruption.at_step:
                trigger_s = self._seen_step.setdefault(disruption.at_step, now_s)
            else:
                continue
            if trigger_s is None or now_s < trigger_s + disruption.at_s:
                continue
            self._try(disruption, status, now_s)

    def _try(self, disruption: Disruption, status: RunStatus | None, now_s: float) -> None:
        """Begin it, or leave it for a later tick while nobody is free."""
        target = self._target(disruption, status)
        if target is not None:
            self._waiting.remove(disruption)
            self._begin(disruption, target, status)
        elif now_s - self._due_since.setdefault(disruption.number, now_s) >= PATIENCE_S:
            self._waiting.remove(disruption)
            why = f"no target within {PATIENCE_S:g} s"
            self.skipped.append((disruption, why))
            self._write("skipped", disruption, outcome=why)

    def _target(self, disruption: Disruption, status: RunStatus | None) -> str | None:
        busy = {active.done.target for active in self._active.values()}
        match disruption.kind:
            case Kind.JOIN:
                return "new miner"
            case Kind.VALIDATOR_KILL:
                free = [VALIDATOR] if self.ground.running(VALIDATOR) else []
            case Kind.STORE_OUTAGE:
                free = [STORE] if self.ground.running(STORE) else []
            case _:
                free = list(self.ground.miners())
                if disruption.kind is Kind.LEAVE and len(free) + self._coming_back(free) <= self.rules.min_miners:
                    free = []
                if self.rules.keep_last_replica and disruption.kind in LAST_REPLICA_KINDS:
                    lone = lone_members(status)
                    free = [name for name in free if self.ground.hotkey(name) not in lone]
        free = [name for name in free if name not in busy]
        return free[int(disruption.choice * len(free))] if free else None

    def _coming_back(self, running: Sequence[str]) -> int:
        kinds = (Kind.KILL, Kind.PREEMPT, Kind.REJOIN)
        return sum(a.done.kind in kinds and a.done.target not in running for a in self._active.values())

    def _begin(self, disruption: Disruption, target: str, status: RunStatus | None) -> None:
        hotkey = "" if disruption.kind is Kind.JOIN else self.ground.hotkey(target)
        pid = None if disruption.kind is Kind.JOIN else self.ground.pid(target)
        done = Done(disruption, target, hotkey, pid, self.clock.wall_ns() / 1e9)
        active = _Active(done, script(self.ground, disruption, target), 0.0)
        self._active[disruption.number] = active
        self._write("began", disruption, done, outcome=describe(disruption))
        stage = next((m.stage for m in status.members if m.hotkey == hotkey), None) if status and hotkey else None
        where = "" if stage is None else f" (stage {stage})"
        self.say(f"{disruption.kind} {target}{where} {describe(disruption)}".rstrip())
        self._step(disruption.number, active)

    # ---- going on and ending

    def _step(self, number: int, active: _Active) -> None:
        try:
            wait_s = next(active.script)
        except StopIteration as stop:
            self._end(number, active, str(stop.value))
        except NoEffect as error:
            self._end(number, active, str(error), happened=False)
        else:
            active.due_s = self.clock.now_s() + wait_s

    def _end(self, number: int, active: _Active, outcome: str, *, happened: bool = True) -> None:
        del self._active[number]
        ended_s = self.clock.wall_ns() / 1e9
        done = replace(active.done, ended_s=ended_s, outcome=outcome, happened=happened)
        self.done.append(done)
        self._write("ended", done.disruption, done, outcome=outcome if happened else f"no effect: {outcome}")

    def _write(
        self, what: str, disruption: Disruption | None = None, done: Done | None = None, *, outcome: str = ""
    ) -> None:
        self.journal.write(
            Entry(
                time=self.clock.wall_ns() / 1e9,
                what=what,
                number=disruption.number if disruption is not None else None,
                kind=disruption.kind.value if disruption is not None else "",
                target=done.target if done is not None else "",
                hotkey=done.hotkey if done is not None else "",
                pid=done.pid if done is not None else None,
                outcome=outcome,
            )
        )


def lone_members(status: RunStatus | None) -> set[str]:
    """Hotkeys that are the only member of their stage."""
    if status is None:
        return set()
    stages: dict[int, list[str]] = {}
    for member in status.members:
        stages.setdefault(member.stage, []).append(member.hotkey)
    return {hotkeys[0] for hotkeys in stages.values() if len(hotkeys) == 1}
