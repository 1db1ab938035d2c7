"""How far honest machines of other hardware classes lie apart: what the limits of :mod:`subnet.audit.tolerance` stand on.

Runs in each precision and code of boundaries are worked on this machine and made into bundles with the claimed outputs in
them; then processes that compute otherwise (older instruction sets, another number of threads, other kernels) replay them as
any foreign machine would. Prints the largest distance of each kind beside its limit, and what a small lie is at. Exit status
1 when an honest distance is above a third of its limit.

    python -m benchmarks.audit_tolerance [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.corpus import OUT

MODES = {
    f"{compute} {code}": {"compute": compute, "code": code}
    for compute in ("fp32", "bf16")
    for code in ("raw", "int8", "int4")
}
DEEP = {"fp32 raw deep": {"compute": "fp32"}, "bf16 raw deep": {"compute": "bf16"}}
"""Ten layers in one stage of two."""
CLASSES: dict[str, dict[str, str]] = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "2 threads": {"TOLERANCE_THREADS": "2"},
    "4 threads": {"TOLERANCE_THREADS": "4"},
    "no oneDNN": {"TOLERANCE_PLAIN": "1"},
    "SSE, no oneDNN, plain attention": {
        "TOLERANCE_PLAIN": "2",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}
"""What the environment of a process must be to compute as that class does."""
KINDS = ("output", "gradient", "loss", "integers", "maxima")
MARGIN = 3.0
LIMIT_S = 3000.0


def plan_of(name: str, quick: bool) -> Any:
    from subnet.model.registry import load_architecture, plan_model
    from subnet.run.config import (
        DataSection,
        ModelSection,
        ObjectiveSection,
        PipelineSection,
        PrecisionSection,
        RunConfig,
        RunSection,
    )

    mode = MODES.get(name) or DEEP[name]
    hidden, layers, length = (64, 3, 32) if quick else (256, 12 if name in DEEP else 6, 128)
    model: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": length,
    }
    cuts = (0, 2) if name in DEEP and not quick else (0, layers // 3, 2 * layers // 3)
    run = RunConfig(
        run=RunSection(name="tolerance", seed=7, steps=4),
        model=ModelSection(config=model),
        data=DataSection(sequence_length=length),
        objective=ObjectiveSection(ce_chunk_tokens=128),
        pipeline=PipelineSection(
            stages=len(cuts), microbatches=2, microbatch_rows=4, chunks=2, boundary_code=mode.get("code", "raw")
        ),
        precision=PrecisionSection(compute=mode["compute"]),
    )
    return plan_model(run, load_architecture(model), cuts)


def make(directory: Path, quick: bool) -> None:
    """Bundles ``directory/MODE/STAGE`` of the last of three steps, by one member."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from audit_cases import LiveRun  # pyright: ignore[reportMissingImports]

    from subnet.audit.bundle import needed_blobs, put_blob, useful_blobs, write_bundle
    from subnet.model.hardware_class import hardware_class
    from subnet.model.stage import prepare_torch

    prepare_torch(1)
    for name in MODES if quick else {**MODES, **DEEP}:
        plan = plan_of(name, quick)
        live = LiveRun(plan, num_members=1).run(2)
        blobs, golden = live.all_blobs(), hardware_class(plan)
        for stage in range(plan.num_stages):
            case = msgspec.structs.replace(live.case(1, stage), hardware_class=golden)
            found: dict[str, bytes] = {}
            while lacking := needed_blobs(case, found.get):
                found |= {need.hash: blobs[need.hash] for need in lacking}
            at = directory / name / str(stage)
            write_bundle(at, case, found)
            for need in useful_blobs(case):
                if need.hash in blobs:
                    put_blob(at, need.hash, blobs[need.hash])
            for done in live.done[1, stage, live.members[0]].slices.values():
                put_blob(at, done.hash, done.data)
        print(f"made {name}", flush=True)


def replay(directory: Path) -> None:
    """As a machine of the class that the environment makes this process: the distances of all bundles, as JSON."""
    import torch

    from subnet.audit import worker
    from subnet.audit.messages import ReplayRequest

    plain, threads = int(os.environ.get("TOLERANCE_PLAIN", "0")), int(os.environ.get("TOLERANCE_THREADS", "0"))
    prepare = worker.prepare_torch

    def otherwise(num_threads: int) -> None:
        prepare(threads or num_threads)
        if plain:
            torch.backends.mkldnn.enabled = False  # pyright: ignore[reportAttributeAccessIssue]
        if plain > 1:
            torch.backends.cuda.enable_flash_sdp(False)

    worker.prepare_torch = otherwise
    replayer = worker.Replayer()
    for bundle in sorted(directory.glob("*/*")):
        found = replayer.replay(ReplayRequest(str(bundle), 1 << 40, tolerant=True))
        distances = [] if found.other_class is None else found.other_class.distances
        lacking = 0 if found.other_class is None else found.other_class.not_compared
        line = {
            "mode": bundle.parent.name,
            "stage": int(bundle.name),
            "same": found.other_class is None,
            "roots": len(found.wrong_roots),
            "not_compared": lacking,
            "apart": {
                kind: max((d.distance for d in distances if kind_of(d.what) == kind), default=0.0) for kind in KINDS
            },
        }
        print(json.dumps(line), flush=True)


def kind_of(what: str) -> str:
    word = what.split()[0]
    return word if word in ("output", "gradient", "loss", "maxima") else "integers"


def measured(directory: Path, name: str) -> list[dict[str, Any]]:
    """One class: a process that replays everything."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.audit_tolerance", "--replay", str(directory)],
        env={**os.environ, **CLASSES[name]},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"class {name}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def report(found: dict[str, list[dict[str, Any]]]) -> bool:
    """The table; whether every honest distance has its margin."""
    from subnet.audit.tolerance import TOLERANCES

    most: dict[tuple[str, str], dict[str, tuple[float, str]]] = {}
    for name, lines in found.items():
        for line in lines:
            mode = tuple(line["mode"].split()[:2])
            worst = most.setdefault(mode, {})
            for kind, value in line["apart"].items():
                worst[kind] = max(worst.get(kind, (0.0, "")), (value, f"{name}, {line['mode']}"))
    good = True
    print("| precision, code | " + " | ".join(f"{kind}: most / limit" for kind in KINDS) + " |")
    print("|---|" + "---|" * len(KINDS))
    for mode, worst in sorted(most.items()):
        limits = TOLERANCES[mode]
        cells = [f"{worst[kind][0]:.2g} / {getattr(limits, kind):.2g}" for kind in KINDS]
        good &= all(worst[kind][0] * MARGIN <= getattr(limits, kind) for kind in KINDS)
        print(f"| {' '.join(mode)} | " + " | ".join(cells) + " |")
    for mode, worst in sorted(most.items()):
        print(f"{' '.join(mode)}: " + "; ".join(f"{kind} by {worst[kind][1]}" for kind in KINDS))
    for name, lines in found.items():
        same = sum(line["same"] for line in lines)
        roots, lacking = sum(line["roots"] for line in lines), sum(line["not_compared"] for line in lines)
        print(f"{name}: {len(lines)} replays, {same} of the same class, {roots} roots differ, {lacking} not compared")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--replay", type=Path)
    flags = parser.parse_args()
    if flags.replay is not None:
        replay(flags.replay)
        return 0
    directory = OUT / "audit_tolerance"
    shutil.rmtree(directory, ignore_errors=True)
    make(directory / "bundles", flags.quick)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in CLASSES:
        found[name] = measured(directory / "bundles", name)
        print(f"{name}: {len(found[name])} replays", flush=True)
    (directory / "figures.json").write_text(json.dumps(found))
    good = report(found)
    print(json.dumps({"benchmark": "audit_tolerance", "ok": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
