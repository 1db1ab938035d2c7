"""A swarm that is only pretended, and a clock that is moved by hand, for tests of the chaos runner."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

from iota.chaos.faults import NoEffect
from iota.chaos.journal import ChaosJournal, Entry, read_journal
from iota.chaos.plan import Disruption, Kind
from iota.chaos.proxy import Policy
from iota.chaos.runner import Chaos, Rules
from subnet.protocol.api import MemberView, RunStatus, RunSummary
from subnet.timing import ManualClock


class FakeGround:
    """Processes that end a moment after SIGKILL; SIGTERM takes ``leave_s``. Everything that is done is written down."""

    restarts_itself = False

    def __init__(self, clock: ManualClock, miners: int = 3, leave_s: float = 0.2) -> None:
        self.clock, self.leave_s = clock, leave_s
        self.up = {name: 0.0 for name in ("validator", "store", *(f"miner-{i}" for i in range(miners)))}
        self.ends: dict[str, float] = {}
        self.stopped: set[str] = set()
        self.links: dict[str, Policy] = {}
        self.flipped: dict[str, int] = {}
        self.expected: list[str] = []
        self.log: list[str] = []
        self.num = miners

    def miners(self) -> tuple[str, ...]:
        return tuple(f"miner-{i}" for i in range(self.num) if self.running(f"miner-{i}"))

    def running(self, name: str) -> bool:
        if name in self.ends and self.clock.now_s() >= self.ends[name]:
            self.up.pop(name, None)
            del self.ends[name]
        return name in self.up

    def pid(self, name: str) -> int | None:
        return 100 + len(name)

    def hotkey(self, name: str) -> str:
        return f"hotkey of {name}" if name.startswith("miner") else ""

    def signal(self, name: str, number: int, *, group: bool = False) -> int:
        if not self.running(name):
            raise NoEffect(f"{name} isn't running")
        self.log.append(f"{signal.Signals(number).name} {name}{' group' if group else ''}")
        if number == signal.SIGKILL:
            self.ends[name] = self.clock.now_s() + 0.01
        elif number == signal.SIGTERM:
            self.ends[name] = self.clock.now_s() + self.leave_s
        elif number == signal.SIGSTOP:
            self.stopped.add(name)
        elif number == signal.SIGCONT:
            self.stopped.discard(name)
        return 1

    def expect_end(self, name: str) -> None:
        self.expected.append(name)

    def restart(self, name: str) -> None:
        assert not self.running(name)
        self.log.append(f"restart {name}")
        self.up[name] = self.clock.now_s()

    def add_miner(self) -> str:
        self.num += 1
        name = f"miner-{self.num - 1}"
        self.up[name] = self.clock.now_s()
        return name

    def set_link(self, name: str, policy: Policy) -> None:
        self.links[name] = policy

    def num_flipped(self, name: str) -> int:
        return self.flipped.get(name, 0)


class Stage:
    """A runner, its swarm and its clock."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.ground = FakeGround(self.clock)
        self.journal = ChaosJournal(path)
        self.said: list[str] = []
        self.chaos: Chaos | None = None

    def begin(self, *plan: Disruption, rules: Rules = Rules()) -> Chaos:
        self.chaos = Chaos(self.ground, plan, self.journal, rules, self.said.append, self.clock)
        self.chaos.start()
        return self.chaos

    def go(self, seconds: float, status: RunStatus | None = None) -> None:
        assert self.chaos is not None
        end = self.clock.now_s() + seconds
        while self.clock.now_s() < end - 1e-9:
            wait_s = self.chaos.tick(status)
            assert 0 <= wait_s <= 0.1
            self.clock.advance(min(max(wait_s, 0.01), end - self.clock.now_s()))
        self.chaos.tick(status)

    def entries(self) -> list[Entry]:
        return read_journal(self.journal.path)


def one(kind: Kind, at_s: float = 1.0, choice: float = 0.0, number: int = 0, **more: object) -> Disruption:
    return msgspec.structs.replace(Disruption(number=number, at_s=at_s, kind=kind, choice=choice), **more)


def status_of(*stages: int, step: int = 0, state: str = "running", events: tuple[str, ...] = ()) -> RunStatus:
    members = tuple(
        MemberView(f"hotkey of miner-{i}", f"1.{i}", stage, step, 0, 0, None, 0.0) for i, stage in enumerate(stages)
    )
    summary = RunSummary("run", "id", state, 0, step, 100, None, "ab" if state == "finished" else None)
    return RunStatus(summary, 0, members, (), 0.0, 0, 0, 3, 0, events, 0, "", 0)
