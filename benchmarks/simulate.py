"""The simulator at scale and against reality: 139 GPUs on a 16B model, 5,000 members, two swarms that were measured.

python -m benchmarks.simulate [--quick] [--pictures docs/images]     # prints a JSON line a part
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from iota.simulate import model_of
from iota.simulate_pictures import draw
from iota.simulate_tally import Figures
from iota.simulate_world import Stuck, World
from subnet.model.plan import ModelPlan
from subnet.run.config import (
    DataSection,
    EvaluationSection,
    MergeSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet, load_fleet, parse_fleet
from subnet.simulate.legacy import LegacySettings, simulate_legacy

PATIENCE_S = 3600.0
"""Without a step for so long a simulated run is said to be stuck."""
ROOT = Path(__file__).resolve().parent.parent

MEASURED = (
    # docs/results.md, section 3: members, replicas, seconds of a step, seconds of an item (first, last stage) as they were there
    ("2 stages x 1 miner", 1, 28.1, (1.59, 1.45)),
    ("2 stages x 2 replicas", 2, 27.2, (2 * 1.59, 2 * 1.45)),
)
"""Two cores: four miners have half a core each."""


def llama(
    name: str, hidden: int, layers: int, wide: int, heads: int, vocab: int, length: int, **more: Any
) -> RunConfig:
    model = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(8, heads),
        "max_position_embeddings": length,
        "tie_word_embeddings": more.pop("tied", False),
    }
    compute = more.pop("compute", "bf16")
    return RunConfig(
        run=RunSection(name=name, steps=10),
        model=ModelSection(config=model),
        data=DataSection(sequence_length=length),
        evaluation=EvaluationSection(rows=0),
        merge=MergeSection(packing=more.pop("packing", "bits")),
        precision=PrecisionSection(compute=compute),
        pipeline=PipelineSection(**more),
    )


def sixteen() -> RunConfig:
    """About 16 billion parameters (56 layers) in 28 stages: what fits into 24 GB each."""
    return llama(
        "16b", 5120, 56, 13824, 40, 32000, 2048, stages=28, microbatches=128, microbatch_rows=2, boundary_code="int8"
    )


def hundred() -> RunConfig:
    """About 100 billion parameters in 16 stages, as the public run had."""
    return llama(
        "100b", 10240, 80, 28672, 80, 128256, 2048, stages=16, microbatches=96, microbatch_rows=1, boundary_code="int4"
    )


def small() -> RunConfig:
    """What the coordinator has to do doesn't depend on the model's size."""
    return llama("many", 512, 16, 1536, 8, 8192, 256, stages=16, microbatches=5000, microbatch_rows=1)


def run_world(
    plan: ModelPlan, fleet: Fleet, num_steps: int, pictures: Path | None = None, prefix: str = ""
) -> dict[str, Any]:
    began_s = time.perf_counter()
    world = World(plan, fleet, num_steps=num_steps, seed=1, picture_step=num_steps // 2, patience_s=PATIENCE_S)
    try:
        world.run()
    except Stuck as error:
        return {"stuck": str(error), "events": dict(world.tally.counts.most_common(12))}
    took_s = time.perf_counter() - began_s
    figures = world.tally.figures()
    if pictures is not None:
        for path in draw(world, figures, pictures / "parts"):
            path.rename(pictures / f"simulate_{prefix}{path.name}")
        (pictures / "parts").rmdir()
    return {**short(figures), **machine(world, took_s), "events": dict(world.tally.counts.most_common(8))}


def short(figures: Figures) -> dict[str, Any]:
    shown = msgspec.structs.asdict(figures)
    del shown["each_step"]
    return shown


def machine(world: World, took_s: float) -> dict[str, float]:
    """What the simulation and the coordinator's code in it took here."""
    steps = max(1, len(world.tally.steps))
    return {
        "simulator_s": took_s,
        "simulated_s": world.now_s,
        "simulator_events_per_s": world.num_handled / took_s,
        "coordinator_cpu_s_per_step": world.coordinator.cpu_s / steps,
        "coordinator_cpu_us_per_record": 1e6 * world.coordinator.cpu_s / world.coordinator.num_records,
    }


def reality() -> dict[str, Any]:
    """Swarms whose steps were measured, predicted from the seconds of an item on that machine."""
    rows: list[dict[str, Any]] = []
    for name, replicas, measured_s, (first_s, last_s) in MEASURED:
        config = llama(
            "reality", 512, 8, 1408, 8, 8192, 256, stages=2, microbatches=16, microbatch_rows=4, tied=True, compute="fp32",
            packing="bytes",
        )  # fmt: skip
        plan = model_of(config, (0, 5))
        layer_s = first_s / 5
        unit_s = [0.0, *[layer_s] * 8, last_s - 3 * layer_s]
        gpu = f'[[group]]\nkind = "custom"\nmemory_gb = 8\ntflops = 1\nmfu = 1\nbandwidth_gb_s = {10 / replicas}\n'
        fleet = parse_fleet(
            f"{gpu}count = {2 * replicas}\nrtt_ms = 1\nup_mbit = 10000\ndown_mbit = 10000\n[store]\nrtt_ms = 2\n"
        )
        figures = World(plan, fleet, num_steps=4, unit_s=unit_s).run().tally.figures()
        steps = figures.each_step
        predicted_s = (steps[-1].sealed_s - steps[0].sealed_s) / (len(steps) - 1)
        rows.append(
            {"swarm": name, "measured_s": measured_s, "predicted_s": predicted_s, "error": predicted_s / measured_s - 1}
        )
    return {"part": "reality", "rows": rows, "worst": max(abs(row["error"]) for row in rows)}


def beside_legacy(config: RunConfig, fleet: Fleet, min_batches: int) -> dict[str, Any]:
    costs = StageCosts(model_of(config))
    return msgspec.structs.asdict(
        simulate_legacy(costs, fleet, LegacySettings(min_batches=min_batches, epochs=10), seed=1)
    )


def many(count: int) -> Fleet:
    """Home GPUs that come and go; the links are good, so that the coordinator is what is loaded."""
    return parse_fleet(
        f'[store]\nup_mbit = 1e6\ndown_mbit = 1e6\n[[group]]\nkind = "rtx4090"\ncount = {count}\nmtbf_hours = 20\n'
        f"up_mbit = 1000\ndown_mbit = 1000\nmfu = 0.002\noutage_s = 120\n"
    )


def say(part: str, found: dict[str, Any]) -> None:
    print(json.dumps({"part": part, **found}), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer members, fewer steps")
    parser.add_argument("--pictures", type=Path, help="a directory for simulate_*.png")
    parser.add_argument("--part", default="", help="only this: reality, 139, 100b, members")
    options = parser.parse_args(argv)
    quick, part = options.quick, options.part
    bad = False
    if part in ("", "reality"):
        found = reality()
        bad = found["worst"] > 0.15
        say("reality", found)
    home = load_fleet(ROOT / "examples/fleets/home139.toml")
    if part in ("", "139"):
        for prefix, mbit in (("", None), ("fast_", 10_000)):
            fleet = home if mbit is None else faster(home, mbit)
            found = run_world(model_of(sixteen()), fleet, 2 if quick else 4, options.pictures if mbit else None, prefix)
            say(f"16B on 139, {'home links' if mbit is None else f'{mbit} Mbit/s'}", found)
            for batches in (10, 100):
                say(f"the same, legacy, B_min {batches}", beside_legacy(sixteen(), fleet, batches))
    if part in ("", "100b") and not quick:
        fleet = load_fleet(ROOT / "examples/fleets/a100x48.toml")
        say("100B on 48 A100", run_world(model_of(hundred()), fleet, 3))
        say("the same, legacy, B_min 10", beside_legacy(hundred(), fleet, 10))
    if part in ("", "members"):
        say("members", run_world(model_of(small()), many(500 if quick else 5000), 2))
    return 1 if bad else 0


def faster(fleet: Fleet, mbit: float) -> Fleet:
    """The same machines behind links of so many Mbit/s."""
    groups = tuple(msgspec.structs.replace(group, up_mbit=mbit, down_mbit=mbit) for group in fleet.group)
    store = msgspec.structs.replace(fleet.store, up_mbit=40 * mbit, down_mbit=40 * mbit)
    return msgspec.structs.replace(fleet, group=groups, store=store)


if __name__ == "__main__":
    sys.exit(main())
