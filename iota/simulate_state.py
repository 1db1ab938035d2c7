"""The part of a simulated member that has a stage's state: restores it, follows the seals, stores snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iota.simulate_saying import Lease, Saying
from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.simulate import costs as passes
from subnet.simulate import links

if TYPE_CHECKING:
    from iota.simulate_world import BoundaryKey
    from subnet.simulate.presets import Preset
    from subnet.words import Member


class Restoring(Saying):
    """:class:`iota.simulate_member.SimMember` fills it."""

    hotkey: str
    gpu: Preset
    stage: int
    version: int | None
    restored_stage: int
    restoring: bool
    merging: bool
    updating: bool
    leases: dict[tuple[int, int], Lease]
    has: set[BoundaryKey]
    wants: dict[BoundaryKey, float]
    sums: dict[tuple[int, tuple[int, ...]], tuple[float, float, tuple[Member, ...]]]
    fetched_s: dict[tuple[int, int, int], float]
    step_compute_s: dict[int, float]

    def look(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        """Its own state where that goes on, else the newest snapshot it may trust; then the seals since."""
        state, now_s = self.state, self.world.now_s
        self.restoring = True
        log_from = min(state.sealed, default=state.next_step)
        mine = self.version is not None and self.restored_stage == self.stage and self.version >= log_from
        if mine:
            self._catch_up()
            return
        point = st.restore_point(state, self.stage, f"cold-{self.hotkey}")
        costs = self.world.costs
        size = 4 * costs.params[self.stage] if point.whole else costs.state_bytes(self.stage)
        done_s = links.get(self.world.store_start_s(now_s), self.link, self.world.store, size, "state")
        self.after(done_s, self._restored, point.version)

    def _restored(self, version: int) -> None:
        self.version, self.restored_stage = version, self.stage
        self._catch_up()

    def _catch_up(self) -> None:
        """Applies the next seal, if there is one; else says that it is there."""
        state, now_s = self.state, self.world.now_s
        assert self.version is not None
        if self.version >= state.next_step:
            self.restoring = self.merging = self.updating = False
            self.say(msg.UpdatedClaim(state.next_step, f"root-{state.next_step}-{self.stage}"))
            self.look()
            return
        log = state.sealed.get(self.version)
        if log is None:  # too old by now
            self.version = None
            self._restore()
            return
        group = st.group_of(state, self.stage)
        if self.restoring and not any(key[:2] == (self.version, group) for key in self.fetched_s):
            size = sum(log.groups[group].blobs[p][1] for p in st.partitions_of(state, group, self.stage))
            now_s = links.get(self.world.store_start_s(now_s), self.link, self.world.store, size, "merged")
        self.updating = True
        updated_s = now_s + self.world.costs.pass_s(self.stage, self.gpu, passes.UPDATE_BYTES)
        self.after(updated_s, self._updated, self.version + 1)

    def _updated(self, version: int) -> None:
        self.version = version
        self._catch_up()

    def _step_sealed(self, step: int) -> None:
        self.leases = {key: lease for key, lease in self.leases.items() if key[0] > step}
        self.step_compute_s = {key: s for key, s in self.step_compute_s.items() if key > step}
        self.has = {key for key in self.has if key[0] > step}
        self.wants = {key: since for key, since in self.wants.items() if key[0] > step}
        self.sums = {key: value for key, value in self.sums.items() if key[0] > step}
        if self.version == step and not self.restoring and self.stage == self.restored_stage:
            self._catch_up()
        self.fetched_s = {key: at for key, at in self.fetched_s.items() if key[0] > step}

    def _snapshot(self, step: int) -> None:
        size = self.world.costs.state_bytes(self.stage)
        done_s = links.put(self.world.store_start_s(), self.link, self.world.store, size, "state")
        claim = msg.SnapshotClaim(step, self.stage, f"snapshot-{step}-{self.stage}", f"root-{step}-{self.stage}")
        self.after(done_s, self.say, claim)
