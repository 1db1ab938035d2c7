"""Two validators, one run, two seeds: how far the scores are apart that each finds by its own audits after 200 steps.

The second follows the journal in the log store, redoes what its own seed draws and keeps its own scores; it knows nothing of the
first one's database. Compared are the two score vectors over all miners: Spearman's rank correlation and the largest difference.

    python -m benchmarks.two_validators            # 200 steps, keeps its part in benchmarks/out/two_validators
    python -m benchmarks.two_validators --quick    # 6 steps
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.audit_facts import accused
from benchmarks.audit_swarm import Plan, audited_config, default_audits, run_audited, scores_of
from benchmarks.corpus import OUT
from benchmarks.parts import Parts, finish, table
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import IotaError
from subnet.protocol.api import RunStatus

DIRECTORY = OUT / "two_validators"
STAGES, MINERS, STEPS, QUICK_STEPS = 2, 8, 200, 6
CORRELATION, DIFFERENCE = 0.9, 0.05
LIMIT_S = 3600.0


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, the mean of them for equals."""
    ordered = sorted(range(len(values)), key=lambda index: values[index])
    found = [0.0] * len(values)
    at = 0
    while at < len(ordered):
        end = at
        while end + 1 < len(ordered) and values[ordered[end + 1]] == values[ordered[at]]:
            end += 1
        for place in range(at, end + 1):
            found[ordered[place]] = (at + end) / 2 + 1
        at = end + 1
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; 1 where neither vector says any difference."""
    a, b = ranks(first), ranks(second)
    mean = (len(a) + 1) / 2
    over = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    under = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    if under == 0:
        return 1.0 if a == b else 0.0
    return over / under


class Follower:
    """The second validator, started once the run has begun; its scores as they were last seen, by step."""

    def __init__(self) -> None:
        self.url = ""
        self.scores: dict[str, float] = {}
        self.why = "never asked"

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        if not self.url:
            if status.summary.step >= 1:
                self.url = swarm.start_follower()
            return
        try:
            self.scores = scores_of(self.url) or self.scores
        except IotaError as error:
            self.why = str(error)


class Leading:
    """A swarm's statuses, with the leader's scores of the same moment beside the follower's."""

    def __init__(self) -> None:
        self.follower = Follower()
        self.leader: dict[str, float] = {}

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        self.follower(swarm, status)
        if self.follower.scores:
            self.leader = scores_of(swarm.validator_url)


def run(steps: int) -> dict[str, Any]:
    both = Leading()
    options = SwarmOptions(measure_costs=False, device="cpu", spare_validators=1)
    config = audited_config("two_validators", default_audits(), stages=STAGES, steps=steps)
    plan = Plan(config, MINERS, during=both, options=options, limit_s=LIMIT_S)
    made = run_audited(DIRECTORY / "swarm", plan)
    return {**made, "leader": both.leader, "follower": both.follower.scores, "follower_why": both.follower.why}


def compare(leader: dict[str, float], follower: dict[str, float]) -> dict[str, float]:
    hotkeys = sorted({*leader, *follower})
    first, second = ([scores.get(hotkey, 0.0) for hotkey in hotkeys] for scores in (leader, follower))
    return {
        "correlation": spearman(first, second),
        "largest_difference": max((abs(x - y) for x, y in zip(first, second, strict=True)), default=1.0),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_validators", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    options = parser.parse_args(arguments)
    steps = QUICK_STEPS if options.quick else STEPS
    parts = Parts(DIRECTORY, again=options.again or options.quick)
    made = parts.part(f"run-{steps}", lambda: run(steps), lambda found: f"{found['seconds']:.0f} s {found['why']}")
    found = compare(made["leader"], made["follower"])
    rows = [[hotkey[:8], made["leader"].get(hotkey), made["follower"].get(hotkey)] for hotkey in sorted(made["leader"])]
    print(table(["miner", "leader's score", "follower's score"], rows))
    figures = {**found, "steps": steps, "miners": len(made["follower"]), "accused": sorted(accused(made))}
    limits = {"correlation": CORRELATION, "largest_difference": DIFFERENCE}
    close = found["largest_difference"] <= DIFFERENCE and (options.quick or found["correlation"] >= CORRELATION)
    ok = made["finished"] and bool(made["follower"]) and close and not figures["accused"]
    return finish("two_validators", figures, limits, bool(ok))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
