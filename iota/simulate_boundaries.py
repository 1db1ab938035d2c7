"""The half of a simulated member that gets and gives boundaries: straight, or through the store where that has to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.simulate import links
from subnet.simulate.fleet import GroupPart
from subnet.simulate.links import Link

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from iota.simulate_member import SimMember
    from iota.simulate_saying import Lease
    from iota.simulate_world import BoundaryKey, World

MISSING_S = 2.0
"""After so long without anybody who has it a boundary is reported missing."""
KIND = "boundaries"


class Boundaries:
    """:class:`iota.simulate_member.SimMember` fills it."""

    world: World
    group: GroupPart
    link: Link
    online: bool
    life: int
    stage: int
    leases: dict[tuple[int, int], Lease]
    has: set[BoundaryKey]
    flying: set[BoundaryKey]
    wants: dict[BoundaryKey, float]

    if TYPE_CHECKING:

        @property
        def state(self) -> st.RunState: ...

        def after(self, when_s: float, work: Callable[..., None], *args: Any) -> None: ...

        def queue(self, step: int, m: int, lease: Lease, *, backward: bool) -> None: ...

        def say(self, claim: msg.AnyClaim, lazy: bool = False) -> None: ...

    def try_start(self, step: int, m: int) -> None:
        """Queues what the lease's inputs allow, and asks for what is lacking."""
        lease = self.leases.get((step, m))
        if lease is None or lease.done:
            return
        if not lease.forwarded:
            key = (step, m, self.stage - 1, False)
            if self.stage == 0 or key in self.has:
                self.queue(step, m, lease, backward=False)
            else:
                self.request(key)
            return
        key = (step, m, self.stage + 1, True)
        if key in self.has:
            self.queue(step, m, lease, backward=True)
        else:
            self.request(key)

    def request(self, key: BoundaryKey) -> None:
        """Has it sent by whoever has it; without anybody it is waited for."""
        if key in self.flying or key in self.has:
            return
        world = self.world
        if key in world.stored and self._by_store(None):
            done_s = links.get(world.store_start_s(), self.link, world.store, world.costs.boundary_bytes, KIND)
            self.flying.add(key)
            self.after(done_s, self._arrived, key)
            return
        sources = [node for node in world.holders_of(key) if node is not self]
        if not sources:
            self.wants.setdefault(key, world.now_s)
            return
        source = sources[0]
        self.wants.pop(key, None)
        if self._by_store(source):
            self.wants.setdefault(key, world.now_s)
            source.put_boundary(key)
            return
        self.flying.add(key)
        done_s = links.send(world.now_s, source.link, self.link, world.costs.boundary_bytes, KIND)
        self.after(done_s, self._delivered, key, source, source.life)

    def _by_store(self, source: SimMember | None) -> bool:
        """``source`` None: whether it may come from there at all."""
        if st.config(self.state).pipeline.boundaries == "store" or not self.group.reachable:
            return True
        return source is None or not source.group.reachable

    def _delivered(self, key: BoundaryKey, source: SimMember, source_life: int) -> None:
        if source.life != source_life:  # it broke off
            self.flying.discard(key)
            self.wants.setdefault(key, self.world.now_s)
            self.request(key)
            return
        self._arrived(key)

    def _arrived(self, key: BoundaryKey) -> None:
        self.flying.discard(key)
        self.wants.pop(key, None)
        if key in self.has or st.work_at(self.state, key[0]) is None:
            return
        self._have(key)
        self.try_start(key[0], key[1])

    def _have(self, key: BoundaryKey) -> None:
        self.has.add(key)
        self.world.boundaries.setdefault(key, []).append(self)  # pyright: ignore[reportArgumentType]

    def produce(self, key: BoundaryKey) -> float:
        """It is made: pushed to whoever has the lease it is for. When a receipt may say so."""
        if key not in self.has:
            self._have(key)
        step, m, stage, backward = key
        holder = self.world.lease_holder(step, m, stage - 1 if backward else stage + 1)
        store_only = st.config(self.state).pipeline.boundaries == "store" or not self.group.reachable
        if store_only or (holder is not None and not holder.group.reachable):
            return self.put_boundary(key)
        if holder is not None:
            holder.request(key)
        return self.world.now_s

    def put_boundary(self, key: BoundaryKey) -> float:
        """Into the store, once; then whoever waits for it fetches it."""
        world = self.world
        if key in world.stored:
            return world.now_s
        if world.storing.get(key, -1.0) >= world.now_s:
            return world.storing[key]
        done_s = links.put(world.store_start_s(), self.link, world.store, world.costs.boundary_bytes, KIND)
        world.storing[key] = done_s
        self.after(done_s, self._stored, key)
        return done_s

    def _stored(self, key: BoundaryKey) -> None:
        world = self.world
        world.stored.add(key)
        world.storing.pop(key, None)
        step, m, stage, backward = key
        holder = world.lease_holder(step, m, stage - 1 if backward else stage + 1)
        if holder is not None:
            holder.request(key)

    def ask_again(self) -> None:
        """What is waited for: from whoever has it by now; and where nobody has what was receipted, it is missing."""
        now_s = self.world.now_s
        for key, since_s in list(self.wants.items()):
            if (key[0], key[1]) not in self.leases or key in self.has:
                del self.wants[key]
                continue
            self.request(key)
            if key in self.wants and now_s - since_s >= MISSING_S and self._is_receipted(key):
                self.say(msg.MissingClaim(key[0], key[1], self.stage, key[3]))

    def _is_receipted(self, key: BoundaryKey) -> bool:
        found = st.item(self.state, key[0], key[1], key[2])
        if found is None:
            return False
        return found.status == st.DONE or (not key[3] and found.forwarded)
