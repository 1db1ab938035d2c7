"""Every cheat against a real validator: caught or harmless, how soon, what it earned, what it cost the others.

Each is a real miner process with one altered behaviour (:mod:`benchmarks.cheats`) in a swarm of 2 stages and 6 miners, on a tiny
model, and lies in all that it does: from its first item on, in its probation; and where an audit is to find it and it needs
nobody else, once more from the end of its probation on, at a fifth of the work redone. Without rewind, so that what slips
through stays to be seen. Prints a table and draws how many steps each lived.

    python -m benchmarks.adversaries              # keeps finished cheats in benchmarks/out/adversaries
    python -m benchmarks.adversaries --write      # and puts the table into docs/security.md
    python -m benchmarks.adversaries --only no_work lying_owner
    python -m benchmarks.adversaries --quick      # one cheat
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.audit_facts import CONVICTED, LYING, accused, convictions
from benchmarks.audit_swarm import Plan, audited_config, reference_root, run_audited, share_of_honest
from benchmarks.cheats import CHEATS, cheating
from benchmarks.corpus import OUT
from benchmarks.parts import Parts, finish, table, write_section
from benchmarks.sybils import sybil_plan
from iota.swarm import LocalSwarm
from subnet.protocol.api import RunStatus
from subnet.run.config import AuditSection, RunConfig

DIRECTORY = OUT / "adversaries"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
STAGES, MINERS, QUICK_MINERS = 2, 6, 4
AUDIT = AuditSection(rate=0.2, before_seal="probation", window_steps=4)
PROBATION, AFTER = "in probation", "after it"
"""When it begins to lie."""
SHORT, LONG, QUICK_STEPS = 12, 30, 5
"""Steps: of those that are found in their probation, of those that wait for its end."""
SYBILS, WATCHED = "sybils", "watched_honesty"
SEEN = (*LYING, "checksum")
"""Why somebody is gone who was seen to lie: at the state's root the others vote it out."""
NUM_CHEATS, EARNED, LIMIT_S = 14, 0.01, 600.0


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


def config_of(steps: int) -> RunConfig:
    return audited_config("adversaries", AUDIT, stages=STAGES, steps=steps)


class Trial(NamedTuple):
    """One run: the cheat, when it begins, and how long it has."""

    cheat: str
    when: str
    steps: int


def trials(names: Sequence[str]) -> list[Trial]:
    """Of the cheats with these names, and of the sybils."""
    first = [Trial(name, PROBATION, SHORT) for name in names if name != WATCHED]
    alone = [name for name in names if name in CHEATS and CHEATS[name].slots == 1 and CHEATS[name].caught_by == "audit"]
    return first + [Trial(name, AFTER, LONG) for name in alone]


def swarm_of(when: str) -> Path:
    """Those that begin at different times may run beside each other."""
    return DIRECTORY / f"swarm-{when.split()[0]}"


def label(trial: Trial) -> str:
    """The name of its part."""
    return f"{trial.cheat}-{trial.when.split()[0]}-{trial.steps}"


def plan_of(trial: Trial, miners: int) -> Plan:
    notes, config = swarm_of(trial.when).with_suffix(".notes"), config_of(trial.steps)
    if trial.cheat == SYBILS:
        return sybil_plan(config, miners, notes, limit_s=LIMIT_S)
    slots = CHEATS[trial.cheat].slots or miners // STAGES
    more = {"honest_while": "probation"} if trial.when == AFTER and trial.cheat != WATCHED else {}
    before = {number: cheating(trial.cheat, notes, slots=slots, **more) for number in range(miners)}
    return Plan(config, miners, before, notes, Rescue(STAGES), limit_s=LIMIT_S)


def run_trial(trial: Trial, miners: int) -> dict[str, Any]:
    return run_audited(swarm_of(trial.when), plan_of(trial, miners))


def run_honest(trial: Trial, expected: str) -> dict[str, Any]:
    """The same without a cheat."""
    steps = trial.steps
    made = run_audited(swarm_of(trial.when), Plan(config_of(steps), MINERS, limit_s=LIMIT_S))
    if made["root"] != expected or accused(made):
        raise RuntimeError(f"the honest run went wrong: {made['why'] or made['cases']}")
    return made


def verdict(cheat: str, made: dict[str, Any], honest: dict[str, Any], expected: str) -> dict[str, Any]:
    """What is reported of one cheat. ``honest``: a run without it."""
    seen, convicted, liars = convictions(made, SEEN), convictions(made, ("liar",), CONVICTED), made["liars"]
    soonest = [_soon(made, liar, seen[liar]) for liar in liars if liar in seen and liar in made["lies"]]
    shares = {liar: share for liar in liars if (share := share_of_honest(made, liar)) is not None}
    extra_s = made["training_s"] - honest["training_s"] if made["training_s"] and honest.get("training_s") else None
    found = {
        "cheat": cheat,
        "lies": sum(told[0] for told in made["lies"].values()),
        "caught": len([liar for liar in liars if liar in seen]),
        "convicted": len([liar for liar in liars if liar in convicted]),
        "liars": len(liars),
        "steps": min((steps for steps, _ in soonest), default=None),
        "seconds": min((seconds for _, seconds in soonest), default=None),
        "earned": max(shares.values(), default=None),
        "voided_items": sum(items for hotkey, items in made["void_items"].items() if hotkey not in liars),
        "extra_s": extra_s,
        "root_equal": made["root"] == expected,
        "surviving": len(made["surviving"]),
        "innocent": sorted(accused(made) - set(liars)),
        "finished": made["finished"],
    }
    paid = any(share > EARNED for liar, share in shares.items() if liar in convicted)
    harmless = found["root_equal"] or found["caught"] > 0
    found["ok"] = bool(made["finished"] and found["lies"] and harmless and not found["innocent"] and not paid)
    return found


def _soon(made: dict[str, Any], liar: str, found: dict[str, Any]) -> tuple[int, float]:
    """Steps and seconds from a liar's first lie to when it was seen."""
    _, step, time_ns = made["lies"][liar]
    return max(0, found["step"] - step), (found["time_ns"] - time_ns) / 1e9


def adversaries(chosen: Sequence[Trial], miners: int, parts: Parts) -> list[dict[str, Any]]:
    """Reports of these trials."""
    reports: list[dict[str, Any]] = []
    for trial in chosen:
        steps = trial.steps
        root = parts.part(f"reference-{steps}", lambda s=steps: {"root": reference_root(config_of(s))})["root"]
        honest: dict[str, Any] = {}
        if miners == MINERS:
            honest = parts.part(f"honest-{steps}", lambda t=trial, r=root: run_honest(t, r), _said)
        made = parts.part(label(trial), lambda t=trial: run_trial(t, miners), _said)
        reports.append({"when": trial.when, **verdict(trial.cheat, made, honest, root)})
    return reports


def _said(made: dict[str, Any]) -> str:
    guilty = sorted(hotkey[:8] for hotkey in convictions(made, SEEN))
    end = f"root {made['root'][:12]}" if made["finished"] else f"not finished: {made['why']}"
    lies = sum(told[0] for told in made["lies"].values())
    return f"{end}, {made['seconds']:.0f} s, {lies} lies, seen {guilty}"


def shown(reports: Sequence[dict[str, Any]]) -> str:
    head = ["cheat", "what it does", "lies from", "lies told", "outcome", "after steps", "after s"]
    more = ["earned", "others' items done again", "extra s", "final root as without", "lies in the end"]
    rows = [
        [
            report["cheat"],
            CHEATS[report["cheat"]].words if report["cheat"] in CHEATS else "one coldkey, three hotkeys, one lies",
            "its first item" if report["when"] == PROBATION else "the end of probation",
            report["lies"],
            _outcome(report),
            report["steps"],
            report["seconds"],
            None if report["earned"] is None else f"{100 * report['earned']:.0f} %",
            report["voided_items"],
            report["extra_s"],
            report["root_equal"],
            report["surviving"],
        ]
        for report in reports
    ]
    return table([*head, *more], rows)


def _outcome(report: dict[str, Any]) -> str:
    if report["convicted"]:
        return f"convicted ({report['convicted']} of {report['liars']})"
    if report["caught"]:
        return "caught, unpaid or voted out"
    return "harmless" if report["root_equal"] else "NOT CAUGHT"


def draw(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Steps from the first lie until it was seen, by cheat and time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(report["cheat"] for report in reports))
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(names) + 1.5))
    height = 0.4
    for number, when in enumerate((PROBATION, AFTER)):
        chosen = [report for report in reports if report["when"] == when]
        at = [names.index(report["cheat"]) + number * height for report in chosen]
        axes.barh(at, [(report["steps"] or 0) + 0.15 for report in chosen], height, label=f"lies {when}")
        for place, report in zip(at, chosen, strict=True):
            if report["steps"] is None:
                axes.text(0.25, place, _outcome(report), va="center", fontsize=7)
    axes.set_yticks([place + height / 2 for place in range(len(names))], names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("steps from the first lie until it was seen")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adversaries", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cheat, few steps")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    parser.add_argument("--only", nargs="+", choices=[*CHEATS, SYBILS], help="these cheats")
    parser.add_argument("--when", choices=[PROBATION, AFTER], help="only those that begin then")
    parser.add_argument("--finished", action="store_true", help="report what is there, run nothing")
    parser.add_argument("--write", action="store_true", help="put the table into docs/security.md")
    options = parser.parse_args(arguments)
    quick = [Trial("scaled_gradient", PROBATION, QUICK_STEPS)]
    chosen = quick if options.quick else trials(options.only or [*CHEATS, SYBILS])
    chosen = [trial for trial in chosen if options.when in (None, trial.when)]
    if options.finished:
        chosen = [trial for trial in chosen if (DIRECTORY / f"{label(trial)}.json").exists()]
    parts = Parts(DIRECTORY, again=options.again or options.quick)
    reports = adversaries(chosen, QUICK_MINERS if options.quick else MINERS, parts)
    text = shown(reports)
    print(text)
    draw(reports, DIRECTORY / ("quick.png" if options.quick else "lifetimes.png"))
    if options.write:
        write_section(PAGE, "adversaries", text)
    bad = [f"{report['cheat']} {report['when']}" for report in reports if not report["ok"]]
    num_cheats = len({report["cheat"] for report in reports})
    figures: dict[str, Any] = {
        "num_cheats": num_cheats,
        "num_caught": sum(report["caught"] > 0 for report in reports),
        "num_innocent_accused": sum(len(report["innocent"]) for report in reports),
        "bad": bad,
        "reports": reports,
    }
    enough = 1 if options.quick or options.only or options.when else NUM_CHEATS
    limits = {"bad": [], "num_innocent_accused": 0, "earned": EARNED, "num_cheats": enough}
    return finish("adversaries", figures, limits, not bad and num_cheats >= enough)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
