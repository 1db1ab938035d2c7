"""A run that is stopped whole, goes on with another fleet, and later under another validator: the same root.

3 stages, 40 steps. *Day 1*: 6 miners; at a third every process is ended at once. *Day 2*: the same directories, 9 miners.
*Day 3*: the validator's directory is deleted; another validator leads from the log store, with 4 miners. The root must be
that of the one-process reference.

    python -m benchmarks.resume
    python -m benchmarks.resume --quick    # 9 steps, fewer miners
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from pathlib import Path

from benchmarks.corpus import OUT
from benchmarks.determinism import config_of, prepared, reference_root
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.timing import Deadline

DIRECTORY = OUT / "resume"
STAGES = 3
LIMIT_S = 900.0


class TakenOver(LocalSwarm):
    """Its first validator is the spare one, which leads from the log store."""

    def start_validator(
        self, name: str = "validator-1", *, lead_from: bool = True, directory: Path | None = None
    ) -> None:
        super().start_validator(name, lead_from=lead_from, directory=directory)


def day(
    kind: type[LocalSwarm], run: RunConfig | None, miners: int, until: int | None, spare: int
) -> tuple[RunStatus, float]:
    """Goes on until ``until`` steps are sealed (or the end), then ends every process with signal 9; seconds to a seal."""
    options = SwarmOptions(measure_costs=False, spare_validators=1, spare_miners=spare)
    began, first = time.monotonic(), 0.0
    before: list[int] = []
    with kind(DIRECTORY / "swarm", run, miners, options) as swarm:

        def seen(status: RunStatus) -> None:
            nonlocal first
            before.append(status.summary.step)
            if not first and status.summary.step > before[0]:
                first = time.monotonic() - began

        def there(status: RunStatus) -> bool:
            return status.summary.state == "finished" or (until is not None and status.summary.step >= until)

        status = swarm.wait_until(there, Deadline.after(LIMIT_S), poll_s=0.1, seen=seen)
        names = [name for name, child in swarm.parent.children.items() if child.running]
        for name in names:
            swarm.kill(name, signal.SIGKILL)
    return status, round(first, 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resume", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    steps, fleet = (9, (3, 4, 3)) if options.quick else (40, (6, 9, 4))
    _, data = prepared()
    config = config_of("fp32", False, STAGES, steps, data)
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    spare = max(fleet) - fleet[0]
    one, first = day(LocalSwarm, config, fleet[0], steps // 3, spare)
    two, again = day(LocalSwarm, None, fleet[1], 2 * steps // 3, 0)
    shutil.rmtree(DIRECTORY / "swarm" / "validator")
    three, taken = day(TakenOver, None, fleet[2], None, 0)
    expected = reference_root("fp32", False, steps)
    figures = {
        "steps_at_the_stops": [one.summary.step, two.summary.step],
        "fleets": fleet,
        "seconds_to_a_seal": [first, again, taken],
        "root": three.summary.root,
        "num_different": int(three.summary.root != expected),
    }
    result = {"name": "resume", "figures": figures, "limits": {"num_different": 0}, "ok": not figures["num_different"]}
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
