"""Two validators, one run, two seeds: how far the scores are apart that each finds by its own audits after 200 steps.

The second follows the journal in the log store, redoes what its own seed draws and keeps its own scores; it knows nothing of the
first one's database. The miners are of two speeds, and one lies in some of its work, from a step behind its probation on.
Compared are the two score vectors over all miners: Spearman's rank correlation and the largest difference; at the default audit
rate, at which such a liar may get through so short a run, and at one at which it doesn't.

    python -m benchmarks.two_validators            # 200 steps twice, keeps its parts in benchmarks/out/two_validators
    python -m benchmarks.two_validators --quick    # 4 steps, 3 honest miners
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.audit_facts import accused
from benchmarks.audit_swarm import Plan, audited_config, default_audits, run_audited, scores_of
from benchmarks.cheats import cheating
from benchmarks.corpus import OUT
from benchmarks.parts import Parts, finish, table
from iota.entries import Before
from iota.remote import Remote
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import IotaError
from subnet.protocol.api import RunStatus
from subnet.protocol.follow_api import FollowerStatus
from subnet.timing import Deadline

DIRECTORY = OUT / "two_validators"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "two_validators.png"
STAGES, MINERS, STEPS, QUICK_MINERS, QUICK_STEPS = 2, 8, 200, 3, 4
SLOW, SLOW_S = (4, 5, 6), 0.02
"""Miners whose every item takes so much longer."""
LIAR, CHEAT, LYING_SHARE, LYING_FROM = 7, "scaled_gradient", 0.3, 60
RATES = (None, 0.1)
"""Audit rates; None: the default."""
CORRELATION, DIFFERENCE = 0.9, 0.05
LIMIT_S, CATCH_UP_S, CALL_S = 3300.0, 300.0, 20.0


def slow(seconds: float) -> None:
    """For :class:`iota.entries.Before`: every item of this process takes longer."""
    from subnet.engine.stage_executor import StageExecutor

    def slower(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(self: StageExecutor, *arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return original(self, *arguments, **named)

        return changed

    for name in ("forward", "backward"):
        setattr(StageExecutor, name, slower(getattr(StageExecutor, name)))


# --- comparing -----------------------------------------------------------------------------------------------------


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


def compare(leader: dict[str, float], follower: dict[str, float]) -> dict[str, float]:
    hotkeys = sorted({*leader, *follower})
    first, second = ([scores.get(hotkey, 0.0) for hotkey in hotkeys] for scores in (leader, follower))
    return {
        "correlation": spearman(first, second),
        "largest_difference": max((abs(x - y) for x, y in zip(first, second, strict=True)), default=1.0),
    }


# --- the swarm -----------------------------------------------------------------------------------------------------


class TwoValidators(LocalSwarm):
    """``found``: both score vectors and what the follower did, taken once the run is over and the follower is done with it."""

    found: dict[str, Any]
    follower_url = ""

    def begin_following(self) -> None:
        if not self.follower_url:
            self.follower_url = self.start_follower()

    def final_root(self) -> str:
        root = super().final_root()
        status = self._caught_up()
        found = {"leader": scores_of(self.validator_url), "follower": scores_of(self.follower_url)}
        TwoValidators.found = {
            **found,
            **_told(status),
            "same_root": status is not None and status.summary.root == root,
        }
        return root

    def _caught_up(self) -> FollowerStatus | None:
        """What the follower says once it has nothing left to redo, or at the end of the wait."""
        deadline, status = Deadline.after(CATCH_UP_S), None
        while not deadline.expired:
            try:
                status = Remote(self.follower_url).status(Deadline.after(CALL_S))
            except IotaError:
                status = None  # it doesn't follow the run yet
            followed = status if isinstance(status, FollowerStatus) and status.summary.state == "finished" else None
            if followed is not None and not any(view.to_redo for view in followed.followed):
                return followed
            time.sleep(0.5)
        return status if isinstance(status, FollowerStatus) else None


def _told(status: FollowerStatus | None) -> dict[str, Any]:
    if status is None:
        return {"own_audits": {}, "breaches": {}, "verdicts": 0, "confirmed": 0, "to_redo": None}
    return {
        "own_audits": status.own_audits,
        "breaches": status.num_breaches,
        "verdicts": len(status.verdicts),
        "confirmed": sum(verdict.confirmed for verdict in status.verdicts),
        "to_redo": sum(view.to_redo for view in status.followed),
    }


def run(steps: int, miners: int, rate: float | None) -> dict[str, Any]:
    """The facts of one run with a follower from its first step on."""

    def during(swarm: LocalSwarm, status: RunStatus) -> None:
        assert isinstance(swarm, TwoValidators)
        swarm.begin_following()

    notes = DIRECTORY / "lies"
    before = {number: Before("benchmarks.two_validators:slow", {"seconds": SLOW_S}) for number in SLOW}
    if miners > LIAR:
        before[LIAR] = cheating(CHEAT, notes, share=LYING_SHARE, from_step=LYING_FROM)
    before = {number: what for number, what in before.items() if number < miners}
    plan = Plan(
        audited_config(
            "two_validators", default_audits(**({} if rate is None else {"rate": rate})), stages=STAGES, steps=steps
        ),
        miners,
        before=before,
        notes=notes,
        during=during,
        swarm_class=TwoValidators,
        limit_s=LIMIT_S,
        options=SwarmOptions(measure_costs=False, device="cpu", spare_validators=1),
    )
    TwoValidators.found = {"leader": {}, "follower": {}, **_told(None), "same_root": False}
    made = run_audited(DIRECTORY / "swarm", plan)
    if not TwoValidators.found["follower"]:
        raise RuntimeError(made["why"] or "the follower has no scores")  # nothing to keep: made again next time
    return {**made, **TwoValidators.found}


# --- what is shown -------------------------------------------------------------------------------------------------


def kind_of(made: dict[str, Any], number: int) -> str:
    if made["hotkeys"][str(number)] in made["liars"]:
        return f"lies in {LYING_SHARE:.0%} from step {LYING_FROM}"
    return "slow" if number in SLOW else "fast"


def rows_of(made: dict[str, Any]) -> list[list[Any]]:
    """Number, kind and both scores of each miner."""
    return [
        [int(number), kind_of(made, int(number)), made["leader"].get(hotkey, 0.0), made["follower"].get(hotkey, 0.0)]
        for number, hotkey in sorted(made["hotkeys"].items(), key=lambda pair: int(pair[0]))
    ]


def draw(rows: list[tuple[dict[str, Any], dict[str, Any]]], path: Path) -> None:
    """Both vectors of each run as bars, a pair for each miner."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(len(rows), 1, figsize=(8, 3.6 * len(rows)), squeeze=False)
    for (made, figures), axes in zip(rows, every[:, 0], strict=True):
        bars = rows_of(made)
        for shift, column, label in ((-0.2, 2, "leads"), (0.2, 3, "follows, own seed")):
            heights = [bar[column] for bar in bars]
            axes.bar([bar[0] + shift for bar in bars], heights, 0.4, label=f"validator that {label}")
        names = [f"miner {bar[0]}\n{bar[1].replace(' from', chr(10) + 'from')}" for bar in bars]
        axes.set_xticks([bar[0] for bar in bars], names)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylabel("score (share of all)")
        axes.set_ylim(top=1.3 * max(0.01, *(max(bar[2:]) for bar in bars)))  # room for the legend
        title = f"{figures['steps']} steps, audit rate {figures['rate']}: rank correlation {figures['correlation']:.3f}"
        axes.set_title(f"{title}, largest difference {figures['largest_difference']:.4f}", fontsize=10)
        axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def figures_of(made: dict[str, Any], steps: int, rate: float | None) -> dict[str, Any]:
    told = {name: made[name] for name in ("own_audits", "breaches", "verdicts", "confirmed", "to_redo", "same_root")}
    return {
        **compare(made["leader"], made["follower"]),
        "steps": steps,
        "rate": default_audits().rate if rate is None else rate,
        "miners": len(made["follower"]),
        "seconds": made["seconds"],
        "why": made["why"],
        "innocent_accused": sorted(accused(made) - set(made["liars"])),
        "liars_accused": sorted(accused(made) & set(made["liars"])),
        **told,
    }


def is_close(figures: dict[str, Any], quick: bool) -> bool:
    """Whether the run is whole, nobody innocent stands accused, nobody's word was broken, and the vectors are near each other."""
    whole = not figures["why"] and figures["miners"] and figures["same_root"] and figures["to_redo"] == 0
    clean = not figures["innocent_accused"] and not figures["breaches"] and not figures["own_audits"].get("refused")
    near = figures["largest_difference"] <= DIFFERENCE and (quick or figures["correlation"] >= CORRELATION)
    return bool(whole and clean and near)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_validators", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished parts")
    options = parser.parse_args(arguments)
    steps, miners = (QUICK_STEPS, QUICK_MINERS) if options.quick else (STEPS, MINERS)
    parts, rows = Parts(DIRECTORY, again=options.again or options.quick), list[tuple[dict[str, Any], dict[str, Any]]]()
    for rate in RATES[:1] if options.quick else RATES:
        name = f"run-{steps}" if rate is None else f"run-{steps}-rate-{rate:g}"
        made = parts.part(
            name,
            lambda rate=rate: run(steps, miners, rate),  # type: ignore[misc]
            lambda said: f"{said['seconds']:.0f} s {said['why']}",
        )
        figures = figures_of(made, steps, rate)
        rows.append((made, figures))
        print(f"\naudit rate {figures['rate']}:\n")
        print(table(["miner", "kind", "leader's score", "follower's score"], rows_of(made)), flush=True)
    draw(rows, DIRECTORY / "quick.png" if options.quick else PICTURE)
    limits = {"correlation": CORRELATION, "largest_difference": DIFFERENCE, "innocent_accused": [], "breaches": {}}
    runs = [figures for _, figures in rows]
    worst = {
        "correlation": min(figures["correlation"] for figures in runs),
        "largest_difference": max(figures["largest_difference"] for figures in runs),
        "runs": runs,
    }
    return finish("two_validators", worst, limits, all(is_close(figures, options.quick) for figures in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
