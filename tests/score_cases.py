"""A tiny run written down record by record, for books: members that seal, are late, go, are audited."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from journal_cases import records_of
from schedule_toy import plan_run

from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.run.event_base import Event
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined
from subnet.score.score import Score
from subnet.words import Commitment, Member
from validator.projection import SessionProjection

AUDITED = AuditSection(rate=0.1, before_seal="probation", window_steps=2, open_windows=1)
TOKENS = 4 * 128
"""Of one microbatch of the toy run; stage 0 of two costs two units a token, with the embedding."""


def planned(audit: AuditSection = AUDITED, **options: Any) -> ev.RunPlanned:
    plain = plan_run(2, 4, 100, **options)
    config = msgspec.structs.replace(plain.config, audit=audit)
    return msgspec.structs.replace(plain, config=config)


def member(name: str, number: int = 1, term: int = 1) -> Member:
    return Member(name, term, number)


OUTCOMES = ("convicted", "fault", "cleared", "unconfirmed")


def judged(records: Sequence[ev.Record], rng: random.Random, often: float = 0.03) -> list[ev.Record]:
    """The journal with times, and with audits, cases, appeals, rewinds and new registrations that come at random.

    For books alone: the fold of a run wouldn't take it.
    """
    judge = Judge(rng, often)
    for record in records:
        judge.add(record.event)
    time_ns, stamped = 1_700_000_000 * 10**9, list[ev.Record]()
    for number, event in enumerate(judge.events):
        time_ns += rng.choice([0, 10**6, 10**9, 90 * 10**9, -(10**6)])
        stamped.append(ev.Record(number, time_ns, event))
    return stamped


class Judge:
    def __init__(self, rng: random.Random, often: float) -> None:
        self.rng, self.often, self.events = rng, often, list[ev.AnyEvent]()
        self.sealed: list[tuple[int, int, Member]] = []
        self.blocks: dict[str, int] = {}
        self.leader, self.audits, self.cases, self.branch = "", 0, 0, 0

    def add(self, event: ev.AnyEvent) -> None:
        rng = self.rng
        if isinstance(event, ev.RunPlanned):
            event = msgspec.structs.replace(event, config=msgspec.structs.replace(event.config, audit=AUDITED))
        if isinstance(event, ev.Joined):
            block = self.blocks.setdefault(event.member.hotkey, 7)
            event = msgspec.structs.replace(event, registered_at_block=block)
        self.events.append(event)
        if isinstance(event, ev.TermStarted):
            self.leader = event.hotkey
        if isinstance(event, ev.StageSealed):
            self.sealed += [(event.step, entry.stage, entry.member) for entry in event.entries]
        if isinstance(event, ev.Backwarded) and rng.random() < 2 * self.often:
            self.void(event.step, event.microbatch, event.stage)
        if self.sealed and rng.random() < self.often:
            kinds = [self.audit, self.audit, self.audit, self.case, self.rewind, self.again]
            rng.choice(kinds)(*rng.choice(self.sealed))

    def void(self, step: int, microbatch: int, stage: int) -> None:
        leased = (e for e in reversed(self.events) if isinstance(e, ev.Leased))
        holder = next(e.member for e in leased if (e.step, e.microbatch, e.stage) == (step, microbatch, stage))
        self.events.append(ev.Voided(step, stage, holder, "inputs"))
        if self.rng.random() < 0.5:
            self.case(step, 0, Member("somebody", 1, 1))

    def audit(self, step: int, stage: int, member: Member) -> None:
        self.audits += 1
        by = self.rng.choice([self.leader, "other"])
        self.events.append(ev.AuditOpened(self.audits, step, stage, 0, (member,), by, (), (3,)))
        outcome = {self.rng.choice(["passed", "failed", "undecided"]): (member,)}
        unopened = (self.rng.choice(self.sealed)[2],) if self.rng.random() < 0.3 else ()
        self.events.append(ev.AuditClosed(self.audits, unopened=unopened, **outcome))

    def case(self, step: int, stage: int, member: Member) -> None:
        self.cases += 1
        case, rng = self.cases, self.rng
        self.events.append(ev.CaseOpened(case, member.hotkey, member, step, stage, "partial", "", "true", True))
        for hotkey in rng.sample(sorted(self.blocks), min(2, len(self.blocks))):
            self.events.append(ev.WitnessAsked(case, Member(hotkey, 1, 1)))
            self.events.append(ev.WitnessSaid(case, hotkey, rng.choice(["true", "claimed", ""])))
        self.events.append(ev.CaseClosed(case, rng.choice(OUTCOMES)))
        if rng.random() < 0.5:
            self.events.append(ev.Appealed(case, rng.random() < 0.5, ""))

    def again(self, step: int, stage: int, member: Member) -> None:
        """It registers again, and goes on as the same process."""
        block = self.blocks[member.hotkey] = self.blocks.get(member.hotkey, 7) + 1 + self.rng.randrange(100)
        self.events.append(ev.Gone(member, "left"))
        self.events.append(ev.Joined(member, "cold", stage, "boot", "h", 1, registered_at_block=block))

    def rewind(self, step: int, stage: int, member: Member) -> None:
        self.branch += 1
        self.events.append(ev.Rewound(step, self.branch, self.cases))


def put_schedule(run: Any, seed: int) -> None:
    """A random schedule's journal as its leader's signed segments, into a :class:`lead_cases.Run`."""
    from lead_cases import FIRST  # it takes a second

    events = list[ev.AnyEvent]()
    for record in records_of(seed):
        event = record.event
        if isinstance(event, ev.RunPlanned):
            event = msgspec.structs.replace(event, run_id=run.run_id)
        if isinstance(event, ev.TermStarted):
            event = msgspec.structs.replace(event, hotkey=FIRST.hotkey)
        events.append(event)
        if isinstance(event, ev.QUORUM_EVENTS):
            run.put(*events)
            events = []


class Owner:
    """What a session keeps: the book, fed by the coordinator, in each copy of the fold. For :class:`journal_cases.Rig`."""

    def __init__(self, policy: ScorePolicy | None = None) -> None:
        self.book, self.seen = RunBook(policy), list[ev.Record]()
        self.projection = SessionProjection(self.book)
        self.dump, self.load = self.projection.dump, self.projection.load

    def fold(self, record: ev.Record) -> None:
        self.book.note(record)
        self.seen.append(record)


class Journal:
    """Records with times; ``at`` moves the clock, ``add`` journals."""

    def __init__(self, policy: ScorePolicy | None = None, audit: AuditSection = AUDITED) -> None:
        self.now_s = 1000.0
        self.policy = policy if policy is not None else ScorePolicy(half_life_s=100.0)
        self.records: list[ev.Record] = []
        self.book = RunBook(self.policy)
        self.audits = 0
        self.done = set[tuple[int, int, int]]()
        """(step, microbatch, stage) whose lease is done."""
        self.add(planned(audit), ev.TermStarted(1, "leader", "n"))

    def add(self, *events: Event) -> Journal:
        for event in events:
            record = ev.Record(len(self.records), round(self.now_s * 1e9), event)  # type: ignore[arg-type]
            self.records.append(record)
            if isinstance(event, ev.Backwarded):
                self.done.add((event.step, event.microbatch, event.stage))
            elif isinstance(event, ev.Voided | ev.Rewound | ev.TermStarted | ev.Gone):
                self.done.clear()  # whatever is sealed then is done again here
            self.book.note(record)
        return self

    def wait(self, seconds: float) -> Journal:
        self.now_s += seconds
        return self

    def join(self, name: str, stage: int = 0, number: int = 1, block: int = 7, term: int = 1) -> Journal:
        who = member(name, number, term)
        return self.add(ev.Joined(who, "cold" + name, stage, f"b{number}", "h", 1, registered_at_block=block))

    def work(self, step: int, who: Member, items: Iterable[int], stage: int = 0) -> Journal:
        """Leases that are done in time, or were done already."""
        for m in items:
            if (step, m, stage) not in self.done:
                self.add(ev.Leased(step, m, stage, who, 1), ev.Backwarded(step, m, stage, 1, ""))
        return self

    def seal(self, step: int, shares: dict[Member, int], stage: int = 0) -> Journal:
        """Stage ``stage`` of the step, so many items by member, done just before if they weren't."""
        first, entries = 0, list[Commitment]()
        for who, count in shares.items():
            items = tuple(range(first, first + count))
            entries.append(Commitment(who, stage, items, ((0, "h"),)))
            self.work(step, who, items, stage)
            first += count
        return self.add(ev.StageSealed(step, stage, 1, tuple(entries), ("h",), (("b", 1),), "0"))

    def end_step(self, step: int) -> Journal:
        return self.add(ev.StepSealed(step, 4, 0, 0, 0, 1))

    def audit(self, step: int, stage: int = 0, by: str = "leader", **outcome: tuple[Member, ...]) -> Journal:
        self.audits += 1
        members = tuple(who for name in ("passed", "failed", "undecided") for who in outcome.get(name, ()))
        opened = ev.AuditOpened(self.audits, step, stage, 0, members, by, ())
        return self.add(opened, ev.AuditClosed(self.audits, **outcome))

    def scores(self, later_s: float = 0.0) -> dict[str, Score]:
        return combined([self.book], self.policy, self.now_s + later_s)
