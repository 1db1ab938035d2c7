"""Audits and cases as a book needs them: whose word an audit is, what a case is about, which third parties were right."""

from __future__ import annotations

from collections import Counter

import msgspec

from subnet.run import events as ev
from subnet.words import Member

CONVICTED, FAULT, CLEARED = "convicted", "fault", "cleared"
MERGE, UNOPENED = "merge", "unopened"
MAX_CLOSED = 1000
"""Closed cases that an appeal may still be about: as many as the fold keeps."""


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """An audit. ``number``: 0 after the seal; ``by``: whose it is; ``items`` of each member's partial."""

    step: int
    stage: int
    number: int
    by: str
    members: tuple[Member, ...]
    items: tuple[int, ...]

    def items_of(self, member: Member) -> int:
        return next((n for other, n in zip(self.members, self.items, strict=False) if other == member), 0)


class Charge(msgspec.Struct):
    """A case against a hotkey."""

    hotkey: str
    member: Member
    step: int
    stage: int
    what: str
    digest: str
    sealed: bool
    branch: int
    items: int
    """What a third party redoes."""
    asked: list[str] = []
    said: dict[str, str] = {}
    outcome: str = ""
    effective: bool = False
    """Its outcome is in the book."""
    took: bool = False
    """Because it was believed, the partial was taken back."""
    believed: bool = False
    """Replayed by this validator, which got the same (where the leader alone isn't believed)."""

    @property
    def is_guilty(self) -> bool:
        return self.outcome in (CONVICTED, FAULT)

    def right(self) -> tuple[str, ...]:
        """The third parties whose answer decided the case: that is whose work was of use."""
        answers = {hotkey: digest for hotkey, digest in self.said.items() if digest and hotkey in self.asked}
        if self.is_guilty and self.digest:
            wanted = self.digest
        elif self.is_guilty or self.outcome == CLEARED:
            count = Counter(digest for digest in answers.values() if digest != self.digest)
            wanted = max(sorted(count), key=lambda digest: count[digest], default="")
        else:
            wanted = ""
        return tuple(hotkey for hotkey, digest in answers.items() if wanted and digest == wanted)


class Trials(msgspec.Struct):
    leader: str = ""
    branch: int = 0
    audits: dict[int, Opened] = {}
    cases: dict[int, Charge] = {}

    def term(self, leader: str) -> None:
        """As the fold does it: audits before a seal end, the old leader's others are the new one's."""
        before, self.leader = self.leader, leader
        self.audits = {
            number: msgspec.structs.replace(audit, by=leader) if audit.by == before else audit
            for number, audit in self.audits.items()
            if not audit.number
        }

    def rewound(self, step: int, branch: int) -> None:
        self.branch = branch
        self.audits = {n: audit for n, audit in self.audits.items() if not audit.number and audit.step < step}

    def opened(self, event: ev.AuditOpened) -> None:
        self.audits[event.audit] = Opened(
            event.step, event.stage, event.number, event.by, event.members, event.num_items
        )

    def closed(self, audit: int) -> Opened | None:
        """The leader's own audits alone: what another validator redoes is its own affair."""
        found = self.audits.pop(audit, None)
        return found if found is not None and found.by == self.leader else None

    def accused(self, event: ev.CaseOpened, sealed_items: int) -> None:
        """``sealed_items``: of the accused's sealed partial, as far as it is known."""
        audits = [a for a in self.audits.values() if (a.step, a.stage, a.by) == (event.step, event.stage, self.leader)]
        if event.charge == UNOPENED:
            items = 0
        elif event.charge == MERGE:
            items = max((sum(audit.items) for audit in audits), default=0)
        else:
            items = sealed_items or max((audit.items_of(event.member) for audit in audits), default=0)
        self.cases[event.case] = Charge(
            event.hotkey,
            event.member,
            event.step,
            event.stage,
            event.charge,
            event.digest,
            event.sealed,
            self.branch,
            items,
        )

    def forget(self, kept: set[int]) -> None:
        """All but the last closed cases, those that are open and ``kept``."""
        old = [case for case, charge in sorted(self.cases.items()) if charge.outcome and case not in kept]
        for case in old[: max(0, len(old) - MAX_CLOSED)]:
            del self.cases[case]
