"""One swarm under a list of faults, each fired by the event that begins its phase, one after the other."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.determinism import config_of, prepared
from iota.chaos.faults import STORE, VALIDATOR, NoEffect, Script, script
from iota.chaos.plan import PROCESS, Disruption, Kind
from iota.chaos.swarm import ChaosSwarm, OwnGround
from iota.swarm import SwarmOptions
from subnet.errors import IotaError
from subnet.run import events as ev
from subnet.run.apply import apply_record
from subnet.run.config import EvaluationSection, RunConfig, SnapshotSection
from subnet.run.state import RunState, members_of, new_state

STAGES, MINERS = 3, 6
FOR_S = 7.0
"""Longer than a silence that counts as gone."""
BACK_S = 1.5
START_S, FIRE_S, GO_ON_S = 240.0, 60.0, 120.0
LONG_BACK_S = 6.0
"""Of a whole stage: long enough to be seen in the status."""
POLL_S = 0.01

PHASES: dict[str, type[object] | tuple[type[object], ...]] = {
    "forward": ev.StepPlanned,
    "backward": ev.Backwarded,
    "reduce": ev.ReduceOrdered,
    "check": ev.SeedRevealed,
    "sealed": ev.StageSealed,
    "snapshot": ev.SnapshotOrdered,
    "restore": ev.Joined,
}


@dataclass(frozen=True)
class Cell:
    role: str
    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.role} / {self.phase} / {self.fault}"


class JournalTail:
    """The validator's journal as it grows, folded; restarts of the validator don't matter."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0
        self._decoder = msgspec.msgpack.Decoder(ev.Record)
        self.state: RunState = new_state()
        self.sealed = -2

    def news(self) -> list[ev.AnyEvent]:
        if not self._path.exists():
            return []
        try:
            with sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=1.0) as connection:
                query = "SELECT data FROM records WHERE number >= ? ORDER BY number"
                rows = connection.execute(query, (self._next,)).fetchall()
            connection.close()
        except sqlite3.OperationalError:
            return []  # being made, or restarting: it is asked again
        found: list[ev.AnyEvent] = []
        for (data,) in rows:
            record = self._decoder.decode(data)
            apply_record(self.state, record)
            self._next = record.number + 1
            found.append(record.event)
            if isinstance(record.event, ev.StepSealed):
                self.sealed = record.event.step
        return found


def cells_config(steps: int) -> RunConfig:
    _, data = prepared()
    config = config_of("fp32", False, STAGES, steps, data)
    return msgspec.structs.replace(
        config, evaluation=EvaluationSection(rows=4), snapshot=SnapshotSection(every_steps=3)
    )


def disk_full(ground: OwnGround, target: str) -> Script:
    """No file of the process can grow for a while; a process that ends of it is started again."""
    pid = ground.pid(target)
    if pid is None or not ground.running(target):
        raise NoEffect(f"{target} isn't running")
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    ground.expect_end(target)
    waited_s = 0.0
    while ground.running(target) and waited_s < FOR_S:
        yield 0.1
        waited_s += 0.1
    if ground.running(target):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        return "has room again"
    yield BACK_S
    ground.restart(target)
    return "ended and was started again"


def fault_script(ground: OwnGround, cell: Cell, target: str) -> Script:
    back_s = LONG_BACK_S if cell.role == "whole stage" else BACK_S
    common = {"number": 0, "at_s": 0.0, "choice": 0.0, "for_s": FOR_S, "back_s": back_s, "notice_s": 1.0}
    store = target == STORE
    match cell.fault:
        case "disk full":
            return disk_full(ground, target)
        case "kill":
            kind = Kind.VALIDATOR_KILL if target == VALIDATOR else Kind.KILL
            return script(ground, Disruption(kind=kind, **common), target)
        case "pause":
            return script(ground, Disruption(kind=Kind.PAUSE, **common), target)
        case "slow" if store:
            slow = Disruption(kind=Kind.STORE_OUTAGE, mode="slow", delay_ms=300, kbit_per_s=2_000, **common)
            return script(ground, slow, target)
        case "slow":
            return script(ground, Disruption(kind=Kind.SLOW, link=PROCESS, share=0.2, **common), target)
        case "partition" if store:
            return script(ground, Disruption(kind=Kind.STORE_OUTAGE, mode="blackhole", **common), target)
        case "partition":
            return script(ground, Disruption(kind=Kind.PARTITION, mode="blackhole", link="both", **common), target)
        case "corrupt" if store:
            broken = Disruption(kind=Kind.STORE_OUTAGE, mode="truncate", truncate_after=2_000, **common)
            return script(ground, broken, target)
        case "corrupt":
            spoilt = Disruption(kind=Kind.CORRUPT, link="peers", num_bytes=20, every_bytes=500, **common)
            return script(ground, spoilt, target)
        case _:
            raise ValueError(f"no fault is called {cell.fault}")


class Storm:
    def __init__(self, swarm: ChaosSwarm, tail: JournalTail, say: Callable[[str], None]) -> None:
        self._swarm, self._ground, self._tail, self._say = swarm, OwnGround(swarm), tail, say
        self._names = {swarm.miner_hotkey(n): f"miner-{n}" for n in range(MINERS)}

    def target(self, cell: Cell, event: ev.AnyEvent) -> list[str]:
        """Who has the cell's role now; empty: nobody yet."""
        state = self._tail.state
        stages = {"first": 0, "middle": 1, "last": STAGES - 1, "sole": 1, "whole stage": 1}
        match cell.role:
            case "validator" | "store":
                return [cell.role]
            case "joiner":
                return [self._names[event.member.hotkey]] if isinstance(event, ev.Joined) else []
            case "owner":
                owners = [
                    merge.owners[0] for merge in (state.work.merges if state.work else []) if merge.owners
                ] or members_of(state, 0)
                return [self._names[owners[0].hotkey]] if owners else []
            case _:
                members = members_of(state, stages[cell.role])
                names = [self._names[member.hotkey] for member in members]
                return names if cell.role in ("whole stage", "sole") else names[:1]

    def drive(
        self, scripts: Sequence[Script], until: Callable[[], bool], limit_s: float, *, ask: bool = False
    ) -> tuple[bool, set[str]]:
        """Carry the scripts out and look at the journal until they are over and ``until`` holds.

        ``ask``: what the run says it waits for is asked on the way (a validator that is away would hold this up).
        """
        due = {number: 0.0 for number in range(len(scripts))}
        began, asked_s, waits = time.monotonic(), 0.0, set[str]()
        while time.monotonic() - began < limit_s:
            now = time.monotonic()
            for number in [n for n, at in due.items() if now >= at]:
                try:
                    due[number] = now + next(scripts[number])
                except StopIteration:
                    del due[number]
            for text in self._ground.poll():
                raise RuntimeError(f"nobody ended it, but {text}")
            self._tail.news()
            if not due and until():
                return True, waits
            if ask and now - asked_s > 0.5:
                asked_s = now
                waits |= self._waits()
            time.sleep(POLL_S)
        return False, waits

    def _waits(self) -> set[str]:
        try:
            status = self._swarm.status(steps=1)
        except IotaError:
            return set()
        return {status.summary.waiting_for} if status is not None else set()

    def fire(self, cell: Cell) -> list[str]:
        """The targets, once the phase begins."""
        began = time.monotonic()
        while time.monotonic() - began < FIRE_S:
            for event in self._tail.news():
                if isinstance(event, PHASES[cell.phase]) and self._tail.state.next_step >= 1:
                    targets = self.target(cell, event)
                    if targets:
                        return targets
            self._ground.poll()
            time.sleep(POLL_S)
        return []

    def _make_joiner(self) -> None:
        """A miner that is ended and comes back: what the joiner's cell waits for."""
        kill = Disruption(kind=Kind.KILL, number=0, at_s=0.0, choice=0.0, back_s=BACK_S)
        members = members_of(self._tail.state, 0)
        newest = max(members, key=lambda member: member.number)
        one: Script = script(self._ground, kill, self._names[newest.hotkey])
        self.drive([one], lambda: True, GO_ON_S)

    def _scripts(self, cell: Cell, targets: Sequence[str]) -> list[Script]:
        """A sole replica is one whose stage has lost the others in the same moment, for longer."""
        if cell.role != "sole":
            return [fault_script(self._ground, cell, target) for target in targets]
        kill = Disruption(kind=Kind.KILL, number=0, at_s=0.0, choice=0.0, back_s=FOR_S + 3.0)
        others = [script(self._ground, kill, target) for target in targets[1:]]
        return [*others, fault_script(self._ground, cell, targets[0])]

    def run(self, cell: Cell) -> dict[str, object]:
        if cell.phase == "restore":
            self._make_joiner()
        targets = self.fire(cell)
        base = {"role": cell.role, "phase": cell.phase, "fault": cell.fault}
        if not targets:
            self._say(f"{cell}: did not fire")
            return {**base, "outcome": "did not fire", "seconds": 0.0}
        began, at = time.monotonic(), self._tail.sealed
        try:
            scripts = self._scripts(cell, targets)
            ask = cell.role == "whole stage"
            went_on, waits = self.drive(scripts, lambda: self._tail.sealed >= at + 2, GO_ON_S, ask=ask)
        except NoEffect as error:
            self._say(f"{cell}: {error}")
            return {**base, "outcome": "did not fire", "seconds": 0.0}
        named = cell.role != "whole stage" or any("stage 1" in text for text in waits)
        outcome = "did not go on" if not went_on else "ok" if named else "unnamed"
        seconds = round(time.monotonic() - began, 1)
        self._say(f"{cell} at {', '.join(targets)} in step {at + 1}: {outcome}, {seconds} s")
        return {**base, "outcome": outcome, "seconds": seconds}


def run_cells(directory: Path, cells: Sequence[Cell], steps: int) -> dict[str, object]:
    """All cells in one swarm; then the run goes to its end."""
    shutil.rmtree(directory, ignore_errors=True)
    config = cells_config(steps)
    swarm = ChaosSwarm(directory, config, MINERS, SwarmOptions(measure_costs=False), proxied=True)
    with swarm:
        tail = JournalTail(directory / "validator" / "runs" / config.run.name / "journal.db")
        storm = Storm(swarm, tail, lambda text: print(text, file=sys.stderr, flush=True))
        begun, _ = storm.drive([], lambda: tail.state.next_step >= 1, START_S)
        if not begun:
            raise RuntimeError(f"the swarm in {directory} has not begun to train")
        found = [storm.run(cell) for cell in cells]
        finished, _ = storm.drive([], lambda: tail.state.finished is not None, 600.0)
        root = tail.state.finished.root if finished and tail.state.finished is not None else ""
    shutil.rmtree(directory, ignore_errors=True)
    return {"root": root, "cells": found}
