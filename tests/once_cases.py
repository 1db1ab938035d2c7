"""Interleavings of the pure state machine: what members add, say and repeat, in any order, at any age; and what is counted.

A case is a string of bytes: each pair is an operation and whom it concerns. There is no network and no arithmetic: a sum is
the list of microbatches in it, and its hash is that list in writing. So a manifest shows what is really in its partials,
and not only what somebody says: every microbatch once, at every stage, or :class:`Miscounted`.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import schedule_toy as toy
from once_hands import Hand
from schedule_nodes import POLICY

from miner import owed as owing
from miner.owed_ahead import owed_ahead
from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import apply as folding
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.follower import Took
from subnet.run.invariants import check
from subnet.run.state_codec import dump_state, load_state, state_bytes
from subnet.words import Commitment, Member
from validator import intake, journal_core
from validator.decide import decide
from validator.decision import FinishRun, ProbeSlices, TraceVerdict
from validator.watch import Watch

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 2, 3, 1
HOTKEYS = 5
MAIL, HISTORY = 60, 120
ALL = 1 << 20
CALM_ROUNDS = 400


class Miscounted(Exception):
    """A microbatch is in a manifest's partials twice, or not at all; or what only grows went back."""


class Case:
    """One run of the coordinator's pure parts under one string of bytes; with ``delay`` two steps are open at a time."""

    def __init__(self, choices: bytes, *, delay: int = 0) -> None:
        self.choices = choices
        self.rng = random.Random(choices)
        self.now = 0.0
        self.state, self.watch = st.new_state(), Watch()
        self.journal: list[ev.Record] = []
        self.core = journal_core.JournalCore(1)
        self.mail: list[tuple[Member | None, msg.AnyClaim]] = []
        self.said: dict[bool, deque[tuple[Member | None, msg.AnyClaim]]] = {
            merging: deque(maxlen=HISTORY) for merging in (False, True)
        }
        """What was said lately: of merges, and else."""
        self.hands: list[Hand] = []
        self.seen: Counter[str] = Counter()
        self.num_boots = 0
        self.grown: dict[object, int] = {}
        self.emit(toy.plan_run(NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS + 2 * delay, update_delay=delay))
        self.emit(journal_core.term_started(1, "validator", "nonce"))
        self.emit(ev.HardwareClassSet(("golden",), "operator"))
        self.acknowledge()
        for _ in range(HOTKEYS - 1):
            self.start()

    def post(self, member: Member | None, claim: msg.AnyClaim) -> None:
        """Into the bag of what is under way; when it is full, something is lost."""
        self.said[hasattr(claim, "group")].append((member, claim))
        if len(self.mail) >= MAIL:
            self.mail.pop(self.rng.randrange(MAIL))
        self.mail.append((member, claim))

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # --- the coordinator ---------------------------------------------------------------------------------------

    def emit(self, event: ev.AnyEvent) -> None:
        self.journal.append(ev.Record(len(self.journal), 0, event))
        folding.apply(self.state, event)
        self.core.appended(event)
        self.seen[type(event).__name__] += 1
        check(self.state)
        self.judge(event)

    def judge(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.ReduceOrdered | ev.StageSealed):
            for stage in st.group_shape(self.state, event.group).stages:
                for partition in st.partitions_of(self.state, event.group, stage):
                    self.count(event.entries, stage, partition)
        for work in st.works(self.state):
            for stage, items in enumerate(work.items):
                for m, found in items.items():
                    self.grows(("generation", self.state.term, work.step, stage, m), found.generation)
            for member in self.state.members:
                self.grows(("epoch", work.step, member), work.epochs.get(member, 0))
            for group, merge in enumerate(work.merges):
                self.grows(("freeze", self.state.term, work.step, group), merge.number)
                self.grows(("version", self.state.term, work.step, group), merge.version)

    def count(self, entries: tuple[Commitment, ...], stage: int, partition: int) -> None:
        """What is in the partials themselves, by what their hashes say."""
        written = [dict(e.hashes)[partition].partition(":")[2] for e in entries if e.stage == stage]
        inside = sorted(int(m) for text in written for m in text.split(",") if m)
        if inside != st.counted(self.state):
            raise Miscounted(f"stage {stage}: {inside} in the sum, not {st.counted(self.state)}")

    def grows(self, key: object, value: int) -> None:
        if value < self.grown.get(key, 0):
            raise Miscounted(f"{key} went back to {value}")
        self.grown[key] = value

    def acknowledge(self) -> None:
        """The log store has everything."""
        records = self.journal[self.core.acknowledged :]
        if records:
            self.core.answered(self.core.num_segments, stored=True, segment=records, own=records)

    def decide(self, most: int) -> bool:
        """At most so many decisions; whether there were any."""
        decisions = decide(self.now, self.state, self.watch, POLICY, self.rng)
        for decision in decisions[:most]:
            match decision.what:
                case ProbeSlices() as probe:
                    for value in probe.hashes:
                        self.watch.blob_confirmed(value)
                    self.watch.done(probe)
                case TraceVerdict() as trace:
                    self.watch.done(trace)
                case FinishRun() as finish:
                    self.emit(ev.RunFinished(finish.step, "root", finish.evaluation))
                case event:
                    self.emit(event)
        for decision in decisions[most:]:
            self.watch.started.discard(decision.what)
        return bool(decisions)

    def admit(self, index: int, again: bool) -> None:
        """Something arrives: what is under way, or what was said long ago and arrived already, perhaps."""
        said = self.said[self.chance(0.6)] if again else self.mail
        if not said:
            return
        index %= len(said)
        member, claim = said[index] if again else self.mail.pop(index)
        assert member is not None
        self.watch.heard(member, self.now)
        for blob in intake.blobs_to_confirm(claim):
            self.watch.blob_confirmed(blob)
        events = intake.admit(self.state, member, claim, self.watch)
        if not isinstance(events, intake.Ignored):
            for event in events:
                self.emit(event)

    def restart(self, from_copy: bool) -> None:
        """The coordinator's process ends between two events and is started again."""
        new = load_state(dump_state(self.state)) if from_copy else folding.fold(self.journal)
        if state_bytes(new) != state_bytes(self.state):
            raise Miscounted("another state after a restart")
        self.state, self.watch = new, Watch()

    def new_term(self) -> None:
        """Another coordinator leads, from what the log store has; what was behind that never was."""
        kept, term = self.core.acknowledged, self.core.term + 1
        self.journal = self.journal[:kept]
        self.core = journal_core.JournalCore.of(term, [r.event for r in self.journal], kept, self.core.num_segments)
        self.state, self.watch = folding.fold(self.journal), Watch()
        self.grown = {key: value for key, value in self.grown.items() if key[0] == "epoch"}  # type: ignore[index]
        self.emit(journal_core.term_started(term, "validator", f"nonce{term}"))
        self.acknowledge()

    # --- members -----------------------------------------------------------------------------------------------

    def start(self, hotkey: str = "") -> None:
        self.num_boots += 1
        self.hands.append(Hand(hotkey or f"hot{len(self.hands)}", f"boot{self.num_boots}"))

    def hear(self, hand: Hand, most: int) -> None:
        """Some more of the journal reaches a member."""
        begin = self.core.resume(hand.follower.cursor)
        assert begin is not None
        end = min(self.core.effective_end, begin + most)
        if hand.follower.take(self.core.term, begin, self.journal[begin:end]) is Took.NEW_TERM:
            self.num_boots += 1
            hand.drop(f"boot{self.num_boots}")
        if hand.me is not None:
            self.watch.heard(hand.me, self.now)

    def act(self, hand: Hand, most: int) -> bool:
        """A member does some of what it owes by what it has heard."""
        state = hand.follower.state
        if state.run is None or state.finished is not None:
            return False
        me, used_up = owing.incarnation(state, hand.hotkey, hand.boot)
        if me is None:
            if used_up:
                self.num_boots += 1
                hand.drop(f"boot{self.num_boots}")
            return self.hello(hand)
        hand.me = me
        while hand.running and (most >= ALL or self.chance(0.6)):
            hand.finish_one()
        owes = [*owed_ahead(state, me, hand.local), *owing.owed(state, me, hand.local)]
        for owe in owes[:most]:
            hand.do(owe, self)
        return bool(owes or hand.running)

    def hello(self, hand: Hand) -> bool:
        request = msg.JoinRequest(1, "toy", hand.boot, "127.0.0.1", 1, ("golden",), hand.follower.cursor)
        cold = f"cold-{hand.hotkey}"
        joined = intake.admit_join(self.state, request, hand.hotkey, cold, self.now, self.watch, POLICY)
        if isinstance(joined, Refusal):
            return False
        self.emit(joined)
        return True

    def die(self, hand: Hand, told: bool) -> None:
        """The process ends and starts again, with nothing; the coordinator knows at once, or only by its hello."""
        if told and hand.me in self.state.members:
            self.emit(ev.Gone(hand.me, "lost"))
        self.hands.remove(hand)
        self.start(hand.hotkey)

    # --- the case ----------------------------------------------------------------------------------------------

    def run(self) -> Case:
        for at in range(0, len(self.choices) - 1, 2):
            self.operate(self.choices[at], self.choices[at + 1])
        self.calm()
        return self

    def operate(self, what: int, whom: int) -> None:
        if self.state.finished is not None:
            return
        hand = self.hands[whom % len(self.hands)]
        if what < 70:
            self.hear(hand, 1 + whom)
            self.act(hand, 1 + what % 8)
        elif what < 100:
            for other in self.hands:
                self.hear(other, 1 + whom)
                self.act(other, 1 + what % 4)
        elif what < 150:
            for _ in range(1 + what % 8):
                self.admit(self.rng.randrange(1 << 16), again=False)
        elif what < 166:
            self.admit(self.rng.randrange(1 << 16), again=True)
        elif what < 221:
            self.decide(1 + whom // 8)
        elif what < 235:
            self.acknowledge()
        elif what < 238:
            self.pass_time(POLICY.answer_s * (1 + whom % 3))
        elif what < 244:
            self.restart(from_copy=bool(whom % 2))
        elif what < 245:
            self.new_term()
        elif what < 248:
            self.die(hand, told=bool(whom // 128))
        elif what < 251:
            self.void(hand)
        else:
            self.revoke(whom)

    def pass_time(self, seconds: float) -> None:
        """Most members are heard meanwhile."""
        self.now += seconds
        for hand in self.hands:
            if hand.me in self.state.members and self.chance(0.9):
                self.watch.heard(hand.me, self.now)

    def either(self) -> st.StepWork | None:
        """One of the open steps."""
        works = st.works(self.state)
        return works[self.rng.randrange(len(works))] if len(works) > 1 else self.state.work

    def void(self, hand: Hand) -> None:
        """A member is late with an answer, at the worst moment."""
        info, work = self.state.members.get(hand.me) if hand.me else None, self.either()
        if info is None or work is None or st.is_sealed(self.state, info.stage, work):
            return
        assert hand.me is not None
        self.emit(ev.Voided(work.step, info.stage, hand.me, "late"))

    def revoke(self, whom: int) -> None:
        """A lease's clock runs out."""
        work = self.either()
        live = [(stage, m) for stage, ms in enumerate(work.live) for m in sorted(ms)] if work else []
        if work is None or not live:
            return
        stage, m = live[whom % len(live)]
        found = work.items[stage][m]
        if found.status == st.LIVE:
            self.emit(ev.Revoking(work.step, m, stage, found.generation))

    def calm(self) -> None:
        """Everybody hears everything, and does what it owes, until the run is finished."""
        for _ in range(CALM_ROUNDS):
            moved = False
            for hand in self.hands:
                self.hear(hand, ALL)
                moved |= self.act(hand, ALL)
            while self.mail:
                self.admit(0, again=False)
            for _ in range(50):
                if not self.decide(ALL):
                    break
                moved = True
            self.acknowledge()
            if self.state.finished is not None:
                return
            self.now += 0.0 if moved and self.chance(0.7) else 1.0
        raise Miscounted("the run doesn't come to its end")


def choices_of(seed: int, num_operations: int = 280) -> bytes:
    return random.Random(seed).randbytes(2 * num_operations)


def first_failure(seeds: range, *, delay: int = 0) -> tuple[int, str] | None:
    """The first seed whose case fails, and how."""
    for seed in seeds:
        try:
            Case(choices_of(seed), delay=delay).run()
        except Exception as error:  # noqa: BLE001  any failure is told
            return seed, f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    import sys
    import time

    started, total = time.perf_counter(), Counter[str]()
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            total += Case(choices_of(number)).run().seen
        except Exception as error:  # noqa: BLE001  every failure is told
            print(number, type(error).__name__, error)
    print(total, round(time.perf_counter() - started, 1), "s", round(time.process_time(), 1), "s of a core")
