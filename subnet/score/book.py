"""What each hotkey has earned in one run, folded from the run's journal records and from nothing else.

:meth:`RunBook.note` takes every record once, in order; times are those that records were stamped with. The same records and
policy give the same floats, whether noted live, after a restart from a dump, or by :func:`subnet.score.recompute.recompute`.

A partial is credited when its stage is sealed. Its credit is taken back when its audit fails, or its member doesn't open evidence
of that step; it is given back when the case ends with ``cleared`` or a successful appeal. A conviction makes the score 0 as long
as it is remembered. Work that a rewind undoes stays paid. Not paid: evaluation items, replays, what is void before its seal.
"""

from __future__ import annotations

import msgspec

from subnet.run import events as ev
from subnet.score.entry import ABSENT, AWAY, PRESENT, Credit, Entry, TakenBack, advance, decayed, factor, tally_of
from subnet.score.policy import ScorePolicy
from subnet.score.score import Tally, Unpaid
from subnet.words import Member

KEPT_UNPAID = 64
_MOST_OFTEN = ev.Updated | ev.Committed | ev.PartitionMerged | ev.Fingerprinted | ev.Checked


class _Audit(msgspec.Struct, frozen=True, array_like=True):
    step: int
    stage: int
    number: int


class _Data(msgspec.Struct):
    run_id: str = ""
    entries: dict[str, Entry] = {}
    holders: dict[int, dict[tuple[int, int], str]] = {}
    """By step: who holds, or held last, the lease of (microbatch, stage)."""
    stage_flops: list[float] = []
    """Of one item, by stage."""
    microbatches: int = 0
    settle_after: int = 0
    """Steps after which no audit of a partial can come any more."""
    leader: str = ""
    audits: dict[int, _Audit] = {}
    cases: dict[int, tuple[str, int, int, Member]] = {}
    """By case: hotkey, step, stage, member."""
    items_done: dict[str, int] = {}
    now_s: float = 0.0


_decoder = msgspec.msgpack.Decoder(_Data)


def item_flops(planned: ev.RunPlanned) -> list[float]:
    """FLOPs of one microbatch, forward and backward, by stage."""
    units, cuts = planned.unit_flops_per_token, planned.cuts
    tokens = planned.config.pipeline.microbatch_rows * planned.config.data.sequence_length
    ends = (*cuts[1:], len(units) - 2)
    own = [list(units[1 + lo : 1 + hi]) for lo, hi in zip(cuts, ends, strict=True)]
    own[0].insert(0, units[0])
    own[-1].append(units[-1])
    return [sum(stage) * tokens for stage in own]


class RunBook:
    """``leader_audits`` False: audits, cases and convictions in the journal count nothing, only what :meth:`judge` and
    :meth:`convict` are told: the book of a validator that doesn't believe the leader."""

    def __init__(self, policy: ScorePolicy | None = None, *, leader_audits: bool = True) -> None:
        self.policy = policy if policy is not None else ScorePolicy()
        self._leader_audits = leader_audits
        self._data = _Data()

    def dump(self) -> bytes:
        """Everything, for :meth:`load`."""
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        """In place; the next record to note is the one behind the dump."""
        self._data = _decoder.decode(data)

    def items_done(self, hotkey: str) -> int:
        """Training items of the hotkey that were sealed, paid or not."""
        return self._data.items_done.get(hotkey, 0)

    # --- the fold ------------------------------------------------------------------------------------------------

    def note(self, record: ev.Record) -> None:
        event, data = record.event, self._data
        if isinstance(event, _MOST_OFTEN):
            return
        now_s = data.now_s = max(data.now_s, record.time_ns / 1e9)
        match event:
            case ev.Leased():
                holders = data.holders.setdefault(event.step, {})
                holders[event.microbatch, event.stage] = event.member.hotkey
            case ev.Backwarded():
                self._count(event.step, event.microbatch, event.stage, "done")
            case ev.Forwarded():
                if event.microbatch >= data.microbatches:
                    self._count(event.step, event.microbatch, event.stage, "done")
            case ev.Revoking():
                self._count(event.step, event.microbatch, event.stage, "late")
            case ev.Voided():
                entry = self._at_now(event.member.hotkey)
                if entry is not None and event.why == "silent":
                    entry.silent += 1.0
            case ev.RunPlanned():
                self._planned(event)
            case ev.TermStarted():
                data.leader = event.hotkey
                data.audits = {audit: found for audit, found in data.audits.items() if not found.number}
                self._everybody_away()
            case ev.Joined():
                self._joined(event)
            case ev.Gone():
                self._gone(event)
            case ev.StageSealed():
                self._stage_sealed(event)
            case ev.StepSealed():
                self._step_sealed(event)
            case ev.RunFinished():
                self._everybody_away(absent_too=True)
                self._settle(below=event.step + 1)
            case ev.Rewound():
                self._rewound(event)
            case _:
                if self._leader_audits:
                    self._note_audit(now_s, event)

    def _note_audit(self, now_s: float, event: ev.AnyEvent) -> None:
        data = self._data
        match event:
            case ev.AuditOpened():
                if event.by == data.leader:
                    data.audits[event.audit] = _Audit(event.step, event.stage, event.number)
            case ev.AuditClosed():
                opened = data.audits.pop(event.audit, None)
                if opened is not None:
                    self._judge(opened.step, opened.stage, event)
            case ev.CaseOpened():
                data.cases[event.case] = (event.hotkey, event.step, event.stage, event.member)
            case ev.CaseClosed():
                hotkey = data.cases.get(event.case, ("",))[0]
                if event.outcome == "convicted":
                    self._convict(event.case, hotkey, f"convicted in case {event.case}")
                elif event.outcome == "cleared":
                    self._clear(event.case)
            case ev.Appealed():
                if not event.upheld:
                    self._clear(event.case)
            case _:
                pass

    # --- for a validator that believes its own audits alone -------------------------------------------------------

    def judge(self, time_ns: int, step: int, stage: int, outcome: ev.AuditClosed) -> None:
        """As if the journal had closed an audit of (step, stage) like this."""
        self._data.now_s = max(self._data.now_s, time_ns / 1e9)
        self._judge(step, stage, outcome)

    def convict(self, time_ns: int, hotkey: str, why: str, case: int = 0) -> None:
        self._data.now_s = max(self._data.now_s, time_ns / 1e9)
        self._convict(case, hotkey, why)

    def clear(self, time_ns: int, hotkey: str, case: int = 0) -> None:
        """Ends a conviction by :meth:`convict`."""
        self._data.now_s = max(self._data.now_s, time_ns / 1e9)
        entry = self._data.entries.get(hotkey)
        if entry is not None:
            entry.convictions.pop(case, None)

    # --- members -------------------------------------------------------------------------------------------------

    def _planned(self, event: ev.RunPlanned) -> None:
        data, audit = self._data, event.config.audit
        data.run_id, data.stage_flops = event.run_id, item_flops(event)
        data.microbatches = event.config.pipeline.microbatches
        data.settle_after = (audit.open_windows + 2) * audit.window_steps if audit.on else 0

    def _at_now(self, hotkey: str) -> Entry | None:
        """The entry, decayed to the time of the record."""
        entry = self._data.entries.get(hotkey)
        if entry is not None:
            advance(entry, self._data.now_s, self.policy.half_life_s)
        return entry

    def _joined(self, event: ev.Joined) -> None:
        data, hotkey, block = self._data, event.member.hotkey, event.registered_at_block
        entry = self._at_now(hotkey)
        anew = entry is not None and block > 0 and entry.registered_at_block not in (0, block)
        if entry is None or anew:
            entry = data.entries[hotkey] = Entry(block, data.now_s, data.now_s)
        entry.registered_at_block = block or entry.registered_at_block
        entry.member, entry.status = event.member, PRESENT

    def _gone(self, event: ev.Gone) -> None:
        entry = self._at_now(event.member.hotkey)
        if entry is None:
            return
        if event.why == "liar" and self._leader_audits:
            self._convict(0, event.member.hotkey, "its sums contradict their fingerprints")
        if entry.member == event.member:
            lost = event.why in ("lost", "silent")
            entry.status, entry.member = ABSENT if lost else AWAY, None

    def _everybody_away(self, *, absent_too: bool = False) -> None:
        for hotkey, entry in self._data.entries.items():
            if entry.status == PRESENT or absent_too:
                self._at_now(hotkey)
                entry.status, entry.member = AWAY, None
        self._data.holders = {}

    def _count(self, step: int, microbatch: int, stage: int, what: str) -> None:
        hotkey = self._data.holders.get(step, {}).get((microbatch, stage), "")
        entry = self._at_now(hotkey)
        if entry is not None:
            setattr(entry, what, getattr(entry, what) + 1.0)

    # --- work ----------------------------------------------------------------------------------------------------

    def _stage_sealed(self, event: ev.StageSealed) -> None:
        data = self._data
        for commitment in event.entries:
            hotkey, count = commitment.member.hotkey, len(commitment.microbatches)
            data.items_done[hotkey] = data.items_done.get(hotkey, 0) + count
            entry = self._at_now(hotkey)
            if entry is None or not count:
                continue
            work = data.stage_flops[commitment.stage] * count
            entry.credits.append(Credit(event.step, commitment.stage, commitment.member, data.now_s, count, work))
            entry.sealed_work += work
            entry.sealed_items += count
            entry.sealed_partials += 1
            entry.last_sealed_s = data.now_s

    def _step_sealed(self, event: ev.StepSealed) -> None:
        data = self._data
        for step in [step for step in data.holders if step <= event.step]:
            del data.holders[step]
        self._settle(below=event.step + 1 - data.settle_after)
        forgotten = data.now_s - self.policy.memory_s
        for hotkey in [h for h, e in data.entries.items() if e.status != PRESENT and e.as_of_s < forgotten]:
            del data.entries[hotkey]
        horizon = event.step - 64 * max(1, data.settle_after)
        data.cases = {case: found for case, found in data.cases.items() if found[1] >= horizon}

    def _settle(self, *, below: int | None = None, since: int | None = None) -> None:
        """Credits of these steps are final: no audit of them can come any more."""
        for hotkey, entry in self._data.entries.items():
            final = [
                c
                for c in entry.credits
                if (below is not None and c.step < below) or (since is not None and c.step >= since)
            ]
            if not final:
                continue
            self._at_now(hotkey)
            for credit in final:
                entry.settled += decayed(credit, self._data.now_s, self.policy.half_life_s)
            entry.credits = [credit for credit in entry.credits if credit not in final]

    def _rewound(self, event: ev.Rewound) -> None:
        self._settle(since=event.step)
        self._everybody_away()
        self._data.audits = {a: found for a, found in self._data.audits.items() if found.step < event.step}

    # --- audits --------------------------------------------------------------------------------------------------

    def _judge(self, step: int, stage: int, event: ev.AuditClosed) -> None:
        for member in event.passed:
            entry = self._at_now(member.hotkey)
            if entry is not None:
                entry.passed += 1.0
        for member in event.failed:
            entry = self._at_now(member.hotkey)
            if entry is not None:
                entry.failed += 1.0
            if not self._take_back(step, stage, member, "failed", event.audit) and entry is not None:
                nothing = Credit(step, stage, member, self._data.now_s, 0, 0.0)  # found before its seal
                self._lose(entry, nothing, "failed", event.audit)
        for member in event.unopened:
            entry = self._at_now(member.hotkey)
            if entry is not None:
                entry.unopened += 1.0
            self._take_back(step, None, member, "unopened", event.audit)
        for member in event.undecided:
            if member not in event.unopened and self.policy.undecided_pay < 1.0:
                self._take_back(step, stage, member, "undecided", event.audit, paid=self.policy.undecided_pay)

    def _take_back(
        self, step: int, stage: int | None, member: Member, why: str, audit: int, *, paid: float = 0.0
    ) -> bool:
        """Whether there was a credit of it."""
        entry = self._at_now(member.hotkey)
        if entry is None:
            return False
        kept: list[Credit] = []
        for credit in entry.credits:
            if credit.step != step or credit.member != member or (stage is not None and credit.stage != stage):
                kept.append(credit)
                continue
            lost = msgspec.structs.replace(credit, work=credit.work * (1.0 - paid), items=0 if paid else credit.items)
            self._lose(entry, lost, why, audit)
            entry.sealed_work -= lost.work
            if paid:
                kept.append(msgspec.structs.replace(credit, work=credit.work * paid))
            else:
                entry.sealed_items -= credit.items
                entry.sealed_partials -= 1
        found = len(kept) < len(entry.credits)
        entry.credits = kept
        return found

    def _lose(self, entry: Entry, credit: Credit, why: str, audit: int) -> None:
        entry.taken_back = [*entry.taken_back, TakenBack(credit, why, self._data.now_s, audit)][-KEPT_UNPAID:]

    def _convict(self, case: int, hotkey: str, why: str) -> None:
        entry = self._at_now(hotkey)
        if entry is not None:
            entry.convictions[case] = (self._data.now_s, why)

    def _clear(self, case: int) -> None:
        """The work was right: paid after all, and the audit counts as passed."""
        hotkey, step, stage, member = self._data.cases.get(case, ("", 0, 0, None))
        entry = self._at_now(hotkey)
        if entry is None:
            return
        entry.convictions.pop(case, None)
        for taken in [t for t in entry.taken_back if t.why == "failed"]:
            credit = taken.credit
            if (credit.step, credit.stage, credit.member) != (step, stage, member):
                continue
            entry.taken_back = [other for other in entry.taken_back if other != taken]
            entry.settled += decayed(credit, self._data.now_s, self.policy.half_life_s)
            entry.sealed_work += credit.work
            entry.sealed_items += credit.items
            entry.sealed_partials += credit.items > 0
            entry.failed = max(0.0, entry.failed - factor(self._data.now_s - taken.time_s, self.policy.half_life_s))
            entry.passed += 1.0

    # --- what is asked of it -------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self._data.run_id

    def tallies(self, now_s: float) -> dict[str, Tally]:
        """What was counted, decayed to ``now_s``, by hotkey. Changes nothing."""
        now_s = max(now_s, self._data.now_s)
        return {hotkey: tally_of(hotkey, entry, now_s, self.policy) for hotkey, entry in self._data.entries.items()}

    def unpaid(self, hotkey: str) -> tuple[Unpaid, ...]:
        """The last sealed partials of the hotkey that weren't paid (in full), oldest first."""
        entry = self._data.entries.get(hotkey)
        if entry is None:
            return ()
        return tuple(
            Unpaid(t.credit.step, t.credit.stage, t.credit.items, t.credit.work, t.why, t.time_s, self.run_id, t.audit)
            for t in entry.taken_back
        )
