"""The parts of a state that belong to audits: what is being redone, who stands accused, which windows wait. Plain data.

Folded by :mod:`subnet.run.audit_folds`, asked by :mod:`subnet.run.audits`.
"""

from __future__ import annotations

import msgspec

from subnet.run.audit_events import WindowClosed
from subnet.words import CALIBRATION_STEP, Member, Want

CONVICTED, FAULT, CLEARED, UNCONFIRMED = "convicted", "fault", "cleared", "unconfirmed"
"""Outcomes of a case."""
PARTIAL, MERGE, UNOPENED, EQUIVOCATION = "partial", "merge", "unopened", "equivocation"
ROOT, UNUSABLE = "root", "unusable"
CHARGES = (PARTIAL, MERGE, UNOPENED, EQUIVOCATION, ROOT, UNUSABLE)
"""What a case is about."""
SHOWN = (UNOPENED, EQUIVOCATION, UNUSABLE)
"""Of these what the accused did, or signed, is the proof: no third party runs anything."""


class OpenAudit(msgspec.Struct, frozen=True, array_like=True):
    """Partials of (step, stage) that are being done again. ``number``: of the freeze, before the seal; 0 after it."""

    step: int
    stage: int
    number: int
    members: tuple[Member, ...]
    by: str
    """Hotkey of the validator that does it."""
    wants: tuple[Want, ...] = ()
    num_items: tuple[int, ...] = ()
    """Of each member's partial."""


class CaseState(msgspec.Struct):
    """An accusation, open while ``outcome`` is empty."""

    hotkey: str
    member: Member
    coldkey: str
    """Of the accused; empty where it was never a member."""
    step: int
    stage: int
    charge: str
    bundle: str
    digest: str
    sealed: bool
    branch: int
    claimed: str = ""
    asked: tuple[Member, ...] = ()
    coldkeys: dict[str, str] = {}
    """By hotkey of who was asked."""
    said: dict[str, str] = {}
    """By hotkey of a third party: the digest of its run, in the order they came in."""
    outcome: str = ""
    upheld: bool = True
    """False once an appeal has shown that the work was right."""

    @property
    def is_open(self) -> bool:
        return not self.outcome


class AuditState(msgspec.Struct):
    """All of it that everybody folds; the same in every view."""

    branch: int = 0
    """How often the run was rewound."""
    num_opened: int = 0
    num_cases: int = 0
    open: dict[int, OpenAudit] = {}
    coldkeys: dict[str, str] = {}
    """By hotkey: whose it was when it joined last."""
    clean: dict[str, int] = {}
    """By hotkey: items that were redone, and right, since its probation began."""
    marks: dict[str, int] = {}
    """By hotkey: unpaid mismatches and released quarantines; it is audited more."""
    unopened: dict[str, int] = {}
    """By hotkey: audits for which it didn't open what it had receipted, though it was there all the time."""
    lost: dict[str, int] = {}
    """By hotkey: audits for which it said that it had lost what it had receipted."""
    unproven: dict[str, int] = {}
    """By hotkey: audits of it since the last that passed of which somebody kept the evidence back."""
    cases: dict[int, CaseState] = {}
    """Open ones, and the last closed ones."""
    quarantined: dict[str, int] = {}
    """By hotkey: its open case."""
    windows: dict[int, WindowClosed] = {}
    """Closed, and not yet audited by the leader."""
    next_window: int = 0
    """The next one to close."""
    audited_to: int = CALIBRATION_STEP
    """The first step that no audited window covers."""
    settled: set[str] = set()
    """Convicted hotkeys whose sealed lies have been undone, as far as they could be."""
