"""Faults at given roles in given phases of a step, with real processes: every run ends with the undisturbed root.

3 stages, 2 miners each, behind proxies. The validator's journal is read as it grows; a cell fires as soon as the event
that begins its phase is in it, and the next cell follows once steps are sealed again. ``whole stage`` ends every replica
of a stage: the run must say that it waits for that stage, and go on.

    python -m benchmarks.fault_cells            # about 45 cells in four runs, kept in benchmarks/out/fault_cells
    python -m benchmarks.fault_cells --quick    # four cells
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.corpus import OUT
from benchmarks.determinism import reference_root
from benchmarks.fault_cells_run import Cell, run_cells

DIRECTORY = OUT / "fault_cells"
MINER_FAULTS = ("kill", "pause", "slow", "partition", "corrupt", "disk full")
MINER_PHASES = ("forward", "backward", "reduce", "check", "snapshot")
ROLES = ("first", "middle", "last", "owner", "sole")
STEPS_PER_CELL = 8
PER_RUN = 12
QUICK = (
    Cell("owner", "reduce", "kill"),
    Cell("middle", "forward", "partition"),
    Cell("validator", "check", "kill"),
    Cell("whole stage", "forward", "kill"),
)


def all_cells() -> list[Cell]:
    """Each fault of a miner in each phase, roles in turn; the validator and the store; joiners; a whole stage."""
    cells = [
        Cell(ROLES[(row + column) % len(ROLES)], phase, fault)
        for row, phase in enumerate(MINER_PHASES)
        for column, fault in enumerate(MINER_FAULTS)
    ]
    cells += [Cell("validator", phase, "kill") for phase in ("forward", "reduce", "check", "sealed", "snapshot")]
    cells += [Cell("validator", "forward", "pause"), Cell("validator", "reduce", "disk full")]
    cells += [Cell("store", "reduce", fault) for fault in ("pause", "partition", "corrupt", "slow")]
    cells += [Cell("store", "snapshot", "disk full"), Cell("store", "sealed", "partition")]
    cells += [Cell("joiner", "restore", fault) for fault in ("kill", "pause", "partition")]
    cells += [Cell("whole stage", "forward", "kill"), Cell("whole stage", "reduce", "kill")]
    return cells


def table(found: Sequence[dict[str, object]]) -> str:
    """Markdown: a row for each role and phase, the faults with what became of them and the seconds until it went on."""
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in found:
        entry = f"{cell['fault']} {cell['outcome']} {cell['seconds']} s"
        rows.setdefault((str(cell["role"]), str(cell["phase"])), []).append(entry)
    lines = ["| role | phase | faults |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {role} | {phase} | {', '.join(each)} |" for (role, phase), each in rows.items())])


def run_part(number: int, cells: Sequence[Cell], again: bool) -> dict[str, object]:
    path = DIRECTORY / f"part-{number}.json"
    if path.exists() and not again:
        return json.loads(path.read_text())
    steps = STEPS_PER_CELL * len(cells) + 6
    made: dict[str, object] = run_cells(DIRECTORY / f"part-{number}", cells, steps)
    made["expected"] = reference_root("fp32", False, steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_cells", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    options = parser.parse_args(arguments)
    cells = list(QUICK) if options.quick else all_cells()
    groups = [cells[i : i + PER_RUN] for i in range(0, len(cells), PER_RUN)]
    offset = 100 if options.quick else 0
    parts = [run_part(offset + n, group, options.again or options.quick) for n, group in enumerate(groups)]
    found: list[dict[str, object]] = [cell for part in parts for cell in part["cells"]]  # type: ignore[union-attr]
    print(table(found), flush=True)
    figures = {
        "num_cells": len(found),
        "num_not_fired": sum(cell["outcome"] == "did not fire" for cell in found),
        "num_not_recovered": sum(cell["outcome"] == "did not go on" for cell in found),
        "num_unnamed_pauses": sum(cell["outcome"] == "unnamed" for cell in found),
        "num_different": sum(part["root"] != part["expected"] for part in parts),
    }
    limits = {"num_cells": len(cells), **{name: 0 for name in figures if name != "num_cells"}}
    ok = all(figures[name] == limit for name, limit in limits.items())
    print(json.dumps({"name": "fault_cells", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
