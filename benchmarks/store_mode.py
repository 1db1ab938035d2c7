"""Throughput with every boundary and slice through the object store, against straight links, on 3 stages x 2 miners.

Whole optimizer steps of one model, straight and by store in turn, on the embedded store or on a SeaweedFS server (S3).
Demanded: one root, and as many requests as the formula says, give or take those for tokens that aren't in the miners' caches
yet. Printed: seconds a step, requests and bytes a step beside the formula, and what a million tokens cost at the list prices
of R2 and S3.

    python -m benchmarks.store_mode [--quick] [--store embedded s3] [--rounds N] [--steps N] [--microbatches N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import baselines
from benchmarks.baseline_worker import Shape
from benchmarks.corpus import OUT
from benchmarks.store_costs import R2, S3, evidence_use, expected_use, per_million_tokens
from benchmarks.swarms import run_swarm
from benchmarks.throughput import config_of
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import DeadlinePassed
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.protocol.api import RunStatus
from subnet.protocol.messages import StoreUse
from subnet.run.config import RunConfig
from validator.settings import ValidatorSettings
from validator.stage_plan import plan_cuts

STAGES, REPLICAS = 3, 2
WARMUP_STEPS = 2
DIRECTORY = OUT / "store_mode"
MODES = ("straight", "store")
QUICK = msgspec.structs.replace(baselines.QUICK, layers=6, microbatches=8)
LIMITS = {"store_vs_straight": 0.80, "requests_off_formula": 0.10}
QUICK_LIMITS = {"store_vs_straight": 0.10, "requests_off_formula": 0.25}


class Part(msgspec.Struct, frozen=True):
    """One run that has been measured; ``use`` is of one step."""

    root: str
    seconds: list[float]
    use: StoreUse
    own: StoreUse


# --- stores ------------------------------------------------------------------------------------------------------


class S3Swarm(LocalSwarm):
    """Its validator keeps blobs and log in a bucket; its own store stays empty."""

    bucket: dict[str, Any]

    def _request(self, name: str, kind: str, settings: Any) -> None:
        if isinstance(settings, ValidatorSettings):
            settings = msgspec.structs.replace(settings, **self.bucket)
        super()._request(name, kind, settings)


@contextmanager
def swarms_on(store: str) -> Iterator[Callable[[str], type[LocalSwarm]]]:
    """What makes the class of swarms on this store, each under a prefix of its own."""
    if store == "embedded":
        yield lambda name: LocalSwarm
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from seaweed import BUCKET, KEY, SECRET_KEY, start_seaweed, stop_seaweed

    folder = DIRECTORY / "seaweed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    credentials = folder / "credentials"
    credentials.touch(mode=0o600)
    credentials.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    server = start_seaweed(folder / "server")
    try:
        yield lambda name: type(
            "S3Swarm",
            (S3Swarm,),
            {
                "bucket": {
                    "store_url": f"s3://{BUCKET}/{name}",
                    "store_endpoint": server.endpoint,
                    "store_credentials": credentials,
                }
            },
        )
    finally:
        stop_seaweed(server)
        shutil.rmtree(folder, ignore_errors=True)


# --- measuring ---------------------------------------------------------------------------------------------------


def run_config(shape: Shape, steps: int, mode: str, number: int) -> RunConfig:
    """One more step than is measured, so that the last snapshot isn't counted."""
    config = config_of(shape, "fp32", WARMUP_STEPS + steps + 1, f"{mode}-{number}")
    pipeline = msgspec.structs.replace(config.pipeline, stages=STAGES, boundaries=mode)
    return msgspec.structs.replace(
        config, pipeline=pipeline, snapshot=msgspec.structs.replace(config.snapshot, every_steps=10_000)
    )


def measure(shape: Shape, steps: int, mode: str, number: int, swarm_class: type[LocalSwarm]) -> Part:
    """Seconds of each step, and what the swarm asks of the store in one."""
    seen: dict[int, RunStatus] = {}

    def note(swarm: LocalSwarm, status: RunStatus, now_s: float) -> None:
        seen.setdefault(status.summary.step, status)

    options = SwarmOptions(measure_costs=False, spare_miners=0)
    result = run_swarm(
        DIRECTORY / "swarm",
        run_config(shape, steps, mode, number),
        STAGES * REPLICAS,
        options=options,
        limit_s=3600.0,
        on_status=note,
        swarm_class=swarm_class,
    )
    first, last = seen[WARMUP_STEPS].store, seen[WARMUP_STEPS + steps].store
    if first is None or last is None:
        raise RuntimeError("the validator counts nothing")
    views = [view.seconds for view in result.status.steps if WARMUP_STEPS <= view.step < WARMUP_STEPS + steps]
    return Part(
        result.root,
        views,
        per_step(last.reported.minus(first.reported), steps),
        per_step(last.own.minus(first.own), steps),
    )


def per_step(use: StoreUse, steps: int) -> StoreUse:
    return StoreUse(*(round(getattr(use, name) / steps) for name in use.__struct_fields__))


def kept(key: str, make: Callable[[], Part]) -> Part:
    """From disk, where it has been measured before."""
    path = DIRECTORY / "parts" / f"{key}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Part)
    part = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(part))
    return part


def measure_all(shape: Shape, store: str, rounds: int, steps: int) -> dict[str, list[Part]]:
    """Straight and by store in turn."""
    found: dict[str, list[Part]] = {mode: [] for mode in MODES}
    size = f"{shape.hidden}x{shape.layers}-{shape.microbatches}x{shape.rows}x{shape.sequence_length}"
    with swarms_on(store) as swarm_class:
        for number in range(rounds):
            for mode in MODES:
                key = f"{store}-{size}-{steps}-{mode}-{number}"
                swarms = swarm_class(f"{mode}-{number}")
                part = kept(key, lambda mode=mode, number=number, s=swarms: measure(shape, steps, mode, number, s))
                print(
                    f"  {store} {mode}: {median(part.seconds):.2f} s a step {part.seconds}", file=sys.stderr, flush=True
                )
                found[mode].append(part)
    return found


# --- judging -----------------------------------------------------------------------------------------------------


def model_plan(config: RunConfig) -> ModelPlan:
    """As the validator cuts it without measured costs."""
    architecture = load_architecture(config.model.config or {})
    flops = architecture.units(config.data.sequence_length).unit_flops_per_token
    return plan_model(config, architecture, plan_cuts(flops, config.pipeline.stages))


def judge(shape: Shape, found: dict[str, list[Part]]) -> dict[str, Any]:
    seconds = {mode: median(s for part in parts for s in part.seconds) for mode, parts in found.items()}
    figures: dict[str, Any] = {
        "seconds_per_step": seconds,
        "tokens_per_s": {mode: shape.tokens_per_step / value for mode, value in seconds.items()},
        "store_vs_straight": seconds["straight"] / seconds["store"],
        "steps": {mode: sum(len(part.seconds) for part in parts) for mode, parts in found.items()},
        "same_root": len({part.root for parts in found.values() for part in parts}) == 1,
        "requests_off_formula": 0.0,
    }
    for mode, parts in found.items():
        plan = model_plan(run_config(shape, 1, mode, 0))
        expected = expected_use(plan, [REPLICAS] * STAGES, by_store=mode == "store")
        measured = middle([part.use for part in parts])
        own = middle([part.own for part in parts])
        off = abs(measured.puts + measured.gets - expected.puts - expected.gets) / (expected.puts + expected.gets)
        figures["requests_off_formula"] = max(figures["requests_off_formula"], off)
        evidence = evidence_use(plan, [REPLICAS] * STAGES) if mode == "store" else StoreUse()
        whole = measured.plus(own)
        figures[mode] = {
            "measured_per_step": msgspec.to_builtins(measured),
            "formula_per_step": msgspec.to_builtins(expected),
            "validator_per_step": msgspec.to_builtins(own),
            "usd_per_million_tokens": {
                name: per_million_tokens(whole, prices, shape.tokens_per_step, seconds[mode], evidence.bytes_up)
                for name, prices in (("r2", R2), ("s3", S3))
            },
        }
    return figures


def middle(uses: list[StoreUse]) -> StoreUse:
    return StoreUse(*(round(median(getattr(use, name) for use in uses)) for name in StoreUse.__struct_fields__))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_mode", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute, limits of its own")
    parser.add_argument("--store", nargs="+", default=["embedded"], choices=["embedded", "s3"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, help="fewer or more than 16")
    parser.add_argument("--anew", action="store_true", help="measure again what has been measured")
    options = parser.parse_args(arguments)
    shape, steps = (QUICK, 5) if options.quick else (baselines.FULL, options.steps)
    if options.microbatches:
        shape = msgspec.structs.replace(shape, microbatches=options.microbatches)
    limits = QUICK_LIMITS if options.quick else LIMITS
    if options.anew or options.quick:
        shutil.rmtree(DIRECTORY / "parts", ignore_errors=True)
    figures: dict[str, Any] = {"parameters": shape.parameters, "tokens_per_step": shape.tokens_per_step}
    ok, roots = True, set[str]()
    for store in options.store:
        print(f"{store} store, {STAGES} stages x {REPLICAS} miners", file=sys.stderr, flush=True)
        found = measure_all(shape, store, options.rounds, steps)
        figures[store] = judged = judge(shape, found)
        roots |= {part.root for parts in found.values() for part in parts}
        ok &= len(roots) == 1 and judged["store_vs_straight"] >= limits["store_vs_straight"]
        ok &= judged["requests_off_formula"] <= limits["requests_off_formula"]
    print(json.dumps({"name": "store_mode", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DeadlinePassed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
