"""What ``iota plan`` says a miner needs is what it uses: peak memory above its level after import, within 20 %.

The 29.5M-parameter model on 2 stages x 1 miner, long enough for every cache to reach its horizon. A miner's level after
import is its resident memory right after it was forked from the warm parent; its peak is what the kernel saw.

    python -m benchmarks.memory [--quick]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import baselines
from benchmarks.corpus import OUT
from benchmarks.throughput import config_of
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import DeadlinePassed, Unreachable
from subnet.model.memory import Budgets, StageMemory, stage_memory
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.protocol.api import RunStatus
from subnet.run.config import PipelineSection, RunConfig, RunSection
from subnet.timing import Deadline

LIMIT = 0.20


def memory_of(pid: int, field: str) -> int:
    """Bytes of a field of the process's status (``VmRSS``, ``VmHWM``); 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def predicted(plan: ModelPlan, stage: int, kept_steps: int) -> StageMemory:
    return stage_memory(plan, stage, Budgets(replicas=1, kept_steps=kept_steps))


def watch(config: RunConfig, limit_s: float) -> tuple[dict[int, int], tuple[int, ...]]:
    """By stage, bytes of the peak above the level after import; and the run's cuts."""
    directory = OUT / "memory"
    shutil.rmtree(directory, ignore_errors=True)
    base: dict[int, int] = {}
    peak: dict[int, int] = {}
    stage_of: dict[str, int] = {}
    cuts: tuple[int, ...] = ()
    deadline = Deadline.after(limit_s)
    stages = config.pipeline.stages
    with LocalSwarm(directory, config, stages, SwarmOptions(measure_costs=True, spare_miners=0)) as swarm:
        finished = False
        while not finished:
            swarm.parent.poll()
            for number in range(stages):
                child = swarm.parent.children.get(f"miner-{number}")
                if child is not None and child.running and child.pid is not None:
                    base.setdefault(number, memory_of(child.pid, "VmRSS"))
                    peak[number] = max(peak.get(number, 0), memory_of(child.pid, "VmHWM"))
            status = _status(swarm)
            if status is not None:
                stage_of |= {member.hotkey: member.stage for member in status.members}
                finished = status.summary.state == "finished"
            deadline.check("the run of the memory benchmark")
            time.sleep(0.02 if len(base) < stages else 0.5)
        cuts = swarm.remote().export_info(config.run.name, None, Deadline.after(10.0)).cuts
        found = {stage_of[swarm.miner_hotkey(n)]: peak[n] - base[n] for n in range(stages)}
    return found, cuts


def _status(swarm: LocalSwarm) -> RunStatus | None:
    try:
        return swarm.status(1)
    except Unreachable:
        return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model; the fixed parts dominate, limit 100 %%")
    parser.add_argument("--steps", type=int, default=10, help="10: until every cache has reached its horizon")
    options = parser.parse_args(arguments)
    shape = baselines.QUICK if options.quick else baselines.FULL
    limit, steps = (1.0, 3) if options.quick else (LIMIT, options.steps)
    config = config_of(shape, "fp32", steps, "memory")
    config = msgspec.structs.replace(
        config,
        run=RunSection(name="memory", seed=1, steps=steps),
        pipeline=PipelineSection(stages=2, microbatches=shape.microbatches, microbatch_rows=shape.rows),
    )
    measured, cuts = watch(config, 3600.0)
    plan = plan_model(config, load_architecture(config.model.config or {}), cuts)
    figures: dict[str, Any] = {"steps": steps, "cuts": cuts}
    worst = 0.0
    for stage, got in sorted(measured.items()):
        told = predicted(plan, stage, min(steps, Budgets().kept_steps))
        off = got / told.peak_bytes - 1
        worst = max(worst, abs(off))
        figures[f"stage_{stage}"] = {
            "measured_mb": got / 1e6,
            "predicted_mb": told.peak_bytes / 1e6,
            "off": off,
            "terms_mb": {term.name: term.size_bytes / 1e6 for term in told.terms},
        }
    ok = worst <= limit
    print(json.dumps({"name": "memory", "figures": {**figures, "worst": worst}, "limits": {"worst": limit}, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DeadlinePassed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
