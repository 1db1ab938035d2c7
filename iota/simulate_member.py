"""A simulated member: joins, restores, computes what it has leases for, passes boundaries on, and says what the protocol asks.

It owes what :mod:`miner.owed` says a member owes, driven by events instead of by looking at everything again and again:
backward before forward, one item at a time, receipts of forwards batched, everything else at once. Its view is the
coordinator's own fold; what reaches it first travels.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from iota.simulate_boundaries import Boundaries
from iota.simulate_coordinator import HARDWARE
from iota.simulate_saying import REPEAT_S, Job, Lease
from iota.simulate_state import Restoring
from subnet.errors import Refusal
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.simulate import costs as passes
from subnet.simulate.fleet import GroupPart
from subnet.simulate.links import Link
from subnet.words import PROTOCOL_VERSION, Cursor, Member

if TYPE_CHECKING:
    from iota.simulate_world import World

LOSS_BITS = 0x40000000
PHASES: tuple[str, ...] = ("compute", "input", "merge", "idle", "join", "down")


class SimMember(Restoring, Boundaries):
    """One machine with one GPU; ``life`` changes whenever what was under way is lost."""

    def __init__(self, world: World, hotkey: str, group: GroupPart, link: Link) -> None:
        self.world, self.hotkey, self.group, self.link = world, hotkey, group, link
        self.gpu = group.gpu
        self.online, self.life = False, 0
        self.boot, self.member, self.stage = "", None, -1
        self.version: int | None = None
        self.restored_stage = -1
        self.restoring = False
        self.merging = False
        self.last_hello_s = 0.0
        self.phase, self.phase_since_s = "down", 0.0
        self.spent_s = dict.fromkeys(PHASES, 0.0)
        self.lost_s = 0.0
        """Of ``compute``: what was for nothing."""
        self.step_compute_s: dict[int, float] = {}
        self.too_small = False
        self._clear()

    def _clear(self) -> None:
        """What belongs to an incarnation."""
        self.leases: dict[tuple[int, int], Lease] = {}
        self.forwards: deque[Job] = deque()
        self.backwards: deque[Job] = deque()
        self.job: Job | None = None
        self.job_began_s = 0.0
        self.has: set[tuple[int, int, int, bool]] = set()
        self.flying: set[tuple[int, int, int, bool]] = set()
        self.wants: dict[tuple[int, int, int, bool], float] = {}
        self.pending: dict[msg.AnyClaim, float] = {}
        self.outbox: list[msg.AnyClaim] = []
        self.flush_s: float | None = None
        self.report_free_s = 0.0
        self.merging = self.updating = False
        self.sums: dict[tuple[int, tuple[int, ...]], tuple[float, float, tuple[Member, ...]]] = {}
        """By (step, m-set): from when to when its slices travel, to which owners."""
        self.fetched_s: dict[tuple[int, int, int], float] = {}
        """By (step, group, version): when all merged partitions announced so far are here."""
        self.said: set[tuple[object, ...]] = set()
        self.hashed_s = 0.0
        """When its sum's slices are hashed."""

    # --- coming and going

    def start(self) -> None:
        """A process begins, or its link is back."""
        self.online, self.life = True, self.life + 1
        if self.member is not None and self.member in self.state.members:  # it wasn't missed
            if self.version is None or self.restored_stage != self.stage:
                self._restore()
            for key in list(self.leases):
                self.try_start(*key)
        else:
            self._new_incarnation()
        self.look()

    def stop(self, *, process: bool) -> None:
        """``process``: all of it is gone; else only its link, and its state stays."""
        self._waste_job()
        self.online, self.life, self.job, self.flush_s = False, self.life + 1, None, None
        self.restoring = self.updating = False
        self.flying.clear()
        self.forwards.clear()
        self.backwards.clear()
        if process:
            self.version, self.restored_stage = None, -1
            self.lose_sums()
            self._clear()
            self.member, self.stage = None, -1
        self.look()

    def _new_incarnation(self) -> None:
        self._waste_job()
        self.lose_sums()
        self._clear()
        self.member, self.stage, self.restoring, self.life = None, -1, False, self.life + 1
        self.boot = f"{self.hotkey}/{self.life}"
        self._hello()

    def reconnect(self) -> None:
        """The coordinator is back; what it didn't hear is said again."""
        if self.online:
            self.pending = dict.fromkeys(self.pending, -REPEAT_S)

    def _hello(self) -> None:
        world = self.world
        request = msg.JoinRequest(
            PROTOCOL_VERSION,
            self.state.run.run_id if self.state.run else "",
            self.boot,
            "simulated",
            1,
            HARDWARE,
            Cursor(0, 0),
            reachable=self.group.reachable,
        )
        self.last_hello_s = world.now_s
        world.at(world.now_s + self.link.one_way_s, world.coordinator.hello, self, request)

    def refused(self, boot: str, refusal: Refusal) -> None:
        if boot == self.boot and self.online and self.member is None and refusal.code != "boot_seen":
            wait_s = refusal.retry_after if refusal.retry_after is not None else 5.0
            self.last_hello_s = self.world.now_s + wait_s
            self.after(self.world.now_s + max(0.1, wait_s), self._hello)

    # --- events

    def notice(self, event: ev.AnyEvent) -> None:
        """An event of the stream arrives."""
        if not self.online:
            return
        match event:
            case ev.Joined() if event.boot == self.boot:
                self.member, self.stage = event.member, event.stage
                self._restore()
            case ev.Gone() if event.member == self.member:
                self._new_incarnation()
            case ev.Leased() if event.member == self.member:
                self._leased(event)
            case ev.ReplayLeased() if event.member == self.member:
                self.forwards.append(Job(event.step, event.microbatch, 0, event.backward, replay=True))
                self.begin()
            case ev.Revoking() if (event.step, event.microbatch) in self.leases:
                self._revoked(event)
            case ev.Voided() if event.member == self.member:
                self._voided(event)
            case ev.StepSealed():
                self._step_sealed(event.step)
            case ev.StepPlanned():
                pass
            case ev.SnapshotOrdered() if event.member == self.member:
                self._snapshot(event.step)
            case _:
                return
        self.look()

    def _leased(self, event: ev.Leased) -> None:
        found = st.item(self.state, event.step, event.microbatch, event.stage)
        if found is None or found.member != self.member or found.generation != event.generation:
            return
        self.leases[event.step, event.microbatch] = Lease(event.generation)
        self.try_start(event.step, event.microbatch)

    def _revoked(self, event: ev.Revoking) -> None:
        lease = self.leases[event.step, event.microbatch]
        if lease.generation != event.generation or lease.done:
            return
        self._drop_lease(event.step, event.microbatch)
        self.say(msg.NotAccumulatedClaim(event.step, event.microbatch, event.stage, event.generation))

    def _drop_lease(self, step: int, m: int) -> None:
        self.leases.pop((step, m), None)
        if self.job is not None and (self.job.step, self.job.microbatch) == (step, m) and not self.job.replay:
            self._waste_job()
            self.job = None
            self.begin()

    def _voided(self, event: ev.Voided) -> None:
        self.lost_s += self.step_compute_s.pop(event.step, 0.0)
        for step, m in [key for key in self.leases if key[0] == event.step]:
            found = st.item(self.state, step, m, self.stage)
            if found is None or found.member != self.member or found.generation != self.leases[step, m].generation:
                self._drop_lease(step, m)
        self.sums = {key: value for key, value in self.sums.items() if key[0] != event.step}
        self.merging = False

    def lose_sums(self) -> None:
        self.lost_s += sum(self.step_compute_s.values())
        self.step_compute_s.clear()

    # --- computing

    def queue(self, step: int, m: int, lease: Lease, *, backward: bool) -> None:
        (self.backwards if backward else self.forwards).append(Job(step, m, lease.generation, backward))
        self.begin()

    def begin(self) -> None:
        """Takes up the next thing, if it is free."""
        while self.online and self.job is None and (self.backwards or self.forwards):
            job = (self.backwards or self.forwards).popleft()
            lease = self.leases.get((job.step, job.microbatch))
            if not job.replay and (lease is None or lease.generation != job.generation):
                continue
            self.job, self.job_began_s = job, self.world.now_s
            self.after(self.world.now_s + self._seconds(job, lease), self._finish, job)
        if self.job is None and self.outbox:
            self._flush()
        self.look()

    def _seconds(self, job: Job, lease: Lease | None) -> float:
        costs, stage = self.world.costs, self.stage
        whole_s, overhead_s = costs.item_s(stage, self.gpu), self.group.item_overhead_ms / 1000
        evaluation = st.is_evaluation(self.state, job.microbatch)
        forward_s = whole_s * passes.FORWARD_SHARE + overhead_s
        if evaluation or (job.replay and not job.backward):
            return forward_s
        add_s = costs.pass_s(stage, self.gpu, passes.ADD_BYTES)
        if job.replay or stage == costs.num_stages - 1:
            return whole_s + 2 * overhead_s + add_s
        if not job.backward:
            assert lease is not None
            held = sum(other.forwarded and not other.done and not other.recompute for other in self.leases.values())
            room = max(1, int(self.group.graph_memory_gb * 2**30 / max(1, costs.graph_bytes[stage])))
            lease.recompute = held >= room
            return forward_s
        again_s = whole_s * passes.FORWARD_SHARE if lease is not None and lease.recompute else 0.0
        return whole_s * (1 - passes.FORWARD_SHARE) + again_s + overhead_s + add_s

    def _waste_job(self) -> None:
        if self.job is not None:
            self.lost_s += self.world.now_s - self.job_began_s

    def _finish(self, job: Job) -> None:
        if self.job is not job:
            return
        took_s, self.job = self.world.now_s - self.job_began_s, None
        step, m = job.step, job.microbatch
        if job.replay:
            self.lost_s += took_s
            self.produce((step, m, self.stage, job.backward))
            self.begin()
            return
        lease = self.leases.get((step, m))
        if lease is None or lease.generation != job.generation:
            self.lost_s += took_s
            self.begin()
            return
        evaluation = st.is_evaluation(self.state, m)
        last = self.stage == self.world.costs.num_stages - 1
        self.step_compute_s[step] = self.step_compute_s.get(step, 0.0) + took_s
        if evaluation or not (job.backward or last):
            lease.forwarded = True
            lease.done = evaluation
        else:
            lease.forwarded = lease.done = True
        self._hand_on(job, took_s, lease, evaluation=evaluation, last=last)
        if lease.done and not evaluation:
            self.world.merges.may_begin(self)
        self.begin()

    def _hand_on(self, job: Job, took_s: float, lease: Lease, *, evaluation: bool, last: bool) -> None:
        """The output goes to its neighbour, the receipt to the coordinator: after it where the store has to have it."""
        step, m, stage = job.step, job.microbatch, self.stage
        backward = lease.done and not evaluation
        kind = msg.BackwardReceipt if backward else msg.ForwardReceipt
        has_output = stage > 0 if backward else not last
        claim = kind(
            step=step,
            microbatch=m,
            stage=stage,
            generation=lease.generation,
            input=f"{step}/{m}/{stage - 1}" if stage else "",
            output=f"{step}/{m}/{stage}/{int(backward)}" if has_output else "",
            compute_s=max(took_s, 1e-9),
            loss_bits=LOSS_BITS if last else None,
        )
        lazy = not backward and not evaluation
        there_s = self.produce((step, m, stage, backward)) if has_output else self.world.now_s
        if there_s > self.world.now_s:
            self.after(there_s, self.say, claim, lazy)
        else:
            self.say(claim, lazy)
        if not lease.done:
            self.try_start(step, m)

    # --- once a second

    def sweep(self) -> None:
        """Once a second: what was lost on the way is said or asked again."""
        if not self.online:
            return
        now_s = self.world.now_s
        if self.member is None:
            if now_s - self.last_hello_s >= REPEAT_S:
                self._hello()
            return
        if self.member not in self.state.members:
            self._new_incarnation()
            return
        for claim, said_s in list(self.pending.items()):
            if now_s - said_s >= REPEAT_S:
                del self.pending[claim]
                if self.owes(claim):
                    self.say(claim)
        if self.wants:
            self.ask_again()
        if self.version == self.state.next_step and not self.restoring:
            self.world.merges.ensure(self)
        elif self.version is not None and not self.restoring and not self.updating:
            self.restoring = True
            self._catch_up()

    # --- where its time goes

    def look(self) -> None:
        """Notes what it is at, where that has changed."""
        if not self.online:
            phase = "down"
        elif self.job is not None:
            phase = "compute"
        elif self.member is None or self.restoring or self.version is None:
            phase = "join"
        elif self.merging or self.version != self.state.next_step:
            phase = "merge"
        elif any(not lease.done for lease in self.leases.values()):
            phase = "input"
        else:
            phase = "idle"
        if phase != self.phase:
            self.world.tally.spent(self, self.phase, self.phase_since_s, self.world.now_s)
            self.phase, self.phase_since_s = phase, self.world.now_s

    def _myself(self) -> SimMember:
        return self
