"""A member of the schedule test: the production fold, follower and `owed`, with toy arithmetic behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import schedule_toy as toy
from schedule_lanes import compute_part
from schedule_merging import Merging
from schedule_nodes import Bad

from miner import owed as owing
from miner.local_view import BoundaryKey, LocalView, MadeFrom, Sent, StoredLocally
from miner.owed_ahead import owed_ahead
from miner.owes import (
    ApplySeal,
    Check,
    Commit,
    Compute,
    Drop,
    DropLane,
    Examine,
    Fetch,
    FetchMerged,
    FetchSlice,
    Fingerprint,
    MakeSnapshot,
    Push,
    Reduce,
    Refuse,
    Report,
    Restore,
    SendSlice,
    StoreEvidence,
    StoreSlice,
)
from subnet.protocol import messages as msg
from subnet.run import audits
from subnet.run import state as st
from subnet.run.events import Rewound
from subnet.run.follower import Follower, Took
from subnet.words import CALIBRATION_STEP, Member

if TYPE_CHECKING:
    from schedule_sim import Sim


class Miner(Merging):
    """One process of a hotkey."""

    def __init__(self, sim: Sim, hotkey: str) -> None:
        self.sim, self.hotkey, self.dead, self.paused = sim, hotkey, False, False
        self.lie, self.slow = sim.liars.get(hotkey), sim.slow.get(hotkey, 0)
        self.boot = sim.unique()
        self.coordinator = sim.coordinator
        self.follower, self.local = Follower(), LocalView()
        self.me: Member | None = None
        self.w = self.w_before = 0
        self.values: dict[BoundaryKey, int] = {}
        self.sums: dict[tuple[int, int], dict[int, toy.Vector]] = {}
        self.own_slices: dict[str, toy.Vector] = {}
        self.slices: dict[str, toy.Vector] = {}
        self.running: dict[Compute, float] = {}
        self.lanes: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """By (step, lane): weights of the lane's stage, gradients of the inner step under way."""
        self.claimed: set[msg.AnyClaim] = set()
        self.seeds: dict[tuple[int, int], str] = {}

    @property
    def reads(self) -> bool:
        """Whether the store answers it."""
        return self.sim.answers(self)

    @property
    def writes(self) -> bool:
        """Whether the store, and its own disk, take what it writes."""
        return self.sim.takes(self)

    @property
    def state(self) -> st.RunState:
        return self.follower.state

    # --- receiving

    def receive(self, source: Any, kind: str, *args: Any) -> None:
        if kind == "announce":
            if args[0] >= self.follower.term:
                self.coordinator = source
            if args[0] > self.follower.term:
                self.sim.send(source, self, "poll", self.follower.cursor)
        elif kind == "stream":
            branch = audits.branch(self.state)
            took = self.follower.take(*args)
            if took is Took.NEW_TERM:
                self.coordinator = source
                self.drop()
            if audits.branch(self.state) != branch:
                self.rewind(min(r.event.step for r in args[2] if isinstance(r.event, Rewound)))
            self.sim.progress |= took is not Took.NOTHING
        elif kind == "boundary":
            frame, value = args
            key = BoundaryKey(frame.step, frame.microbatch, frame.stage, frame.backward, frame.part)
            whole = toy.name(value) == frame.hash
            if whole and self.me is not None and owing.accepts_boundary(self.state, self.me, frame):
                self.have(key, value)
                self.local.sent_to_me[key] = Sent(frame.hash, frame.generation, frame.signature)
        elif kind == "need":
            key = args[0]
            if key in self.values and self.lie != "mute":
                self.give_boundary(source, key)
        elif kind == "slice":
            value = args[0]
            self.sim.progress |= toy.name(value) not in self.slices
            self.slices[toy.name(value)] = value
            self.local.slices.add(toy.name(value))
        elif kind == "need_slice" and args[0] in self.own_slices:
            self.give_slice(source, args[0])

    def drop(self) -> None:
        """Whatever belongs to an incarnation goes with it."""
        self.boot, self.me = self.sim.unique(), None
        for key in self.local.new_incarnation():
            self.values.pop(key, None)
        self.local.jobs.clear()
        self.sums, self.own_slices, self.slices, self.running, self.claimed = {}, {}, {}, {}, set()
        self.lanes = {}

    def rewind(self, step: int) -> None:
        """The run goes on from there: later boundaries never were, and the state is to be had anew."""
        self.local.rewind(step)
        self.values = {key: value for key, value in self.values.items() if key.step < step}

    def have(self, key: BoundaryKey, value: int) -> None:
        self.sim.progress |= key not in self.values
        self.values[key] = value
        self.local.boundaries[key] = self.local.kept[key] = toy.name(value)
        self.local.unavailable.discard(key)

    def give_boundary(self, to: Miner, key: BoundaryKey) -> None:
        if self.me is None:
            return
        value = self.values[key]
        found = st.item(self.state, key.step, key.microbatch, key.stage)
        generation = found.generation if found else 0
        made = self.local.made_from.get(key)
        named = found is not None and toy.name(value) == (found.backward_hash if key.backward else found.forward_hash)
        if (
            found is not None
            and found.member == self.me
            and not named
            and (made is None or made.generation != generation)
        ):
            return  # made under an earlier lease: under this one it may come out otherwise
        frame = msg.BoundaryFrame(
            run="toy",
            step=key.step,
            microbatch=key.microbatch,
            stage=key.stage,
            backward=key.backward,
            sender=self.me,
            generation=generation,
            hash=toy.name(value),
            signature=b"signed",
            part=key.part,
        )
        self.sim.signed.add((self.me, key, generation, frame.hash))
        self.sim.send(to, self, "boundary", frame, value)

    def give_slice(self, to: Miner, value: str) -> None:
        if self.lie in ("mute", "withhold") and self.local.version != CALIBRATION_STEP:
            return
        given = self.own_slices[value]
        if self.lie == "slice":
            given = (given[0] + 1, *given[1:])
        self.sim.send(to, self, "slice", given)

    # --- acting

    def tick(self, late: bool = False) -> None:
        self.sim.send(self.coordinator, self, "poll", self.follower.cursor)
        if self.hotkey in self.state.convicted or self.state.run is None:
            return
        me, used_up = owing.incarnation(self.state, self.hotkey, self.boot)
        if me is None:
            if used_up or self.me is not None:
                self.drop()
            self.say_hello()
            return
        self.me = me
        self.sim.addresses[me] = self
        for owe in list(self.running):
            self.finish(owe)
        wanted: set[BoundaryKey] = set()
        ahead = owed_ahead(self.state, me, self.local) if self.sim.ahead else []
        for owe in [*owing.owed(self.state, me, self.local), *ahead]:
            if isinstance(owe, Fetch):
                wanted.add(owe.key)
            self.do(me, owe)
        if late:
            self.local.unavailable |= {key for key in wanted if key not in self.values}

    def say_hello(self) -> None:
        state = self.state
        hardware = state.hardware_class.hashes if state.hardware_class else ("golden",)
        request = msg.JoinRequest(1, "toy", self.boot, "127.0.0.1", 1, hardware, self.follower.cursor)
        self.sim.send(self.coordinator, self, "hello", request)

    def do(self, me: Member, owe: Any) -> None:
        match owe:
            case Report():
                self.report(me, owe.claim)
            case Compute() if self.lie != "mute":
                self.local.jobs.add(owe)
                self.running[owe] = self.sim.now + self.slow
                self.finish(owe)
            case Refuse():
                self.refuse(owe)
            case DropLane():
                self.lanes.pop((owe.step, owe.microbatch), None)
                self.local.lanes.pop((owe.step, owe.microbatch), None)
            case Drop():
                self.lanes.pop((owe.key.step, owe.key.microbatch), None)
                for key in self.local.drop_item(owe.key, owe.stage):
                    self.values.pop(key, None)
            case Fetch():
                for source in owe.sources:
                    if source in self.sim.addresses and source != me:
                        self.sim.send(self.sim.addresses[source], self, "need", owe.key)
            case StoreEvidence() if self.writes and owe.key in self.values:
                self.sim.put(self.values[owe.key])
                self.local.opened.add((owe.audit, owe.hash))
            case Push():
                if owe.to in self.sim.addresses:
                    self.local.note_pushed(owe.key, owe.to)
                    self.give_boundary(self.sim.addresses[owe.to], owe.key)
            case ApplySeal() if self.reads:
                self.apply_seal(me, owe.step)
            case Restore():
                self.restore(owe)
            case MakeSnapshot() if self.writes and self.lie not in ("nosnap", "mute"):
                manifest = self.sim.put((owe.step, owe.stage, self.w))
                self.local.snapshots[owe.step] = StoredLocally(manifest, self.local.root)
            case FetchMerged():
                if self.reads and owe.blob in self.sim.store:
                    self.local.fetched.add(owe.hash)
            case Examine():
                self.local.examined.add(((owe.step, owe.group, owe.version), owe.seed))
            case Commit() | SendSlice() | StoreSlice() | FetchSlice() | Reduce() | Fingerprint() | Check():
                if self.lie != "mute":
                    getattr(self, f"do_{type(owe).__name__}")(me, owe)
            case _:
                pass

    def report(self, me: Member, claim: msg.AnyClaim) -> None:
        if self.lie == "mute" and not isinstance(claim, msg.UpdatedClaim):
            return
        silent = {"nocommit": msg.CommitClaim, "nofp": msg.FingerprintClaim, "nocheck": msg.CheckClaim}
        if self.lie in silent and isinstance(claim, silent[self.lie]):
            return
        if not self.sim.repeats and claim in self.claimed:
            return
        self.claimed.add(claim)
        if isinstance(claim, msg.ForwardReceipt | msg.BackwardReceipt):
            self.local.note_receipt(claim)
        self.sim.send(self.coordinator, self, "claim", me, claim)

    def refuse(self, owe: Refuse) -> None:
        """Cancels a job that hasn't added; one that runs on must not add any more."""
        self.local.refused.add((owe.step, owe.microbatch, owe.generation))
        for job in [job for job in self.running if job.microbatch == owe.microbatch and job.generation]:
            if self.sim.rng.random() < 0.5:
                del self.running[job]
                self.local.jobs.discard(job)

    # --- work

    def finish(self, owe: Compute) -> None:
        if self.running[owe] > self.sim.now:
            self.sim.busy = True
            return
        if self.sim.chaos and self.sim.rng.random() < 0.3:
            return
        del self.running[owe]
        self.local.jobs.discard(owe)
        w = self.weights(owe)
        if self.me is not None and w is not None and owe.stage == self.local.restored_stage:
            if owe.part:
                compute_part(self, self.me, owe, w)
            else:
                self.compute(self.me, owe, w)

    def weights(self, owe: Compute) -> int | None:
        """Of the state that the item is computed from: the newest, or the one before it, which is kept."""
        training = owe.microbatch < st.num_microbatches(self.state)
        delayed = training and owe.step > 0 and st.update_delay(self.state)
        version = owe.step - 1 if delayed else owe.step
        if version == self.local.version:
            return self.w
        return self.w_before if delayed and version == self.local.version_before else None

    def compute(self, me: Member, owe: Compute, w: int) -> None:
        step, m, stage = owe.step, owe.microbatch, owe.stage
        count = st.num_microbatches(self.state)
        entry = BoundaryKey(step, m, stage - 1, False)
        if stage and entry not in self.values:
            return
        x = self.values[entry] if stage else toy.token(step, m, count)
        last = stage == st.num_stages(self.state) - 1
        if (step, m, stage, owe.backward) == self.sim.poison and owe.generation is not None:
            self.local.failures[step, m, owe.generation] = ("not finite", "the gradient isn't finite")
            return
        used = self.local.boundaries.get(entry, "")
        if not owe.backward:
            self.local.made_from[BoundaryKey(step, m, stage, False)] = MadeFrom(used, "", owe.generation or 0)
            if last:
                self.local.losses[step, m] = toy.loss_bits(w, x)
                self.local.evaluated.add((step, m))
            else:
                self.have(BoundaryKey(step, m, stage, False), toy.forward(w, x, stage))
            return
        g = toy.loss_gradient(w, x) if last else self.values.get(BoundaryKey(step, m, stage + 1, True))
        if g is None:
            return
        if last:
            self.local.losses[step, m] = toy.loss_bits(w, x)
        gradient = "" if last else self.local.boundaries.get(BoundaryKey(step, m, stage + 1, True), "")
        self.local.made_from[BoundaryKey(step, m, stage, True)] = MadeFrom(used, gradient, owe.generation or 0)
        self.have(BoundaryKey(step, m, stage, True), toy.backward(w, x, g, stage))
        if owing.may_add(self.state, me, self.local, owe):
            sums = self.sums.setdefault((step, owe.epoch), {})
            for p in st.partitions_of(self.state, st.group_of(self.state, stage), stage):
                sums[p] = toy.accumulate(step, sums.get(p), toy.gradient(w, x, g, stage, p))
            assert owe.generation is not None
            self.local.added[step, m, owe.epoch] = owe.generation

    def restore(self, owe: Restore) -> None:
        if owe.whole:
            self.w = toy.first_state(owe.stage)
        elif self.reads and owe.manifest in self.sim.store:
            self.w = self.sim.store[owe.manifest][2]
        else:
            return
        self.local.version, self.local.version_before, self.local.restored_stage = owe.version, None, owe.stage
        self.settle(owe.stage)

    def apply_seal(self, me: Member, step: int) -> None:
        log, stage = self.state.sealed[step], self.local.restored_stage
        assert stage is not None
        if not self.sim.has_effect(self.state, step) and self.sim.demands_effect:
            raise Bad("update before its seal is effective")
        group = st.group_of(self.state, stage)
        hashes = [log.groups[group].hashes[p] for p in st.partitions_of(self.state, group, stage)]
        if any(value not in self.sim.store for value in hashes):
            return
        self.w_before = self.w
        self.w = toy.updated(self.w, [self.sim.store[value] for value in hashes], log.coefficient_bits)
        if st.update_delay(self.state) and step > CALIBRATION_STEP:
            self.local.version_before = step
        self.local.version = step + 1
        first = audits.evidence_from(self.state) if st.config(self.state).audit.on else step + 1
        self.local.end_step(step, first)
        self.values = {
            key: value
            for key, value in self.values.items()
            if key.step > step or (key.step >= first and key in self.local.produced)
        }
        self.local.kept = {key: name for key, name in self.local.kept.items() if key in self.values}
        self.sums = {key: sums for key, sums in self.sums.items() if key[0] > step}
        self.running = {job: due for job, due in self.running.items() if job.step > step}
        self.own_slices, self.slices, self.claimed = {}, {}, set()
        self.local.jobs.clear()
        self.local.jobs.update(self.running)
        self.settle(stage)

    def settle(self, stage: int) -> None:
        """The state is at a new version: its root, and against the reference."""
        assert self.local.version is not None
        self.local.root = "" if self.local.version == CALIBRATION_STEP else toy.name(self.w)
        self.sim.progress = True
        self.sim.settled(self.local.version, stage, self.w, self.hotkey)
