"""A third of the miners lie, each in its own way, and the run ends where it would have ended without them.

12 miners at 3 stages, 100 steps, 4 liars of kinds drawn from a seed: one full-time, one in 5 % of its work that also clears
every accused when it is asked as third party, one that joins late, one that turns once its probation is over. Twice a seed: with
everything redone before the seal (the final root is that of the clean run), and at the default rate with rewinds (equal whenever
every liar that lied was convicted; else lies survive, and are counted). The clean run is that of one process, bit for bit that
of honest miners; a run of such says how long it takes.

    python -m benchmarks.liars               # 10 seeds; keeps finished runs in benchmarks/out/liars
    python -m benchmarks.liars --seeds 1 2 --mode all
    python -m benchmarks.liars --quick       # one seed, everything redone, few steps and miners
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.audit_facts import CONVICTED, accused, convictions
from benchmarks.audit_swarm import Plan, audited_config, default_audits, reference_end, run_audited, share_of_honest
from benchmarks.cheats import cheating
from benchmarks.corpus import OUT
from benchmarks.parts import Parts, finish, table, write_section
from iota.swarm import LocalSwarm
from subnet.protocol.api import RunStatus
from subnet.run.config import AuditSection, RunConfig

DIRECTORY = OUT / "liars"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
SEEDS = tuple(range(1, 11))
GUILTY = ("liar",)
"""Why who is gone is out for good; what else is a conviction is the end of a case."""
MICROBATCHES = 6
KINDS = (
    "wrong_forward",
    "wrong_backward",
    "zero_gradient",
    "scaled_gradient",
    "stale_weights",
    "replayed_output",
    "no_work",
    "lying_partial",
    "lying_fingerprint",
    "lying_owner",
    "inflated_maxima",
    "equivocating_sender",
)
"""What is possible alone and at any stage."""
HOLDOUT_PERCENT, LIMIT_S = 2.0, 3600.0


@dataclass(frozen=True)
class Size:
    stages: int
    miners: int
    liars: int
    steps: int
    snapshot_steps: int


FULL, QUICK = Size(3, 12, 4, 100, 10), Size(2, 5, 2, 6, 3)


def modes(quick: bool) -> dict[str, AuditSection]:
    every = AuditSection(rate=0.0, before_seal="all")
    return {"all": every} if quick else {"all": every, "rewind": default_audits(rewind=True)}


def config_of(audit: AuditSection, size: Size, seed: int) -> RunConfig:
    steps = {"steps": size.steps, "snapshot_steps": size.snapshot_steps}
    return audited_config("liars", audit, stages=size.stages, seed=100 + seed, microbatches=MICROBATCHES, **steps)


def swarm_of(audit: AuditSection) -> Path:
    """Two modes may run beside each other."""
    return DIRECTORY / f"swarm-{audit.before_seal}"


@dataclass(frozen=True)
class Role:
    """What one liar does. ``joins_at``: it comes once so many steps are done. ``covers``: it clears whoever is accused."""

    cheat: str
    share: float = 1.0
    honest_while: str = ""
    joins_at: int = 0
    covers: bool = False

    def terms(self) -> dict[str, Any]:
        return {"share": self.share, "honest_while": self.honest_while, "covers": self.covers}


def roles(seed: int, size: Size) -> dict[int, Role]:
    """By number of the miner; the last number is the one that may come late."""
    rng = random.Random(f"liars/{seed}")
    kinds = rng.sample(KINDS, size.liars)
    numbers = [*rng.sample(range(size.miners - 1), size.liars - 1), size.miners - 1]
    ways = [
        Role(kinds[0], share=0.05, covers=True),
        *(Role(kind, honest_while=when) for kind, when in zip(kinds[1:-1], ("probation", ""), strict=False)),
        Role(kinds[-1], joins_at=max(2, size.steps // 4)),
    ]
    return dict(zip(numbers, ways, strict=True))


class Latecomers:
    """Miners with the highest numbers, started when their time has come."""

    def __init__(self, late: Sequence[Role], first: int) -> None:
        self._late, self._first = list(late), first

    def __call__(self, swarm: LocalSwarm, status: RunStatus) -> None:
        started = swarm.num_miners - self._first
        if started < len(self._late) and status.summary.step >= self._late[started].joins_at:
            swarm.add_miner()


def run_liars(audit: AuditSection, size: Size, seed: int) -> dict[str, Any]:
    directory, given = swarm_of(audit), roles(seed, size)
    notes = directory.with_suffix(".notes")
    before = {number: cheating(role.cheat, notes, seed=seed, **role.terms()) for number, role in given.items()}
    late = [role for _, role in sorted(given.items()) if role.joins_at]
    first = size.miners - len(late)
    plan = Plan(config_of(audit, size, seed), first, before, notes, Latecomers(late, first), limit_s=LIMIT_S)
    made = run_audited(directory, plan)
    made["roles"] = {
        str(number): [role.cheat, role.share, role.honest_while, role.joins_at] for number, role in given.items()
    }
    return made


def run_honest(audit: AuditSection, size: Size, seed: int, root: str) -> dict[str, Any]:
    """The same run of honest miners."""
    config = config_of(audit, size, seed)
    made = run_audited(swarm_of(audit), Plan(config, size.miners, limit_s=LIMIT_S))
    if made["root"] != root:
        raise RuntimeError(f"honest miners came to {made['root'][:12]}, not {root[:12]}: {made['why']}")
    return made


def report(made: dict[str, Any], clean: dict[str, Any], honest_s: float | None) -> dict[str, Any]:
    """``clean``: root and hold-out loss without liars. ``honest_s``: what a run of honest miners took."""
    guilty, lied = convictions(made, GUILTY, CONVICTED), set(made["lies"])
    earned = [share for liar in lied & set(guilty) if (share := share_of_honest(made, liar)) is not None]
    holdout, own = clean["holdout"], made["holdout"]
    return {
        "finished": made["finished"],
        "why": made["why"],
        "equal": made["root"] == clean["root"],
        "liars": len(made["roles"]),
        "lied": len(lied),
        "convicted": len(lied & set(guilty)),
        "all_convicted": lied <= set(guilty),
        "innocent": sorted(accused(made) - {made["hotkeys"].get(number) for number in made["roles"]}),
        "lies": sum(told[0] for told in made["lies"].values()),
        "surviving": len(made["surviving"]),
        "rewinds": len(made["rewinds"]),
        "earned": max(earned, default=0.0),
        "holdout_percent": 100 * abs(own / holdout - 1) if own and holdout else None,
        "slower": made["seconds"] / honest_s if honest_s else None,
    }


def shown(reports: Sequence[dict[str, Any]]) -> str:
    head = ["seed", "mode", "root as without", "liars convicted", "lies told", "lies in the end", "rewinds"]
    rows = [
        [
            one["seed"],
            one["mode"],
            one["equal"],
            f"{one['convicted']} of {one['lied']}",
            one["lies"],
            one["surviving"],
            one["rewinds"],
            one["holdout_percent"],
            len(one["innocent"]),
        ]
        for one in reports
    ]
    return table([*head, "hold-out loss off by %", "innocent accused"], rows)


def is_ok(one: dict[str, Any]) -> bool:
    """What is promised of one run."""
    if not one["finished"] or one["innocent"] or (one["holdout_percent"] or 0.0) > HOLDOUT_PERCENT:
        return False
    return one["equal"] if one["mode"] == "all" else one["equal"] or not one["all_convicted"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.liars", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    parser.add_argument("--write", action="store_true", help="put the table into docs/security.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--mode", choices=["all", "rewind"])
    options = parser.parse_args(arguments)
    size, seeds = (QUICK, [1]) if options.quick else (FULL, options.seeds)
    parts = Parts(DIRECTORY, again=options.again or options.quick)
    mark, reports = f"-{size.steps}", list[dict[str, Any]]()
    for seed in seeds:
        every = modes(options.quick)
        plain = next(iter(every.values()))
        clean = parts.part(f"clean-{seed}{mark}", lambda s=seed, a=plain: reference_end(config_of(a, size, s)))
        for mode, audit in every.items():
            if options.mode in (None, mode):
                honest = _honest(parts, mode, audit, size, options.quick)
                made = parts.part(f"{mode}-{seed}{mark}", lambda a=audit, s=seed: run_liars(a, size, s), _said)
                reports.append({"seed": seed, "mode": mode, **report(made, clean, honest)})
    text = shown(reports)
    print(text)
    if options.write:
        write_section(PAGE, "liars", text)
    bad = [f"{one['mode']} {one['seed']}" for one in reports if not is_ok(one)]
    rewound = [one for one in reports if one["mode"] == "rewind"]
    figures = {
        "runs": len(reports),
        "bad": bad,
        "equal_with_all": sum(one["equal"] for one in reports if one["mode"] == "all"),
        "equal_with_rewind": sum(one["equal"] for one in rewound),
        "all_convicted_share": sum(one["all_convicted"] for one in rewound) / len(rewound) if rewound else None,
        "surviving": sum(one["surviving"] for one in rewound),
        "worst_holdout_percent": max((one["holdout_percent"] or 0.0 for one in reports), default=0.0),
        "reports": reports,
    }
    limits = {"bad": [], "worst_holdout_percent": HOLDOUT_PERCENT}
    return finish("liars", figures, limits, not bad)


def _honest(parts: Parts, mode: str, audit: AuditSection, size: Size, quick: bool) -> float | None:
    """Seconds of the first seed's run without liars."""
    if quick:
        return None
    seed = SEEDS[0]
    clean = parts.part(f"clean-{seed}-{size.steps}", lambda: reference_end(config_of(audit, size, seed)))
    made = parts.part(f"honest-{mode}-{seed}-{size.steps}", lambda: run_honest(audit, size, seed, clean["root"]), _said)
    return made["seconds"]


def _said(made: dict[str, Any]) -> str:
    end = f"root {made['root'][:12]}" if made["finished"] else f"not finished: {made['why']}"
    guilty = sorted(hotkey[:8] for hotkey in convictions(made, GUILTY, CONVICTED))
    return f"{end}, {made['seconds']:.0f} s, {len(made['rewinds'])} rewinds, convicted {guilty}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
