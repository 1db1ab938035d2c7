"""How scores are made: every number that goes into them, in one frozen type that checks itself.

Validators that agree on a policy and fold the same journal have the same scores.
"""

from __future__ import annotations

import math

import msgspec

from subnet.errors import ConfigError


class ScorePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The formula is in :mod:`subnet.score.score`; these are its constants."""

    half_life_s: float = 3600.0
    """Seconds after which a piece of work, an absence or an audit counts half. Default 3600, above 0, at most 10^9."""
    forget_after_half_lives: float = 30.0
    """A hotkey is forgotten so many half-lives after it was last heard of (2^-30 of its work is left), and so is a
    conviction: until then it makes the score 0. Default 30, 1 to 1000."""
    uptime_prior_s: float = 900.0
    """Seconds of presence that everybody is credited with in the uptime term, so that one absence of a newcomer isn't all
    there is. Default 900, 0 to 10^9."""
    deadline_prior_leases: float = 32.0
    """Leases done in time that everybody is credited with. Default 32, 0 to 10^9."""
    audit_prior_partials: float = 8.0
    """Passed audits that everybody is credited with. Default 8, 0 to 10^9."""
    uptime_exponent: float = 1.0
    """Power of the uptime term; 0 leaves it out. Default 1, 0 to 16."""
    deadline_exponent: float = 1.0
    """Power of the term of deadlines kept. Default 1, 0 to 16."""
    audit_exponent: float = 2.0
    """Power of the term of audits passed. Default 2, 0 to 16."""
    undecided_pay: float = 1.0
    """What part of a partial is paid whose evidence was lost, or refused by somebody else, when it was audited. Default 1,
    0 to 1."""

    def __post_init__(self) -> None:
        bounds = {
            "half_life_s": (0.0, 1e9),
            "forget_after_half_lives": (1.0, 1e3),
            "uptime_prior_s": (0.0, 1e9),
            "deadline_prior_leases": (0.0, 1e9),
            "audit_prior_partials": (0.0, 1e9),
            "uptime_exponent": (0.0, 16.0),
            "deadline_exponent": (0.0, 16.0),
            "audit_exponent": (0.0, 16.0),
            "undecided_pay": (0.0, 1.0),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high and (value > 0 or name != "half_life_s")):
                above = "above" if name == "half_life_s" else "from"
                raise ConfigError(
                    f"score.{name} = {value!r} is not allowed", hint=f"allowed: {above} {low:g} to {high:g}"
                )

    @property
    def memory_s(self) -> float:
        """Seconds after which nothing is remembered of a hotkey."""
        return self.forget_after_half_lives * self.half_life_s
