"""What the schedule test demands of a run: each event as it is journaled, each segment as it becomes final, each state."""

from __future__ import annotations

from collections import Counter

import schedule_toy as toy
from schedule_nodes import Bad, Coordinator

from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.schedule import bits_fp32
from subnet.run.state import RunState
from validator.decide_steps import fp64_bits


class Audit:
    """The judging half of a schedule; the other half fills these in."""

    max_events = 6000

    run_planned: ev.RunPlanned
    reference: toy.Reference
    profile: str
    num_microbatches: int
    liars: dict[str, str]
    poison: tuple[int, int, int, bool] | None
    store: dict[str, toy.Vector]
    counts: Counter[str]
    num_events: int
    tainted: bool
    wrong: bool
    progress: bool
    skipped: set[tuple[int, int]]
    seals: dict[tuple[int, int], tuple[str, ...]]
    steps: dict[int, ev.StepSealed]
    audits: list[ev.StageSealed]
    finished: ev.RunFinished | None

    def saw(self, coordinator: Coordinator, event: ev.AnyEvent) -> None:
        self.num_events += 1
        self.counts[type(event).__name__] += 1
        if self.num_events > self.max_events:
            raise Bad("the journal grows without end")
        if isinstance(event, ev.Gone) and not self.tainted:
            if event.why == "liar" and event.member.hotkey not in self.liars:
                raise Bad(f"honest {event.member} convicted")
            if event.why == "silent" and event.member.hotkey not in self.liars and self.profile == "calm":
                raise Bad(f"honest {event.member} taken for silent")
            if event.why == "checksum" and event.member.hotkey not in self.liars:
                raise Bad(f"{event.member} has another state")
        if isinstance(event, ev.StageSealed):
            for stage in self.run_planned.groups[event.group].stages:
                replicas = st.ready(coordinator.state, stage) or st.members_of(coordinator.state, stage)
                if all(member.hotkey in self.liars for member in replicas):
                    self.tainted = True

    def logged(self, records: tuple[ev.Record, ...]) -> None:
        """What is in the log store is final."""
        self.progress = True
        for event in (record.event for record in records):
            if isinstance(event, ev.StageSealed):
                if self.seals.setdefault((event.step, event.group), event.hashes) != event.hashes:
                    raise Bad("two seals")
                self.audits.append(event)
            elif isinstance(event, ev.MicrobatchSkipped):
                self.skipped.add((event.step, event.microbatch))
            elif isinstance(event, ev.StepSealed):
                if event.step in self.steps:
                    raise Bad("step sealed twice")
                self.steps[event.step] = event
                self.audit_step(event)
            elif isinstance(event, ev.RunFinished):
                self.finished = event

    def has_effect(self, state: RunState, step: int) -> bool:
        """Whether a member with this fold may apply the seal of the step."""
        return step in self.steps

    def audit_step(self, event: ev.StepSealed) -> None:
        skipped = frozenset(self.skipped)
        counted = self.reference.counted(event.step, skipped)
        for m in (m for t, m in skipped if t == event.step):
            if m < self.num_microbatches and (self.poison is None or (event.step, m) != self.poison[:2]):
                raise Bad("good microbatch skipped")
        if self.tainted:
            return
        if event.num_counted != len(counted):
            raise Bad("wrong number of microbatches")
        losses = self.reference.losses(self.reference.version_of(event.step), event.step, skipped, counted)
        mean = sum(map(bits_fp32, losses)) / len(losses)
        if event.loss_bits != fp64_bits(mean):
            raise Bad("wrong loss")
        self.audit_evaluation(event.step, event.evaluation)
        if event.coefficient_bits != self.reference.coefficient(event.step, skipped):
            raise Bad("wrong coefficient")

    def audit_evaluation(self, step: int, evaluation: tuple[int, ...]) -> None:
        config, first = self.run_planned.config, self.num_microbatches
        count = config.num_evaluation_items if config.evaluates_at(step) else 0
        items = range(first, first + count)
        if list(evaluation) != self.reference.losses(step, step, frozenset(self.skipped), items):
            raise Bad("wrong evaluation")

    def audit(self) -> None:
        """Sealed sums against the reference, with the skips that became final."""
        skipped = frozenset(self.skipped)
        for seal in self.audits:
            if seal.step not in self.steps:
                continue
            found = {p: self.store.get(value) for p, value in enumerate(seal.hashes)}
            right = found == self.reference.sums(seal.step, skipped)[seal.group]
            if self.tainted:
                self.wrong |= not right
                continue
            for stage in self.run_planned.groups[seal.group].stages:
                covered = sorted(m for e in seal.entries if e.stage == stage for m in e.microbatches)
                if covered != self.reference.counted(seal.step, skipped):
                    raise Bad(f"not exactly once: {covered}")
            if not right:
                raise Bad("wrong sum")

    def settled(self, version: int, stage: int, w: int, hotkey: str = "") -> None:
        if not self.tainted and w != self.reference.states(version, frozenset(self.skipped))[stage]:
            raise Bad(f"wrong state at {version}")
