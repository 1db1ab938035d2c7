"""What the throughput benchmark is compared with, measured in fresh processes that never outlive the call.

``plain``: PyTorch, one process, 2 threads, tied embeddings. ``pipeline``: ``torch.distributed.pipelining`` 1F1B over
gloo, 2 processes with 1 thread each. ``pipeline_dp``: the same with 2 replicas a stage, 4 processes, the microbatches
split between the replicas, gradients all-reduced by gloo. The pipelines have untied embeddings (the library has no
tying across stages): 4.2M parameters more for the optimizer, the same work for the matrix units.

    python -m benchmarks.baselines [--quick] [--precision fp32 bf16] [--steps N] [--microbatches M]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.baseline_worker import Shape, Work
from subnet.errors import DeadlinePassed, InputError, IotaError

FULL = Shape()
QUICK = Shape(hidden=128, intermediate=352, layers=4, heads=4, vocab_size=2048, sequence_length=64, microbatches=4)

ROOT = Path(__file__).parent.parent
THREADS = {"plain": 2, "pipeline": 1, "pipeline_dp": 1}
PROCESSES = {"plain": 1, "pipeline": 2, "pipeline_dp": 4}


def measure(
    kind: str,
    precision: str,
    steps: int,
    *,
    shape: Shape = FULL,
    warmup: int = 1,
    deadline_s: float = 900.0,
    clock: str = "wall",
) -> list[float]:
    """Seconds (``clock``: ``wall``, or ``cpu`` of ``plain``) of each of ``steps`` optimizer steps behind ``warmup`` others."""
    if kind not in PROCESSES:
        raise InputError(f"no baseline is named {kind!r}", hint=", ".join(PROCESSES))
    if shape.microbatches % 2:
        raise InputError(f"{shape.microbatches} microbatches can't be split between two replicas")
    replicas = 2 if kind == "pipeline_dp" else 1
    with tempfile.TemporaryDirectory() as folder:
        works = [
            Work(
                kind, precision, THREADS[kind], steps, warmup, deadline_s, shape, rank, replicas,
                str(Path(folder) / "rendezvous"), clock,
            )
            for rank in range(PROCESSES[kind])
        ]  # fmt: skip
        return _run(works, deadline_s)[0]


def matmul_peak(precision: str, threads: int, *, deadline_s: float = 120.0) -> float:
    """GFLOP/s of a matrix product on this machine, now."""
    return _run([Work("matmul", precision, threads, 1, 0, deadline_s, FULL)], deadline_s)[0][0]


def mfu(shape: Shape, seconds_per_step: float, peak_gflops: float) -> float:
    """Model FLOP of a step over what the matrix peak could have done in its time."""
    return shape.flop_per_token * shape.tokens_per_step / seconds_per_step / (peak_gflops * 1e9)


def _run(works: list[Work], deadline_s: float) -> list[list[float]]:
    """Runs one process for each piece of work; all are gone when this returns or raises."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for work in works:
            environment = {**os.environ, "OMP_NUM_THREADS": str(work.threads), "GLOO_SOCKET_IFNAME": "lo"}
            argument = msgspec.json.encode(work).decode()
            command = [sys.executable, "-m", "benchmarks.baseline_worker", argument]
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        return _collect(processes, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def _collect(processes: list[subprocess.Popen[str]], until: float) -> list[list[float]]:
    results: list[list[float]] = []
    for rank, process in enumerate(processes):
        try:
            output, errors = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise DeadlinePassed(f"a baseline's rank {rank} was not done in time") from error
        if process.returncode:
            last = errors.strip().splitlines()[-1:] or [f"status {process.returncode}"]
            raise IotaError(f"a baseline's rank {rank} failed: {last[0]}")
        results.append(msgspec.json.decode(output.strip().splitlines()[-1], type=list[float]))
    return results


def figures_of(precision: str, shape: Shape, steps: int, kinds: list[str]) -> dict[str, float]:
    """All baselines in turn, with the peak and the MFU."""
    figures: dict[str, float] = {}
    peaks = {threads: matmul_peak(precision, threads) for threads in (1, 2)}
    for threads, peak in peaks.items():
        figures[f"{precision}_matmul_gflops_{threads}_threads"] = peak
    for kind in kinds:
        seconds = median(measure(kind, precision, steps, shape=shape))
        figures[f"{precision}_{kind}_step_s"] = seconds
        figures[f"{precision}_{kind}_tokens_per_s"] = shape.tokens_per_step / seconds
        figures[f"{precision}_{kind}_mfu"] = mfu(shape, seconds, peaks[2])
        print(f"{precision} {kind}: {seconds:.2f} s a step", file=sys.stderr, flush=True)
    return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument("--kinds", nargs="+", default=list(PROCESSES), choices=list(PROCESSES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--microbatches", type=int)
    options = parser.parse_args(arguments)
    shape = QUICK if options.quick else FULL
    if options.microbatches:
        shape = msgspec.structs.replace(shape, microbatches=options.microbatches)
    figures: dict[str, float] = {"parameters": shape.parameters, "tokens_per_step": shape.tokens_per_step}
    for precision in options.precision:
        figures.update(figures_of(precision, shape, options.steps, options.kinds))
    print(json.dumps({"name": "baselines", "figures": figures, "limits": {}, "ok": True}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except IotaError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
