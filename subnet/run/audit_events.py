"""The journal's events about audits: what is done again, who is accused, what third parties say, and what comes of it.

Part of the one union in :mod:`subnet.run.events`, from where they are imported.
"""

from __future__ import annotations

from subnet.run.event_base import Event
from subnet.words import Member, Want


class AuditOpened(Event, tag="AuditOpened", frozen=True):
    """These members' partials of (step, stage) are to be done again; whoever holds a wanted boundary puts it into the store.

    Before the seal ``number`` is that of the freeze whose commitments are meant, after it 0.
    """

    audit: int
    """Counts up from 1."""
    step: int
    stage: int
    number: int
    members: tuple[Member, ...]
    by: str
    """Hotkey of the validator that does it."""
    wants: tuple[Want, ...]
    """Inputs of the items, as far as they aren't known to be in the store."""
    num_items: tuple[int, ...] = ()
    """Of each member's partial, in order: what counts for its probation."""


class AuditClosed(Event, tag="AuditClosed", frozen=True):
    """How an audit ended, by member: every member of it is in exactly one of the first three."""

    audit: int
    passed: tuple[Member, ...] = ()
    failed: tuple[Member, ...] = ()
    """Redone twice and different both times: a case follows."""
    undecided: tuple[Member, ...] = ()
    """An input is lost: nobody's lie, and nothing that counts as verified."""
    unopened: tuple[Member, ...] = ()
    """Members (of any stage) that were there all the time and didn't open what they had receipted."""
    lost: tuple[Member, ...] = ()
    """And those that said they don't hold it any more."""


class WindowClosed(Event, tag="WindowClosed", frozen=True):
    """Q. All steps of the window are sealed. Each validator draws its audits of it from the hash of block ``block``, which
    didn't exist when this was journaled, and its own hotkey (:mod:`subnet.audit.draw`)."""

    window: int
    first_step: int
    last_step: int
    block: int


class WindowAudited(Event, tag="WindowAudited", frozen=True):
    """The leader's audits of the window are closed."""

    window: int


class CaseOpened(Event, tag="CaseOpened", frozen=True):
    """A hotkey stands accused: it is in quarantine until the case is closed. ``charge``: ``partial`` (its sum isn't that of its
    items), ``merge`` (a partition it merged isn't the sum), ``root`` (it reported another root of the state before ``step`` + 1
    than snapshot and log lead to), ``unopened`` (it refuses evidence), ``equivocation`` (it signed one boundary when it sent it,
    and receipted another), ``unusable`` (the bytes of a boundary that it has receipted are no numbers)."""

    case: int
    """Counts up from 1."""
    hotkey: str
    member: Member
    step: int
    stage: int
    charge: str
    bundle: str
    """Blob hash of the evidence (:mod:`subnet.audit.case`); empty for the last three."""
    digest: str
    """What the leader's two runs gave (:func:`subnet.audit.case.digest`); of an ``unusable`` boundary its hash."""
    sealed: bool
    """Whether the work was sealed when the case was opened."""
    claimed: str = ""
    """What a run of the bundle would give if all that the accused claims were true; empty where that can't be told."""


class WitnessAsked(Event, tag="WitnessAsked", frozen=True):
    """A member of a third coldkey is to do the accused's work again."""

    case: int
    member: Member


class WitnessSaid(Event, tag="WitnessSaid", frozen=True):
    """What a third party's run of the bundle gave: a miner that was asked, or another validator. An empty digest: it can't
    run it, which is an answer, and no voice."""

    case: int
    hotkey: str
    digest: str


class CaseClosed(Event, tag="CaseClosed", frozen=True):
    """``convicted``: the hotkey is out, its unverified work of the score's window counts nothing; a third party's run gave what
    the leader's gave, and no more coldkeys back the accused (:func:`subnet.run.audits.verdict`). ``fault``: so too, but the first
    mismatch in a long clean record: unpaid, on probation again. ``cleared``: two coldkeys say that the work was right, and none
    that it was wrong. ``unconfirmed``: neither: unpaid, on probation again."""

    case: int
    outcome: str


class Appealed(Event, tag="Appealed", frozen=True):
    """A closed case was run again with new evidence. ``upheld`` False: the conviction ends, and with it the penalty."""

    case: int
    upheld: bool
    digest: str


class Rewound(Event, tag="Rewound", frozen=True):
    """Q. The run goes on from the state after ``step`` updates, on a new branch; every incarnation ends, as by a new term."""

    step: int
    branch: int
    case: int
    owner: bool = False
    """By the word of the run's owner (``rollback``): nobody has lied."""
