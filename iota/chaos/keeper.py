"""What ``iota up`` does beside watching: keeps ``swarm.json``, and starts again who died, where it was asked to.

A process that ends again and again right after its start is an error, not a loop.
"""

from __future__ import annotations

from iota.chaos.roster import FILE, Roster, roster_of, write_roster
from iota.processes import Child, failure_of
from iota.swarm import LocalSwarm
from subnet.timing import SYSTEM_CLOCK, Clock

YOUNG_S = 20.0
MAX_YOUNG_ENDS = 5


class Keeper:
    """``restart_s`` None: miners that die stay dead, and the validator's end is an error."""

    def __init__(self, swarm: LocalSwarm, restart_s: float | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._swarm, self._restart_s, self._clock = swarm, restart_s, clock
        self._written: Roster | None = None
        self._ended_s: dict[str, float] = {}
        self._begun_s: dict[str, float] = {}
        self._young_ends: dict[str, int] = {}

    def tick(self) -> list[str]:
        """What was started again, by name. Raises where the swarm can't go on."""
        restarting = self._restart_s is not None
        self._swarm.check(validator=not restarting)
        restarted = self._restart_due() if restarting else []
        roster = roster_of(self._swarm, self._restart_s)
        if roster != self._written:
            write_roster(self._swarm.directory, roster)
            self._written = roster
        return restarted

    def close(self) -> None:
        """The swarm ends: there is nothing to act on any more."""
        (self._swarm.directory / FILE).unlink(missing_ok=True)

    def _restart_due(self) -> list[str]:
        now_s, restarted = self._clock.now_s(), list[str]()
        for name, child in list(self._swarm.parent.children.items()):
            if child.status is None or not (name == self._swarm.leader or name.startswith("miner-")):
                continue
            ended_s = self._ended_s.get(name)
            if ended_s is None:
                self._ended_s[name] = now_s
                self._count(name, child, now_s)
            elif now_s - ended_s >= (self._restart_s or 0.0):
                del self._ended_s[name]
                self._begun_s[name] = now_s
                self._start(name)
                restarted.append(name)
        return restarted

    def _start(self, name: str) -> None:
        if name.startswith("miner-"):
            self._swarm.restart_miner(int(name.removeprefix("miner-")))
        else:
            self._swarm.start_validator(name)

    def _count(self, name: str, child: Child, now_s: float) -> None:
        """Ends that come soon after a restart, and weren't anybody's SIGKILL, are counted."""
        young = now_s - self._begun_s.get(name, -1e9) < YOUNG_S and (child.status or 0) >= 0
        self._young_ends[name] = self._young_ends.get(name, 0) + 1 if young else 0
        if self._young_ends[name] >= MAX_YOUNG_ENDS:
            raise failure_of(child)
