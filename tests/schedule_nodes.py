"""The coordinator and the log store of the schedule test, made of the production state machine and toy arithmetic.

Everything that decides is the production code: intake, decide, trace and journal core on one side, fold, follower and
owed on the other. What is toy is the arithmetic, the network, the store and the clock.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import schedule_toy as toy

from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import apply as folding
from subnet.run import events as ev
from subnet.run import invariants
from subnet.run import state as st
from subnet.words import Cursor, Member
from validator import decide as deciding
from validator import intake, journal_core, trace
from validator.decision import FinishRun, ProbeSlices, TraceVerdict
from validator.policy import Policy
from validator.watch import Watch

if TYPE_CHECKING:
    from schedule_miner import Miner
    from schedule_sim import Sim


class Bad(Exception):
    """The protocol broke a promise."""


class Crash(Exception):
    """The coordinator dies right after an event is on disk."""


@dataclass(frozen=True)
class Trouble:
    """Chances, a round or a message, of what goes wrong."""

    faults: float
    haste: float
    delayed: float = 0.2
    lost: float = 0.0
    doubled: float = 0.08
    echoes: int = 0

    @staticmethod
    def of(profile: str, rng: random.Random) -> Trouble:
        if profile == "void":
            return Trouble(0.02, 0.5, doubled=0.3)
        if profile == "takeover":
            return Trouble(0.06, 0.05, doubled=0.3)
        if profile == "stale":
            return Trouble(0.01, 0.4, delayed=0.4, doubled=0.2, echoes=3)
        if profile == "rivals":
            return Trouble(0.05, 0.05, delayed=0.4, echoes=1)
        return Trouble(rng.choice([0, 0.05, 0.1, 0.2]), rng.choice([0, 0.05, 0.2]), lost=rng.choice([0, 0.03, 0.1]))


class ChaosWatch(Watch):
    """Now and then takes somebody for late who isn't: deadlines must be safe at any length."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.hasty = rng, False

    def age(self, key: Hashable, now_s: float) -> float:
        age_s = super().age(key, now_s)
        return 1e9 if self.hasty and self.rng.random() < 0.2 else age_s

    def silent_for(self, member: Member, now_s: float) -> float:
        silent_s = super().silent_for(member, now_s)
        return 1e9 if self.hasty and self.rng.random() < 0.02 else silent_s


POLICY = Policy(
    silence_s=2,
    answer_s=1,
    lease_min_s=1,
    lease_unknown_s=0.2,
    commit_s=2,
    owner_s=2,
    routed_s=2,
    fingerprint_s=2,
    check_s=2,
    trace_s=2,
    replay_s=2,
    snapshot_s=3,
    empty_stage_s=8,
    rebalance_s=1,
    rebalance_steps=1,
    rebalance_gap_s=1,
    back_off_s=1,
    back_off_max_s=8,
    window_extra=1,
    window_s=0,
    class_coldkeys=1,
)


class Arithmetic:
    """What a trace needs, from the toy store."""

    def __init__(self, sim: Sim, step: int) -> None:
        self.sim, self.step = sim, step

    def read(self, group: int, partition: int, hash: str) -> toy.Vector | None:
        return self.sim.store.get(hash)

    def fingerprint(self, group: int, partition: int, values: toy.Vector, seed: str) -> tuple[int, ...]:
        return toy.fingerprint(values, seed, partition)

    def merge(self, group: int, partition: int, slices: Sequence[toy.Vector]) -> tuple[str, str]:
        total = toy.merge(self.step, slices)
        return toy.name(total), toy.squares(self.step, total)


class Coordinator:
    """A validator process: durable are its journal and the acknowledgements it has noted, volatile its watch."""

    paused = False
    policy = POLICY

    def __init__(self, sim: Sim, journal: list[ev.Record], term: int, acknowledged: int, num_segments: int) -> None:
        self.sim, self.journal, self.dead = sim, journal, False
        self.state = folding.fold(journal)
        events = [record.event for record in journal]
        self.core = journal_core.JournalCore.of(term, events, acknowledged, num_segments)
        self.watch = ChaosWatch(sim.rng)
        self.listeners: dict[Miner, int] = {}
        self.postponed: list[deciding.Action] = []

    @property
    def now(self) -> float:
        return self.sim.now

    def emit(self, event: ev.AnyEvent) -> None:
        sim = self.sim
        if sim.commit_fails(self):
            self.dead = True
            raise Crash
        self.journal.append(ev.Record(len(self.journal), 0, event))
        folding.apply(self.state, event)
        self.core.appended(event)
        sim.saw(self, event)
        if sim.checks_all:
            invariants.check(self.state)
        if sim.chaos and sim.rng.random() < 0.004:
            self.dead = True
            raise Crash

    def receive(self, source: Any, kind: str, *args: Any) -> None:
        if kind == "put":
            self._put(*args)
        elif self.core.may_speak:
            getattr(self, f"_{kind}")(source, *args)

    def _put(self, index: int, stored: bool, segment: tuple[ev.Record, ...]) -> None:
        acknowledged = self.core.acknowledged
        own = self.journal[acknowledged : acknowledged + len(segment)]
        answer = self.core.answered(index, stored=stored, segment=segment, own=own)
        if answer is journal_core.Segment.DEPOSED:
            self.dead = True

    def _poll(self, source: Miner, cursor: Cursor) -> None:
        start = self.core.resume(cursor)
        if start is None:
            self.dead = True
            return
        if source.me is not None:
            self.watch.heard(source.me, self.now)
        self.listeners[source] = start
        self._feed(source, self.core.effective_end)

    def _feed(self, to: Miner, end: int) -> None:
        start = self.listeners[to]
        records = tuple(self.journal[start:end])
        self.sim.send(to, self, "stream", self.core.term, start, records, key=(self.core.term, start, end))

    def _hello(self, source: Miner, request: msg.JoinRequest) -> None:
        hotkey = source.hotkey
        joined = intake.admit_join(
            self.state, request, hotkey, self.sim.coldkey_of(hotkey), self.now, self.watch, self.policy
        )
        if not isinstance(joined, Refusal):
            self.emit(joined)

    def _claim(self, source: Miner, member: Member, claim: msg.AnyClaim) -> None:
        self.watch.heard(member, self.now)
        for blob in (*intake.blobs_to_confirm(claim), *intake.boundary_to_confirm(self.state, member, claim)):
            if self.sim.answers(self) and blob in self.sim.store:
                self.watch.blob_confirmed(blob)
        events = intake.admit(self.state, member, claim, self.watch)
        if not isinstance(events, intake.Ignored):
            for event in events:
                self.emit(event)

    def tick(self, late: bool = False) -> None:
        due = self.core.segment_due()
        if due is not None:
            records = tuple(self.journal[due.start : due.end])
            self.sim.send(self.sim.log, self, "segment", due.index, records, key=(due.index, due.start, due.end))
        if not self.core.may_speak:
            return
        self.watch.hasty = late and self.sim.chaos
        while self.postponed:
            self.watch.started.discard(self.postponed.pop())
        try:
            for _ in range(200):
                decisions = deciding.decide(self.now, self.state, self.watch, self.policy, self.sim.rng)
                if not decisions:
                    break
                for decision in decisions:
                    self._carry_out(decision.what)
            else:
                raise Bad(f"decides for ever: {decisions}")
        except Crash:
            return
        end = self.core.effective_end
        for miner, start in self.listeners.items():
            if start < end:
                self._feed(miner, end)

    def _carry_out(self, what: ev.AnyEvent | deciding.Action) -> None:
        if not isinstance(what, ProbeSlices | TraceVerdict | FinishRun):
            self.emit(what)
            return
        if not self.sim.answers(self):
            self.postponed.append(what)
            return
        if isinstance(what, ProbeSlices):
            for value in what.hashes:
                if value in self.sim.store:
                    self.watch.blob_confirmed(value)
        elif isinstance(what, TraceVerdict):
            merge = st.merge_of(self.state, what.step, what.group)
            assert merge is not None
            verdict = trace.Trial(self.state, what.group, merge, Arithmetic(self.sim, what.step)).verdict()
            for decision in trace.verdict_events(self.state, what, verdict):
                self._carry_out(decision.what)
        else:
            self.emit(ev.RunFinished(what.step, toy.name(what.manifests), what.evaluation))
        self.watch.done(what)


class Log:
    """The log store: write-once segments."""

    dead = paused = False

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.segments: list[tuple[ev.Record, ...]] = []

    def receive(self, source: Coordinator, kind: str, index: int, records: tuple[ev.Record, ...]) -> None:
        if not self.sim.up or index > len(self.segments):
            return
        stored = index == len(self.segments)
        if stored:
            self.segments.append(records)
            self.sim.logged(records)
        answer = self.segments[index]
        self.sim.send(source, self, "put", index, stored, answer, key=(index, stored))
