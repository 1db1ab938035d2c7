"""What a coordinator knows of audits and a journal doesn't keep: results, blocks, who said that it lost what, what was asked.

All of it is lost in a restart: then open audits are run again, windows drawn again (the draws are the same), witnesses waited
for anew. Its size is bounded by what is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from subnet.audit.draw import Draw
from subnet.audit.ledger import WorkLedger
from subnet.words import Member, Want
from validator.decision import Action, AuditResult, JudgeBoundary, RootResult
from validator.intake_proofs import proves

MAX_QUEUED = 1024
ClockKey = tuple[str, int, object]
"""("audit" or "case", its number, what is waited for)."""


@dataclass(frozen=True)
class AuditRequest:
    """Another validator wants evidence of these hotkeys' partials of (step, stage) put into the store."""

    by: str
    window: int
    step: int
    stage: int
    hotkeys: tuple[str, ...]


@dataclass(frozen=True)
class Unusable:
    """A receipted boundary whose receiver says that its bytes are no numbers. ``stage``: the maker's."""

    step: int
    microbatch: int
    stage: int
    backward: bool
    maker: Member
    reporter: Member


class AuditWatch:
    """Filled by the shell, read by :mod:`validator.decide_audits`."""

    def __init__(self) -> None:
        self.block: int | None = None
        """The newest known block."""
        self.block_hashes: dict[int, str] = {}
        """Of the blocks that closed windows wait for."""
        self.results: dict[int, AuditResult] = {}
        """By audit: what came of ``RunAudit``."""
        self.not_held: set[tuple[int, Want]] = set()
        """(audit, want): its maker said that it doesn't hold it any more, or the maker is gone and somebody said so."""
        self.not_held_by: set[tuple[int, Want, str]] = set()
        """Of which their maker, by hotkey, said so."""
        self.roots: dict[tuple[int, int], RootResult] = {}
        """By version and stage: what came of ``RunRoots``."""
        self.unusable: dict[str, Unusable] = {}
        """By hash: receipted boundaries that their receivers call unusable."""
        self.judged: dict[str, bool] = {}
        """Of these: whether they are."""
        self.requests: deque[AuditRequest] = deque(maxlen=MAX_QUEUED)
        """Of other validators."""
        self.words: deque[tuple[int, str, str]] = deque(maxlen=MAX_QUEUED)
        """(case, hotkey of another validator, digest that its run of the bundle gave)."""
        self.appeals: deque[int] = deque(maxlen=MAX_QUEUED)
        """Closed cases that are to be run again."""
        self.ledger = WorkLedger()
        self.registered: dict[str, int] = {}
        """By hotkey: the block it was registered at."""
        self._missed: dict[int, tuple[int, int]] = {}
        self.began: dict[int, tuple[int, int]] = {}
        """By audit: freeze and manifest version that it was run for."""
        self.equivocators: set[str] = set()
        """Hotkeys of whom a signature shows that they sent one thing and receipted another."""
        self.proves = proves
        """Whether a claim shows that; by real signatures."""
        self._differences: dict[tuple[str, str], int] = {}
        self._differed_with: dict[str, set[str]] = {}
        """By hotkey: coldkeys of whoever it has differed with about a boundary, as long as this process leads."""
        self._mismatches: dict[tuple[Member, int], int] = {}
        self.draws: dict[tuple[int, int], tuple[Draw, ...]] = {}
        """By branch and window: what this validator redoes of it."""
        self.nothing_due: set[tuple[int, str]] = set()
        """(branch, hotkey) of the convicted who left nothing sealed that could be undone."""
        self._since: dict[ClockKey, float] = {}

    def take(self, action: Action, found: AuditResult | RootResult | bool | None) -> None:
        """What an action has found out."""
        if isinstance(found, AuditResult):
            self.results[found.audit] = found
        elif isinstance(found, RootResult):
            self.roots[found.version, found.stage] = found
        elif found is not None and isinstance(action, JudgeBoundary):
            self.judged[action.hash] = found

    # --- clocks: unlike the other clocks of a watch they don't end with a step

    def age(self, key: ClockKey, work_s: float) -> float:
        """Seconds of the store's working time since the key was first asked about."""
        return max(0.0, work_s - self._since.setdefault(key, work_s))

    def restart(self, key: ClockKey, work_s: float) -> None:
        self._since[key] = work_s

    def is_timed(self, key: ClockKey) -> bool:
        return key in self._since

    def forget(self, *keys: ClockKey) -> None:
        for key in keys:
            self._since.pop(key, None)

    # --- what is over

    def keep(self, audits: Collection[int], cases: Collection[int]) -> None:
        """Forgets what belongs to audits and cases that aren't open any more."""
        for known in (self.results, self.began, self._missed):
            for audit in [audit for audit in known if audit not in audits]:
                del known[audit]
        if len(self._mismatches) > MAX_QUEUED:
            self._mismatches.clear()
        for key in [key for key in self._since if key[1] not in (audits if key[0] == "audit" else cases)]:
            del self._since[key]
        if self.not_held:
            self.not_held = {entry for entry in self.not_held if entry[0] in audits}
            self.not_held_by = {entry for entry in self.not_held_by if entry[0] in audits}

    def missed(self, audit: int, missing: Collection[Want]) -> int:
        """How often in a row so much of it was missing, this time included."""
        before, times = self._missed.get(audit, (0, 0))
        times = times + 1 if len(missing) == before else 1
        self._missed[audit] = (len(missing), times)
        return times

    def call_unusable(self, hash_: str, told: Unusable) -> None:
        """The first who says so of a boundary."""
        if len(self.unusable) < MAX_QUEUED:
            self.unusable.setdefault(hash_, told)

    def mismatched(self, member: Member, step: int) -> int:
        """Counts a sum of this step that the member wants void because of its inputs; how many there were before."""
        count = self._mismatches.get((member, step), 0)
        self._mismatches[member, step] = count + 1
        return count

    def differences(self, pair: tuple[str, str]) -> int:
        """How often these hotkeys have differed about a boundary: its maker, and who reports it missing."""
        return self._differences.get(pair, 0)

    def differ(self, pair: tuple[str, str], coldkeys: tuple[str, str]) -> tuple[int, tuple[int, int]]:
        """They differ once more: how often they had before, and with how many coldkeys each of them has, whichever it was."""
        if len(self._differences) > MAX_QUEUED:
            self._differences.clear()
            self._differed_with.clear()
        before = self._differences.get(pair, 0)
        self._differences[pair] = before + 1
        for hotkey, coldkey in zip(pair, reversed(coldkeys), strict=True):
            self._differed_with.setdefault(hotkey, set()).add(coldkey)
        maker, reporter = (len(self._differed_with[hotkey]) for hotkey in pair)
        return before, (maker, reporter)
