"""No honest miner is ever accused: ten thousand of their partials redone, in every way an honest miner can have come about them.

Counted are partials (one member's sum of one step at one stage) of honest members that a validator has redone from real evidence
in real swarms: all of a run whose miners are killed, started again, and come late; of one that liars have rewound; of one with
more processes than cores, paused and continued; of one whose miners recompute (no room for graphs); and those of finished runs of
:mod:`benchmarks.liars` and :mod:`benchmarks.adversaries`, calm ones and ones with liars. A last run, at the default rate and with
more to compute, says what audits cost: their compute over the network's, after probation and in all, and their bytes.

    python -m benchmarks.honest_audits            # keeps finished runs in benchmarks/out/honest_audits
    python -m benchmarks.honest_audits --only restarted rewound
    python -m benchmarks.honest_audits --quick    # one short run
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.adversaries import DIRECTORY as ADVERSARIES
from benchmarks.audit_facts import accused
from benchmarks.audit_swarm import (
    SMALL,
    TINY,
    Plan,
    Shape,
    audited_config,
    default_audits,
    reference_root,
    run_audited,
)
from benchmarks.cheats import cheating
from benchmarks.corpus import OUT
from benchmarks.liars import DIRECTORY as LIARS
from benchmarks.parts import Parts, finish, table, write_section
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.run.config import AuditSection, RunConfig
from subnet.timing import Deadline, seeded

DIRECTORY = OUT / "honest_audits"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
STAGES, MINERS, STEPS, MICROBATCHES = 3, 12, 30, 12
COST_STEPS, COST_MICROBATCHES = 60, 16
AUDITS, COST_SHARE, LIMIT_S = 10_000, 0.03, 1800.0
ELSEWHERE = {
    "calm": (LIARS, "honest-*-100"),
    "beside liars, all redone before the seal": (LIARS, "all-*-100"),
    "beside liars, rewound": (LIARS, "rewind-*-100"),
    "beside one cheat": (ADVERSARIES, "*-[0-9]*"),
}
"""Finished parts of :mod:`benchmarks.liars` and of :mod:`benchmarks.adversaries` whose audits of honest members count."""
SMALL_GRAPHS, LARGE_ITEMS = 1 << 20, Shape(64, 4, 64)
"""Bytes for graphs, the least that is allowed, and items of which none fits: each backward computes its forward again."""

During = Callable[[LocalSwarm, RunStatus], None]


def everything(**more: Any) -> AuditSection:
    return AuditSection(rate=1.0, before_seal="probation", window_steps=4, **more)


def config_of(audit: AuditSection, steps: int, stages: int = STAGES, shape: Shape = TINY) -> RunConfig:
    return audited_config("honest", audit, stages=stages, steps=steps, microbatches=MICROBATCHES, shape=shape)


@dataclass
class Restarts:
    """Every so many steps a miner is killed and started again; halfway one more joins."""

    every: int
    miners: int
    again_at: dict[int, int] = field(default_factory=dict)
    next_at: int = 3
    joined: bool = False

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        step = status.summary.step
        for number, at in list(self.again_at.items()):
            if step >= at:
                del self.again_at[number]
                swarm.wait_end(number, Deadline.after(60.0))
                swarm.restart_miner(number)
        if step >= self.next_at:
            number = seeded("honest_audits", self.next_at).randrange(self.miners)
            self.next_at += self.every
            if number not in self.again_at:
                swarm.kill(number)
                self.again_at[number] = step + 2
        if not self.joined and step >= status.summary.steps // 2:
            self.joined = True
            swarm.add_miner()


@dataclass
class Pauses:
    """Now and then a miner stands still for some steps' time, as on a machine with too much to do."""

    every: int
    miners: int
    paused: tuple[int, int] | None = None
    next_at: int = 5

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        polls = 8
        if self.paused is not None:
            number, left = self.paused
            self.paused = (number, left - 1) if left else None
            if not left:
                swarm.kill(number, signal.SIGCONT)
        elif status.summary.step >= self.next_at:
            number = seeded("honest_audits", self.next_at).randrange(self.miners)
            self.next_at += self.every
            swarm.kill(number, signal.SIGSTOP)
            self.paused = (number, polls)


def options_of(**more: Any) -> SwarmOptions:
    return SwarmOptions(measure_costs=False, device="cpu", **more)


def recomputed(steps: int) -> Plan:
    config = config_of(everything(), steps, shape=LARGE_ITEMS)
    return Plan(config, MINERS, options=options_of(graph_memory_bytes=SMALL_GRAPHS), limit_s=LIMIT_S)


def restarted(steps: int) -> Plan:
    return Plan(config_of(everything(), steps), MINERS, during=Restarts(6, MINERS), limit_s=LIMIT_S)


def oversubscribed(steps: int) -> Plan:
    return Plan(config_of(everything(), steps), 2 * MINERS, during=Pauses(8, 2 * MINERS), limit_s=LIMIT_S)


def rewound(steps: int) -> Plan:
    """Two liars that begin after their probation, one after the other: the honest do their work again, in new incarnations."""
    notes = DIRECTORY / "notes"
    before = {
        number: cheating("scaled_gradient", notes, honest_while="probation", from_step=from_step)
        for number, from_step in ((0, steps // 6), (1, steps // 2))
    }
    config = config_of(everything(rewind=True), steps)
    return Plan(config, MINERS, before, notes, options=options_of(graph_memory_bytes=4 << 30), limit_s=LIMIT_S)


RUNS: dict[str, tuple[Callable[[int], Plan], int]] = {
    "restarted": (restarted, STEPS),
    "rewound": (rewound, STEPS),
    "oversubscribed": (oversubscribed, 2 * STEPS),
    "recomputed": (recomputed, STEPS),
}
"""With their steps."""


class Costs:
    """Audit costs as the run's status says them, by step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        if status.audits is not None and (not self.seen or status.summary.step >= self.seen[-1][0] + 5):
            self.seen.append((status.summary.step, msgspec.to_builtins(status.audits)))


def cost_config(steps: int) -> RunConfig:
    return audited_config(
        "costs", default_audits(), stages=STAGES, steps=steps, microbatches=COST_MICROBATCHES, shape=SMALL
    )


def boundary_bytes(config: RunConfig) -> int:
    """What members send each other of activations and gradients in the run."""
    width = int((config.model.config or {})["hidden_size"])
    one = 4 * config.pipeline.microbatch_rows * config.data.sequence_length * width
    return one * 2 * (config.pipeline.stages - 1) * config.pipeline.microbatches * (config.run.steps + 1)


def run_costs(steps: int) -> dict[str, Any]:
    """A run at the default rate, with what audits had cost at each fifth step."""
    costs = Costs()
    plan = Plan(cost_config(steps), MINERS, during=costs, limit_s=LIMIT_S)
    made = run_audited(DIRECTORY / "swarm", plan)
    made["seen"] = costs.seen
    return made


def cost_figures(made: dict[str, Any]) -> dict[str, Any]:
    """Shares of the network's compute, and bytes. ``after`` probation: from a quarter of the run on."""
    seen = [entry for entry in made["seen"] if entry[1]["receipted_s"] > 0]
    first = next((costs for step, costs in seen if step >= made["steps"][-1] // 4), seen[0][1])
    end = made["costs"] or seen[-1][1]
    work_s, audit_s = (end[key] - first[key] for key in ("receipted_s", "compute_s"))
    state_s = end["state_s"] - first["state_s"]
    items = sum(made["items"].values())
    redone, bytes_ = made["audited_items"], boundary_bytes(cost_config(made["steps"][-1] + 1))
    per_item = (end["compute_s"] / max(1, redone)) / (end["receipted_s"] / items)
    return {
        "compute_share": (audit_s + state_s) / work_s,
        "state_share": state_s / work_s,
        "compute_share_in_all": (end["compute_s"] + end["state_s"]) / end["receipted_s"],
        "redone_item_over_item": per_item,
        "state_over_item": per_item * end["state_s"] / max(1e-9, end["compute_s"]),
        "partials": made["audits"].get("passed", 0),
        "partials_after_seal": made["audits"].get("after_seal", 0),
        "items": items,
        "items_redone": redone,
        "evidence_bytes": end["evidence_bytes"],
        "read_bytes": end["read_bytes"],
        "boundary_bytes": bytes_,
        "evidence_share": end["evidence_bytes"] / bytes_,
    }


def from_elsewhere() -> list[dict[str, Any]]:
    """What became of honest members in finished runs of other benchmarks, as one report a kind."""
    found: list[dict[str, Any]] = []
    for name, (directory, pattern) in ELSEWHERE.items():
        reports: list[dict[str, Any]] = []
        for made in (made for made in Parts(directory).finished(pattern) if "audits_of" in made):
            liars = {*made["liars"], *(made["hotkeys"].get(number) for number in made.get("roles", {}))}
            reports.append(honest_figures(name, {**made, "liars": liars}, None))
        if reports:
            found.append({key: _together(key, [one[key] for one in reports]) for key in reports[0]})
    return found


def _together(key: str, values: list[Any]) -> Any:
    """Of several runs as one."""
    match key:
        case "run" | "root_equal":
            return f"{values[0]} ({len(values)} runs)" if key == "run" else None
        case "finished":
            return all(values)
        case "why":
            return "; ".join(filter(None, values))
        case _:
            return sum(values[1:], values[0])


def honest_figures(name: str, made: dict[str, Any], expected: str | None) -> dict[str, Any]:
    """``audits``: partials of honest members that were redone. ``expected``: the root to end with, where it is known."""
    honest = {hotkey: count for hotkey, count in made["audits_of"].items() if hotkey not in made["liars"]}
    return {
        "run": name,
        "finished": made["finished"],
        "why": made["why"],
        "audits": sum(honest.values()),
        "undecided": made["audits"].get("undecided", 0),
        "unopened": made["audits"].get("unopened", 0),
        "innocent": sorted(accused(made) - set(made["liars"])),
        "root_equal": None if expected is None else made["root"] == expected,
        "rewinds": len(made["rewinds"]),
        "incarnations": sum(made["joined"].values()),
        "seconds": made["seconds"],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honest_audits", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    parser.add_argument("--finished", action="store_true", help="report what is there, run nothing")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/security.md")
    parser.add_argument("--only", nargs="+", choices=[*RUNS, "costs"])
    options = parser.parse_args(arguments)
    parts = Parts(DIRECTORY, again=options.again or options.quick)
    if options.quick:
        return _quick(parts)
    chosen = options.only or [*RUNS, "costs"]
    if options.finished:
        known = {**{name: steps for name, (_, steps) in RUNS.items()}, "costs": COST_STEPS}
        chosen = [name for name in chosen if (DIRECTORY / f"{name}-{known[name]}.json").exists()]
    reports: list[dict[str, Any]] = []
    for name in (name for name in chosen if name in RUNS):
        make, steps = RUNS[name]
        plan = make(steps)
        root = parts.part(_reference(plan), lambda p=plan: {"root": reference_root(p.config)})["root"]
        reports.append(honest_figures(name, parts.part(f"{name}-{steps}", lambda p=plan: _run(p), _said), root))
    if options.only is None:
        reports += from_elsewhere()
    costs = (
        cost_figures(parts.part(f"costs-{COST_STEPS}", lambda: run_costs(COST_STEPS), _said))
        if "costs" in chosen
        else {}
    )
    text = shown(reports) + (f"\n\n{shown_costs(costs)}" if costs else "")
    print(text)
    if options.write:
        write_section(PAGE, "honest_audits", text)
    audits, innocent = sum(one["audits"] for one in reports), sum(len(one["innocent"]) for one in reports)
    figures = {"audits": audits, "innocent_accused": innocent, "runs": reports, "costs": costs}
    limits = {"audits": AUDITS, "innocent_accused": 0, "compute_share": COST_SHARE}
    whole = options.only is not None or audits >= AUDITS
    cheap = not costs or costs["compute_share"] <= COST_SHARE
    ended = all(one["finished"] for one in reports if one["run"] in RUNS)
    return finish("honest_audits", figures, limits, not innocent and whole and cheap and ended)


def _quick(parts: Parts) -> int:
    steps = 6
    config = config_of(everything(), steps, stages=2)
    plan = Plan(config, 4, limit_s=300.0)
    report = honest_figures("quick", parts.part("quick", lambda: _run(plan), _said), reference_root(config))
    print(shown([report]))
    ok = report["finished"] and report["root_equal"] and not report["innocent"] and report["audits"] > 0
    return finish("honest_audits", report, {"innocent_accused": 0}, bool(ok))


def _reference(plan: Plan) -> str:
    """The name of the part of its run in one process."""
    return f"reference-{(plan.config.model.config or {})['hidden_size']}-{plan.config.run.steps}"


def _run(plan: Plan) -> dict[str, Any]:
    return run_audited(DIRECTORY / "swarm", plan)


def _said(made: dict[str, Any]) -> str:
    end = f"root {made['root'][:12]}" if made["finished"] else f"not finished: {made['why']}"
    return f"{end}, {made['seconds']:.0f} s, audits {made['audits']}, accused {sorted(accused(made))}"


def shown(reports: Sequence[dict[str, Any]]) -> str:
    head = ["run", "audits", "honest accused", "undecided", "unopened", "root as without", "rewinds", "incarnations"]
    rows = [
        [
            one["run"],
            one["audits"],
            len(one["innocent"]),
            one["undecided"],
            one["unopened"],
            one["root_equal"],
            one["rewinds"],
            one["incarnations"],
        ]
        for one in reports
    ]
    return table(head, rows)


def shown_costs(costs: dict[str, Any]) -> str:
    """What audits at the default rate have cost, as a sentence for each."""
    after, whole, state = (100 * costs[key] for key in ("compute_share", "compute_share_in_all", "state_share"))
    return "\n".join(
        [
            f"- Compute at the default rate, after probation: {after:.2f} % of the network's (of it {state:.2f} for bringing a"
            f" stage to a step's state); with everybody's probation, in {COST_STEPS} steps: {whole:.1f} %.",
            f"- {costs['items_redone']} of {costs['items']} items redone; one costs {costs['redone_item_over_item']:.2f} times"
            " what it cost first.",
            f"- Evidence put into the store: {costs['evidence_bytes'] / 1e6:.2f} MB, {100 * costs['evidence_share']:.2f} % of the"
            f" {costs['boundary_bytes'] / 1e6:.0f} MB of boundaries that members sent each other; read by the auditor, state and"
            f" log included: {costs['read_bytes'] / 1e6:.1f} MB.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
