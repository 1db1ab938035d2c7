"""Seven runs of one config under seven seeded plans of disruptions end with the root of the undisturbed run, to the bit.

4 stages, 12 miners, 120 steps; in each run 84 disruptions of miners (kill -9, preempt with 1 s notice, pause and resume,
leave and rejoin) and 2 kills of the validator, spread over its steps: 602 in all. The undisturbed run is a swarm as well,
and the reference (:mod:`benchmarks.reference`, one process) is computed beside it. Draws the eight loss curves.

    python -m benchmarks.churn            # keeps finished runs in benchmarks/out/churn, goes on after an interruption
    python -m benchmarks.churn --rate     # throughput: kills at one per 5 s, mixed faults at one per 15 s
    python -m benchmarks.churn --lanes    # 60 rounds of local steps (docs/lanes.md): 4 lanes of 2 inner steps
    python -m benchmarks.churn --quick    # one run of 8 steps with 6 disruptions; with --rate: short spans
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks import churn_figures as figures_of
from benchmarks.corpus import OUT
from benchmarks.determinism import config_of, prepared, reference_root
from iota.chaos.plan import Disruption, Kind, make_plan, make_plan_counted
from iota.chaos.run import ChaosOptions, run_chaos
from iota.swarm import SwarmOptions
from subnet.run.config import EvaluationSection, LanesSection, RunConfig, RunSection, SnapshotSection

DIRECTORY = OUT / "churn"
STAGES, MINERS, STEPS = 4, 12, 120
LANES, LANE_ROUNDS = LanesSection(count=4, inner_steps=2), 60
RUNS, DISRUPTIONS, VALIDATOR_KILLS = 7, 84, 2
MINER_KINDS = (Kind.KILL, Kind.PREEMPT, Kind.PAUSE, Kind.REJOIN)
MIXED_KINDS = (Kind.KILL, Kind.PREEMPT, Kind.PAUSE, Kind.SLOW, Kind.PARTITION, Kind.CORRUPT, Kind.STORE_OUTAGE)
RATES = {"calm": None, "kill": (5.0, (Kind.KILL,)), "mixed": (15.0, MIXED_KINDS)}
RATE_STEPS, RATE_ROUNDS = 120, 2
LIMIT_S = 3600.0


def churn_config(steps: int, lanes: LanesSection | None = None) -> RunConfig:
    """fp32, untied, as in the determinism benchmark; a snapshot each 20 steps."""
    _, data = prepared()
    config = config_of("fp32", False, STAGES, steps, data, lanes=lanes)
    return msgspec.structs.replace(
        config,
        run=RunSection(name="churn", seed=config.run.seed, steps=steps),
        evaluation=EvaluationSection(rows=4),
        snapshot=SnapshotSection(every_steps=20),
    )


def churn_plan(seed: int, steps: int, num: int, validator_kills: int) -> tuple[Disruption, ...]:
    """``num`` disruptions of miners, the four kinds equally often, and the validator's kills, over the run's steps."""
    total = num + validator_kills
    return make_plan_counted(
        seed, total, MINER_KINDS, num_steps=steps, fixed={Kind.VALIDATOR_KILL: validator_kills}, network=False
    )


def run_one(name: str, config: RunConfig, plan: tuple[Disruption, ...], *, stop: float | None = None) -> dict[str, Any]:
    """A run to its end; what is kept of it (``stop``: give up after so many seconds)."""
    directory = DIRECTORY / name
    shutil.rmtree(directory, ignore_errors=True)
    options = ChaosOptions(swarm=SwarmOptions(measure_costs=False), num_steps=400, poll_s=0.2)
    result = run_chaos(directory, config, MINERS, plan, options=options, limit_s=stop or LIMIT_S, say=_say(name))
    if not result.finished:
        raise RuntimeError(f"{name}: {result.error or 'not finished'}; see {directory}")
    kept = figures_of.kept(result, directory / "swarm")
    shutil.rmtree(directory / "swarm", ignore_errors=True)
    return kept


def _say(name: str) -> Callable[[str], None]:
    return lambda text: print(f"{name}: {text}", file=sys.stderr, flush=True)


def part(name: str, make: Callable[[], dict[str, Any]], again: bool) -> dict[str, Any]:
    """A finished part from disk, or made now."""
    path = DIRECTORY / f"{name}.json"
    if path.exists() and not again:
        return json.loads(path.read_text())
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(made))
    partial.replace(path)
    print(f"{name}: root {made['root'][:12]}, {made['num_done']} disruptions, {made['seconds']:.0f} s", flush=True)
    return made


def churn(*, quick: bool, again: bool, lanes: LanesSection | None = None) -> dict[str, Any]:
    """The undisturbed run, the disturbed ones, their figures and the picture."""
    steps, runs = (8, 1) if quick else (LANE_ROUNDS if lanes else STEPS, RUNS)
    num, kills = (6, 1) if quick else (DISRUPTIONS, VALIDATOR_KILLS)
    config, mark = churn_config(steps, lanes), ("quick-" if quick else "") + ("lanes-" if lanes else "")
    calm = part(f"{mark}calm", lambda: run_one(f"{mark}calm", config, ()), again)
    expected = reference_root("fp32", False, steps, lanes=lanes)
    disturbed = [
        part(
            f"{mark}run-{seed}",
            lambda s=seed: run_one(f"{mark}run-{s}", config, churn_plan(s, steps, num, kills)),
            again,
        )
        for seed in range(1, runs + 1)
    ]
    figures_of.draw(calm, disturbed, DIRECTORY / f"{mark}curves.png")
    figures = figures_of.churn_figures(calm, disturbed)
    figures["num_different"] = sum(run["root"] != expected for run in [calm, *disturbed])
    limits = {"num_different": 0, "num_disruptions": runs * (num + kills) if quick else 585, "num_kinds": 4}
    limits["least_validator_kills"] = kills
    ok = not figures["num_different"] and all(figures[k] >= v for k, v in limits.items() if k != "num_different")
    return {"name": "churn_lanes" if lanes else "churn", "figures": figures, "limits": limits, "ok": ok}


def rate(*, quick: bool, again: bool) -> dict[str, Any]:
    """Throughput with faults over throughput without, in turns, the median of the rounds."""
    steps, rounds = (16, 1) if quick else (RATE_STEPS, RATE_ROUNDS)
    config = churn_config(steps)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in RATES}
    for number in range(rounds):
        for name, storm in RATES.items():
            plan = make_plan(100 + number, LIMIT_S, storm[0], storm[1]) if storm else ()
            title = f"{steps}-rate-{name}-{number}"
            found[name].append(part(title, lambda t=title, p=plan: run_one(t, config, p), again))
    figures = figures_of.rate_figures(found)
    limits = {"kill_share": 0.6, "mixed_share": 0.6, "num_different": 0}
    ok = figures["num_different"] == 0 and (quick or all(figures[k] >= 0.6 for k in ("kill_share", "mixed_share")))
    return {"name": "churn_rate", "figures": figures, "limits": limits, "ok": ok}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.churn", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rate", action="store_true", help="throughput under faults instead of the seven runs")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    parser.add_argument("--lanes", action="store_true", help="rounds of local steps instead of a merge each step")
    options = parser.parse_args(arguments)
    again, lanes = options.again or options.quick, LANES if options.lanes else None
    if options.rate and lanes:
        parser.error("--rate is measured without --lanes")
    if options.rate:
        result = rate(quick=options.quick, again=again)
    else:
        result = churn(quick=options.quick, again=again, lanes=lanes)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
