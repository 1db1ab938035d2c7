"""The accounts of one run: what is credited to a registration, taken back, given back, and what it is convicted of.

Every call finds the account decayed to ``now_s``, the time of the record that is being folded.
"""

from __future__ import annotations

import msgspec

from subnet.run import events as ev
from subnet.score.decay import half_power
from subnet.score.entry import ABSENT, AWAY, PRESENT, Credit, Entry, advance, count_lease, decayed, owns, take_back
from subnet.score.policy import ScorePolicy, WorkPolicy
from subnet.score.score import finite
from subnet.score.timeline import Timeline
from subnet.words import Commitment, Member

MOST_FLOPS = 1e30
"""Of one item: more is no number that a machine computes."""


def item_flops(planned: ev.RunPlanned) -> list[float]:
    """FLOPs of one microbatch, forward and backward, by stage; what isn't a number counts nothing."""
    units, cuts = [finite(flops, MOST_FLOPS) for flops in planned.unit_flops_per_token], planned.cuts
    tokens = planned.config.tokens_per_item
    ends = (*cuts[1:], len(units) - 2)
    own = [list(units[1 + lo : 1 + hi]) for lo, hi in zip(cuts, ends, strict=True)]
    own[0].insert(0, units[0])
    own[-1].append(units[-1])
    return [finite(sum(stage) * tokens, MOST_FLOPS) for stage in own]


class AccountsData(msgspec.Struct):
    entries: dict[str, Entry] = {}
    stage_flops: list[float] = []
    """Of one item, by stage."""
    now_s: float = 0.0


class Accounts:
    def __init__(self, policy: ScorePolicy | Timeline, data: AccountsData) -> None:
        self.timeline = policy if isinstance(policy, Timeline) else Timeline.of(policy)
        self.data = data

    @property
    def policy(self) -> ScorePolicy:
        return self.timeline.at(self.data.now_s)

    @property
    def pay(self) -> WorkPolicy:
        return self.timeline.work_at(self.data.now_s)

    def reach(self, time_ns: int) -> None:
        """Time never goes back, whatever a record is stamped with."""
        self.data.now_s = max(self.data.now_s, time_ns / 1e9)

    def at_now(self, hotkey: str) -> Entry | None:
        entry = self.data.entries.get(hotkey)
        if entry is not None:
            advance(entry, self.data.now_s, self.timeline)
        return entry

    def of(self, member: Member) -> Entry | None:
        """The account of the registration that this incarnation belongs to."""
        entry = self.at_now(member.hotkey)
        return entry if entry is not None and owns(entry, member) else None

    def work(self, stage: int, items: int) -> float:
        """FLOPs."""
        flops = self.data.stage_flops
        return flops[stage] * items if 0 <= stage < len(flops) else 0.0

    # --- members -------------------------------------------------------------------------------------------------

    def joined(self, member: Member, block: int) -> Member | None:
        """A new registration begins at zero. Returns the incarnation that this one replaces."""
        entry = self.at_now(member.hotkey)
        before = entry.member if entry is not None else None
        anew = entry is not None and block > 0 and entry.registered_at_block not in (0, block)
        if entry is None or anew:
            now_s = self.data.now_s
            entry = self.data.entries[member.hotkey] = Entry(block, now_s, now_s, (member.term, member.number))
        entry.registered_at_block = block or entry.registered_at_block
        entry.member, entry.status = member, PRESENT
        return before

    def gone(self, member: Member, *, lost: bool) -> None:
        entry = self.of(member)
        if entry is not None and entry.member == member:
            entry.status, entry.member = ABSENT if lost else AWAY, None

    def everybody_away(self, *, absent_too: bool = False) -> None:
        for hotkey, entry in self.data.entries.items():
            if entry.status == PRESENT or absent_too:
                self.at_now(hotkey)
                entry.status, entry.member = AWAY, None

    def forget_idle(self) -> None:
        forgotten = self.data.now_s - self.policy.memory_s
        entries = self.data.entries
        for hotkey in [h for h, e in entries.items() if e.status != PRESENT and e.as_of_s < forgotten]:
            del entries[hotkey]

    def count(self, member: Member | None, *, done: int = 0, late: int = 0, silent: int = 0) -> None:
        """A lease."""
        entry = self.data.entries.get(member.hotkey) if member is not None else None
        if member is not None and entry is not None and owns(entry, member):
            count_lease(entry, self.data.now_s, self.timeline, done=done, late=late, silent=silent)

    # --- work ----------------------------------------------------------------------------------------------------

    def sealed(self, step: int, commitment: Commitment) -> None:
        entry, count = self.of(commitment.member), len(commitment.microbatches)
        if entry is None or not count:
            return
        now_s, work = self.data.now_s, self.work(commitment.stage, count)
        entry.credits.append(Credit(step, commitment.stage, commitment.member, now_s, count, work))
        entry.sealed_work += work
        entry.sealed_items += count
        entry.sealed_partials += 1
        entry.last_sealed_s = now_s

    def settle(self, *, below: int | None = None, since: int | None = None) -> None:
        """Credits of these steps are final: no audit of them can come any more."""
        for hotkey, entry in self.data.entries.items():
            final, kept = list[Credit](), list[Credit]()
            for credit in entry.credits:
                is_final = (below is not None and credit.step < below) or (since is not None and credit.step >= since)
                (final if is_final else kept).append(credit)
            if final:
                self.at_now(hotkey)
                for credit in final:
                    entry.settled += decayed(credit, self.data.now_s, self.timeline)
                entry.credits = kept

    def pay_redone(self, member: Member, stage: int, items: int, time_s: float) -> None:
        """Of items that were done by ``time_s`` and were void through nobody's fault but a liar's."""
        entry = self.of(member)
        if entry is not None:
            work = self.work(stage, items) * self.pay.redone_pay
            entry.settled += work * half_power(self.timeline.halves(time_s, self.data.now_s))
            entry.redone_work += work
            entry.redone_items += items

    def pay_witness(self, hotkey: str, stage: int, items: int) -> None:
        entry = self.at_now(hotkey)
        if entry is not None:
            work = self.work(stage, items) * self.pay.witness_pay
            entry.settled += work
            entry.witness_work += work
            entry.witness_items += items

    # --- audits --------------------------------------------------------------------------------------------------

    def passed(self, member: Member) -> None:
        entry = self.of(member)
        if entry is not None:
            entry.passed += 1.0

    def failed(self, step: int, stage: int, member: Member, audit: int, items: int) -> bool:
        """Once, however often it is found; whether it was news. ``items``: where it failed before its seal."""
        entry = self.of(member)
        if entry is None or any(is_of(t.credit, step, stage, member) for t in entry.taken_back if t.why == "failed"):
            return False
        entry.failed += 1.0
        if not self.take_back(step, stage, member, "failed", audit):
            now_s = self.data.now_s
            void = Credit(step, stage, member, now_s, items, self.work(stage, items))
            take_back(entry, void, "failed", now_s, audit, sealed=False)
        return True

    def unopened(self, step: int, member: Member, audit: int) -> None:
        entry = self.of(member)
        if entry is not None:
            entry.unopened += 1.0
            self.take_back(step, None, member, "unopened", audit)

    def undecided(self, step: int, stage: int, member: Member, audit: int) -> None:
        if self.policy.undecided_pay < 1.0:
            self.take_back(step, stage, member, "undecided", audit, paid=self.policy.undecided_pay)

    def take_back(
        self, step: int, stage: int | None, member: Member, why: str, audit: int, *, paid: float = 0.0
    ) -> bool:
        """Whether there was a credit of it."""
        entry = self.of(member)
        if entry is None:
            return False
        kept: list[Credit] = []
        for credit in entry.credits:
            if credit.step != step or credit.member != member or (stage is not None and credit.stage != stage):
                kept.append(credit)
                continue
            lost = msgspec.structs.replace(credit, work=credit.work * (1.0 - paid), items=0 if paid else credit.items)
            take_back(entry, lost, why, self.data.now_s, audit, sealed=True)
            entry.sealed_work = max(0.0, entry.sealed_work - lost.work)
            if paid:
                kept.append(msgspec.structs.replace(credit, work=credit.work * paid))
            else:
                entry.sealed_items -= credit.items
                entry.sealed_partials -= 1
        found = len(kept) < len(entry.credits)
        entry.credits = kept
        return found

    def give_back(self, step: int, stage: int, member: Member) -> None:
        """The work was right: paid after all, and the audit counts as passed."""
        entry = self.of(member)
        if entry is None:
            return
        for taken in [t for t in entry.taken_back if t.why == "failed" and is_of(t.credit, step, stage, member)]:
            credit, now_s = taken.credit, self.data.now_s
            entry.taken_back = [other for other in entry.taken_back if other != taken]
            entry.failed = max(0.0, entry.failed - half_power(self.timeline.halves(taken.time_s, now_s)))
            entry.passed += 1.0
            if taken.sealed:
                entry.settled += decayed(credit, now_s, self.timeline)
                entry.sealed_work += credit.work
                entry.sealed_items += credit.items
                entry.sealed_partials += 1
            else:
                self.pay_redone(member, stage, credit.items, credit.time_s)

    def sealed_items(self, step: int, stage: int, member: Member) -> int:
        """Of the member's partial, whether it is still paid or not; 0 where it is no longer known."""
        entry = self.data.entries.get(member.hotkey)
        if entry is None:
            return 0
        credits = [*entry.credits, *(taken.credit for taken in entry.taken_back if taken.sealed)]
        return max((credit.items for credit in credits if is_of(credit, step, stage, member)), default=0)

    # --- convictions ---------------------------------------------------------------------------------------------

    def convict(self, case: int, entry: Entry | None, why: str) -> None:
        if entry is not None:
            entry.convictions[case] = (self.data.now_s, why)

    def acquit(self, case: int, hotkey: str) -> None:
        entry = self.data.entries.get(hotkey)
        if entry is not None:
            entry.convictions.pop(case, None)

    def convictions(self) -> set[int]:
        return {case for entry in self.data.entries.values() for case in entry.convictions}


def is_of(credit: Credit, step: int, stage: int, member: Member) -> bool:
    return (credit.step, credit.stage, credit.member) == (step, stage, member)
