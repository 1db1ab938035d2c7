"""A merge of a gradient among miners against gloo's and hivemind's all-reduce: seconds, bytes, and where the time goes.

64 and 256 MiB of fp32-equivalent gradient, M = 16 and 64 microbatches, 2, 4 and 8 miners as processes on loopback: the real
transport and the real merge work, integers packed on the way, fingerprints checked by everybody; straight, with two owners a
partition, and with the merged partitions through the embedded store. gloo and hivemind sum the same sizes in the same run.

    python -m benchmarks.butterfly [--quick] [--size 64 256] [--miners 2 4 8] [--microbatches 16 64] [--kinds ...]

Every cell is kept under ``benchmarks/out/butterfly`` as soon as it is done, and not measured again. hivemind gets an
environment of its own there; where it can't be installed the JSON says so and its limits don't count as met.
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

from benchmarks.butterfly_frames import TWO_OWNERS, Cell
from benchmarks.corpus import OUT
from subnet.errors import IotaError

FOLDER = OUT / "butterfly"
ENVIRONMENT = FOLDER / "hivemind"
HIVEMIND = "hivemind==1.1.12"
KINDS = ("gloo", "hivemind", "straight", TWO_OWNERS, "store")
CELL_S = 1800.0
INSTALL_S = 900.0
FASTER_THAN_HIVEMIND, BYTES_OF_HIVEMIND, TIMES_GLOO = 3.0, 0.6, 5.0
LIMITS = {
    "faster_than_hivemind": FASTER_THAN_HIVEMIND,
    "share_of_hivemind_bytes": BYTES_OF_HIVEMIND,
    "times_gloo": TIMES_GLOO,
}
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")}


class Unavailable(IotaError):
    """hivemind can't be installed here."""

    code = "unavailable"


def hivemind_python(*, install: bool) -> Path:
    """The interpreter of hivemind's own environment, which sees this one's torch; made on first use."""
    python = ENVIRONMENT / "bin" / "python"
    if (ENVIRONMENT / "installed").exists():
        return python
    if not install:
        raise Unavailable("hivemind isn't installed yet: a full run installs it")
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", str(ENVIRONMENT)], INSTALL_S)
        own = next(ENVIRONMENT.glob("lib/python*/site-packages"))
        shared = next(path for path in sys.path if path.endswith("site-packages"))
        (own / "outer.pth").write_text(shared + "\n")
        _run([str(python), "-m", "pip", "install", "--quiet", HIVEMIND], INSTALL_S)
        _run([str(python), "-c", "import hivemind"], 120.0)
    except (OSError, IotaError) as error:
        raise Unavailable(f"hivemind can't be installed: {error}") from error
    (ENVIRONMENT / "installed").touch()
    return python


def _run(command: list[str], limit_s: float) -> str:
    """The last line of its output; nothing of it outlives the limit."""
    environment = {**os.environ, **ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}
    try:
        done = subprocess.run(
            command, env=environment, timeout=limit_s, capture_output=True, text=True, cwd=OUT.parent.parent
        )
    except subprocess.TimeoutExpired as error:
        raise IotaError(f"{command[1:4]} was not done in {limit_s:g} s") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise IotaError(f"{command[1:4]}: {last[0][-300:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def cell_of(kind: str, size_mib: int, microbatches: int, miners: int, rounds: int, *, install: bool) -> dict[str, Any]:
    """One cell's figures, from disk where it was measured before."""
    number = 0 if kind in ("gloo", "hivemind") else microbatches
    kept = FOLDER / f"{kind}-{size_mib}-{number}-{miners}-{rounds}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    if kind == "hivemind":
        try:
            python = hivemind_python(install=install)
            script = str(Path(__file__).with_name("butterfly_hivemind.py"))
            found = json.loads(_run([str(python), script, str(size_mib), str(miners), str(rounds)], CELL_S))
        except IotaError as error:
            return {"missing": str(error)}
        moved = 2 * (miners - 1) * (size_mib << 20) / miners
        found |= {"bytes_up": moved, "bytes_up_is": "what an averager of fp32 has to send: 2 (n - 1) / n of the tensor"}
    else:
        cell = Cell(size_mib, microbatches, miners, kind, rounds)
        found = json.loads(
            _run([sys.executable, "-m", "benchmarks.butterfly_cell", msgspec.json.encode(cell).decode()], CELL_S)
        )
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(kept)
    return found


def compared(
    cells: dict[str, dict[str, Any]], sizes: list[int], counts: list[int], miners: list[int]
) -> dict[str, Any]:
    """The three ratios of every straight cell, and the worst of each."""
    ratios: dict[str, dict[str, float]] = {}
    for size in sizes:
        for number in miners:
            gloo, hivemind = cells.get(f"gloo {size} MiB x {number}"), cells.get(f"hivemind {size} MiB x {number}")
            for count in counts:
                name = f"straight {size} MiB x {number}, M = {count}"
                ours = cells.get(name)
                if ours is None:
                    continue
                ratio: dict[str, float] = {}
                if gloo is not None:
                    ratio["times_gloo"] = ours["seconds"] / gloo["seconds"]
                if hivemind is not None and "missing" not in hivemind:
                    ratio["faster_than_hivemind"] = hivemind["seconds"] / ours["seconds"]
                    ratio["share_of_hivemind_bytes"] = ours["bytes_up"] / hivemind["bytes_up"]
                ratios[name] = {key: round(value, 3) for key, value in ratio.items()}
    worst: dict[str, float] = {}
    for key, pick in (("times_gloo", max), ("faster_than_hivemind", min), ("share_of_hivemind_bytes", max)):
        values = [ratio[key] for ratio in ratios.values() if key in ratio]
        if values:
            worst[key] = pick(values)
    return {"ratios": ratios, "worst": worst}


def met(worst: dict[str, float], kinds: list[str]) -> bool:
    """Every limit whose yardstick was asked for; one that couldn't be measured isn't met."""
    checks: list[bool] = []
    if "gloo" in kinds:
        checks.append(worst.get("times_gloo", float("inf")) <= TIMES_GLOO)
    if "hivemind" in kinds:
        checks.append(worst.get("faster_than_hivemind", 0.0) >= FASTER_THAN_HIVEMIND)
        checks.append(worst.get("share_of_hivemind_bytes", float("inf")) <= BYTES_OF_HIVEMIND)
    return all(checks)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.butterfly", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small cell of each kind, hivemind if it is installed")
    parser.add_argument("--size", nargs="+", type=int, default=[64, 256], help="MiB of fp32")
    parser.add_argument("--miners", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    kinds, rounds = list(options.kinds), options.rounds
    sizes, miners, counts = options.size, options.miners, options.microbatches
    if options.quick:
        sizes, miners, counts, rounds = [16], [2], [16], 3
        if not (ENVIRONMENT / "installed").exists():
            kinds.remove("hivemind")
    cells: dict[str, dict[str, Any]] = {}
    for size in sizes:
        for number in miners:
            for kind in kinds:
                for count in [0] if kind in ("gloo", "hivemind") else counts:
                    name = f"{kind} {size} MiB x {number}" + (f", M = {count}" if count else "")
                    cells[name] = cell_of(kind, size, count, number, rounds, install=not options.quick)
                    shown = cells[name].get("missing") or f"{cells[name]['seconds']:.3f} s"
                    print(f"{name}: {shown}", file=sys.stderr, flush=True)
    found = compared(cells, sizes, counts, miners)
    # a quick run's merges are too short for what a round of messages costs: it shows that all of it works
    ok = bool(found["ratios"]) if options.quick else met(found["worst"], kinds)
    figures = {"cells": cells, **found}
    print(json.dumps({"name": "butterfly", "figures": figures, "limits": {} if options.quick else LIMITS, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
