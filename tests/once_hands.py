"""A process of the exactly-once cases: what it owes is the production's word, what it adds is written into its hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import schedule_toy as toy

from miner import owed as owing
from miner.local_view import BoundaryKey, LocalView, MergedLocally, StoredLocally
from miner.owes import (
    ApplySeal,
    Check,
    Commit,
    Compute,
    Examine,
    Fetch,
    FetchMerged,
    FetchSlice,
    Fingerprint,
    MakeSnapshot,
    Owe,
    Push,
    Reduce,
    Refuse,
    Report,
    Restore,
    SendSlice,
    StoreSlice,
)
from subnet.run import state as st
from subnet.run.follower import Follower
from subnet.words import CALIBRATION_STEP, Commitment, Member

if TYPE_CHECKING:
    from once_cases import Case


@dataclass
class Hand:
    """A process of a hotkey: its fold, as far as it has heard, and its own sums."""

    hotkey: str
    boot: str
    follower: Follower = field(default_factory=Follower)
    local: LocalView = field(default_factory=LocalView)
    me: Member | None = None
    sums: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By (step, epoch): the microbatches that were added, each as often as it was."""
    running: list[Compute] = field(default_factory=list)

    def drop(self, boot: str) -> None:
        self.boot, self.me, self.sums = boot, None, {}
        self.local.new_incarnation()
        self.forget_jobs()

    def do(self, owe: Owe, case: Case) -> None:
        local, step = self.local, getattr(owe, "step", None)
        match owe:
            case Report():
                case.post(self.me, owe.claim)
            case Compute():
                local.jobs.add(owe)
                self.running.append(owe)
            case Refuse():
                local.refused.add((owe.step, owe.microbatch, owe.generation))
            case Fetch():
                if case.chance(0.2):
                    local.unavailable.add(owe.key)
                else:
                    local.boundaries[owe.key] = "boundary"
            case Push():
                local.pushed.add((owe.key, owe.to))
            case Commit():
                self.commit(owe)
            case SendSlice():
                local.sent.add((owe.hash, owe.to))
            case StoreSlice():
                local.stored.add(owe.hash)
            case FetchSlice():
                local.slices.add(owe.hash)
            case Reduce():
                merged = MergedLocally("+".join(owe.hashes), "+".join(owe.hashes), 8, "1")
                local.merged[(owe.step, owe.group, owe.version), owe.partition] = merged
            case FetchMerged():
                local.fetched.add(owe.hash)
            case Examine():
                local.examined.add(((owe.step, owe.group, owe.version), owe.seed))
            case Fingerprint():
                values = tuple((p, (1,)) for p in owe.partitions)
                local.fingerprints[(owe.step, owe.group, owe.version), owe.seed] = values
            case Check():
                local.checks[owe.step, owe.group, owe.version] = True
            case ApplySeal():
                if st.update_delay(self.follower.state) and owe.step > CALIBRATION_STEP:
                    local.version_before = owe.step
                local.version = owe.step + 1
                local.end_step(owe.step)
                left = [job for job in self.running if job.step > owe.step]
                self.forget_jobs()
                self.running.extend(left)
                local.jobs.update(left)
                local.root = "root"
            case Restore():
                local.version, local.version_before, local.restored_stage = owe.version, None, owe.stage
                local.root = "" if owe.version == CALIBRATION_STEP else "root"
            case MakeSnapshot():
                assert step is not None
                local.snapshots[step] = StoredLocally("manifest", "root")

    def forget_jobs(self) -> None:
        self.running.clear()
        self.local.jobs.clear()

    def finish_one(self) -> None:
        """The oldest job ends; it may have been revoked meanwhile, which it doesn't know."""
        owe = self.running.pop(0)
        self.local.jobs.discard(owe)
        delayed = owe.step > 0 and st.update_delay(self.follower.state) and not owe.evaluation
        if self.local.computes(owe.step - 1 if delayed else owe.step) and owe.stage == self.local.restored_stage:
            self.compute(owe)

    def compute(self, owe: Compute) -> None:
        local = self.local
        local.boundaries[BoundaryKey(owe.step, owe.microbatch, owe.stage, owe.backward)] = "boundary"
        if owe.stage == st.num_stages(self.follower.state) - 1:
            local.losses[owe.step, owe.microbatch] = toy.fp32_bits(1.0)
            local.evaluated.add((owe.step, owe.microbatch))
        if owe.backward and self.me is not None and owing.may_add(self.follower.state, self.me, local, owe):
            self.sums.setdefault((owe.step, owe.epoch), []).append(owe.microbatch)
            assert owe.generation is not None
            local.added[owe.step, owe.microbatch, owe.epoch] = owe.generation

    def commit(self, owe: Commit) -> None:
        content = self.sums.get((owe.step, owe.epoch), [])
        assert self.local.restored_stage is not None
        stage, state = self.local.restored_stage, self.follower.state
        written = ",".join(map(str, sorted(content)))
        hashes = tuple((p, f"{self.me}:{written}") for p in st.partitions_of(state, owe.group, stage))
        assert self.me is not None
        commitment = Commitment(self.me, stage, owe.microbatches, hashes)
        self.local.commitments[owe.step, owe.epoch, owe.microbatches] = commitment
        self.local.made[owe.step, owe.epoch, owe.microbatches] = dict(hashes)
