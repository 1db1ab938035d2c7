"""What each hotkey has earned in one run, folded from the run's journal records and from nothing else.

:meth:`RunBook.note` takes every record once, in order; times are those that records were stamped with. The same records and
policy give the same floats, whether noted live, after a restart from a dump, or by :func:`subnet.score.recompute.recompute`.

Paid is the work of a sealed partial, when its stage is sealed. It is taken back when its audit fails, or its member doesn't open
evidence of that step, and given back when the case ends ``cleared`` or an appeal succeeds. A conviction makes the score 0 as long
as it is remembered. Work that a rewind undoes stays paid. Items that were done and became void for another's lie are paid too
(:mod:`subnet.score.steps`), and those that a third party redid to settle a case (:mod:`subnet.score.trials`). Not paid:
evaluation items, replays of lost boundaries, all else that is void before its seal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from subnet.errors import Corrupt
from subnet.run import events as ev
from subnet.score.accounts import Accounts, AccountsData, item_flops
from subnet.score.entry import tally_of
from subnet.score.policy import ScorePolicy
from subnet.score.score import Tally, Unpaid
from subnet.score.steps import Steps, Void
from subnet.score.timeline import Counting, Timeline, continues
from subnet.score.trials import CLEARED, CONVICTED, MERGE, UNOPENED, Charge, Trials
from subnet.words import Member

VERSION = 4
"""Of dumps."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """The last change of policy that the journal tells of."""

    digest: str
    effective_s: float


class _Data(msgspec.Struct):
    version: int = 0
    timeline: tuple[Counting, ...] = ()
    told: Told | None = None
    run_id: str = ""
    accounts: AccountsData = msgspec.field(default_factory=AccountsData)
    steps: Steps = msgspec.field(default_factory=Steps)
    trials: Trials = msgspec.field(default_factory=Trials)
    microbatches: int = 0
    settle_after: int = 0
    """Steps after which no audit of a partial can come any more."""
    items_done: dict[str, int] = {}


_decoder = msgspec.msgpack.Decoder(_Data)


class RunBook:
    """``policy``: what counts when; without ``own_policy`` as long as the journal doesn't change it (``PolicyChanged``).

    ``leader_audits`` False: audits, cases and convictions in the journal count nothing, only what :meth:`judge`,
    :meth:`convict` and :meth:`believe` are told: the book of a validator that doesn't believe the leader, nor its policy."""

    def __init__(
        self,
        policy: ScorePolicy | Timeline | None = None,
        *,
        leader_audits: bool = True,
        own_policy: bool = False,
    ) -> None:
        self._leader_audits, self._own_policy = leader_audits, own_policy or not leader_audits
        timeline = policy if isinstance(policy, Timeline) else Timeline.of(policy)
        self._use(_Data(VERSION, timeline.entries))
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ev.Leased: self._leased,
            ev.Backwarded: self._backwarded,
            ev.Forwarded: self._forwarded,
            ev.Revoking: self._revoking,
            ev.Voided: self._voided,
            ev.MicrobatchSkipped: self._skipped,
            ev.RunPlanned: self._planned,
            ev.TermStarted: self._term,
            ev.Joined: self._joined,
            ev.Gone: self._gone,
            ev.StageSealed: self._stage_sealed,
            ev.StepSealed: self._step_sealed,
            ev.RunFinished: self._finished,
            ev.Rewound: self._rewound,
            ev.AuditOpened: self._audit_opened,
            ev.AuditClosed: self._audit_closed,
            ev.CaseOpened: self._case_opened,
            ev.WitnessAsked: self._witness_asked,
            ev.WitnessSaid: self._witness_said,
            ev.CaseClosed: self._case_closed,
            ev.Appealed: self._appealed,
        }
        if not self._own_policy:
            self._handlers[ev.PolicyChanged] = self._policy_changed

    def _use(self, data: _Data) -> None:
        self._data, self.timeline = data, Timeline(data.timeline)
        self._accounts, self._steps, self._trials = Accounts(self.timeline, data.accounts), data.steps, data.trials

    @property
    def told(self) -> Told | None:
        """The last change of policy that the journal tells of, whether this book follows it or not."""
        return self._data.told

    def fresh(self) -> RunBook:
        """An empty book that begins like this one."""
        entries = self.timeline.entries if self._own_policy else self.timeline.entries[:1]
        return RunBook(Timeline(entries), leader_audits=self._leader_audits, own_policy=self._own_policy)

    def change(self, counting: Counting) -> None:
        """Another policy from its time on; never for what has been counted already."""
        since_s = max(counting.since_s, self.now_s)
        self.timeline = self.timeline.changed(msgspec.structs.replace(counting, since_s=since_s))
        self._data.timeline, self._accounts.timeline = self.timeline.entries, self.timeline

    def dump(self) -> bytes:
        """Everything, for :meth:`load`."""
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        """In place; the next record to note is the one behind the dump. :class:`Corrupt`, and nothing is changed, where it can't be
        read, or was counted with another policy: what has faded can't be counted otherwise afterwards."""
        hint = "the log store has all records: iota score recompute STORE_URL RUN counts them anew"
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"these scores can't be read: {error}", hint=hint) from error
        if found.version != VERSION:
            raise Corrupt(f"these scores are of version {found.version}, not {VERSION}", hint=hint)
        own = self.timeline
        if not found.timeline or not continues(
            Timeline(found.timeline if self._own_policy else found.timeline[:1]), own, found.accounts.now_s
        ):
            raise Corrupt("these scores were counted with another policy", hint=hint)
        if self._own_policy:
            found.timeline = own.entries
        self._use(found)

    def note(self, record: ev.Record) -> None:
        handle = self._handlers.get(type(record.event))
        if handle is None:
            if isinstance(record.event, ev.PolicyChanged):  # somebody else's: it isn't even a time
                self._told(record.event)
            return
        self._accounts.reach(record.time_ns)
        handle(record.event)

    # --- for a validator that believes its own audits alone -------------------------------------------------------

    def judge(self, time_ns: int, step: int, stage: int, outcome: ev.AuditClosed) -> None:
        """As if the journal had closed an audit of (step, stage) like this."""
        self._accounts.reach(time_ns)
        self._judge(step, stage, outcome, {})

    def believe(self, time_ns: int, case: int) -> None:
        """This validator replayed the case and got its digest: if it ends ``convicted`` or ``fault``, the partial isn't paid, and
        those who redid it, or had to redo theirs, are. Said again it changes nothing; convictions are :meth:`convict`'s."""
        self._accounts.reach(time_ns)
        charge = self._trials.cases.get(case)
        if charge is not None:
            charge.believed = True
            self._take_effect(case, charge)

    def convict(self, time_ns: int, hotkey: str, why: str, case: int = 0) -> None:
        self._accounts.reach(time_ns)
        self._accounts.convict(case, self._accounts.at_now(hotkey), why)

    def clear(self, time_ns: int, hotkey: str, case: int = 0) -> None:
        """Ends a conviction by :meth:`convict`; what :meth:`believe` took is given back."""
        self._accounts.reach(time_ns)
        self._accounts.acquit(case, hotkey)
        charge = self._trials.cases.get(case)
        if charge is not None and charge.took:
            charge.took = False
            self._accounts.give_back(charge.step, charge.stage, charge.member)

    def _policy_changed(self, event: ev.PolicyChanged) -> None:
        self._told(event)
        self.change(Counting(event.effective_s, event.policy.score, event.policy.work))

    def _told(self, event: ev.PolicyChanged) -> None:
        self._data.told = Told(event.digest, event.effective_s)

    # --- members -------------------------------------------------------------------------------------------------

    def _planned(self, event: ev.RunPlanned) -> None:
        data, audit = self._data, event.config.audit
        data.run_id, data.accounts.stage_flops = event.run_id, item_flops(event)
        data.microbatches = event.config.num_items
        data.settle_after = (audit.open_windows + 2) * audit.window_steps if audit.on else 0

    def _term(self, event: ev.TermStarted) -> None:
        self._trials.term(event.hotkey)
        self._everybody_away()

    def _joined(self, event: ev.Joined) -> None:
        older = self._accounts.joined(event.member, event.registered_at_block)
        if older is not None:
            self._steps.drop(older)

    def _gone(self, event: ev.Gone) -> None:
        self._steps.drop(event.member)
        if event.why == "liar" and self._leader_audits:
            self._accounts.convict(0, self._accounts.of(event.member), "its sums contradict their fingerprints")
        self._accounts.gone(event.member, lost=event.why in ("lost", "silent"))

    def _everybody_away(self, *, absent_too: bool = False) -> None:
        self._accounts.everybody_away(absent_too=absent_too)
        self._steps.open = {}

    # --- leases --------------------------------------------------------------------------------------------------

    def _leased(self, event: ev.Leased) -> None:
        self._steps.leased(event.step, event.microbatch, event.stage, event.member)

    def _holder(self, event: ev.Backwarded | ev.Forwarded | ev.Revoking) -> Member | None:
        return self._steps.holder(event.step, event.microbatch, event.stage)

    def _backwarded(self, event: ev.Backwarded) -> None:
        member = self._holder(event)
        if member is not None:
            self._steps.done(event.step, event.microbatch, event.stage, member)
            self._accounts.count(member, done=1)

    def _forwarded(self, event: ev.Forwarded) -> None:
        """Of an evaluation: that of a training item counts with its backward."""
        if event.microbatch >= self._data.microbatches:
            self._accounts.count(self._holder(event), done=1)

    def _revoking(self, event: ev.Revoking) -> None:
        self._accounts.count(self._holder(event), late=1)

    def _voided(self, event: ev.Voided) -> None:
        items = self._steps.void(event.step, event.stage, event.member)
        if event.why == "silent":
            self._accounts.count(event.member, silent=1)
        if event.why == "inputs" and items:
            void = Void(event.step, event.stage, event.member, self._data.accounts.now_s, items)
            if self._steps.void_for_inputs(void):
                self._pay(void)

    def _skipped(self, event: ev.MicrobatchSkipped) -> None:
        if event.microbatch < self._data.microbatches:
            self._steps.skip(event.step, event.microbatch)

    def _pay(self, void: Void) -> None:
        self._accounts.pay_redone(void.member, void.stage, void.items, void.time_s)

    # --- seals ---------------------------------------------------------------------------------------------------

    def _stage_sealed(self, event: ev.StageSealed) -> None:
        items_done = self._data.items_done
        for commitment in event.entries:
            hotkey, count = commitment.member.hotkey, len(commitment.microbatches)
            items_done[hotkey] = items_done.get(hotkey, 0) + count
            self._accounts.sealed(event.step, commitment)
            self._steps.stage_sealed(event.step, commitment.stage)

    def _step_sealed(self, event: ev.StepSealed) -> None:
        self._steps.step_sealed(event.step)
        self._accounts.settle(below=event.step + 1 - self._data.settle_after)
        self._accounts.forget_idle()
        self._trials.forget(self._accounts.convictions())

    def _finished(self, event: ev.RunFinished) -> None:
        self._everybody_away(absent_too=True)
        self._accounts.settle(below=event.step + 1)

    def _rewound(self, event: ev.Rewound) -> None:
        guilty = self._trials.cases.get(event.case)
        if guilty is not None and (self._leader_audits or guilty.believed):
            for void in self._steps.all_done(self._data.accounts.now_s):
                if void.member.hotkey != guilty.hotkey:
                    self._pay(void)
        if event.owner:
            for void in self._steps.all_done(self._data.accounts.now_s):
                self._pay(void)
        self._accounts.settle(since=event.step)
        self._everybody_away()
        self._trials.rewound(event.step, event.branch)
        self._steps.rewound(event.step)

    # --- audits --------------------------------------------------------------------------------------------------

    def _audit_opened(self, event: ev.AuditOpened) -> None:
        self._trials.opened(event)

    def _audit_closed(self, event: ev.AuditClosed) -> None:
        opened = self._trials.closed(event.audit)
        if opened is not None and self._leader_audits:
            self._judge(opened.step, opened.stage, event, {m: opened.items_of(m) for m in event.failed})

    def _judge(self, step: int, stage: int, event: ev.AuditClosed, items: dict[Member, int]) -> None:
        """``items``: of partials that failed before their seal."""
        accounts, audit = self._accounts, event.audit
        for member in event.passed:
            accounts.passed(member)
        for member in event.failed:
            accounts.failed(step, stage, member, audit, items.get(member, 0))
        for member in event.unopened:
            accounts.unopened(step, member, audit)
        for member in event.undecided:
            if member not in event.unopened:
                accounts.undecided(step, stage, member, audit)

    # --- cases ---------------------------------------------------------------------------------------------------

    def _case_opened(self, event: ev.CaseOpened) -> None:
        items = self._accounts.sealed_items(event.step, event.stage, event.member) if event.sealed else 0
        self._trials.accused(event, items)

    def _witness_asked(self, event: ev.WitnessAsked) -> None:
        charge = self._trials.cases.get(event.case)
        if charge is not None:
            charge.asked = [*charge.asked, event.member.hotkey]

    def _witness_said(self, event: ev.WitnessSaid) -> None:
        charge = self._trials.cases.get(event.case)
        if charge is not None:
            charge.said[event.hotkey] = event.digest

    def _case_closed(self, event: ev.CaseClosed) -> None:
        charge = self._trials.cases.get(event.case)
        if charge is not None:
            charge.outcome = event.outcome
            self._take_effect(event.case, charge)

    def _take_effect(self, case: int, charge: Charge) -> None:
        """Once: when it is closed, or believed after that."""
        if charge.effective or not charge.outcome or not (self._leader_audits or charge.believed):
            return
        if not self._leader_audits and not charge.is_guilty:
            return
        charge.effective = True
        accounts, step, stage, member = self._accounts, charge.step, charge.stage, charge.member
        if charge.outcome == CLEARED:
            accounts.give_back(step, stage, member)
        elif charge.is_guilty and charge.what not in (MERGE, UNOPENED):
            if charge.believed:
                charge.took = accounts.failed(step, stage, member, 0, charge.items)
            if charge.branch == self._trials.branch:
                for void in self._steps.lied(step, charge.hotkey):
                    self._pay(void)
        if charge.outcome == CONVICTED and self._leader_audits:
            accounts.convict(case, accounts.of(member), f"convicted in case {case}")
        for hotkey in charge.right():
            accounts.pay_witness(hotkey, stage, charge.items)

    def _appealed(self, event: ev.Appealed) -> None:
        charge = self._trials.cases.get(event.case)
        if charge is not None and not event.upheld and self._leader_audits:
            self._accounts.acquit(event.case, charge.hotkey)
            self._accounts.give_back(charge.step, charge.stage, charge.member)

    # --- what is asked of it -------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """When the last record that counts was stamped; scores are never of an earlier time."""
        return self._data.accounts.now_s

    @property
    def run_id(self) -> str:
        return self._data.run_id

    def items_done(self, hotkey: str) -> int:
        """Training items of the hotkey that were sealed, paid or not."""
        return self._data.items_done.get(hotkey, 0)

    def tallies(self, now_s: float) -> dict[str, Tally]:
        """What was counted, decayed to ``now_s``, by hotkey. Changes nothing."""
        now_s, entries = max(now_s, self.now_s), self._data.accounts.entries
        faded: dict[float, float] = {}
        return {hotkey: tally_of(hotkey, entry, now_s, self.timeline, faded) for hotkey, entry in entries.items()}

    def unpaid(self, hotkey: str) -> tuple[Unpaid, ...]:
        """The last partials of the hotkey that weren't paid (in full), oldest first."""
        entry = self._data.accounts.entries.get(hotkey)
        return tuple(
            Unpaid(c.step, c.stage, c.items, c.work, t.why, t.time_s, self.run_id, t.audit, t.sealed)
            for t in (entry.taken_back if entry is not None else ())
            for c in (t.credit,)
        )
