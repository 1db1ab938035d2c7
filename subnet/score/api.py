"""What a validator tells of scores: each with the numbers it is made of, and what keeps a hotkey from work or pay.

Public reads: ``GET /v1/scores`` and ``GET /v1/scores/HOTKEY``.
"""

from __future__ import annotations

import msgspec

from subnet.policy.api import PolicyLine
from subnet.score.policy import ScorePolicy
from subnet.score.score import Score, Unpaid
from subnet.score.terms import Term


class ScoreList(msgspec.Struct, frozen=True):
    """``GET /v1/scores``: everybody's, best first, as they stand at ``time_s``."""

    time_s: float
    policy: ScorePolicy
    runs: tuple[str, ...]
    """Ids of the runs that are added up."""
    scores: tuple[Score, ...]
    in_force: PolicyLine | None = None
    """The whole policy of the validator, its digest, and since when; ``policy`` is its ``[score]``."""


class RefusalView(msgspec.Struct, frozen=True):
    """A join that was refused. ``times`` in a row for the same reason, the last at ``time_s``."""

    time_s: float
    code: str
    reason: str
    retry_after_s: float | None
    """What is left of it; None: a retry doesn't help."""
    hint: str
    times: int = 1


class CaseLine(msgspec.Struct, frozen=True):
    """A case against the hotkey; all of it is at ``GET /v1/cases/N``."""

    case: int
    charge: str
    step: int
    stage: int
    outcome: str
    """Empty while it is open."""
    upheld: bool


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a hotkey stands in the active run, in numbers."""

    run: str
    stage: int | None
    """None: not a member now."""
    leases: int = 0
    """Items it is at work on or has queued."""
    convicted: bool = False
    quarantine: int | None = None
    """The open case that keeps it out."""
    on_probation: bool = False
    items_right: int = 0
    """Items redone, and right, since its probation began."""
    items_needed: int = 0
    audited_before_seal: bool = False
    audit_rate: float = 0.0
    """Probability that a sealed sum of it is redone."""
    marks: int = 0
    unopened: int = 0
    absences: int = 0
    back_off_s: float = 0.0
    """Seconds until a join is heard again."""
    open_audits: tuple[tuple[int, int, int], ...] = ()
    """(number, step, stage) of audits that it is in."""
    cases: tuple[CaseLine, ...] = ()
    waiting_for: str = ""
    """What the run waits for, if it does."""


class Hold(msgspec.Struct, frozen=True):
    """Something that keeps a hotkey from work or pay, or has somebody look closer at it."""

    what: str
    """``refused``, ``convicted``, ``quarantine``, ``back-off``, ``probation``, ``audit``, ``marks``, ``unopened``,
    ``registration``, ``run waits``, ``no run``."""
    why: str
    ends: str
    """In words: when, or by what."""
    ends_in_s: float | None = None
    """Seconds, where time alone ends it."""
    hint: str = ""


class ScoreDetail(msgspec.Struct, frozen=True):
    """``GET /v1/scores/HOTKEY``."""

    hotkey: str
    time_s: float
    policy: ScorePolicy
    score: Score | None
    place: int
    """1: the best; 0: no score."""
    num_scores: int
    terms: tuple[Term, ...]
    """Empty where there is no score."""
    unpaid: tuple[Unpaid, ...]
    refusals: tuple[RefusalView, ...]
    standing: Standing | None
    """None where no run is active."""
    where: str
    """In words: a member of what, or not."""
    holds: tuple[Hold, ...]
    in_force: PolicyLine | None = None
