"""The third of a simulated member that speaks: claims batched and repeated until the fold shows that they aren't owed any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.simulate.links import Link
from subnet.timing import TIMEOUTS
from subnet.words import Member

if TYPE_CHECKING:
    from iota.simulate_member import SimMember
    from iota.simulate_world import World

REPEAT_S = 3.0


@dataclass
class Lease:
    generation: int
    forwarded: bool = False
    recompute: bool = False
    done: bool = False


@dataclass
class Job:
    step: int
    microbatch: int
    generation: int
    backward: bool
    replay: bool = False


class Saying:
    """:class:`iota.simulate_member.SimMember` fills it."""

    world: World
    online: bool
    life: int
    link: Link
    member: Member | None
    job: Job | None
    forwards: deque[Job]
    backwards: deque[Job]
    pending: dict[msg.AnyClaim, float]
    outbox: list[msg.AnyClaim]
    flush_s: float | None
    report_free_s: float

    @property
    def state(self) -> st.RunState:
        return self.world.state

    def after(self, when_s: float, work: Callable[..., None], *args: Any) -> None:
        """At that time, if nothing was lost meanwhile."""
        self.world.at(when_s, self._if_same, self.life, work, args)

    def _if_same(self, life: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.life == life and self.online:
            work(*args)

    def say(self, claim: msg.AnyClaim, lazy: bool = False) -> None:
        """A claim on its way, repeated until the fold shows that it isn't owed any more."""
        self.pending[claim] = self.world.now_s
        self.outbox.append(claim)
        wait_s = TIMEOUTS.receipt_flush_s if lazy and (self.job or self.forwards or self.backwards) else 0.0
        due_s = max(self.world.now_s + wait_s, self.report_free_s)
        if self.flush_s is None or due_s < self.flush_s:
            self.flush_s = due_s
            self.after(due_s, self._flush_due, due_s)

    def _flush_due(self, due_s: float) -> None:
        if self.flush_s == due_s:
            self._flush()

    def _flush(self) -> None:
        now_s = self.world.now_s
        if now_s < self.report_free_s:
            return
        self.flush_s = None
        claims, self.outbox = self.outbox, []
        if self.member is not None and claims:
            self.report_free_s = now_s + 2 * self.link.one_way_s
            self.world.at(now_s + self.link.one_way_s, self.world.coordinator.hear, self.member, claims)

    def owes(self, claim: msg.AnyClaim) -> bool:
        """Whether the fold doesn't show it yet, and still could."""
        state = self.state
        match claim:
            case msg.UpdatedClaim():
                info = state.members.get(self.member) if self.member else None
                return info is not None and claim.step == state.next_step and info.version != claim.step
            case msg.ForwardReceipt() | msg.BackwardReceipt() | msg.NotAccumulatedClaim():
                found = st.item(state, claim.step, claim.microbatch, claim.stage)
                if found is None or found.member != self.member or found.generation != claim.generation:
                    return False
                if found.status not in (st.LIVE, st.REVOKING):
                    return False
                return not (isinstance(claim, msg.ForwardReceipt) and found.forwarded)
            case msg.CommitClaim() | msg.MergedClaim() | msg.FingerprintClaim() | msg.CheckClaim():
                return self.world.merges.owes(self._myself(), claim)
            case msg.SnapshotClaim():
                stored = st.stored_snapshot(state, claim.stage, claim.step)
                return stored is None and claim.step == state.next_step
            case _:
                return False

    def _myself(self) -> SimMember:
        raise NotImplementedError
