"""A whole chaos run from a plan: a swarm of its own, every disruption in a journal, and what came of it as one result.

Whatever happens, the swarm and the proxies are ended before this returns; a deadline that passes is part of the result.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec

from iota.chaos.faults import Ground
from iota.chaos.journal import ChaosJournal, Entry
from iota.chaos.plan import Disruption, Kind, needs_network
from iota.chaos.runner import Chaos, Rules
from iota.chaos.swarm import ChaosSwarm, OwnGround
from iota.chaos.verdict import ChaosResult
from iota.chaos.watcher import StatusWatcher, ask_status
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError, DeadlinePassed, IotaError, Unreachable
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.run.runfile import load_run_file
from subnet.timing import Deadline

ALL_STEPS = 100_000
MAX_SPARE = 128
_DRAIN_S = 180.0
_LAST_S = 60.0
_SETTLE_S = 300.0

OnStatus = Callable[[RunStatus], None]


def nothing(value: object) -> None:
    return None


@dataclass(frozen=True)
class ChaosOptions:
    swarm: SwarmOptions = field(default_factory=SwarmOptions)
    rules: Rules = field(default_factory=Rules)
    until_finished: bool = True
    """False: it ends when the plan is over and a step has been sealed after that (or the run has finished)."""
    proxied: bool | None = None
    """None: proxies are there where the plan needs them."""
    poll_s: float = 0.5
    num_steps: int = 20
    """Steps in each status that is asked for."""
    wait_for_members: bool = True
    """The plan's clock starts when the run has its first member, not when it is submitted."""


class PolledGround(Ground, Protocol):
    @property
    def ends_with_run(self) -> bool:
        """Whether the swarm may end once its run has finished."""
        ...

    def poll(self) -> list[str]:
        """Who has ended though nobody ended it; raises where the swarm can't go on."""
        ...


def run_chaos(
    directory: Path,
    config: RunConfig | Path,
    num_miners: int,
    plan: Sequence[Disruption],
    *,
    options: ChaosOptions = ChaosOptions(),
    limit_s: float,
    on_status: OnStatus = nothing,
    say: Callable[[str], None] = nothing,
) -> ChaosResult:
    """Run ``config`` on ``num_miners`` miners under ``plan``; at most ``limit_s`` after the swarm has started.

    Everything lies in ``directory``: ``chaos.ndjson``, ``swarm/``.
    """
    name = (config if isinstance(config, RunConfig) else load_run_file(config)).run.name
    joins = sum(disruption.kind is Kind.JOIN for disruption in plan)
    swarm_options = replace(options.swarm, spare_miners=max(options.swarm.spare_miners, min(joins, MAX_SPARE)))
    proxied = needs_network(plan) if options.proxied is None else options.proxied
    swarm = ChaosSwarm(directory / "swarm", config, num_miners, swarm_options, proxied=proxied)

    def fetch() -> RunStatus | None:
        return ask_status(swarm.validator_url, name, options.num_steps)

    with ChaosJournal(directory / "chaos.ndjson") as journal:
        write_plan(journal, plan)
        with swarm:
            result = storm(OwnGround(swarm), plan, journal, fetch, options, limit_s, on_status=on_status, say=say)
            if result.finished:
                result = replace(result, status=last_status(swarm, name) or result.status)
        return result


def run_reference(
    directory: Path, config: RunConfig | Path, num_miners: int, *, options: SwarmOptions, limit_s: float
) -> str:
    """The root of the same run without any disruption."""
    with LocalSwarm(directory / "reference", config, num_miners, options) as swarm:
        return swarm.wait_finished(Deadline.after(limit_s))


def write_plan(journal: ChaosJournal, plan: Sequence[Disruption]) -> None:
    for disruption in plan:
        more = msgspec.to_builtins(disruption)
        journal.write(
            Entry(time=time.time(), what="plan", number=disruption.number, kind=disruption.kind.value, more=more)
        )


def storm(
    ground: PolledGround,
    plan: Sequence[Disruption],
    journal: ChaosJournal,
    fetch: Callable[[], RunStatus | None],
    options: ChaosOptions,
    limit_s: float,
    *,
    on_status: OnStatus = nothing,
    say: Callable[[str], None] = nothing,
) -> ChaosResult:
    """Carry out ``plan`` on a swarm that runs; ``fetch`` asks for the run's status (in a thread).

    SIGINT and SIGTERM let go whatever is held and then raise ``KeyboardInterrupt``, never in the middle of an action.
    """
    began_s, error, died = time.time(), "", list[str]()
    watcher = StatusWatcher(fetch, options.poll_s)
    chaos = Chaos(ground, plan, journal, options.rules, say)
    with told_to_stop() as stopped, watcher, chaos:
        loop = _Loop(ground, chaos, watcher, journal, options, died, on_status, say, stopped)
        try:
            loop.run(Deadline.after(limit_s))
        except ConfigError:
            raise
        except IotaError as failed:
            error = str(failed)
    if stopped.is_set():
        journal.write(Entry(time=time.time(), what="stopped", outcome="interrupted"))
        raise KeyboardInterrupt
    status = watcher.latest()
    finished = status is not None and status.summary.state == "finished"
    if finished and ground.ends_with_run:
        error = ""
    journal.write(Entry(time=time.time(), what="finished" if finished else "stopped", outcome=error))
    return ChaosResult(
        finished=finished,
        root=status.summary.root if finished and status is not None else None,
        status=status,
        done=tuple(sorted(chaos.done, key=lambda done: (done.began_s, done.disruption.number))),
        skipped=tuple(chaos.skipped),
        events=tuple(watcher.events()),
        progress=tuple(watcher.progress()),
        died=tuple(died),
        error=error,
        began_s=began_s,
        ended_s=time.time(),
    )


@dataclass
class _Loop:
    ground: PolledGround
    chaos: Chaos
    watcher: StatusWatcher
    journal: ChaosJournal
    options: ChaosOptions
    died: list[str]
    on_status: OnStatus
    say: Callable[[str], None]
    stopped: threading.Event
    shown: RunStatus | None = None

    def run(self, deadline: Deadline) -> None:
        started, over_at_step, settle = False, -1, Deadline.after(float("inf"))
        while not self.stopped.is_set():
            status = self._turn(deadline)
            if not started and (not self.options.wait_for_members or _has_members(status)):
                self.chaos.start()
                started = True
            if status is not None and status.summary.state == "finished":
                break
            if self.options.until_finished or not started or not self.chaos.over:
                continue
            if over_at_step < 0:
                over_at_step = status.summary.step if status is not None else 0
                settle = Deadline.after(_SETTLE_S)
            if status is not None and status.summary.step > over_at_step + 1:  # one was begun after the end
                break
            settle.check(f"waiting for a step after the last disruption ({self.watcher.unanswered or 'none sealed'})")
        self.chaos.release()
        drain = Deadline.after(_DRAIN_S)
        while self.chaos.active and not self.stopped.is_set():
            self._turn(drain)

    def _turn(self, deadline: Deadline) -> RunStatus | None:
        """One look around and what is due; the status if there is one."""
        for text in self.ground.poll():
            self.died.append(text)
            self.journal.write(Entry(time=time.time(), what="died", outcome=text))
            self.say(f"nobody ended it, but {text}")
        status = self.watcher.latest()
        if status is not None and status is not self.shown:
            self.shown = status
            self.on_status(status)
        wait_s = self.chaos.tick(status)
        deadline.check(f"waiting for the run ({_where(status)}{_because(self.watcher.unanswered)})")
        self.stopped.wait(wait_s)
        return status


@contextmanager
def told_to_stop() -> Generator[threading.Event]:
    """Set by the first SIGINT or SIGTERM; a second one does what it did before. Elsewhere than in the main thread: never."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]

    def restore() -> None:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()
        restore()

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield stopped
    finally:
        restore()


def last_status(swarm: LocalSwarm, name: str) -> RunStatus | None:
    """All steps of a finished run; the validator may be starting again."""
    deadline = Deadline.after(_LAST_S)
    while True:
        try:
            return swarm.status(ALL_STEPS, run=name)
        except Unreachable:
            try:
                deadline.check("the last status")
            except DeadlinePassed:
                return None
            time.sleep(0.2)


def _has_members(status: RunStatus | None) -> bool:
    return status is not None and bool(status.members)


def _where(status: RunStatus | None) -> str:
    if status is None:
        return "not active yet"
    summary = status.summary
    waits = f", waiting for {summary.waiting_for}" if summary.waiting_for else ""
    return f"{summary.state} at step {summary.step} of {summary.steps}{waits}"


def _because(text: str) -> str:
    return f"; {text}" if text else ""
