"""A tiny run written down record by record, for books: members that seal, are late, go, are audited."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from schedule_toy import plan_run

from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.run.event_base import Event
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined
from subnet.score.score import Score
from subnet.words import Commitment, Member

AUDITED = AuditSection(rate=0.1, before_seal="probation", window_steps=2, open_windows=1)
TOKENS = 4 * 128
"""Of one microbatch of the toy run; stage 0 of two costs two units a token, with the embedding."""


def planned(audit: AuditSection = AUDITED, **options: Any) -> ev.RunPlanned:
    import msgspec

    plain = plan_run(2, 4, 100, **options)
    config = msgspec.structs.replace(plain.config, audit=audit)
    return msgspec.structs.replace(plain, config=config)


def member(name: str, number: int = 1, term: int = 1) -> Member:
    return Member(name, term, number)


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
