"""The shell of :mod:`validator.coordinator` in virtual time: the same turns around the same pure code, no tasks, no sockets."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.words import Member
from validator import decide as deciding
from validator import intake, journal_core
from validator.coordinator import MAX_DECIDED, TICK_S, TURN_GAP_MAX_S, TURN_GAP_MEMBER_S
from validator.decision import FinishRun, ProbeSlices
from validator.index import RunIndex
from validator.policy import Policy
from validator.watch import Probe, Watch

if TYPE_CHECKING:
    from iota.simulate_member import SimMember
    from iota.simulate_world import World

HARDWARE = ("golden",)
IDLE_TICK_S = 1.0
"""Turns come at least so often; the real shell's 0.1 s matter only where a deadline is near."""


class SimCoordinator:
    """``state`` is the fold; what is effective goes to members as notices after the journal's commit."""

    def __init__(self, world: World, planned: ev.RunPlanned, policy: Policy, rng: random.Random) -> None:
        self._world, self._policy, self._rng = world, policy, rng
        self.state = st.new_state()
        self.core = journal_core.JournalCore(term=0)
        self._encoder = msgspec.msgpack.Encoder()
        self._unsent: deque[ev.AnyEvent] = deque()
        self._num_sent = 0
        self._claims: deque[tuple[Member, msg.AnyClaim]] = deque()
        self._joins: deque[tuple[SimMember, msg.JoinRequest]] = deque()
        self._turn_due_s: float | None = None
        self._turned_s = -1.0
        self._publishing = False
        self.up = True
        self.cpu_s = 0.0
        """Of this process, in the coordinator's code: a measurement, not a part of the simulation."""
        self.num_records, self.num_bytes, self.num_claims = 0, 0, 0
        self._new_process()
        self._emit(planned)
        self.watch.index = None if st.update_delay(self.state) else self._index
        self.core.term = 1
        self._emit(journal_core.term_started(1, "validator", "nonce"))
        self._emit(ev.HardwareClassSet(HARDWARE, "operator"))
        self._after_commit()
        self._world.at(IDLE_TICK_S, self._tick)

    def _new_process(self) -> None:
        """What a process knows beyond its journal is gone with it."""
        self.watch, self._index = Watch(), RunIndex()
        if self.state.run is not None and not st.update_delay(self.state):
            self.watch.index = self._index
        self._claims.clear()
        self._joins.clear()

    # --- what reaches it

    def hear(self, member: Member, claims: list[msg.AnyClaim]) -> None:
        """A report arrives."""
        if not self.up or member not in self.state.members:
            return
        self.watch.heard(member, self._world.now_s)
        for claim in claims:
            for blob in (*intake.blobs_to_confirm(claim), *intake.boundary_to_confirm(self.state, member, claim)):
                self.watch.blob_confirmed(blob)  # a simulated member says so once the store has it
            self._claims.append((member, claim))
        self.num_claims += len(claims)
        self.wake()

    def hello(self, node: SimMember, request: msg.JoinRequest) -> None:
        if self.up:
            self._joins.append((node, request))
            self.wake()

    def connection_reset(self, member: Member) -> None:
        """A probe finds that nobody listens there."""
        if self.up and member in self.state.members:
            self.watch.probe_answered(member, Probe.REFUSED, self._world.now_s)
            self.wake()

    def heartbeats(self) -> None:
        if not self.up:
            return
        now_s, ticks = self._world.now_s, int(self._world.now_s)
        for node in self._world.nodes:
            if node.online and node.member is not None and node.member in self.state.members:
                self.watch.beat(node.member, ticks, now_s)
        if self._world.store_down_until_s > now_s:
            self.watch.store.failed("the store is away", now_s)
        elif self.watch.store.trouble:
            self.watch.store.answered(now_s)

    def fail(self) -> None:
        """kill -9."""
        self.up = False

    def restart(self) -> None:
        """Its journal is on its disk: the same term, the same fold; all ages start anew."""
        self.up = True
        self._new_process()
        for node in self._world.nodes:
            node.reconnect()
        self.wake()

    # --- turns

    def wake(self) -> None:
        gap_s = min(TURN_GAP_MAX_S, TURN_GAP_MEMBER_S * len(self.state.members))
        due_s = max(self._world.now_s, self._turned_s + max(gap_s, 1e-4))
        if self._turn_due_s is None:
            self._turn_due_s = due_s
            self._world.at(due_s, self._turn)

    def _tick(self) -> None:
        if self.state.finished is None:
            self.wake()
            late = bool(self.watch.clocks()[:1])
            self._world.at(self._world.now_s + (TICK_S * 5 if late else IDLE_TICK_S), self._tick)

    def _turn(self) -> None:
        self._turn_due_s = None
        if not self.up or self.state.finished is not None:
            return
        began = time.process_time()
        now_s = self._turned_s = self._world.now_s
        while self._claims:
            self._admit(*self._claims.popleft(), now_s)
        while self._joins:
            self._join(*self._joins.popleft(), now_s)
        if self.core.may_speak:
            self._decide(now_s)
        self.cpu_s += time.process_time() - began
        if len(self.core.quorum) or self.core.effective_end > self._num_sent:
            self._world.at(now_s + self._world.fleet.validator.commit_ms / 1000, self._after_commit)

    def _admit(self, member: Member, claim: msg.AnyClaim, now_s: float) -> None:
        result = intake.admit(self.state, member, claim, self.watch)
        if isinstance(result, intake.Ignored):
            return
        if isinstance(claim, msg.ForwardReceipt | msg.BackwardReceipt):
            self.watch.progressed(member, now_s)
        for event in result:
            self._emit(event)

    def _join(self, node: SimMember, request: msg.JoinRequest, now_s: float) -> None:
        hotkey = node.hotkey
        result = intake.admit_join(self.state, request, hotkey, f"cold-{hotkey}", now_s, self.watch, self._policy)
        if isinstance(result, Refusal):
            self._world.at(now_s + node.link.one_way_s, node.refused, request.boot, result)
            return
        self._emit(result)
        self.watch.heard(result.member, now_s)

    def _decide(self, now_s: float) -> None:
        end = self.num_records + MAX_DECIDED
        while self.state.finished is None:
            if self.num_records >= end:
                self.wake()
                return
            decisions = deciding.decide(now_s, self.state, self.watch, self._policy, self._rng)
            if not decisions:
                return
            for decision in decisions:
                self._carry_out(decision.what)

    def _carry_out(self, what: ev.AnyEvent | deciding.Action) -> None:
        if isinstance(what, FinishRun):
            self._emit(ev.RunFinished(what.step, "root", what.evaluation))
        elif isinstance(what, ProbeSlices):
            for value in what.hashes:  # nobody withholds a slice here
                self.watch.blob_confirmed(value)
            self.watch.done(what)
        elif isinstance(what, ev.AnyEvent):
            self._emit(what)
        else:
            raise AssertionError(f"nobody lies and nothing is audited here: {what}")

    def _emit(self, event: ev.AnyEvent) -> None:
        record = ev.Record(self.num_records, int(self._world.now_s * 1e9), event)
        self.num_records += 1
        self.num_bytes += len(self._encoder.encode(record))
        apply(self.state, event)
        self._index.note(self.state, event)
        self.core.appended(event)
        self._unsent.append(event)
        self._world.tally.saw(event)

    # --- what leaves

    def _after_commit(self) -> None:
        if not self.up:
            return
        if self.core.may_speak:
            self._notify()
        due = self.core.segment_due()
        if due is not None and not self._publishing:
            self._publishing = True
            store = self._world.fleet.store
            took_s = (store.rtt_ms + self._world.fleet.validator.rtt_ms) / 1000
            self._world.at(self._world.store_start_s() + took_s, self._published, due)

    def _published(self, due: journal_core.SegmentDue) -> None:
        self._publishing = False
        segment = range(due.start, due.end)
        self.core.answered(due.index, stored=True, segment=segment, own=segment)
        self._after_commit()
        self.wake()

    def _notify(self) -> None:
        end = self.core.effective_end
        while self._num_sent < end:
            event = self._unsent.popleft()
            self._num_sent += 1
            self._world.merges.notice(event)
            for node in concerned(self._world, event):
                self._world.at(self._world.now_s + node.link.one_way_s, node.notice, event)

    def waiting_for(self) -> str:
        return deciding.waiting_for(self.state, self.watch, self._world.now_s, self._policy)


def concerned(world: World, event: ev.AnyEvent) -> list[SimMember]:
    """Whose turn it may be because of this event; everybody sees every event, but for most it changes nothing."""
    match event:
        case ev.Leased() | ev.ReplayLeased() | ev.Joined() | ev.Gone() | ev.SnapshotOrdered():
            return [world.by_hotkey[event.member.hotkey]]
        case ev.Voided():
            return [world.by_hotkey[event.member.hotkey]]
        case ev.Revoking():
            node = world.lease_holder(event.step, event.microbatch, event.stage)
            return [node] if node is not None else []
        case ev.StepSealed() | ev.StepPlanned():
            return [node for node in world.nodes if node.online and node.stage >= 0]
        case _:
            return []
