"""A score term by term: value, unit and the sum it comes from, so that a miner can redo the arithmetic by hand."""

from __future__ import annotations

import msgspec

from subnet.score.policy import ScorePolicy
from subnet.score.score import Score


class Term(msgspec.Struct, frozen=True):
    """A line of the account. ``how`` is for people; every number in it is a field of the score or of the policy."""

    name: str
    value: float
    unit: str
    how: str


def terms_of(policy: ScorePolicy, score: Score, whole: float) -> tuple[Term, ...]:
    """``whole``: everybody's worth (:func:`subnet.score.score.whole_worth`). In the order in which they are made."""
    p, s, half = policy, score, policy.half_life_s
    worth = f"0: {s.convicted}" if s.convicted else f"{s.rate:.6g} x {s.reliability:.6g}"
    powers = f"{s.uptime:.6g}^{p.uptime_exponent} x {s.deadlines:.6g}^{p.deadline_exponent}"
    share = f"{s.worth:.6g} / {whole:.6g}, everybody's worth" if whole > 0 else "nobody has earned anything"
    return (
        Term("sealed", s.sealed_work, "FLOPs", f"{s.sealed_items} items in {s.sealed_partials} sealed sums, paid"),
        Term("redone", s.redone_work, "FLOPs", f"{s.redone_items} items void for another's lie, paid all the same"),
        Term("witness", s.witness_work, "FLOPs", f"{s.witness_items} items redone as a third party"),
        Term("work", s.work, "FLOPs", f"all of these, each half after {half:g} s"),
        Term("rate", s.rate, "FLOP/s", f"{s.work:.6g} x ln 2 / {half:g} s"),
        Term("uptime", s.uptime, "", _fraction(s.present_s, s.absent_s, p.uptime_prior_s, "s present", "s absent")),
        Term("deadlines", s.deadlines, "", _deadlines(p, s)),
        Term(
            "audits",
            s.audits,
            "",
            _fraction(
                s.audits_passed,
                s.audits_failed + s.audits_unopened,
                p.audit_prior_partials,
                "passed",
                "failed or not opened",
            ),
        ),
        Term("reliability", s.reliability, "", f"{powers} x {s.audits:.6g}^{p.audit_exponent}"),
        Term("worth", s.worth, "FLOP/s", worth),
        Term("score", s.total, "", share),
    )


def _deadlines(p: ScorePolicy, s: Score) -> str:
    done, bad = s.leases_done, s.leases_late + s.silent_voids
    return f"({done:.6g} - {bad:.6g}) / ({done:.6g} + {p.unproven_leases:g})  [done; late or silent; unproven]"


def _fraction(good: float, bad: float, prior: float, good_of: str, bad_of: str) -> str:
    return f"({good:.6g} + {prior:g}) / ({good:.6g} + {bad:.6g} + {prior:g})  [{good_of}; {bad_of}; prior {prior:g}]"
