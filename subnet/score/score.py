"""The formula of the score, from what :mod:`subnet.score.book` has counted; every term in [0, 1], every number shown.

All numbers are decayed: what happened at time t counts 2^(-(now - t) / half_life_s) at ``now``, times as integrals of it.

    work        = sum over sealed partials of  FLOPs of their items        (without those that failed, were refused evidence
                                                                            or taken back; undecided: x undecided_pay)
    rate        = work · ln 2 / half_life_s                                 [FLOP/s]
    uptime      = (present + prior) / (present + absent + prior)            [s]       absent: gone as ``lost`` or ``silent``
    deadlines   = (done + prior) / (done + late + silent + prior)           [leases]  late: revoked; silent: void for silence
    audits      = (passed + prior) / (passed + failed + unopened + prior)   [partials]
    reliability = uptime^a · deadlines^b · audits^c
    worth       = rate · reliability, 0 while the hotkey is convicted       [FLOP/s]
    total       = worth / sum of all worths                                 [0 to 1, sums to 1]

Everything belongs to a registration (hotkey and block), never to a uid. Several runs of one validator add up before the terms
are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from subnet.score.policy import ScorePolicy
from subnet.words import short


class Unpaid(msgspec.Struct, frozen=True):
    """A sealed partial that isn't paid. ``why``: ``failed``, ``unopened``, ``undecided`` (in part: ``undecided_pay``)."""

    step: int
    stage: int
    items: int
    work: float
    """FLOPs, undecayed."""
    why: str
    time_s: float
    run: str = ""
    audit: int = 0


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What one book has counted of one registration, decayed to the time it was asked for."""

    hotkey: str
    registered_at_block: int = 0
    """0: not known."""
    first_joined_s: float = 0.0
    work: float = 0.0
    present_s: float = 0.0
    absent_s: float = 0.0
    done: float = 0.0
    late: float = 0.0
    silent: float = 0.0
    passed: float = 0.0
    failed: float = 0.0
    unopened: float = 0.0
    sealed_work: float = 0.0
    sealed_items: int = 0
    sealed_partials: int = 0
    last_sealed_s: float = 0.0
    is_absent: bool = False
    convicted: str = ""
    """Why, if it is."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one hotkey earned, with each number that led to it."""

    hotkey: str
    registered_at_block: int | None
    """Which registration earned it; None where the run's leader didn't know it."""
    total: float
    """Share of all hotkeys' worth, 0 to 1."""
    work: float
    """Decayed work, FLOPs."""
    sealed_work: float
    """All paid work of this registration, undecayed, FLOPs."""
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


def add(tallies: Sequence[Tally]) -> Tally:
    """Several runs of one hotkey: those of its newest registration (and those where it isn't known) added up."""
    newest = max(tally.registered_at_block for tally in tallies)
    own = [tally for tally in tallies if tally.registered_at_block in (0, newest)]
    if len(own) == 1:
        return own[0]
    summed = {
        name: math.fsum(getattr(tally, name) for tally in own)
        for name in (
            "work",
            "present_s",
            "absent_s",
            "done",
            "late",
            "silent",
            "passed",
            "failed",
            "unopened",
            "sealed_work",
        )
    }
    return Tally(
        hotkey=own[0].hotkey,
        registered_at_block=newest,
        first_joined_s=min(tally.first_joined_s for tally in own),
        sealed_items=sum(tally.sealed_items for tally in own),
        sealed_partials=sum(tally.sealed_partials for tally in own),
        last_sealed_s=max(tally.last_sealed_s for tally in own),
        is_absent=any(tally.is_absent for tally in own),
        convicted=next((tally.convicted for tally in own if tally.convicted), ""),
        **summed,
    )


def scores_of(policy: ScorePolicy, tallies: Mapping[str, Sequence[Tally]]) -> dict[str, Score]:
    """Everybody's score, by hotkey in alphabetical order, from what each run's book has counted."""
    scores = {hotkey: _score(policy, add(tallies[hotkey])) for hotkey in sorted(tallies)}
    whole = math.fsum(score.worth for score in scores.values())
    if whole <= 0:
        return scores
    return {hotkey: msgspec.structs.replace(s, total=s.worth / whole) for hotkey, s in scores.items()}


def _term(good: float, bad: float, prior: float) -> float:
    """In [0, 1]; 1 where nothing is known."""
    whole = good + bad + prior
    return (good + prior) / whole if whole > 0 else 1.0


def _score(policy: ScorePolicy, tally: Tally) -> Score:
    rate = tally.work * math.log(2) / policy.half_life_s
    uptime = _term(tally.present_s, tally.absent_s, policy.uptime_prior_s)
    deadlines = _term(tally.done, tally.late + tally.silent, policy.deadline_prior_leases)
    audits = _term(tally.passed, tally.failed + tally.unopened, policy.audit_prior_partials)
    reliability = uptime**policy.uptime_exponent * deadlines**policy.deadline_exponent * audits**policy.audit_exponent
    return Score(
        hotkey=tally.hotkey,
        registered_at_block=tally.registered_at_block or None,
        total=0.0,
        work=tally.work,
        sealed_work=tally.sealed_work,
        last_sealed_s=tally.last_sealed_s,
        worth=0.0 if tally.convicted else rate * reliability,
        rate=rate,
        reliability=reliability,
        uptime=uptime,
        deadlines=deadlines,
        audits=audits,
        sealed_items=tally.sealed_items,
        sealed_partials=tally.sealed_partials,
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
    )


def arithmetic(policy: ScorePolicy, scores: Mapping[str, Score], hotkey: str) -> tuple[str, ...]:
    """The score in words and numbers, a line for each term, so that a miner can redo the sum."""
    score = scores.get(hotkey)
    if score is None:
        return (f"{short(hotkey)} has never been a member here, or was forgotten: score 0",)
    whole = math.fsum(other.worth for other in scores.values())
    block = score.registered_at_block
    p, half = policy, policy.half_life_s
    bad = score.leases_late + score.silent_voids
    lines = [
        f"{hotkey}, " + (f"registered at block {block}" if block is not None else "its registration block isn't known"),
        f"sealed and paid: {score.sealed_work:.6g} FLOPs in {score.sealed_items} items of {score.sealed_partials} sums",
        f"work (half after {half:g} s): {score.work:.6g} FLOPs",
        f"rate = work x ln 2 / {half:g} s = {score.rate:.6g} FLOP/s",
        _fraction("uptime", score.present_s, score.absent_s, p.uptime_prior_s, score.uptime, "s present", "s absent"),
        _fraction(
            "deadlines",
            score.leases_done,
            bad,
            p.deadline_prior_leases,
            score.deadlines,
            "leases done",
            "late or silent",
        ),
        _fraction(
            "audits",
            score.audits_passed,
            score.audits_failed + score.audits_unopened,
            p.audit_prior_partials,
            score.audits,
            "passed",
            "failed or not opened",
        ),
        f"reliability = {score.uptime:.6g}^{p.uptime_exponent:g} x {score.deadlines:.6g}^{p.deadline_exponent:g} x "
        f"{score.audits:.6g}^{p.audit_exponent:g} = {score.reliability:.6g}",
    ]
    if score.convicted:
        lines.append(f"worth = 0: {score.convicted}")
    else:
        lines.append(f"worth = {score.rate:.6g} x {score.reliability:.6g} = {score.worth:.6g} FLOP/s")
    lines.append(f"score = {score.worth:.6g} / {whole:.6g} (everybody's worth) = {score.total:.6g}")
    return tuple(lines)


def _fraction(name: str, good: float, bad: float, prior: float, value: float, good_of: str, bad_of: str) -> str:
    return (
        f"{name} = ({good:.6g} + {prior:g}) / ({good:.6g} + {bad:.6g} + {prior:g}) = {value:.6g}"
        f"  [{good_of}, {bad_of}, prior {prior:g}]"
    )
