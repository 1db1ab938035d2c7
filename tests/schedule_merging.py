"""What a member of the schedule test does for a merge: commits, slices, reduces, fingerprints and checks, in toy arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import schedule_toy as toy

from miner.local_view import LocalView, MergedLocally
from miner.owes import Check, Commit, FetchSlice, Fingerprint, Reduce, SendSlice, StoreSlice
from subnet.run import state as st
from subnet.words import CALIBRATION_STEP, Commitment, Member

if TYPE_CHECKING:
    from schedule_miner import Miner
    from schedule_sim import Sim


class Merging:
    """The merging half of a member; :class:`schedule_miner.Miner` fills it."""

    sim: Sim
    lie: str | None
    local: LocalView
    sums: dict[tuple[int, int], dict[int, toy.Vector]]
    own_slices: dict[str, toy.Vector]
    slices: dict[str, toy.Vector]
    seeds: dict[tuple[int, int], str]

    @property
    def reads(self) -> bool:
        raise NotImplementedError

    @property
    def writes(self) -> bool:
        raise NotImplementedError

    @property
    def state(self) -> st.RunState:
        raise NotImplementedError

    def give_slice(self, to: Miner, value: str) -> None:
        raise NotImplementedError

    def do_Commit(self, me: Member, owe: Commit) -> None:
        sums = self.sums.get((owe.step, owe.epoch))
        if sums is None:
            return
        assert self.local.restored_stage is not None
        hashes = tuple((p, toy.name(values)) for p, values in sorted(sums.items()))
        self.own_slices.update((toy.name(values), values) for values in sums.values())
        commitment = Commitment(me, self.local.restored_stage, owe.microbatches, hashes)
        self.local.commitments[owe.step, owe.epoch, owe.microbatches] = commitment
        self.local.made[owe.step, owe.epoch, owe.microbatches] = dict(hashes)

    def do_SendSlice(self, me: Member, owe: SendSlice) -> None:
        if owe.to in self.sim.addresses:
            self.local.sent.add((owe.hash, owe.to))
            self.give_slice(self.sim.addresses[owe.to], owe.hash)

    def do_StoreSlice(self, me: Member, owe: StoreSlice) -> None:
        if self.lie == "slice" or (self.lie == "withhold" and owe.step != CALIBRATION_STEP):
            return
        if self.writes:
            self.sim.put(self.own_slices[owe.hash])
            self.local.stored.add(owe.hash)

    def do_FetchSlice(self, me: Member, owe: FetchSlice) -> None:
        if self.reads and owe.hash in self.sim.store:
            self.slices[owe.hash] = self.sim.store[owe.hash]
            self.local.slices.add(owe.hash)
        elif owe.source in self.sim.addresses:
            self.sim.send(self.sim.addresses[owe.source], self, "need_slice", owe.hash)

    def do_Reduce(self, me: Member, owe: Reduce) -> None:
        if self.lie == "noown":
            return
        slices = [self.own_slices.get(v) or self.slices.get(v) for v in owe.hashes]
        if None in slices:
            return  # what it is said to have committed to is not what it made
        total = toy.merge(owe.step, [values for values in slices if values is not None])
        seed = self.seeds.get((owe.step, owe.group))
        if self.lie == "owner":
            total = (total[0] + 1, *total[1:])
        if self.lie == "crafty" and seed is not None:
            p = owe.partition
            total = (total[0] + toy.h("r", seed, p, 1), total[1] - toy.h("r", seed, p, 0))
        squares = toy.squares(owe.step, total)
        if self.lie == "square":
            squares = f"{int(squares, 16) + 1:x}"
        value = toy.name(total)
        if self.lie != "nopub":
            if not self.writes:
                return
            self.sim.put(total)
        merged = MergedLocally(value, value, 8, squares)
        self.local.merged[(owe.step, owe.group, owe.version), owe.partition] = merged

    def do_Fingerprint(self, me: Member, owe: Fingerprint) -> None:
        known = (owe.step, owe.group) in self.seeds
        self.seeds[owe.step, owe.group] = owe.seed
        if self.lie == "crafty" and not known:
            return  # silent once, so that there is another version, with a seed it may know by then
        merge = st.merge_of(self.state, owe.step, owe.group)
        assert merge is not None
        entry = next(entry for entry in merge.entries if entry.member == me)
        hashes = dict(entry.hashes)
        false = self.lie == "fp"
        values = tuple(
            (p, tuple(v + false for v in toy.fingerprint(self.own_slices[hashes[p]], owe.seed, p)))
            for p in owe.partitions
        )
        self.local.fingerprints[(owe.step, owe.group, owe.version), owe.seed] = values

    def do_Check(self, me: Member, owe: Check) -> None:
        if not self.reads:
            return
        merge = st.merge_of(self.state, owe.step, owe.group)
        assert merge is not None
        ok = self.judge(merge, owe)
        if ok is None:
            return
        if self.lie in ("yes", "owner", "square"):
            ok = True
        if self.lie == "accuse":
            ok = False
        self.local.checks[owe.step, owe.group, owe.version] = ok

    def judge(self, merge: st.Merge, owe: Check) -> bool | None:
        """None while the store lacks what is to be judged."""
        store = self.sim.store
        for p in owe.partitions:
            said = merge.merged[p]
            entries = [entry for entry in merge.entries if p in dict(entry.hashes)]
            if said.blob not in store:
                return None
            total = store[said.blob]
            if toy.name(total) != said.hash:
                return False
            if owe.step == CALIBRATION_STEP:
                slices = [store[dict(entry.hashes)[p]] for entry in entries]
                right = toy.merge(owe.step, slices) == total
            else:
                parts = [dict(merge.fingerprints[entry.member])[p][0] for entry in entries]
                right = toy.fingerprint(total, merge.seed, p)[0] == sum(parts) % toy.PRIME
            if not right or toy.squares(owe.step, total) != said.squares:
                return False
        return True
