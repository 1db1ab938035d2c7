"""How scores are made: every constant of the formula in one frozen type, each with unit, default, reason and bounds.

Validators that agree on a policy and fold the same journal have the same scores. The formula is in
:mod:`subnet.score.score`; docs/scores.md explains it.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from subnet.errors import ConfigError

BOUNDS: dict[str, tuple[float, float]] = {
    "half_life_s": (1.0, 1e8),
    "forget_after_half_lives": (4.0, 1000.0),
    "uptime_prior_s": (0.0, 86_400.0),
    "unproven_leases": (0.0, 1e6),
    "audit_prior_partials": (0.0, 1e6),
    "uptime_exponent": (0, 8),
    "deadline_exponent": (0, 8),
    "audit_exponent": (0, 8),
    "undecided_pay": (0.0, 1.0),
}
"""What is allowed, both ends included; anything else is refused with its name and these numbers."""


class ScorePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constants of the score. Frozen; checked on construction."""

    half_life_s: float = 3600.0
    """Seconds after which a piece of work, an absence or an audit counts half. Default 3600: a bit less than the tempo at
    which weights are set (360 blocks, 4320 s), so that weights follow who works now. Below 1 s a score is the noise of the last
    seal; above 10^8 s (3 years) nothing fades."""
    forget_after_half_lives: float = 30.0
    """Half-lives after which a hotkey that isn't heard of, and a conviction, are forgotten. Default 30: a billionth of the work
    is left then, so a conviction is forgotten with all it was for. Below 4 more than 6 % of a liar's work would outlive it."""
    uptime_prior_s: float = 900.0
    """Seconds of presence that everybody is credited with in the uptime term. Default 900: a newcomer's first restart isn't all
    there is to say of it. Above a day absence would cost nothing."""
    unproven_leases: float = 16.0
    """Leases that everybody has yet to prove. Default 16: seconds to minutes of work, and enough that a miner split into several
    hotkeys earns less than one (docs/scores.md). 0 leaves it out; then splitting costs nothing."""
    audit_prior_partials: float = 8.0
    """Passed audits that everybody is credited with. Default 8: at a rate of 2 % few partials are audited in an hour, and one
    flipped bit shall not be half of the term."""
    uptime_exponent: int = 1
    """Power of the uptime term. Default 1: half of the time away costs half, beside the work that wasn't done. 0 leaves the term
    out; above 8 a second away would cost more than a day's work."""
    deadline_exponent: int = 1
    """Power of the term of deadlines kept. Default 1: a late lease cancels one done in time. With more, whoever has one hotkey take
    all its lateness gains by it."""
    audit_exponent: int = 2
    """Power of the term of audits passed. Default 2: what wasn't right weighs twice what was late."""
    undecided_pay: float = 1.0
    """What part of a partial is paid whose evidence was lost, or refused by somebody else, when it was audited. Default 1: it is
    sealed, every check before the seal passed, and nobody shall be able to cost another its pay by losing evidence."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"score.{name} = {value!r} is not allowed", hint=f"allowed: {low:g} to {high:g}")

    @property
    def memory_s(self) -> float:
        """Seconds after which nothing is remembered of a hotkey."""
        return self.forget_after_half_lives * self.half_life_s


class _Listed(msgspec.Struct, frozen=True):
    policy: ScorePolicy


def policy_from(path: Path) -> ScorePolicy:
    """From a JSON file that holds a policy, or an answer with one in it, such as that of ``iota score list --json``."""
    try:
        data = path.expanduser().read_bytes()
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "policy" in keys:
            return msgspec.json.decode(data, type=_Listed).policy
        return msgspec.json.decode(data, type=ScorePolicy)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no score policy: {error}", hint="take it from iota score list --json") from error
