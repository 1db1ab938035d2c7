"""What each fault does to a node from the moment it fires, how long it lasts, and whom it excuses.

Time passes only when nothing else moves, so a fault of some units outlasts every deadline that is run into because of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from schedule_nodes import Coordinator, Crash, Log

from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.words import Member

if TYPE_CHECKING:
    from fault_sim import FaultSim

PAUSE_UNITS = 3
OUTAGE_UNITS = 4
SLOW_UNITS = 6
SLOW_ROUNDS = 60
CRASHES = 2


class Effect:
    """Does nothing; the faults override what they change."""

    keeps_waiting = False
    """Whether a joiner's restore, or a maker's snapshot, is held back although the fault has fired."""
    over = True
    """Whether the run may end."""

    def __init__(self, sim: FaultSim) -> None:
        self.sim = sim
        self.hits = 0
        self.ended = False

    @property
    def lasts(self) -> bool:
        return self.sim.fired and self.sim.now < self.sim.fired_at + OUTAGE_UNITS

    def hits_node(self, node: Any) -> bool:
        return self.sim.fired and node is self.sim.victim

    def begin(self, coordinator: Coordinator) -> None: ...

    def round(self) -> None: ...

    def unit(self) -> None:
        """A unit of time has passed."""
        if self.sim.coordinator.dead:
            self.sim.restart(self.sim.coordinator)

    def holds(self, node: Any) -> bool:
        return False

    def skips(self, node: Any) -> bool:
        return False

    def delays(self, to: Any, source: Any, kind: str) -> bool:
        return False

    def arrives(self, to: Any, source: Any, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What of a message arrives; None: nothing."""
        return args

    def answers(self, node: Any) -> bool:
        return not (self.sim.cell.role == "store" and self._store_is_down())

    def takes(self, node: Any) -> bool:
        return self.answers(node)

    def _store_is_down(self) -> bool:
        return False

    def commit_fails(self, coordinator: Coordinator) -> bool:
        return False

    def excuses(self, event: ev.Gone) -> bool:
        """Whether somebody but the victim may go for this."""
        return False

    @property
    def needs_help(self) -> bool:
        """Whether the victim doesn't come back by itself."""
        return False

    def _outage(self) -> bool:
        """One more request of an outage is refused."""
        self.hits += self.lasts
        return self.lasts


class Kill(Effect):
    """The process is gone. Replicas are restarted by their supervisor, a sole one never."""

    def begin(self, coordinator: Coordinator) -> None:
        role = self.sim.cell.role
        if role not in ("log", "store"):
            self.hits = 1
            self.sim.victim.dead = True
        if role == "coordinator":
            raise Crash

    def unit(self) -> None:
        sim = self.sim
        if sim.coordinator.dead and sim.cell.variant == "disk lost":
            if sim.now >= sim.fired_at + PAUSE_UNITS:
                sim.lead()
            return
        super().unit()
        if (
            sim.cell.role in ("first", "middle", "last")
            and sim.now >= sim.fired_at + PAUSE_UNITS
            and sim.victim in sim.miners
        ):
            sim.miners[sim.miners.index(sim.victim)] = sim.new_miner(sim.victim.hotkey)

    def arrives(self, to: Any, source: Any, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        down = self.sim.cell.role == "log" and isinstance(to, Log) and self._outage()
        return None if down else args

    def _store_is_down(self) -> bool:
        return self._outage()

    @property
    def needs_help(self) -> bool:
        return True


class Pause(Effect):
    """Stopped for so long that it is taken for gone; then it goes on where it was, with what it had to say."""

    @property
    def over(self) -> bool:  # type: ignore[override]
        return not self.sim.fired or self.ended

    def begin(self, coordinator: Coordinator) -> None:
        if self.sim.cell.role != "store":
            self.sim.victim.paused = True

    def unit(self) -> None:
        sim, waited = self.sim, self.sim.now - self.sim.fired_at
        if not sim.fired or self.ended:
            super().unit()
            return
        if sim.cell.variant == "takeover" and waited >= PAUSE_UNITS and sim.coordinator is sim.victim:
            sim.lead()
        if isinstance(sim.victim_member, Member):
            gone = sim.victim_member not in sim.coordinator.state.members
            self.ended = gone and waited >= PAUSE_UNITS
        else:
            self.ended = waited >= (2 * OUTAGE_UNITS if sim.cell.variant else OUTAGE_UNITS)
        if self.ended:
            self.hits = 1
            if sim.cell.role != "store":
                sim.victim.paused = False

    def _store_is_down(self) -> bool:
        return self.sim.fired and not self.ended


class Slow(Effect):
    """Alive and heard, but later than every deadline with whatever it owes."""

    def begin(self, coordinator: Coordinator) -> None:
        self.hits = 1
        self.num_rounds = self.num_asked = 0

    def round(self) -> None:
        if self.sim.fired:
            self.num_rounds += 1

    def holds(self, node: Any) -> bool:
        return self.hits_node(node) and self.sim.now < self.sim.fired_at + SLOW_UNITS

    def skips(self, node: Any) -> bool:
        slow = isinstance(node, Coordinator) and self.hits_node(node) and self.num_rounds < SLOW_ROUNDS
        return slow and self.num_rounds % 5 != 0

    def delays(self, to: Any, source: Any, kind: str) -> bool:
        slow = isinstance(to, Log) and self.hits_node(to) and self.sim.now < self.sim.fired_at + 2 * SLOW_UNITS
        return slow and int(self.sim.now) % 3 != 0

    def _store_is_down(self) -> bool:
        if not self.sim.fired or self.sim.now >= self.sim.fired_at + SLOW_UNITS:
            return False
        self.num_asked += 1
        return self.num_asked % 3 != 0


class Partition(Effect):
    """Messages are lost for a while: between it and the coordinator, or between it and its peers."""

    def arrives(self, to: Any, source: Any, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return None if self._is_cut(to, source) and self._outage() else args

    def _is_cut(self, to: Any, source: Any) -> bool:
        victim, variant = self.sim.victim, self.sim.cell.variant
        if to is not victim and source is not victim:
            return False
        other = source if to is victim else to
        if variant == "peers":
            return not isinstance(other, Coordinator | Log)
        if variant == "log" or self.sim.cell.role == "log":
            return isinstance(other, Coordinator | Log)
        return isinstance(other, Coordinator) != isinstance(victim, Coordinator) and not isinstance(other, Log)

    def answers(self, node: Any) -> bool:
        return not (self.sim.cell.role == "store" and self._is_cut_off(getattr(node, "me", None)) and self._outage())

    def _is_cut_off(self, member: Member | None) -> bool:
        info = self.sim.coordinator.state.members.get(member) if member else None
        return info is not None and info.stage == self.sim.stage

    def excuses(self, event: ev.Gone) -> bool:
        """Who is cut off along with others is late too."""
        role = self.sim.cell.role
        return event.why != "liar" and (
            role == "store" or (role == "coordinator" and self.sim.cell.variant == "members")
        )


class Corrupt(Effect):
    """Bytes are changed. In flight: refused by their hash or signature. ``claims``: before they were signed, once."""

    def begin(self, coordinator: Coordinator) -> None:
        self.first_hit = 0.0

    def arrives(self, to: Any, source: Any, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        role, variant = self.sim.cell.role, self.sim.cell.variant
        if role == "coordinator" and source is self.sim.victim and kind == "stream" and args[2]:
            return None if self._outage() else args
        if role == "log" and (isinstance(to, Log) or isinstance(source, Log)):
            return None if self._outage() else args
        if source is not self.sim.victim or self.ended:
            return args
        if variant == "claims" and kind == "claim":
            changed = changed_claim(args[1])
            if changed is not None:
                self.hits, self.ended = 1, True
                self.sim.liars[source.hotkey] = "changed claim"
                return (args[0], changed)
        elif variant == "flight" and kind in ("slice", "boundary"):
            self.first_hit = self.first_hit if self.hits else self.sim.now
            self.ended = self.sim.now >= self.first_hit + OUTAGE_UNITS
            self.hits += not self.ended
            return args if self.ended else (*args[:-1], changed_value(args[-1]))
        return args

    def answers(self, node: Any) -> bool:
        return not (self.sim.cell.role == "store" and self._outage())

    def takes(self, node: Any) -> bool:
        return True

    def excuses(self, event: ev.Gone) -> bool:
        """Whom the coordinator can't reach can't answer it."""
        return self.sim.cell.role == "coordinator" and event.why != "liar"


class DiskFull(Effect):
    """What it writes fails for a while; the coordinator can't commit and ends, each time it is started again."""

    def __init__(self, sim: FaultSim) -> None:
        super().__init__(sim)
        self.first_hit = 0.0

    @property
    def keeps_waiting(self) -> bool:  # type: ignore[override]
        """A joiner can't write down what it restores."""
        return self.sim.cell.role == "joiner" and not self._is_free()

    def _is_free(self) -> bool:
        """Counts an attempt; whether the disk has room again."""
        if self.ended or not self.sim.fired:
            return True
        self.first_hit = self.first_hit if self.hits else self.sim.now
        self.ended = self.sim.now >= self.first_hit + OUTAGE_UNITS
        self.hits += not self.ended
        return self.ended

    def answers(self, node: Any) -> bool:
        return True

    def takes(self, node: Any) -> bool:
        if self.sim.cell.role == "store":
            return not self._outage()
        return not self.hits_node(node) or self._is_free()

    def commit_fails(self, coordinator: Coordinator) -> bool:
        if self.sim.cell.role != "coordinator" or self.hits >= CRASHES:
            return False
        self.hits += 1
        return True

    def arrives(self, to: Any, source: Any, kind: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        full = self.sim.cell.role == "log" and isinstance(to, Log) and args[0] == len(to.segments)
        return None if full and self._outage() else args


EFFECTS: dict[str, type[Effect]] = {
    "kill": Kill,
    "pause": Pause,
    "slow": Slow,
    "partition": Partition,
    "corrupt": Corrupt,
    "disk full": DiskFull,
}


# --- changed bytes -------------------------------------------------------------------------------------------------

WRONG = "f" * 14


def changed_value(value: Any) -> Any:
    return (value[0] + 1, *value[1:]) if isinstance(value, tuple) else value + 1


def changed_claim(claim: msg.AnyClaim) -> msg.AnyClaim | None:
    """The claim with one of its hashes or values wrong; None where it has none."""
    replace = msgspec.structs.replace
    match claim:
        case msg.ForwardReceipt() | msg.BackwardReceipt() if claim.output:
            return replace(claim, output=WRONG)
        case msg.CommitClaim():
            (p, _), *rest = claim.commitment.hashes
            return replace(claim, commitment=replace(claim.commitment, hashes=((p, WRONG), *rest)))
        case msg.MergedClaim():
            return replace(claim, hash=WRONG)
        case msg.FingerprintClaim():
            (p, values), *rest = claim.values
            return replace(claim, values=((p, tuple(v + 1 for v in values)), *rest))
        case msg.CheckClaim():
            return replace(claim, ok=False)
        case msg.UpdatedClaim() if claim.root:
            return replace(claim, root=WRONG)
        case msg.SnapshotClaim():
            return replace(claim, manifest=WRONG)
        case _:
            return None
