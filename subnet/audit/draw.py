"""Which sealed partials a validator redoes: drawn after the fact from a block that nobody knew, so that nobody can be ready for it.

For a closed window: seed = BLAKE3("iota/audit/1\\0", run id, branch, window, hash of the block that ``WindowClosed`` fixed, hotkey
of the validator), each with its length before it; u = BLAKE3(seed, step, stage, hotkey of the miner) as a number in [0, 1). A
partial is drawn if u < its rate: the run's, times 4 where all replicas of the stage belong to one coldkey, times 4 for a hotkey
with an unpaid mismatch or a released quarantine in its record, at most 1.

Theory. A miner whose partials are wrong independently with probability f, each drawn independently with probability r, is caught
within n partials with probability 1 - (1 - r f)^n; one that is redone whole, as in probation, has r = 1. A partial of k items with
a share q of wrong items is wrong with probability 1 - (1 - q)^k: who cheats seldom but on whole partials is harder to catch than
who cheats on as many single items. Expected: 1 / (r f) partials until it is caught.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from blake3 import blake3

from subnet.audit.ledger import PASSED, PartialRecord, WorkLedger
from subnet.errors import InputError
from subnet.run.config import AuditSection
from subnet.run.events import WindowClosed
from subnet.run.state import RunState, config, plan
from subnet.words import Member

UNCHECKED_FACTOR = 4.0
"""Where nobody of a second coldkey has checked the merge, more is at stake."""
MARKED_FACTOR = 4.0
"""For a hotkey that has given reason to look."""
_SEED = b"iota/audit/1\0"
_UNIT_BITS = 53


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """The drawn partials of one (step, stage); ``whole``: they are all of it, so that its merge can be redone too."""

    step: int
    stage: int
    members: tuple[Member, ...]
    whole: bool


def seed(run_id: str, branch: int, window: int, block_hash: str, hotkey: str) -> bytes:
    """The seed of one validator's draws of one window. Changing this changes every draw: bump its version."""
    hasher = blake3(_SEED)
    for part in (run_id, str(branch), str(window), block_hash, hotkey):
        data = part.encode()
        hasher.update(len(data).to_bytes(4, "little")).update(data)
    return hasher.digest()


def unit(seed: bytes, step: int, stage: int, hotkey: str) -> float:
    """A number in [0, 1), uniform and independent for each partial."""
    data = step.to_bytes(8, "little", signed=True) + stage.to_bytes(4, "little") + hotkey.encode()
    return (int.from_bytes(blake3(seed + data).digest()[:8], "little") >> (64 - _UNIT_BITS)) / 2**_UNIT_BITS


def rate_of(audit: AuditSection, *, unchecked: bool = False, marked: bool = False) -> float:
    """Probability with which a partial is drawn."""
    factor = (UNCHECKED_FACTOR if unchecked else 1.0) * (MARKED_FACTOR if marked else 1.0)
    return min(1.0, audit.rate * factor)


def drawn(
    state: RunState, ledger: WorkLedger, window: WindowClosed, block_hash: str, hotkey: str, *, skip_passed: bool = True
) -> tuple[Draw, ...]:
    """What validator ``hotkey`` redoes of a closed window, by step and stage. Call it once the block is there.

    ``skip_passed``: what the leader redid before the seal isn't drawn; who doesn't believe it draws from everything.
    """
    found = seed(plan(state).run_id, ledger.branch_of(window.window), window.window, block_hash, hotkey)
    audit, marks = config(state).audit, state.audits.marks
    draws: list[Draw] = []
    for step in range(window.first_step, window.last_step + 1):
        by_stage: dict[int, list[PartialRecord]] = {}
        for record in ledger.partials(step):
            by_stage.setdefault(record.stage, []).append(record)
        for stage, records in by_stage.items():
            chosen = tuple(
                record.member
                for record in records
                if not (skip_passed and record.outcome == PASSED)
                and unit(found, step, stage, record.member.hotkey)
                < rate_of(audit, unchecked=record.unchecked, marked=marks.get(record.member.hotkey, 0) > 0)
            )
            if chosen:
                draws.append(Draw(step, stage, chosen, whole=len(chosen) == len(records)))
    return tuple(draws)


# --- theory ------------------------------------------------------------------------------------------------------


def _share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise InputError(f"{name} = {value!r} is no share", hint="allowed: 0 to 1")


def wrong_partials(share_of_items_wrong: float, items: int) -> float:
    """Probability that a partial of ``items`` items is wrong, each item being wrong on its own: 1 - (1 - q)^k."""
    _share("share_of_items_wrong", share_of_items_wrong)
    return 1.0 - (1.0 - share_of_items_wrong) ** items


def catch_probability(rate: float, steps: float, share_of_partials_wrong: float) -> float:
    """Probability of having drawn a wrong partial among ``steps`` partials: 1 - (1 - rate · share)^steps.

    One partial a step; all windows of these steps audited. In probation ``rate`` is 1.
    """
    _share("rate", rate)
    _share("share_of_partials_wrong", share_of_partials_wrong)
    return 1.0 - (1.0 - rate * share_of_partials_wrong) ** max(0.0, steps)


def catch_with_probation(
    audit: AuditSection, steps: int, share_of_items_wrong: float, items_per_step: float, *, rate: float | None = None
) -> float:
    """The same with probation before it: its first ceil(probation_items / items_per_step) partials are all redone.

    ``rate``: of the draws after that; without it the run's own.
    """
    wrong = wrong_partials(share_of_items_wrong, max(1, round(items_per_step)))
    redone = steps if audit.before_seal == "all" else math.ceil(audit.probation_items / items_per_step)
    first = min(steps, redone)
    missed = 1.0 - catch_probability(1.0, first, wrong)
    missed *= 1.0 - catch_probability(audit.rate if rate is None else rate, steps - first, wrong)
    return 1.0 - missed


def expected_cost(rate: float, factors: Iterable[tuple[float, float]] = ((1.0, 1.0),)) -> float:
    """Compute of the audits as a share of the work they check: sum of share · min(1, rate · factor).

    ``factors``: (share of the partials, what their rate is multiplied by); a redone item costs what it cost first.
    """
    _share("rate", rate)
    return math.fsum(share * min(1.0, rate * factor) for share, factor in factors)
