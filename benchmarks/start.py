"""A local swarm of 12 miners is training within 20 s of its start: all are members and a step is being worked on.

python -m benchmarks.start [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median

import msgspec

from benchmarks.corpus import OUT
from benchmarks.determinism import config_of, prepared
from benchmarks.swarms import run_swarm
from iota.swarm import LocalSwarm
from subnet.protocol.api import RunStatus
from subnet.run.config import RunSection

LIMIT_S = 20.0


def started_s(miners: int, stages: int) -> dict[str, float]:
    """Seconds from the first process to all members in and a lease dealt; and to the first sealed training step."""
    _, data = prepared()
    config = config_of("fp32", False, stages, 3, data)
    config = msgspec.structs.replace(config, run=RunSection(name="start", seed=1, steps=3))
    all_in: list[float] = []

    def seen(swarm: LocalSwarm, status: RunStatus, now_s: float) -> None:
        if not all_in and len(status.members) == miners and any(member.leases for member in status.members):
            all_in.append(now_s)

    result = run_swarm(OUT / "start", config, miners, on_status=seen)
    return {"all_training_s": all_in[0] if all_in else float("inf"), "first_step_s": result.first_step_s}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 miners, once")
    options = parser.parse_args(arguments)
    miners, rounds = (4, 1) if options.quick else (12, 3)
    found = [started_s(miners, 3 if miners == 12 else 2) for _ in range(rounds)]
    figures = {key: median(one[key] for one in found) for key in found[0]}
    ok = figures["all_training_s"] <= LIMIT_S
    limits = {"all_training_s": LIMIT_S}
    print(
        json.dumps(
            {"name": "start", "figures": {**figures, "miners": miners, "rounds": found}, "limits": limits, "ok": ok}
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
