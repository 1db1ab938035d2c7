"""How surely an audit finds a cheat: theory beside measurement, by audit rate, items a step and replicas.

Theory is the closed form of :mod:`subnet.audit.draw`. Measured is a Monte Carlo of journals: a stage whose replicas share the
step's microbatches; one lies in a share of its items; who must be redone before the seal, and which sealed partials are drawn,
is decided by the production code (``must_audit`` of the fold, the draws of :mod:`subnet.audit.draw`), a run id and a block
hash for each trial. "By step t": by an audit of one of the cheat's first t steps; in a run the audits of a window are made when its
last step is sealed, those before the seal at once. A stage of one replica is drawn four times as often.

    python -m benchmarks.audit_power               # 4000 trials; keeps finished rows in benchmarks/out/audit_power
    python -m benchmarks.audit_power --swarm       # and what the finished parts of benchmarks.adversaries say
    python -m benchmarks.audit_power --quick       # 400 trials, few rows
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import OUT
from benchmarks.parts import Parts, finish, table, write_section
from subnet.audit import draw
from subnet.run.audits import must_audit
from subnet.run.config import AuditSection, DataSection, ModelSection, PipelineSection, RunConfig, RunSection
from subnet.run.events import RunPlanned
from subnet.run.state import RunState, new_state

DIRECTORY = OUT / "audit_power"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
SHARES = (1.0, 0.2, 0.05)
"""Of its items that a cheat lies in."""
BY_STEP = (3, 10, 50, 200)
TRIALS, QUICK_TRIALS = 4000, 400
CHEAT, AUDITOR = "miner-0", "validator-0"
SIGMAS, TAIL_SHARE = 3.0, 0.01
FULL_TIME_BY_3 = 0.99


@dataclass(frozen=True)
class Row:
    rate: float
    microbatches: int
    replicas: int

    @property
    def items(self) -> int:
        """A member's a step, where they share evenly."""
        return self.microbatches // self.replicas


ROWS = tuple(
    Row(rate, microbatches, replicas)
    for rate in (0.02, 0.05, 0.2)
    for microbatches, replicas in ((16, 1), (16, 4), (64, 4))
)
QUICK_ROWS = (Row(0.05, 16, 4), Row(0.2, 16, 2))


def audit_of(row: Row) -> AuditSection:
    return AuditSection(rate=row.rate, before_seal="probation")


def rate_of(row: Row) -> float:
    """Of its draws: higher where nobody of another coldkey checks the merge."""
    return draw.rate_of(audit_of(row), unchecked=row.replicas == 1)


def theory(row: Row, share: float, steps: int, *, probation: bool) -> float:
    """Probability of having been found out by one of the first ``steps`` steps."""
    if probation:
        return draw.catch_with_probation(audit_of(row), steps, share, row.items, rate=rate_of(row))
    return draw.catch_probability(rate_of(row), steps, draw.wrong_partials(share, row.items))


def fold_of(row: Row) -> RunState:
    """A fold of a run with this row's settings, in which nothing has happened yet."""
    state = new_state()
    config = RunConfig(
        run=RunSection(name="power", steps=1000),
        model=ModelSection(config={"model_type": "llama"}),
        data=DataSection(sources=("data",), sequence_length=32),
        pipeline=PipelineSection(stages=1, microbatches=row.microbatches),
        audit=audit_of(row),
    )
    state.run = RunPlanned("power", config, {}, (), (), None, (0,), (), "", "", "", "")
    return state


class Trial:
    """One journal: which of the cheat's partials were redone, whatever it lied about in them."""

    def __init__(self, row: Row, number: int, steps: int, *, probation: bool) -> None:
        state, audit = fold_of(row), audit_of(row)
        if not probation:
            state.audits.clean[CHEAT] = audit.probation_items
        self.redone: list[bool] = []
        seed = b""
        for step in range(steps):
            if step % audit.window_steps == 0:
                window = step // audit.window_steps
                seed = draw.seed(f"run-{number}", 0, window, f"block-{number}-{window}", AUDITOR)
            if must_audit(state, CHEAT):
                self.redone.append(True)
                state.audits.clean[CHEAT] = state.audits.clean.get(CHEAT, 0) + row.items
            else:
                self.redone.append(draw.unit(seed, step, 0, CHEAT) < rate_of(row))

    def caught_at(self, wrong: Sequence[bool]) -> int | None:
        """The first step whose partial is wrong and redone: what was clean before it is as it was."""
        return next((step for step, redone in enumerate(self.redone) if redone and wrong[step]), None)


def measure(row: Row, trials: int, *, probation: bool, seed: int) -> dict[float, list[float]]:
    """By share: how many of the trials were caught by each of ``BY_STEP``, as a fraction."""
    rng = random.Random(f"{seed}/{row}/{probation}")
    steps = max(BY_STEP)
    caught: dict[float, list[int]] = {share: [0] * len(BY_STEP) for share in SHARES}
    for number in range(trials):
        trial = Trial(row, number, steps, probation=probation)
        for share in SHARES:
            wrong = [any(rng.random() < share for _ in range(row.items)) for _ in range(steps)]
            at = trial.caught_at(wrong)
            for place, by in enumerate(BY_STEP):
                caught[share][place] += at is not None and at < by
    return {share: [count / trials for count in counts] for share, counts in caught.items()}


def sigmas(found: float, expected: float, trials: int) -> float:
    """By how many standard deviations of the measurement it differs from theory."""
    deviation = math.sqrt(expected * (1 - expected) / trials)
    if deviation < 1e-9:
        return 0.0 if abs(found - expected) < 1e-9 else math.inf
    # where a success or a failure is expected less than once the count isn't normal: half a count is no deviation
    return max(0.0, abs(found - expected) - 0.5 / trials) / deviation


def power(row: Row, trials: int, seed: int) -> list[dict[str, Any]]:
    """The cells of one setting."""
    cells: list[dict[str, Any]] = []
    for probation in (True, False):
        found = measure(row, trials, probation=probation, seed=seed)
        for share in SHARES:
            expected = [theory(row, share, by, probation=probation) for by in BY_STEP]
            off = [sigmas(f, e, trials) for f, e in zip(found[share], expected, strict=True)]
            setting = {"rate": row.rate, "items": row.items, "replicas": row.replicas, "probation": probation}
            cells.append({**setting, "share": share, "theory": expected, "measured": found[share], "sigmas": off})
    return cells


def shown(cells: Sequence[dict[str, Any]]) -> str:
    head = ["audit rate", "items a step", "replicas", "cheat from", "lies in"]
    rows = [
        [
            f"{100 * cell['rate']:g} %",
            cell["items"],
            cell["replicas"],
            "its first item" if cell["probation"] else "after probation",
            f"{100 * cell['share']:g} %",
            *(f"{t:.3f} / {m:.3f}" for t, m in zip(cell["theory"], cell["measured"], strict=True)),
        ]
        for cell in cells
    ]
    return table([*head, *(f"by step {by}" for by in BY_STEP)], rows)


def swarm_counts() -> dict[str, Any]:
    """Of the finished parts of :mod:`benchmarks.adversaries`: full-time cheats that an audit is to find, by when they began:
    steps from the first lie until each was seen (None: never), and how many by the third.
    """
    from benchmarks.adversaries import AFTER, DIRECTORY, PROBATION, SEEN, WATCHED, label, trials
    from benchmarks.audit_facts import convictions
    from benchmarks.cheats import CHEATS

    names = [name for name, cheat in CHEATS.items() if cheat.caught_by == "audit" and name != WATCHED]
    found: dict[str, Any] = {}
    for when in (PROBATION, AFTER):
        steps: dict[str, list[int | None]] = {}
        for trial in trials(names):
            for made in Parts(DIRECTORY).finished(label(trial)) if trial.when == when else ():
                seen = convictions(made, SEEN)
                for liar, (_, first, _) in made["lies"].items():
                    steps.setdefault(trial.cheat, []).append(seen[liar]["step"] - first if liar in seen else None)
        every = [step for some in steps.values() for step in some]
        by_3 = sum(step is not None and step < BY_STEP[0] for step in every)
        found[when] = {"liars": len(every), "caught_by_step_3": by_3, "steps": steps}
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit_power", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--swarm", action="store_true", help="count real runs as well")
    parser.add_argument("--again", action="store_true", help="forget finished rows")
    parser.add_argument("--write", action="store_true", help="put the table into docs/security.md")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    trials = QUICK_TRIALS if options.quick else options.trials
    parts = Parts(DIRECTORY, again=options.again or options.quick)
    cells: list[dict[str, Any]] = []
    for row in QUICK_ROWS if options.quick else ROWS:
        name = f"{row.rate:g}-{row.microbatches}-{row.replicas}-{trials}-{options.seed}"
        cells += parts.part(name, lambda r=row: {"cells": power(r, trials, options.seed)})["cells"]
    text = shown(cells)
    print(text)
    if options.write:
        write_section(PAGE, "audit_power", text)
    off = [value for cell in cells for value in cell["sigmas"]]
    full = [cell["measured"][0] for cell in cells if cell["probation"] and cell["share"] == 1.0]
    figures: dict[str, Any] = {
        "trials": trials,
        "full_time_in_probation_by_step_3": min(full),
        "cells": len(off),
        "beyond_3_sigmas": sum(value > SIGMAS for value in off),
        "worst_sigmas": max(off),
    }
    if options.swarm:
        figures["swarm"] = swarm_counts()
    limits = {"full_time_in_probation_by_step_3": FULL_TIME_BY_3, "share_beyond_3_sigmas": TAIL_SHARE}
    ok = min(full) > FULL_TIME_BY_3 and figures["beyond_3_sigmas"] <= TAIL_SHARE * len(off)
    return finish("audit_power", figures, limits, ok)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
