"""Runs a local swarm to its end for a benchmark, with faults at given steps, and says what came of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from iota.swarm import LocalSwarm, SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.timing import Deadline


@dataclass(frozen=True)
class Fault:
    """What happens once ``step`` updates are done: ``kill`` (signal 9 to miner ``miner``) or ``join`` (one more miner)."""

    step: int
    kind: str
    miner: int = 0


@dataclass
class SwarmResult:
    root: str
    status: RunStatus
    first_step_s: float
    """From the start of the first process to the first sealed training step."""
    training_s: float
    """From the start of the first process to the first lease of a step."""
    faults: list[str] = field(default_factory=list[str])


def run_swarm(
    directory: Path,
    config: RunConfig,
    num_miners: int,
    *,
    faults: Sequence[Fault] = (),
    limit_s: float = 900.0,
    options: SwarmOptions | None = None,
    on_status: Callable[[LocalSwarm, RunStatus, float], None] = lambda swarm, status, now_s: None,
    swarm_class: type[LocalSwarm] = LocalSwarm,
    poll_s: float = 0.1,
) -> SwarmResult:
    """Raises when the run doesn't finish in time or a fault didn't fire."""
    shutil.rmtree(directory, ignore_errors=True)
    pending = sorted(faults, key=lambda fault: fault.step)
    began = time.monotonic()
    result = SwarmResult("", None, 0.0, 0.0)  # type: ignore[arg-type]
    with swarm_class(directory, config, num_miners, options or SwarmOptions(measure_costs=False)) as swarm:

        def seen(status: RunStatus) -> None:
            now = time.monotonic() - began
            if not result.training_s and any(member.leases for member in status.members):
                result.training_s = now
            if not result.first_step_s and status.summary.step >= 1:
                result.first_step_s = now
            while pending and status.summary.step >= pending[0].step:
                fault = pending.pop(0)
                if fault.kind == "kill":
                    swarm.kill(fault.miner)
                else:
                    swarm.add_miner()
                result.faults.append(f"{fault.kind} at step {status.summary.step}")
            on_status(swarm, status, now)

        def ended(status: RunStatus) -> bool:
            return status.summary.state == "finished"

        result.status = swarm.wait_until(ended, Deadline.after(limit_s), steps=100_000, poll_s=poll_s, seen=seen)
        result.root = swarm.final_root()
    if pending:
        raise RuntimeError(f"the run ended before these faults: {pending}")
    return result
