"""What goes wrong and when: each machine, the store and the validator fail on clocks of their own, seeded one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subnet.protocol.messages import LeavingClaim

if TYPE_CHECKING:
    from iota.simulate_member import SimMember
    from iota.simulate_world import World

RESET_S = 0.05
"""Until a dead process's sockets are found closed."""
RESTART_S = 15.0
"""A process takes so long to begin (imports, the golden tasks) once its machine is back."""


@dataclass(frozen=True)
class Fault:
    """One disruption. ``kind``: kill, silence, leave, store, validator."""

    at_s: float
    kind: str
    who: str
    outage_s: float


class Faults:
    """Failures are exponential in time, outages in length; a machine's next failure counts from its return."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.happened: list[Fault] = []

    def begin(self) -> None:
        world = self._world
        for node in world.nodes:
            if node.group.mtbf_hours > 0:
                self._next(node, random.Random(f"{world.seed}/faults/{node.hotkey}"))
        for name, part in (("store", world.fleet.store), ("validator", world.fleet.validator)):
            if part.mtbf_hours > 0:
                rng = random.Random(f"{world.seed}/faults/{name}")
                world.at(rng.expovariate(1 / (3600 * part.mtbf_hours)), self._service, name, rng)

    def _next(self, node: SimMember, rng: random.Random) -> None:
        self._world.at(self._world.now_s + rng.expovariate(1 / (3600 * node.group.mtbf_hours)), self._member, node, rng)

    def _note(self, kind: str, who: str, outage_s: float) -> None:
        self.happened.append(Fault(self._world.now_s, kind, who, outage_s))

    def _member(self, node: SimMember, rng: random.Random) -> None:
        world, group = self._world, node.group
        outage_s = rng.expovariate(1 / group.outage_s)
        x = rng.random()
        kind = "kill" if x < group.kill_share else "leave" if x < group.kill_share + group.leave_share else "silence"
        self._note(kind, node.hotkey, outage_s)
        member, one_way_s = node.member, node.link.one_way_s
        if member is not None and kind == "leave":
            world.at(world.now_s + one_way_s, world.coordinator.hear, member, [LeavingClaim()])
        node.stop(process=kind != "silence")
        if member is not None and kind == "kill":
            world.at(world.now_s + one_way_s + RESET_S, world.coordinator.connection_reset, member)
        back_s = outage_s if kind == "silence" else outage_s + RESTART_S
        world.at(world.now_s + back_s, self._return, node, rng)

    def _return(self, node: SimMember, rng: random.Random) -> None:
        node.start()
        self._next(node, rng)

    def _service(self, name: str, rng: random.Random) -> None:
        world = self._world
        part = world.fleet.store if name == "store" else world.fleet.validator
        outage_s = rng.expovariate(1 / part.outage_s)
        self._note(name, name, outage_s)
        if name == "store":
            world.store_down_until_s = world.now_s + outage_s
        else:
            world.coordinator.fail()
            world.at(world.now_s + outage_s, world.coordinator.restart)
        world.at(world.now_s + outage_s + rng.expovariate(1 / (3600 * part.mtbf_hours)), self._service, name, rng)
