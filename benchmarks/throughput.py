"""The swarm's speed against plain PyTorch and ``torch.distributed.pipelining``, measured in turn in one run.

The 29.5M-parameter model, 16 microbatches of 4 x 256, whole optimizer steps with merges, hashes, receipts, journal and
snapshots on. 2 stages x 1 miner (1 thread each) against pipelining with 2 processes; 2 stages x 2 replicas against
pipelining with gloo data parallelism, 4 processes on the same cores. Prints where the time goes and the MFU.

    python -m benchmarks.throughput [--quick] [--precision fp32 bf16] [--rounds N] [--steps N] [--update-delay 1]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import baselines
from benchmarks.baseline_worker import Shape
from benchmarks.corpus import OUT
from benchmarks.cpu_use import descendants_cpu_s
from benchmarks.swarms import run_swarm
from iota.prepare import prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import DeadlinePassed
from subnet.protocol.api import RunStatus
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    SnapshotSection,
)

BOOK = Path(__file__).resolve().parent.parent / "iota" / "assets" / "moby_dick.txt"
DIRECTORY = OUT / "throughput"
LIMITS = {"two_miners_vs_pipelining": 0.95, "four_miners_vs_pipelining": 0.90}
BF16_LIMITS = {**LIMITS, "two_miners_vs_pipelining": 0.90}
"""Of bf16 without a delay of the update; with one they are those of fp32."""
QUICK_LIMITS = {"two_miners_vs_pipelining": 0.05, "four_miners_vs_pipelining": 0.05}
MOST_CPU = 1.15
"""CPU seconds a token of two miners and all beside them, over plain PyTorch's."""
POLL_S = 1.0


def config_of(shape: Shape, precision: str, steps: int, name: str, update_delay: int = 0) -> RunConfig:
    vocab = shape.vocab_size
    prepare_data([BOOK], DIRECTORY / f"data-{vocab}", vocab_size=vocab, holdout_fraction=0.05)
    model: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.sequence_length,
        "tie_word_embeddings": True,
    }
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name=name, seed=1, steps=steps),
        model=ModelSection(config=model),
        data=DataSection(sources=(str(DIRECTORY / f"data-{vocab}"),), sequence_length=shape.sequence_length),
        pipeline=PipelineSection(
            stages=2, microbatches=shape.microbatches, microbatch_rows=shape.rows, update_delay=update_delay
        ),
        precision=PrecisionSection(compute=precision),
        snapshot=SnapshotSection(every_steps=max(2, steps // 2)),
        evaluation=EvaluationSection(rows=0),
    )


def swarm_steps(
    shape: Shape, precision: str, miners: int, steps: int, warmup: int, update_delay: int = 0
) -> tuple[list[float], float]:
    """Seconds of each step after ``warmup``, from seal to seal (merge and update included); CPU seconds a step of the whole
    swarm: miners, validator, store, chain."""
    config = config_of(shape, precision, warmup + steps, f"throughput-{precision}-{miners}", update_delay)
    options = SwarmOptions(measure_costs=True, spare_miners=0)
    seen: dict[int, float] = {}

    def note(swarm: LocalSwarm, status: RunStatus, now_s: float) -> None:
        if status.summary.step not in seen:
            seen[status.summary.step] = descendants_cpu_s()

    result = run_swarm(
        DIRECTORY / "swarm", config, miners, options=options, limit_s=3600.0, on_status=note, poll_s=POLL_S
    )
    views = [step for step in result.status.steps if step.step >= warmup]
    first, last = min(step for step in seen if step >= warmup), max(seen)
    return [step.seconds for step in views], (seen[last] - seen[first]) / max(1, last - first)


def measure_round(shape: Shape, precision: str, steps: int, update_delay: int = 0) -> dict[str, float]:
    """Each swarm right after what it is compared with; the two-thread baseline last."""
    figures: dict[str, float] = {}

    def note(kind: str, seconds: list[float]) -> None:
        figures[kind] = median(seconds)
        print(f"  {precision} {kind}: {figures[kind]:.2f} s a step {seconds}", file=sys.stderr, flush=True)

    for baseline, miners in (("pipeline", 2), ("pipeline_dp", 4)):
        note(baseline, baselines.measure(baseline, precision, steps, shape=shape, deadline_s=3000.0))
        name = "two_miners" if miners == 2 else "four_miners"
        seconds, cpu_s = swarm_steps(shape, precision, miners, steps, 2, update_delay)
        note(name, seconds)
        note(f"{name}_cpu", [cpu_s])
    for clock in ("wall", "cpu"):
        seconds = baselines.measure("plain", precision, steps, shape=shape, deadline_s=3000.0, clock=clock)
        note("plain" if clock == "wall" else "plain_cpu", seconds)
    return figures


def breakdown(directory: Path) -> dict[str, dict[str, float]]:
    """Where the miners' time went, from the last line each wrote about it: seconds by kind, over all steps."""
    found: dict[str, dict[str, float]] = {}
    for log in sorted((directory / "logs").glob("miner-*.log")):
        lines = [line for line in log.read_text().splitlines() if "time by kind: " in line]
        if lines:
            found[log.stem] = json.loads(lines[-1].split("time by kind: ", 1)[1])
    return found


def compare(shape: Shape, precision: str, rounds: int, steps: int, update_delay: int = 0) -> dict[str, Any]:
    measured: list[dict[str, float]] = []
    for number in range(rounds):
        print(f"{precision}, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        measured.append(measure_round(shape, precision, steps, update_delay))
    seconds = {kind: median(one[kind] for one in measured) for kind in measured[0]}
    peak = baselines.matmul_peak(precision, 2)
    walls = [kind for kind in seconds if not kind.endswith("_cpu")]
    return {
        "seconds_per_step": seconds,
        "tokens_per_s": {kind: shape.tokens_per_step / seconds[kind] for kind in walls},
        "mfu": {kind: baselines.mfu(shape, seconds[kind], peak) for kind in walls},
        "matmul_gflops_2_threads": peak,
        "two_miners_vs_pipelining": median(one["pipeline"] / one["two_miners"] for one in measured),
        "two_miners_vs_plain": median(one["plain"] / one["two_miners"] for one in measured),
        "cpu_vs_plain": median(one["two_miners_cpu"] / one["plain_cpu"] for one in measured),
        "four_miners_vs_pipelining": median(one["pipeline_dp"] / one["four_miners"] for one in measured),
        "time_by_kind_s": breakdown(DIRECTORY / "swarm"),
    }


def limits_of(precision: str, quick: bool, update_delay: int) -> dict[str, float]:
    """What is asked for: at least, but of CPU at most."""
    if quick:
        return QUICK_LIMITS
    ratios = BF16_LIMITS if precision == "bf16" and not update_delay else LIMITS
    return {**ratios, "cpu_vs_plain": MOST_CPU}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute, limits of its own")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--update-delay", type=int, default=0, choices=[0, 1], help="1: the swarms' merges overlap")
    parser.add_argument("--microbatches", type=int, help="fewer than 16, for machines without fast bf16")
    options = parser.parse_args(arguments)
    shape, rounds, steps = (baselines.QUICK, 1, 3) if options.quick else (baselines.FULL, options.rounds, options.steps)
    if options.microbatches:
        shape = msgspec.structs.replace(shape, microbatches=options.microbatches)
    figures: dict[str, Any] = {
        "parameters": shape.parameters,
        "tokens_per_step": shape.tokens_per_step,
        "update_delay": options.update_delay,
    }
    misses: Counter[str] = Counter()
    limits: dict[str, dict[str, float]] = {}
    for precision in options.precision:
        figures[precision] = found = compare(shape, precision, rounds, steps, options.update_delay)
        limits[precision] = limits_of(precision, options.quick, options.update_delay)
        for name, limit in limits[precision].items():
            missed = found[name] > limit if name == "cpu_vs_plain" else found[name] < limit
            misses[f"{precision} {name}"] += missed
    ok = not any(misses.values())
    print(json.dumps({"name": "throughput", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DeadlinePassed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
