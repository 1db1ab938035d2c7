"""Every cheat against a real validator: caught or harmless, how soon, what it earned, what it cost the others.

Each is a real miner process with one altered behaviour (:mod:`benchmarks.cheats`) in a swarm of 2 stages and 6 miners, on a
tiny model, under two regimes: audits before the seal in probation and a fifth of the work after it; everything before the seal.
Without rewind, so that what slips through stays to be seen. Prints a table and draws how many steps each lived.

    python -m benchmarks.adversaries              # keeps finished cheats in benchmarks/out/adversaries
    python -m benchmarks.adversaries --only no_work lying_owner
    python -m benchmarks.adversaries --quick      # two cheats, one regime
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.audit_facts import LYING, accused, convictions
from benchmarks.audit_swarm import Plan, audited_config, reference_root, run_audited, share_of_honest
from benchmarks.cheats import CHEATS, cheating
from benchmarks.corpus import OUT
from benchmarks.parts import Parts, finish, table
from benchmarks.sybils import sybil_plan
from iota.swarm import LocalSwarm
from subnet.protocol.api import RunStatus
from subnet.run.config import AuditSection, RunConfig

DIRECTORY = OUT / "adversaries"
STAGES, MINERS, STEPS = 2, 6, 40
REPLICAS = MINERS // STAGES
RATE = 0.2
REGIMES = {
    "probation": AuditSection(rate=RATE, before_seal="probation", window_steps=4),
    "all": AuditSection(rate=0.0, before_seal="all"),
}
SYBILS = "sybils"
GUILTY = (*LYING, "checksum")
"""Why a liar is gone: at the state's root the others vote it out."""
EARNED, LIMIT_S = 0.01, 900.0


class Rescue:
    """A stage that all have left gets an honest miner: what colluding replicas took with them is not what is measured."""

    def __init__(self, stages: int, most: int = 4, patience: int = 20) -> None:
        self._stages, self._left, self._patience = stages, most, patience
        self._empty = 0

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        served = {member.stage for member in status.members}
        begun = status.summary.step > 0 or status.num_gone > 0
        self._empty = self._empty + 1 if begun and len(served) < self._stages else 0
        if self._empty > self._patience and self._left:
            self._empty, self._left = 0, self._left - 1
            swarm.add_miner()


def config_of(regime: str, steps: int) -> RunConfig:
    return audited_config("adversaries", REGIMES[regime], stages=STAGES, steps=steps)


def plan_of(cheat: str | None, regime: str, steps: int) -> Plan:
    """A run with this cheat in it; None: an honest one."""
    notes = DIRECTORY / "notes"
    config, rescue = config_of(regime, steps), Rescue(STAGES)
    if cheat == SYBILS:
        return sybil_plan(config, MINERS, notes, limit_s=LIMIT_S)
    if cheat is None:
        return Plan(config, MINERS, limit_s=LIMIT_S)
    slots = CHEATS[cheat].slots or REPLICAS
    before = {number: cheating(cheat, notes, slots=slots) for number in range(MINERS)}
    return Plan(config, MINERS, before, notes, rescue, limit_s=LIMIT_S)


def run_cheat(cheat: str | None, regime: str, steps: int) -> dict[str, Any]:
    return run_audited(DIRECTORY / "swarm", plan_of(cheat, regime, steps))


def verdict(cheat: str, made: dict[str, Any], clean: dict[str, Any], expected: str) -> dict[str, Any]:
    """What is reported of one cheat under one regime."""
    guilty, liars = convictions(made, GUILTY), made["liars"]
    soonest = [_soon(made, liar, guilty[liar]) for liar in liars if liar in guilty and liar in made["lies"]]
    earned = [share for liar in liars if (share := share_of_honest(made, liar)) is not None]
    innocent = sorted(accused(made) - set(liars))
    voids = sum(items for hotkey, items in made["void_items"].items() if hotkey not in liars)
    lied = sum(told[0] for told in made["lies"].values())
    convicted = bool(liars) and all(liar in guilty for liar in liars)
    extra_s = made["training_s"] - clean["training_s"] if made["training_s"] and clean["training_s"] else None
    found = {
        "cheat": cheat,
        "lies": lied,
        "caught": len([liar for liar in liars if liar in guilty]),
        "liars": len(liars),
        "steps": min((steps for steps, _ in soonest), default=None),
        "seconds": min((seconds for _, seconds in soonest), default=None),
        "earned": max(earned, default=None),
        "voided_items": voids,
        "extra_s": extra_s,
        "root_equal": made["root"] == expected,
        "surviving": len(made["surviving"]),
        "innocent": innocent,
        "finished": made["finished"],
    }
    paid = convicted and max(earned, default=0.0) > EARNED
    harmless = found["root_equal"] or found["caught"] > 0
    found["ok"] = bool(made["finished"] and lied and harmless and not innocent and not paid)
    return found


def _soon(made: dict[str, Any], liar: str, found: dict[str, Any]) -> tuple[int, float]:
    """Steps and seconds from a liar's first lie to its conviction."""
    _, step, time_ns = made["lies"][liar]
    return max(0, found["step"] - step), (found["time_ns"] - time_ns) / 1e9


def adversaries(names: Sequence[str], regimes: Sequence[str], steps: int, parts: Parts) -> list[dict[str, Any]]:
    """Reports by cheat and regime."""
    reports: list[dict[str, Any]] = []
    for regime in regimes:
        mark = f"{regime}-{steps}"
        expected = parts.part(f"reference-{mark}", lambda r=regime: {"root": reference_root(config_of(r, steps))})
        clean = parts.part(f"clean-{mark}", lambda r=regime: run_cheat(None, r, steps), _said)
        if clean["root"] != expected["root"] or accused(clean):
            raise RuntimeError(f"the honest run under {regime} went wrong: {clean['why'] or clean['cases']}")
        for name in names:
            made = parts.part(f"{name}-{mark}", lambda n=name, r=regime: run_cheat(n, r, steps), _said)
            reports.append({"regime": regime, **verdict(name, made, clean, expected["root"])})
    return reports


def _said(made: dict[str, Any]) -> str:
    guilty = sorted(hotkey[:8] for hotkey in convictions(made, GUILTY))
    end = f"root {made['root'][:12]}" if made["finished"] else f"not finished: {made['why']}"
    lies = sum(told[0] for told in made["lies"].values())
    return f"{end}, {made['seconds']:.0f} s, {lies} lies, convicted {guilty}"


def shown(reports: Sequence[dict[str, Any]]) -> str:
    """For the results' page."""
    head = [
        "cheat",
        "what it does",
        "regime",
        "lies",
        "outcome",
        "after steps",
        "after s",
        "earned",
        "others' items voided",
    ]
    rows = [
        [
            report["cheat"],
            CHEATS[report["cheat"]].words if report["cheat"] in CHEATS else "one coldkey, three hotkeys, one lies",
            report["regime"],
            report["lies"],
            _outcome(report),
            report["steps"],
            report["seconds"],
            None if report["earned"] is None else f"{100 * report['earned']:.1f} %",
            report["voided_items"],
            report["extra_s"],
            report["root_equal"],
            report["surviving"],
        ]
        for report in reports
    ]
    return table([*head, "extra s", "root as without", "lies in the end"], rows)


def _outcome(report: dict[str, Any]) -> str:
    if report["caught"]:
        return f"caught ({report['caught']} of {report['liars']})"
    return "harmless" if report["root_equal"] else "NOT CAUGHT"


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Steps from the first lie to the conviction, by cheat and regime."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(report["cheat"] for report in reports))
    regimes = list(dict.fromkeys(report["regime"] for report in reports))
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(names) + 1.5))
    height = 0.8 / len(regimes)
    for number, regime in enumerate(regimes):
        chosen = [report for report in reports if report["regime"] == regime]
        at = [names.index(report["cheat"]) + number * height for report in chosen]
        axes.barh(at, [(report["steps"] or 0) + 0.15 for report in chosen], height, label=f"audits: {regime}")
        for place, report in zip(at, chosen, strict=True):
            if report["steps"] is None:
                axes.text(0.25, place, _outcome(report), va="center", fontsize=7)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("steps from the first lie to the conviction")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adversaries", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cheats, one regime, few steps")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    parser.add_argument("--only", nargs="+", choices=[*CHEATS, SYBILS], help="these cheats")
    parser.add_argument("--regime", choices=[*REGIMES], help="one of the two")
    options = parser.parse_args(arguments)
    names = options.only or (["scaled_gradient", "lying_owner"] if options.quick else [*CHEATS, SYBILS])
    regimes = [options.regime] if options.regime else ["probation"] if options.quick else [*REGIMES]
    steps = 6 if options.quick else STEPS
    reports = adversaries(names, regimes, steps, Parts(DIRECTORY, again=options.again or options.quick))
    print(shown(reports))
    draw(reports, DIRECTORY / ("quick.png" if options.quick else "lifetimes.png"))
    bad = [f"{report['cheat']} ({report['regime']})" for report in reports if not report["ok"]]
    figures = {
        "num_cheats": len({report["cheat"] for report in reports}),
        "num_caught": sum(report["caught"] > 0 for report in reports),
        "num_innocent_accused": sum(len(report["innocent"]) for report in reports),
        "bad": bad,
        "reports": reports,
    }
    return finish("adversaries", figures, {"bad": [], "num_innocent_accused": 0, "earned": EARNED}, not bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
