"""The formula of the score, from what :mod:`subnet.score.book` has counted; every term in [0, 1], every number shown.

Numbers fade: what happened at time t counts 2^(-(now - t) / half_life_s) at ``now``, times as integrals of it. Leases fade to the
last one that was counted, so that nobody's term changes while nobody works.

    work        = sum of FLOPs of items that were paid: of sealed partials (without those that failed their audit or whose
                  evidence was refused; undecided: x undecided_pay), done again for another's lie, redone as a witness   [FLOPs]
    rate        = work · ln 2 / half_life_s                                                                             [FLOP/s]
    uptime      = (present + prior) / (present + absent + prior)      [s]         absent: gone as ``lost`` or ``silent``
    deadlines   = (done - late - silent) / (done + unproven), 0 at least    [leases]    late: revoked; silent: void for silence
    audits      = (passed + prior) / (passed + failed + unopened + prior)         [partials]
    reliability = uptime^a · deadlines^b · audits^c
    worth       = rate · reliability, 0 while the hotkey is convicted                                                   [FLOP/s]
    total       = worth / sum of all worths                                                             [0 to 1, sums to 1]

Everything belongs to a registration (hotkey and block), never to a uid. Several runs of one validator add up before the terms
are made. Additions, products and roots alone, in a fixed order: the same bits everywhere (:mod:`subnet.score.decay`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from subnet.score.decay import LN2, half_power, whole_power
from subnet.score.policy import ScorePolicy
from subnet.score.timeline import Fading


class Unpaid(msgspec.Struct, frozen=True):
    """A partial that isn't paid. ``why``: ``failed``, ``unopened``, ``undecided`` (in part: ``undecided_pay``)."""

    step: int
    stage: int
    items: int
    work: float
    """FLOPs, undecayed."""
    why: str
    time_s: float
    run: str = ""
    audit: int = 0
    sealed: bool = True
    """False: found before its seal, the work was void anyway."""


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What one book has counted of one registration, decayed to the time it was asked for."""

    hotkey: str
    registered_at_block: int = 0
    """0: not known."""
    first_joined_s: float = 0.0
    work: float = 0.0
    present_s: float = 0.0
    absent_s: float = 0.0
    leases_as_of_s: float = 0.0
    """When a lease was last counted: ``done``, ``late`` and ``silent`` are decayed to this."""
    done: float = 0.0
    late: float = 0.0
    silent: float = 0.0
    passed: float = 0.0
    failed: float = 0.0
    unopened: float = 0.0
    sealed_work: float = 0.0
    sealed_items: int = 0
    sealed_partials: int = 0
    redone_work: float = 0.0
    redone_items: int = 0
    witness_work: float = 0.0
    witness_items: int = 0
    last_sealed_s: float = 0.0
    is_absent: bool = False
    convicted: str = ""
    """Why, if it is."""
    convicted_until_s: float = 0.0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one hotkey earned, with each number that led to it."""

    hotkey: str
    registered_at_block: int | None
    """Which registration earned it; None where the run's leader didn't know it."""
    total: float
    """Share of all hotkeys' worth, 0 to 1."""
    work: float
    """All paid work, decayed, FLOPs."""
    sealed_work: float
    """Paid work of sealed partials of this registration, undecayed, FLOPs."""
    last_sealed_s: float
    worth: float = 0.0
    """rate · reliability, FLOP/s."""
    rate: float = 0.0
    """FLOP/s."""
    reliability: float = 1.0
    uptime: float = 1.0
    deadlines: float = 1.0
    audits: float = 1.0
    sealed_items: int = 0
    sealed_partials: int = 0
    redone_work: float = 0.0
    """Paid although it was void, since it had to be done again for another's lie; undecayed, FLOPs."""
    redone_items: int = 0
    witness_work: float = 0.0
    """Paid for redoing accused work as a third party; undecayed, FLOPs."""
    witness_items: int = 0
    present_s: float = 0.0
    absent_s: float = 0.0
    leases_done: float = 0.0
    leases_late: float = 0.0
    silent_voids: float = 0.0
    audits_passed: float = 0.0
    audits_failed: float = 0.0
    audits_unopened: float = 0.0
    first_joined_s: float = 0.0
    convicted: str = ""
    """Why the score is 0, if it is for a conviction."""
    convicted_until_s: float = 0.0
    """When that is forgotten; 0: not convicted."""


_FLOATS = (
    "work",
    "present_s",
    "absent_s",
    "passed",
    "failed",
    "unopened",
    "sealed_work",
    "redone_work",
    "witness_work",
)
_COUNTS = ("sealed_items", "sealed_partials", "redone_items", "witness_items")
_LEASES = ("done", "late", "silent")


def add(fading: Fading, tallies: Sequence[Tally]) -> Tally:
    """Several runs of one hotkey: those of its newest registration (and those where it isn't known) added up."""
    newest = max(tally.registered_at_block for tally in tallies)
    own = [tally for tally in tallies if tally.registered_at_block in (0, newest)]
    if len(own) == 1:
        return own[0]
    leases_as_of_s = max(tally.leases_as_of_s for tally in own)
    faded = [half_power(fading.halves(tally.leases_as_of_s, leases_as_of_s)) for tally in own]
    floats = {name: math.fsum(getattr(tally, name) for tally in own) for name in _FLOATS}
    counts = {name: sum(getattr(tally, name) for tally in own) for name in _COUNTS}
    leases = {name: math.fsum(getattr(t, name) * kept for t, kept in zip(own, faded, strict=True)) for name in _LEASES}
    convicted = max(own, key=lambda tally: tally.convicted_until_s)
    return msgspec.structs.replace(
        convicted,
        registered_at_block=newest,
        first_joined_s=min(tally.first_joined_s for tally in own),
        last_sealed_s=max(tally.last_sealed_s for tally in own),
        leases_as_of_s=leases_as_of_s,
        is_absent=any(tally.is_absent for tally in own),
        **floats,
        **counts,
        **leases,
    )


def scores_of(
    policy: ScorePolicy, tallies: Mapping[str, Sequence[Tally]], fading: Fading | None = None
) -> dict[str, Score]:
    """Everybody's score, by hotkey in alphabetical order, from what each run's book has counted. ``fading``: which half-life there
    was when, where it isn't always the policy's."""
    scores = {hotkey: _score(policy, add(fading or policy, tallies[hotkey])) for hotkey in sorted(tallies)}
    whole = whole_worth(scores)
    if not whole > 0:
        return scores
    return {hotkey: msgspec.structs.replace(s, total=s.worth / whole) for hotkey, s in scores.items()}


def whole_worth(scores: Mapping[str, Score]) -> float:
    """What all scores are shares of, FLOP/s: the exactly rounded sum, in whatever order."""
    return math.fsum(score.worth for score in scores.values())


def finite(value: float, most: float = 1e200) -> float:
    """The number if it is one and in [0, most]; 0 for NaN and what is below, ``most`` for what is above."""
    if not value >= 0.0:
        return 0.0
    return min(value, most)


def term(good: float, bad: float, prior: float) -> float:
    """In [0, 1]; 1 where nothing is known."""
    whole = good + bad + prior
    return (good + prior) / whole if whole > 0 else 1.0


def kept(done: float, bad: float, unproven: float) -> float:
    """In [0, 1]; rises from 0 as leases are done in time, and each that wasn't cancels one that was.

    So work · kept is a sum over leases but for ``unproven``, which the larger feel less: whoever divides its leases among several
    hotkeys gains nothing, however it divides the late ones, as long as none is late more often than not.
    """
    if done + unproven <= 0:
        return 0.0 if bad > 0 else 1.0
    return max(0.0, done - bad) / (done + unproven)


def _score(policy: ScorePolicy, tally: Tally) -> Score:
    work = finite(tally.work)
    rate = work * LN2 / policy.half_life_s
    uptime = term(tally.present_s, tally.absent_s, policy.uptime_prior_s)
    deadlines = kept(tally.done, tally.late + tally.silent, policy.unproven_leases)
    audits = term(tally.passed, tally.failed + tally.unopened, policy.audit_prior_partials)
    reliability = (
        whole_power(uptime, policy.uptime_exponent)
        * whole_power(deadlines, policy.deadline_exponent)
        * whole_power(audits, policy.audit_exponent)
    )
    return Score(
        hotkey=tally.hotkey,
        registered_at_block=tally.registered_at_block or None,
        total=0.0,
        work=work,
        sealed_work=tally.sealed_work,
        last_sealed_s=tally.last_sealed_s,
        worth=0.0 if tally.convicted else finite(rate * reliability),
        rate=rate,
        reliability=reliability,
        uptime=uptime,
        deadlines=deadlines,
        audits=audits,
        sealed_items=tally.sealed_items,
        sealed_partials=tally.sealed_partials,
        redone_work=tally.redone_work,
        redone_items=tally.redone_items,
        witness_work=tally.witness_work,
        witness_items=tally.witness_items,
        present_s=tally.present_s,
        absent_s=tally.absent_s,
        leases_done=tally.done,
        leases_late=tally.late,
        silent_voids=tally.silent,
        audits_passed=tally.passed,
        audits_failed=tally.failed,
        audits_unopened=tally.unopened,
        first_joined_s=tally.first_joined_s,
        convicted=tally.convicted,
        convicted_until_s=tally.convicted_until_s,
    )
