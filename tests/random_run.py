"""A run under random but allowed claims, silence, loss and joins, without network or arithmetic: for indexes and views.

Whoever watches is asked at the same times with the same claims; each event is applied once and told to ``on_event``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import schedule_toy as toy

from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.words import CALIBRATION_STEP, Commitment, Cursor, Member
from validator.decide import decide
from validator.decision import FinishRun, ProbeSlices, TraceVerdict
from validator.intake import Ignored, admit, admit_join, blobs_to_confirm
from validator.policy import Policy
from validator.watch import Watch

POLICY = Policy(commit_s=8.0, owner_s=8.0, routed_s=6.0, fingerprint_s=8.0, check_s=10.0, back_off_s=1.0)
SHORTEST_S = 0.15


class Differ(AssertionError):
    """Two watches decided otherwise."""


class RandomRun:
    """``watches``: each is told and asked the same; ``on_event(state, event)`` after each event."""

    def __init__(
        self,
        seed: int,
        num_stages: int,
        num_microbatches: int,
        watches: Sequence[Watch],
        on_event: Callable[[st.RunState, ev.AnyEvent], None] = lambda state, event: None,
        **options: object,
    ) -> None:
        self.rng = random.Random(seed)
        self.state, self.watches, self.on_event = st.new_state(), watches, on_event
        self.events: list[ev.AnyEvent] = []
        self.now_s = 100.0
        self.quiet_until: dict[Member, float] = {}
        self.num_decisions = 0
        self._seeds = [random.Random(seed) for _ in watches]
        self.emit(toy.plan_run(num_stages, num_microbatches, 4, **options))  # type: ignore[arg-type]
        self.emit(ev.TermStarted(1, "validator", "nonce"))
        self.emit(ev.HardwareClassSet(("golden",), "operator"))

    def emit(self, event: ev.AnyEvent) -> None:
        apply(self.state, event)
        self.events.append(event)
        for watch in self.watches:
            if watch.index is not None:
                watch.index.note(self.state, event)
        self.on_event(self.state, event)

    def play(self, num_rounds: int, num_members: int) -> None:
        for _ in range(num_rounds):
            if self.state.finished is not None:
                return
            self.now_s += self.rng.choice([SHORTEST_S, 0.3, 0.3, 1.0, 2.5])
            if len(self.state.members) < num_members or self.rng.random() < 0.03:
                self._join()
            self._claims()
            self._decide()

    def _join(self) -> None:
        number = self.rng.randrange(40)
        boot = f"boot-{len(self.events)}"
        request = msg.JoinRequest(1, "toy", boot, "127.0.0.1", 1, ("golden",), Cursor(1, 0))
        found = [
            admit_join(self.state, request, f"hot{number}", f"cold{number % 7}", self.now_s, watch, POLICY)
            for watch in self.watches
        ]
        self._same(found)
        if not isinstance(found[0], Refusal):
            self.emit(found[0])
            for watch in self.watches:
                watch.heard(found[0].member, self.now_s)

    def _claims(self) -> None:
        rng = self.rng
        for member in sorted(self.state.members):
            if self.quiet_until.get(member, 0.0) > self.now_s:
                continue
            if rng.random() < 0.01:
                self.quiet_until[member] = self.now_s + rng.choice([2.0, 4.0, 30.0])
                continue
            for watch in self.watches:
                watch.heard(member, self.now_s)
            for claim in self._of(member):
                self._say(member, claim)

    def _say(self, member: Member, claim: msg.AnyClaim) -> None:
        for watch in self.watches:
            for blob in blobs_to_confirm(claim):
                watch.blob_confirmed(blob)
        found = [admit(self.state, member, claim, watch) for watch in self.watches]
        self._same(found)
        if isinstance(found[0], Ignored):
            return
        if isinstance(claim, msg.ForwardReceipt | msg.BackwardReceipt):
            for watch in self.watches:
                watch.progressed(member, self.now_s)
        for event in found[0]:
            self.emit(event)

    def _of(self, member: Member) -> list[msg.AnyClaim]:
        """Some of what a member might say now."""
        rng, state, work = self.rng, self.state, self.state.work
        info, claims = state.members[member], list[msg.AnyClaim]()
        if info.version != state.next_step and rng.random() < 0.6:
            claims.append(msg.UpdatedClaim(state.next_step, f"root{state.next_step}.{info.stage}"))
        if rng.random() < 0.004:
            claims.append(msg.LeavingClaim())
        stored = state.orders.get(info.stage) == member
        if stored:
            claims.append(msg.SnapshotClaim(state.next_step, info.stage, "manifest", info.root))
        if work is None:
            return claims
        for m in sorted(work.held.get(member, ())):
            if rng.random() < (0.03 if member.number % 6 == 0 else 0.4):
                claims.extend(self._receipt(work, info.stage, m))
        claims.extend(self._merge(work, member, info.stage))
        return claims

    def _receipt(self, work: st.StepWork, stage: int, m: int) -> list[msg.AnyClaim]:
        found, rng = work.items[stage][m], self.rng
        key = (work.step, m, stage, found.generation)
        if found.status == st.DONE:
            return []
        if found.status == st.REVOKING and rng.random() < 0.6:
            return [msg.NotAccumulatedClaim(*key)]
        if rng.random() < 0.01:
            return [msg.FailedClaim(*key, rng.choice(["nan", "nan", "memory"]), "why")]
        last = stage == len(work.items) - 1
        if not found.forwarded and (not last or m >= work.num_training):
            return [msg.ForwardReceipt(*key, "in", "out", rng.choice([0.1, 0.4, 3.0]), 0 if last else None)]
        return [msg.BackwardReceipt(*key, "in", "out", rng.choice([0.1, 0.4, 3.0]), 0 if last else None)]

    def _merge(self, work: st.StepWork, member: Member, stage: int) -> list[msg.AnyClaim]:
        if self.rng.random() < 0.3:
            return []
        state = self.state
        group = st.group_of(state, stage)
        merge, at = work.merges[group], (work.step, group)
        if merge.phase == st.FROZEN:
            hashes = tuple((p, f"hash{p}{member}") for p in st.partitions_of(state, group, stage))
            mine = Commitment(member, stage, st.done_set(state, member), hashes)
            return [msg.CommitClaim(*at, merge.number, mine)]
        if merge.phase == st.REDUCING:
            own = [p for p, owner in enumerate(merge.owners) if owner == member]
            return [msg.MergedClaim(*at, merge.version, p, f"merged{p}", f"blob{p}", 9, "ff") for p in own]
        if merge.phase != st.REVEALED:
            return []
        claims: list[msg.AnyClaim] = []
        entry = next((entry for entry in merge.entries if entry.member == member), None)
        if entry is not None:
            values = tuple((p, (1,)) for p, _ in entry.hashes)
            claims.append(msg.FingerprintClaim(*at, merge.version, stage, values))
        return [*claims, msg.CheckClaim(*at, merge.version, True)]

    def _decide(self) -> None:
        for _ in range(1000):
            found = [
                decide(self.now_s, self.state, watch, POLICY, rng)
                for watch, rng in zip(self.watches, self._seeds, strict=True)
            ]
            self._same([[(d.what, d.reason) for d in decisions] for decisions in found])
            progressed = False
            for decision in found[0]:
                self.num_decisions += 1
                what = decision.what
                if isinstance(what, ProbeSlices):
                    for watch in self.watches:
                        watch.done(what)
                elif isinstance(what, FinishRun):
                    self.emit(ev.RunFinished(what.step, "root", what.evaluation))
                    return
                elif not isinstance(what, TraceVerdict):
                    self.emit(what)
                    progressed = True
            if not progressed:
                return
        raise AssertionError("decisions don't come to an end")

    def _same(self, found: Sequence[object]) -> None:
        for other in found[1:]:
            if other != found[0]:
                raise Differ(f"at {self.now_s:.2f} s, record {self.state.number}: {found[0]} and {other}")


def calibrating(state: st.RunState) -> bool:
    return state.next_step == CALIBRATION_STEP
