"""Journals of random schedules as if the run had audits: a fold whose members have all served their probation, and a ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec
from journal_cases import records_of

from subnet.audit.ledger import WorkLedger
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.config import AuditSection
from subnet.run.state import RunState, config, new_state
from subnet.words import Member

ON = AuditSection(rate=0.1, before_seal="probation", window_steps=2, open_windows=1, horizon_steps=2)


def with_audits(planned: ev.RunPlanned, audit: AuditSection = ON) -> ev.RunPlanned:
    return msgspec.structs.replace(planned, config=msgspec.structs.replace(planned.config, audit=audit))


def events_of(seed: int, audit: AuditSection = ON) -> Iterator[ev.AnyEvent]:
    for record in records_of(seed):
        event = record.event
        yield with_audits(event, audit) if isinstance(event, ev.RunPlanned) else event


def folded(
    seed: int,
    ledger: WorkLedger,
    audit: AuditSection = ON,
    before: Callable[[RunState, ev.AnyEvent], None] = lambda state, event: None,
) -> RunState:
    """The fold of the journal; ``before`` sees each event with the state before it, as the ledger has noted it."""
    state = new_state()
    for event in events_of(seed, audit):
        ledger.note(state, event)
        before(state, event)
        apply_audited(state, event)
    return state


def apply_audited(state: RunState, event: ev.AnyEvent) -> None:
    """As if all that must be redone before an event had been: these journals are of runs without audits."""
    if isinstance(event, ev.RunFinished):
        state.audits.audited_to = config(state).run.steps
    apply(state, event)
    if isinstance(event, ev.Joined):
        state.audits.clean[event.member.hotkey] = 10**6


class Receipts:
    """What the journal says of each item, kept apart from the fold: the last receipts, the leases, roots by majority."""

    def __init__(self) -> None:
        self.forward: dict[tuple[int, int, int], str] = {}
        self.backward: dict[tuple[int, int, int], tuple[str, int | None]] = {}
        self.holder: dict[tuple[int, int, int], Member] = {}
        self.seals: dict[tuple[int, int], ev.StageSealed] = {}
        self.merged: dict[tuple[int, int, int, int], ev.PartitionMerged] = {}
        self.roots: dict[tuple[int, int], Counter[str]] = {}
        self._stage: dict[Member, int] = {}
        self._coldkeys: dict[Member, str] = {}
        self._seen: set[tuple[int, int, str, str]] = set()

    def note(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.Joined():
                self._stage[event.member], self._coldkeys[event.member] = event.stage, event.coldkey
            case ev.Leased():
                self.holder[event.step, event.microbatch, event.stage] = event.member
            case ev.Forwarded():
                self.forward[event.step, event.microbatch, event.stage] = event.output
            case ev.Backwarded():
                key = (event.step, event.microbatch, event.stage)
                if event.forward:
                    self.forward[key] = event.forward
                self.backward[key] = (event.output, event.loss_bits)
            case ev.PartitionMerged():
                self.merged[event.step, event.group, event.version, event.partition] = event
            case ev.StageSealed():
                self.seals[event.step, event.group] = event
            case ev.Updated():
                stage = self._stage[event.member]
                said = (event.step, stage, event.root, self._coldkeys[event.member])
                if said not in self._seen:
                    self._seen.add(said)
                    self.roots.setdefault((event.step, stage), Counter())[event.root] += 1
            case _:
                pass
