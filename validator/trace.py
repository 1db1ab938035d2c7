"""Who lied in a merge whose check failed: pure judgement over the slices that the store has.

Guilty is whoever reported a fingerprint that isn't its slice's; if nobody did, the owner whose sum isn't that of the
slices, or whose squares aren't the sum's; if nobody did that either, whoever said that a right sum was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Merge, RunState
from subnet.words import Commitment, Member
from validator.decide_members import silent_outcome
from validator.decide_merges import order_reduce
from validator.decision import Decision, TraceVerdict, because

Slice = TypeVar("Slice")


class SliceArithmetic(Protocol[Slice]):
    """What judging needs to know of slices; the shell's is exact arithmetic, a test's is toy arithmetic."""

    def read(self, group: int, partition: int, hash: str) -> Slice | None:
        """The slice with this hash, checked against it; None where the store doesn't have it."""
        ...

    def fingerprint(self, group: int, partition: int, values: Slice, seed: str) -> tuple[int, ...]: ...

    def merge(self, group: int, partition: int, slices: Sequence[Slice]) -> tuple[str, str]:
        """Hash and square-sum (hexadecimal) of the merged slices."""
        ...


@dataclass(frozen=True)
class Verdict:
    """``missing``: contributors whose slices the store doesn't have; nobody is judged while there are any."""

    guilty: tuple[Member, ...] = ()
    missing: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Trial(Generic[Slice]):
    """One group's merge under trial."""

    state: RunState
    group: int
    merge: Merge
    arithmetic: SliceArithmetic[Slice]

    def verdict(self) -> Verdict:
        missing: list[Member] = []
        guilty: list[Member] = []
        parts: dict[int, list[Slice]] = {p: [] for p in range(len(self.merge.owners))}
        for entry in self.merge.entries:
            slices = {p: self.arithmetic.read(self.group, p, value) for p, value in entry.hashes}
            found = {p: values for p, values in slices.items() if values is not None}
            if len(found) < len(slices):
                missing.append(entry.member)
                continue
            for p, values in found.items():
                parts[p].append(values)
            if self._fingerprints(found) != dict(self.merge.fingerprints.get(entry.member, ())):
                guilty.append(entry.member)
        if missing:
            return Verdict(missing=tuple(missing))
        guilty = guilty or self._false_owners(parts)
        return Verdict(guilty=tuple(sorted(set(guilty or self._false_accusers()))))

    def _fingerprints(self, slices: dict[int, Slice]) -> dict[int, tuple[int, ...]]:
        seed = self.merge.seed
        return {p: self.arithmetic.fingerprint(self.group, p, values, seed) for p, values in slices.items()}

    def _false_owners(self, parts: dict[int, list[Slice]]) -> list[Member]:
        false: list[Member] = []
        for p, slices in parts.items():
            said = self.merge.merged[p]
            if self.arithmetic.merge(self.group, p, slices) != (said.hash, said.squares):
                false.append(self.merge.owners[p])
        return false

    def _false_accusers(self) -> list[Member]:
        return [member for member, ok in self.merge.checks.items() if not ok]


def verdict_events(state: RunState, action: TraceVerdict, verdict: Verdict) -> list[Decision]:
    """What to journal of a verdict: the guilty are gone for good; if the manifest survives that, it is reduced anew.

    Empty where the merge went on in the meantime, or slices may still come.
    """
    merge = st.merge_of(state, action.step, action.group)
    work = state.work
    if merge is None or work is None or merge.phase != st.REVEALED or merge.version != action.version:
        return []
    if verdict.missing:
        late = [entry for entry in merge.entries if entry.member in verdict.missing]
        return [] if action.patient or not late else [_withheld(state, late[0])]
    decided = [
        Decision(ev.Gone(member, "liar"), because("convicted", group=action.group, version=action.version))
        for member in verdict.guilty
        if member in state.members
    ]
    if any(entry.member in verdict.guilty for entry in merge.entries):
        return decided
    names = [member.hotkey for member in verdict.guilty]
    return decided + order_reduce(state, work, action.group, merge, merge.entries, "traced", without=names)


def _withheld(state: RunState, entry: Commitment) -> Decision:
    return silent_outcome(state, entry.stage, entry.member, "slices_withheld", 0.0)
