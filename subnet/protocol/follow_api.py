"""What a following validator tells of itself: which journals it follows, what it found wrong in them, what it redid."""

from __future__ import annotations

import msgspec

from subnet.protocol.api import RunStatus
from subnet.words import Member

FOLLOWER = "follower"


class Breach(msgspec.Struct, frozen=True):
    """A record of a run's journal that a leader who keeps to the run file would not have written, or what its audits,
    redone here, gave against its word. What each ``code`` means for the weights: ``docs/follow.md``."""

    run_id: str
    number: int
    """Of the record."""
    step: int
    """The step that was open then."""
    code: str
    what: str
    wrong: bool
    """Whether the run's result can't be what its run file says, or can't be checked: no weights from the run's work behind
    this record."""
    leader: str
    time_ns: int
    """When the record was stamped."""


class OwnAudit(msgspec.Struct, frozen=True):
    """How one of this validator's own audits ended: each member whose work was drawn is in one of the first four."""

    run_id: str
    branch: int
    window: int
    step: int
    stage: int
    number: int
    """Records that were folded when it ended."""
    time_ns: int
    passed: tuple[Member, ...] = ()
    failed: tuple[Member, ...] = ()
    undecided: tuple[Member, ...] = ()
    """Evidence that was lost, or a state that can't be restored any more: nothing that counts as verified."""
    refused: tuple[Member, ...] = ()
    """The leader did not have the evidence opened."""
    why: str = ""
    bundles: tuple[str, ...] = ()
    """Hashes of the bundles of what failed, in this validator's directory of findings."""
    vouched: tuple[Member, ...] = ()
    """Those that failed here and had passed the leader's audit of the same work."""
    untrusted: str = ""
    """Why the state that the work was done from isn't the one that the run's log leads to."""


class CaseVerdict(msgspec.Struct, frozen=True):
    """What this validator's replay of a case of the leader's gave."""

    run_id: str
    case: int
    hotkey: str
    digest: str
    """Empty where the bundle couldn't be replayed, or says nothing."""
    confirmed: bool
    """The replay gave what the leader's runs gave, and not what the accused had claimed."""
    number: int
    time_ns: int
    why: str = ""
    bundle: str = ""
    """Hash of the copy in this validator's directory of findings, where it was confirmed."""
    foreign: bool = False
    """The bundle says of the accused what the journal doesn't."""


class FollowedView(msgspec.Struct, frozen=True):
    """One run as far as it is followed."""

    name: str
    run_id: str
    leader: str
    number: int
    """Records folded and checked."""
    segments: int
    head: str
    behind_s: float
    """Since the last segment was taken."""
    trouble: str = ""
    """Why it doesn't go on, where it doesn't."""
    trouble_code: str = ""
    """corrupt, missing, changed, two_heads, distrusted, withheld, store; empty: none."""
    to_redo: int = 0
    """Closed windows and cases that it hasn't done with."""
    counted_to: int | None = None
    """Record behind which its work earns nothing here, because the result is wrong; None: all of it counts."""
    doubts: tuple[str, ...] = ()
    """What is to be said of those who led it, as the chain has them now."""


class FollowerStatus(RunStatus, frozen=True):
    """``GET /v1/status`` of a follower: a run's status as the journal tells it, and what the follower itself found."""

    role: str = ""
    """``follower``; empty of a validator that leads, whose status has none of the rest."""
    followed: tuple[FollowedView, ...] = ()
    breaches: tuple[Breach, ...] = ()
    """The newest, at most 50."""
    num_breaches: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """By code, of all runs that are followed."""
    distrusted: tuple[tuple[str, str, int], ...] = ()
    """(hotkey, run, record): leaders that signed two heads at one number; nothing of theirs is taken any more."""
    own_audits: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Hotkeys' partials by outcome of this validator's own audits: passed, failed, undecided, refused."""
    verdicts: tuple[CaseVerdict, ...] = ()
    proofs: str = ""
    """Directory of its proofs and findings, on its own machine."""

    def led(self) -> RunStatus:
        """Of a validator that leads: without what only a follower has."""
        return RunStatus(**{name: getattr(self, name) for name in RunStatus.__struct_fields__})
