"""How scores are made: every constant of the formula in one frozen type, each with unit, default, reason and bounds.

Validators that agree on a policy and fold the same journal have the same scores. The formula is in
:mod:`subnet.score.score`; docs/scores.md explains it. In a policy file these are the sections ``[score]`` and ``[work]``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from subnet.policy.values import Value, check_values, values_of


class ScorePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of the score. Frozen; checked on construction."""

    half_life_s: Annotated[
        float,
        Value(
            "s",
            1.0,
            1e8,
            "After this time a piece of work, an absence or an audit counts half. A bit less than the tempo at which weights are "
            "set (360 blocks, 4320 s), so that weights follow who works now. Below 1 s a score is the noise of the last seal; "
            "above 1e8 s (3 years) nothing fades.",
            factor=4.0,
        ),
    ] = 3600.0
    forget_after_half_lives: Annotated[
        float,
        Value(
            "half-lives",
            4.0,
            1000.0,
            "After this time a hotkey that isn't heard of, and a conviction, are forgotten: so long a convict's score is 0. At 30 "
            "a billionth of the work is left, so a conviction is forgotten with all it was for. Below 4 more than 6 % of a liar's "
            "work would outlive it.",
            factor=4.0,
        ),
    ] = 30.0
    uptime_prior_s: Annotated[
        float,
        Value(
            "s",
            0.0,
            86_400.0,
            "Presence that everybody is credited with in the uptime term: a newcomer's first restart isn't all there is to say of "
            "it. Above a day absence would cost nothing.",
            factor=4.0,
            base=60.0,
        ),
    ] = 900.0
    unproven_leases: Annotated[
        float,
        Value(
            "leases",
            0.0,
            1e6,
            "Leases that everybody has yet to prove: seconds to minutes of work, and enough that a miner split into several "
            "hotkeys earns less than one (docs/scores.md). 0 leaves it out; then splitting costs nothing.",
            factor=4.0,
            base=4.0,
        ),
    ] = 16.0
    audit_prior_partials: Annotated[
        float,
        Value(
            "partials",
            0.0,
            1e6,
            "Passed audits that everybody is credited with: at a rate of 2 % few partials are audited in an hour, and one flipped "
            "bit shall not be half of the term.",
            factor=4.0,
            base=2.0,
        ),
    ] = 8.0
    uptime_exponent: Annotated[
        int,
        Value(
            "-",
            0,
            8,
            "Power of the uptime term. At 1 half of the time away costs half, beside the work that wasn't done. 0 leaves the term "
            "out; above 8 a second away would cost more than a day's work.",
            step=1,
        ),
    ] = 1
    deadline_exponent: Annotated[
        int,
        Value(
            "-",
            0,
            8,
            "Power of the term of deadlines kept. At 1 a late lease cancels one done in time. With more, whoever has one hotkey "
            "take all its lateness gains by it.",
            step=1,
        ),
    ] = 1
    audit_exponent: Annotated[
        int,
        Value(
            "-", 0, 8, "Power of the term of audits passed. At 2 what wasn't right weighs twice what was late.", step=1
        ),
    ] = 2
    undecided_pay: Annotated[
        float,
        Value(
            "share",
            0.0,
            1.0,
            "What part of a partial is paid whose evidence was lost, or refused by somebody else, when it was audited. It is "
            "sealed, every check before the seal passed, and nobody shall be able to cost another its pay by losing evidence.",
            step=0.5,
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        check_values(self, "score")

    @property
    def memory_s(self) -> float:
        """Seconds after which nothing is remembered of a hotkey."""
        return self.forget_after_half_lives * self.half_life_s

    # As a :class:`~subnet.score.timeline.Timeline` without changes:

    def at(self, now_s: float) -> ScorePolicy:
        return self

    def spans(self, from_s: float, to_s: float) -> tuple[tuple[float, float], ...]:
        """(end, half-life in seconds), if any time passes."""
        return ((to_s, self.half_life_s),) if to_s > from_s else ()

    def halves(self, from_s: float, to_s: float) -> float:
        """Half-lives between two times."""
        return (to_s - from_s) / self.half_life_s


class WorkPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What work counts. The unit is the FLOP: an item counts its microbatch's FLOPs at its stage, forward and backward."""

    redone_pay: Annotated[
        float,
        Value(
            "share",
            0.0,
            1.0,
            "What part is paid of items that were done and became void for another's lie. Below 1 a liar costs its neighbours.",
            step=0.5,
        ),
    ] = 1.0
    witness_pay: Annotated[
        float,
        Value(
            "share",
            0.0,
            2.0,
            "What part is paid of items that a third party redid to settle a case, if its answer decided it. 1: as much as the "
            "same items of its own. Above 2 accusing would pay more than working.",
            step=0.5,
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        check_values(self, "work")


BOUNDS: dict[str, tuple[float, float]] = {name: (v.low, v.high) for name, v in values_of(ScorePolicy).items()}
"""What is allowed, both ends included; anything else is refused with its name and these numbers."""
