"""The fleet never touches the result: a reference and five swarms end with the same state root after 30 steps.

The reference is the whole model in plain ``transformers`` in one process (:mod:`benchmarks.reference`); the swarms are
1 stage x 1 miner, 2 x 1, 3 x 2, 4 x 3, and 3 x 2 with a ``kill -9`` and a join. fp32 and bf16 autocast, tied and untied.
With a boundary code the cuts belong to the run: there the reference is cut as the swarms are, 3 x 1 and 3 x 2 with churn.

    python -m benchmarks.determinism            # keeps finished parts in benchmarks/out/determinism
    python -m benchmarks.determinism --quick    # fp32 untied, 1 x 1 and 2 x 2 with a kill and a join, 6 steps
    python -m benchmarks.determinism --update-delay 1    # steps that overlap; parts of their own
    python -m benchmarks.determinism --lanes    # rounds of local steps (docs/lanes.md): 4 lanes of 3 inner steps, 10 rounds
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import OUT
from benchmarks.lane_reference import LaneReference
from benchmarks.reference import Reference
from benchmarks.setting import stream_tokens
from benchmarks.swarms import Fault, run_swarm
from iota.plan import make_plan
from iota.prepare import PreparedData, prepare_data
from subnet.protocol.wire import blob_hash
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    LanesSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    SnapshotSection,
)

BOOK = Path(__file__).resolve().parent.parent / "iota" / "assets" / "moby_dick.txt"
DIRECTORY = OUT / "determinism"
LANES = LanesSection(count=4, inner_steps=3)


@dataclass(frozen=True)
class Fleet:
    name: str
    stages: int
    miners: int
    faults: tuple[Fault, ...] = ()


def fleets(steps: int) -> tuple[Fleet, ...]:
    churn = (Fault(steps // 3, "kill", 0), Fault(steps // 2, "join"))
    return (
        Fleet("1x1", 1, 1),
        Fleet("2x1", 2, 2),
        Fleet("3x2", 3, 6),
        Fleet("4x3", 4, 12),
        Fleet("3x2-churn", 3, 6, churn),
    )


def coded_fleets(steps: int) -> tuple[Fleet, ...]:
    return Fleet("3x1", 3, 3), fleets(steps)[-1]


def config_of(
    precision: str,
    tied: bool,
    stages: int,
    steps: int,
    data: Path,
    code: str = "raw",
    update_delay: int = 0,
    lanes: LanesSection | None = None,
) -> RunConfig:
    model = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name=f"determinism-{precision}-{'tied' if tied else 'untied'}-{stages}", seed=7, steps=steps),
        model=ModelSection(config=model),
        data=DataSection(sources=(str(data),), sequence_length=64),
        schedule=ScheduleSection(warmup_steps=5),
        pipeline=PipelineSection(
            stages=stages,
            microbatches=2 if lanes else 8,
            microbatch_rows=2,
            boundary_code=code,
            update_delay=update_delay,
        ),
        lanes=lanes or LanesSection(),
        precision=PrecisionSection(compute=precision),
        snapshot=SnapshotSection(every_steps=10),
        evaluation=EvaluationSection(rows=4),
    )


def prepared() -> tuple[PreparedData, Path]:
    directory = DIRECTORY / "data"
    return prepare_data([BOOK], directory, vocab_size=512, holdout_fraction=0.05), directory


def reference_root(
    precision: str,
    tied: bool,
    steps: int,
    code: str = "raw",
    update_delay: int = 0,
    lanes: LanesSection | None = None,
) -> str:
    data, directory = prepared()
    config = config_of(precision, tied, 1 if code == "raw" else 3, steps, directory, code, update_delay, lanes)
    return trained_root(reference_of(config, data, directory), steps)


def reference_of(config: RunConfig, data: PreparedData, directory: Path) -> Reference:
    """The run in one process, on the prepared data of a directory."""
    files = {blob_hash(path.read_bytes()): path for path in directory.iterdir() if path.is_file()}
    manifest = data.manifest

    def read(blob: str) -> bytes:
        return next(path for hash_, path in files.items() if hash_ == blob).read_bytes()

    kind = LaneReference if config.lanes.on else Reference
    return kind(
        config,
        dict(config.model.config or {}),
        stream_tokens(manifest, manifest.train, read),
        stream_tokens(manifest, manifest.holdout, read),
        cuts=make_plan(config).cuts,
    )


def trained_root(reference: Reference, steps: int) -> str:
    """Its state root after so many steps from the start."""
    reference.calibrate()
    for step in range(steps):
        reference.step(step)
    return reference.state_root()


def swarm_root(
    fleet: Fleet,
    precision: str,
    tied: bool,
    steps: int,
    code: str = "raw",
    update_delay: int = 0,
    lanes: LanesSection | None = None,
) -> dict[str, object]:
    _, data = prepared()
    config = config_of(precision, tied, fleet.stages, steps, data, code, update_delay, lanes)
    result = run_swarm(DIRECTORY / "swarm", config, fleet.miners, faults=fleet.faults)
    status = result.status
    return {
        "root": result.root,
        "faults": result.faults,
        "num_gone": status.num_gone,
        "num_joined": status.num_joined,
        "num_voids": status.num_voids,
        "first_step_s": round(result.first_step_s, 2),
    }


def part(name: str, make: object, again: bool) -> dict[str, object]:
    """A finished part from disk, or made now."""
    path = DIRECTORY / f"{name}.json"
    if path.exists() and not again:
        return json.loads(path.read_text())
    made = make()  # type: ignore[operator]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    print(f"{name}: {made}", flush=True)
    return made


def compare(
    precision: str,
    tied: bool,
    steps: int,
    chosen: tuple[Fleet, ...],
    again: bool,
    code: str = "raw",
    update_delay: int = 0,
    lanes: LanesSection | None = None,
) -> dict[str, object]:
    setting = f"{precision}-{'tied' if tied else 'untied'}-{steps}" + ("" if code == "raw" else f"-{code}")
    setting += ("-delayed" if update_delay else "") + ("-lanes" if lanes else "")
    run = (precision, tied, steps, code, update_delay, lanes)
    expected = part(f"{setting}-reference", lambda: {"root": reference_root(*run)}, again)
    roots: dict[str, object] = {"reference": expected["root"]}
    for fleet in chosen:
        found = part(f"{setting}-{fleet.name}", lambda fleet=fleet: swarm_root(fleet, *run), again)
        roots[fleet.name] = found["root"]
        if fleet.faults and (len(found["faults"]) != len(fleet.faults) or not found["num_gone"]):  # type: ignore[arg-type]
            roots[fleet.name] = "the faults did not fire"
    return roots


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    parser.add_argument("--update-delay", type=int, default=0, choices=[0, 1], help="1: steps overlap")
    parser.add_argument("--lanes", action="store_true", help="rounds of local steps instead of a merge each step")
    options = parser.parse_args(arguments)
    lanes = LANES if options.lanes else None
    settings = [("fp32", False)] if options.quick else [(p, tied) for p in ("fp32", "bf16") for tied in (False, True)]
    steps = (4 if lanes else 6) if options.quick else (10 if lanes else 30)
    quick = (Fleet("1x1", 1, 1), Fleet("2x2-churn", 2, 4, (Fault(1, "kill", 0), Fault(2, "join"))))
    chosen = quick if options.quick else fleets(steps)
    table = {
        f"{precision} {'tied' if tied else 'untied'}": compare(
            precision, tied, steps, chosen, options.again or options.quick, "raw", options.update_delay, lanes
        )
        for precision, tied in settings
    }
    for code in () if options.quick else ("int8", "int4"):
        table[f"fp32 untied {code}"] = compare(
            "fp32", False, steps, coded_fleets(steps), options.again, code, options.update_delay, lanes
        )
    different = {
        f"{setting} {fleet}": root
        for setting, roots in table.items()
        for fleet, root in roots.items()
        if root != roots["reference"]
    }
    figures = {
        "steps": steps,
        "update_delay": options.update_delay,
        "lanes": options.lanes,
        "roots": table,
        "num_runs": sum(len(roots) for roots in table.values()),
    }
    result = {
        "name": "determinism",
        "figures": {**figures, "num_different": len(different), "different": different},
        "limits": {"num_different": 0},
        "ok": not different,
    }
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
