"""The table of faults: every role, in every phase of a step, under every fault; which cells make no sense, and why."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator

from fault_phases import PHASES
from fault_sim import SERVERS, Cell, attempt

FAULTS = ("kill", "pause", "slow", "partition", "corrupt", "disk full")
ROLES = ("first", "middle", "last", "sole", "owner", "contributor", "maker", "joiner", *SERVERS)

NAMES = {
    "first": "replica of the first stage",
    "middle": "replica of a middle stage",
    "last": "replica of the last stage",
    "sole": "sole replica of its stage",
    "owner": "owner of a partition",
    "contributor": "contributor that owns nothing",
    "maker": "maker of a snapshot",
    "joiner": "joiner, restoring",
    "coordinator": "coordinator",
    "log": "log store",
    "store": "blob store",
}


def variants(role: str, fault: str) -> tuple[str, ...]:
    """The forms of a fault at a role; each is a run of its own."""
    member = role not in SERVERS
    if fault == "kill" and role == "coordinator":
        return ("", "disk lost")
    if fault == "pause" and role == "coordinator":
        return ("", "takeover")
    if fault == "partition":
        return ("coordinator", "peers") if member else ("members", "log") if role == "coordinator" else ("",)
    if fault == "corrupt" and member:
        return ("flight", "claims")
    return ("",)


BEFORE_MANIFEST = ("calibration", "planned", "forward", "backward", "evaluation", "freeze", "commit")
AFTER_MERGE = ("step sealed", "update", "snapshot", "run end")
NO_ORDER = ("calibration", "planned", "step sealed", "update")


def senseless(cell: Cell) -> str:
    """Why a cell isn't tried; "" where it is."""
    role, phase = cell.role, cell.phase
    if role in ("owner", "contributor") and phase in BEFORE_MANIFEST:
        return "nobody owns a partition before the manifest: the member is a replica, a row above"
    if role in ("owner", "contributor") and phase in AFTER_MERGE:
        return "the merge is over: the member is a replica, a row above"
    if role == "maker" and phase in NO_ORDER:
        return "no snapshot is on order: none is due before step 1, and the seal of a step waits for the one that is"
    if role == "store" and phase == "run end":
        return "nobody asks the blob store for anything after `RunFinished`"
    if phase == "run end" and role not in ("maker", *SERVERS):
        if cell.variant in ("peers", "flight", "claims"):
            return "members say nothing any more, to each other or to the coordinator, after `RunFinished`"
        if cell.fault == "disk full":
            return "members write nothing any more after `RunFinished`"
    if role == "joiner" and phase in ("update", "snapshot") and cell.variant == "flight":
        return "the last step is dealt before such a late joiner is ready: it sends nothing to peers"
    if role == "sole" and cell.variant == "claims":
        return "nothing is promised where the only replica of a stage signs what is wrong"
    return ""


def senseless_delayed(cell: Cell) -> str:
    """Why a cell that makes sense isn't tried where steps overlap; "" where it is."""
    if cell.role == "maker" and cell.phase in ("forward", "backward", "freeze"):
        return "a step is computed, and frozen, before the snapshot of the state that it updates is on order"
    early = ("calibration", "planned", "forward", "backward", "evaluation")
    if cell.role == "joiner" and cell.variant == "flight" and cell.phase not in early:
        return "the last step is dealt before such a late joiner is ready: it sends nothing to peers"
    return ""


def all_cells() -> Iterator[Cell]:
    for role in ROLES:
        for phase in PHASES:
            for fault in FAULTS:
                for variant in variants(role, fault):
                    yield Cell(role, phase, fault, variant)


def cells(delay: int = 0) -> list[Cell]:
    """All cells that make sense, each variant by itself."""
    return [cell for cell in all_cells() if not senseless(cell) and not (delay and senseless_delayed(cell))]


def quick_cells(every: int = 23, *, delay: int = 0) -> list[Cell]:
    """A spread over all roles, phases and faults, for the suite that everybody runs."""
    return cells(delay)[::every]


# --- as Markdown ---------------------------------------------------------------------------------------------------

LETTERS = dict(zip(FAULTS, "KPSNCD", strict=True))


def entry(role: str, phase: str, outcomes: dict[Cell, str]) -> str:
    """One letter a fault: upper case ok, lower case a named pause that recovered, a dot where it makes no sense."""
    letters = ""
    for fault, letter in LETTERS.items():
        found = {outcomes[cell] for v in variants(role, fault) if (cell := Cell(role, phase, fault, v)) in outcomes}
        bad = found - {"ok", "paused"}
        letters += "!" if bad else letter.lower() if "paused" in found else letter if found else "."
    return letters


def markdown(outcomes: dict[Cell, str]) -> str:
    heads = [NAMES[role] for role in ROLES]
    lines = ["| phase | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for phase in PHASES:
        row = " | ".join(f"`{entry(role, phase, outcomes)}`" for role in ROLES)
        lines.append(f"| {phase} | {row} |")
    legend = ", ".join(f"{letter} {fault}" for fault, letter in LETTERS.items())
    lines += ["", f"{legend}; lower case: the run paused, named the stage and went on; a dot: not tried, because"]
    reasons = Counter(why for cell in all_cells() if (why := senseless(cell)))
    lines += [f"- {why} ({count} runs)" for why, count in reasons.items()]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Runs the cells that have all of ``words`` among role, phase, fault and variant; prints the table and failures.

    The word ``delayed``: with ``update_delay`` 1.
    """
    started, outcomes = time.perf_counter(), dict[Cell, str]()
    delay = int("delayed" in words)
    words = [word for word in words if word != "delayed"]
    for cell in cells(delay):
        if any(word not in (cell.role, cell.phase, cell.fault, cell.variant) for word in words):
            continue
        try:
            outcomes[cell] = "paused" if attempt(cell, delay=delay).named_pause else "ok"
        except Exception as error:  # noqa: BLE001  every failure is an entry of the table
            outcomes[cell] = f"{type(error).__name__}: {error}"
    print(markdown(outcomes))
    counts = Counter(what if what in ("ok", "paused") else "failed" for what in outcomes.values())
    print(f"\n{len(outcomes)} runs, {time.perf_counter() - started:.0f} s: {dict(counts)}")
    for cell, what in outcomes.items():
        if what not in ("ok", "paused"):
            print(f"{cell}: {what}")
    return int("failed" in counts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
