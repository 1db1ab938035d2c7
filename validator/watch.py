"""What a coordinator has seen and a journal doesn't keep: who was heard when, how long something is awaited, speeds.

All of it is lost in a restart, and ages start anew: nobody is late because the coordinator was away. Its size is
bounded by the members and by the open step.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subnet.protocol.messages import LaneClaim
from subnet.words import Member
from validator.audit_watch import AuditWatch
from validator.merge_waits import MergeWaits
from validator.store_clock import StoreClock

if TYPE_CHECKING:
    from validator.index import RunIndex

SPEED_MEMORY = 0.7
"""Weight of what is known of a member's speed against its newest report."""

NEVER = -1e9
MAX_UNCONFIRMED = 1024


class Probe(enum.Enum):
    """What came of a connection to a suspect member's address."""

    ANSWERED = "answered"
    """Somebody listens. No sign of life: a kernel accepts for a stopped process too."""
    REFUSED = "refused"
    """The machine answers, and nobody listens: the process is dead."""
    UNANSWERED = "unanswered"
    """No answer in time, or no way there: a dead machine, or a slow one, or our own trouble."""


@dataclass
class Link:
    """A member's connection: when it was last heard, when its main process last moved, what a probe said since."""

    heard_s: float
    ticked_s: float
    ticks: int | None = None
    probe: Probe | None = None


@dataclass(frozen=True)
class Imbalance:
    """A stage that a move would help, and since when that has been so without a break."""

    target: int
    since_step: int
    since_s: float


@dataclass
class Speed:
    """Seconds of one item, forward and backward apart; None while unknown."""

    forward_s: float | None = None
    backward_s: float | None = None


@dataclass(frozen=True)
class Lane:
    """Parts of a lane's stage that are forward and back, under the lease of this generation."""

    generation: int
    forwards: int
    backwards: int


class Watch:
    """Volatile observations of one coordinator process."""

    def __init__(self) -> None:
        self._links: dict[Member, Link] = {}
        self._speeds: dict[Member, Speed] = {}
        self._since: dict[Hashable, float] = {}
        self._progress_s: dict[Member, float] = {}
        self._absent_since: dict[str, tuple[int, float]] = {}
        self._step: tuple[int, int] | None = None
        self.store = StoreClock()
        """Ages stand still while the store is away."""
        self.waits = MergeWaits()
        self.audits = AuditWatch()
        self.index: RunIndex | None = None
        """With one, decisions look only where something may have to be decided."""
        self._kept = -1
        self.blobs: set[str] = set()
        """Addresses that the store was seen to have."""
        self.started: set[Hashable] = set()
        """Actions that the shell is at."""
        self.probed: set[Hashable] = set()
        """Probes that have been answered."""
        self.unconfirmed: dict[str, tuple[Member, float]] = {}
        """Addresses that the store was asked for in vain at this step: who put them there, and since when."""
        self.imbalance: Imbalance | None = None
        self.balanced_step: int | None = None
        """The step before which the balance of the stages was last looked at."""
        self.held = ""
        """Why no step begins, in words: the validator is about to end."""
        self.drains = False
        """Whether no step is opened ahead, so that a member can be moved between two steps."""
        self.moved_s = NEVER
        """When a member was last moved."""
        self.missing: dict[tuple[int, int, int, bool], None] = {}
        """Reported missing boundaries: (step, microbatch, producing stage, backward), in order of report."""
        self.lost_with: dict[tuple[int, int, int], dict[Member, float]] = {}
        """By (step, microbatch, stage) of an open step: who was lost while it had the item's lease, and when."""
        self.lanes: dict[tuple[int, int, int], Lane] = {}
        """By (step, lane, stage) of the open step: how far its holder says that it is."""
        self.lanes_look_s = NEVER
        """When lanes are looked at next."""
        self.lanes_moved_s = NEVER
        """When it was last seen that somebody came on with a lane."""
        self._num_moves = 0
        self.moves: dict[Member, int] = {}
        """How often a member came on with one of its lanes."""
        self.class_votes: dict[tuple[str, ...], set[str]] = {}
        """Hardware classes of would-be members, with the coldkeys that have them, while the run has none."""

    # --- members ---------------------------------------------------------------------------------------------------

    def heard(self, member: Member, now_s: float) -> None:
        """Any signed message of its main process counts."""
        self._links[member] = Link(now_s, now_s, self._link(member, now_s).ticks)

    def beat(self, member: Member, ticks: int, now_s: float) -> None:
        """Its heartbeat process speaks; the main process lives only while its tick counter moves."""
        link = self._link(member, now_s)
        link.heard_s, link.probe = now_s, None
        if ticks != link.ticks:
            link.ticks, link.ticked_s = ticks, now_s

    def reset(self, member: Member, now_s: float) -> None:
        """Its connection was reset: the shell should probe it."""
        self._link(member, now_s).probe = None

    def probe_answered(self, member: Member, probe: Probe, now_s: float) -> None:
        self._link(member, now_s).probe = probe
        if self.index is not None:
            self.index.lost_look_s = NEVER

    def silent_for(self, member: Member, now_s: float) -> float:
        """Seconds since it was heard; a member never heard by this process counts from now on."""
        return now_s - self._link(member, now_s).heard_s

    def hung_for(self, member: Member, now_s: float) -> float:
        """Seconds since its main process was seen to move."""
        return now_s - self._link(member, now_s).ticked_s

    def is_lost(self, member: Member, now_s: float, quiet_s: float) -> bool:
        """Its connection was reset and a probe failed since it was last heard.

        A refused probe is proof; one without an answer needs so much silence too, or load would look like death.
        """
        link = self._links.get(member)
        if link is None:
            return False
        return link.probe is Probe.REFUSED or (link.probe is Probe.UNANSWERED and now_s - link.heard_s >= quiet_s)

    def lost_look_s(self, member: Member, now_s: float, silence_s: float, hung_s: float, quiet_s: float) -> float:
        """If nothing is heard or found out meanwhile, the member isn't lost before this time."""
        link = self._link(member, now_s)
        if link.probe is Probe.REFUSED:
            return now_s
        quiet_s = quiet_s if link.probe is Probe.UNANSWERED else silence_s
        return min(link.heard_s + min(silence_s, quiet_s), link.ticked_s + hung_s)

    def _link(self, member: Member, now_s: float) -> Link:
        return self._links.setdefault(member, Link(now_s, now_s))

    def absent_for(self, hotkey: str, absences: int, now_s: float) -> float:
        """Seconds since this hotkey's last absence was first seen; the first question starts the clock."""
        seen, since = self._absent_since.get(hotkey, (-1, now_s))
        if seen != absences:
            since = now_s
            self._absent_since[hotkey] = (absences, now_s)
        return now_s - since

    def excuse(self, hotkey: str, absences: int) -> None:
        """It comes back because it was asked to: no wait for absences of long ago."""
        self._absent_since[hotkey] = (absences, NEVER)

    def keep_members(self, members: Container[Member]) -> None:
        """Forgets whoever isn't there any more."""
        if self.index is not None:
            if self._kept == self.index.membership:
                return
            self._kept = self.index.membership
        for known in (self._links, self._speeds, self._progress_s, self.moves):
            for member in [k for k in known if k not in members]:
                del known[member]

    # --- ages ------------------------------------------------------------------------------------------------------

    def age(self, key: Hashable, now_s: float) -> float:
        """Seconds since this process first asked about the key at this step, less those that the store was away."""
        work_s = self.store.work_s(now_s)
        return max(0.0, work_s - self._since.setdefault(key, work_s))

    def is_timed(self, key: Hashable) -> bool:
        return key in self._since

    def waited_s(self, key: Hashable, now_s: float) -> float | None:
        """The age of a key that is timed; asking starts no clock."""
        return max(0.0, self.store.work_s(now_s) - self._since[key]) if key in self._since else None

    def restart_clock(self, key: Hashable, now_s: float) -> None:
        self._since[key] = self.store.work_s(now_s)

    def forget_clocks(self, keys: Iterable[Hashable]) -> None:
        """Of what is over: nobody asks for these again."""
        for key in keys:
            self._since.pop(key, None)

    def clocks(self) -> list[tuple[Hashable, float]]:
        """Keys that are awaited, with when they were first asked for; oldest first."""
        return sorted(self._since.items(), key=lambda entry: entry[1])

    def at_step(self, step: int, branch: int = 0) -> None:
        """Forgets what belongs to an earlier step than this, the one that is sealed next, or to a branch that the run left."""
        if (branch, step) != self._step:
            self._step = (branch, step)
            self._since.clear()
            self.lanes.clear()
            self.missing = {key: None for key in self.missing if key[0] >= step}
            self.lost_with = {key: lost for key, lost in self.lost_with.items() if key[0] >= step}
            self.blobs.clear()
            self.probed.clear()
            self.unconfirmed.clear()

    def note_lane(self, member: Member, claim: LaneClaim) -> None:
        """How far a member has come with a lane's stage."""
        key = (claim.step, claim.microbatch, claim.stage)
        lane = Lane(claim.generation, claim.forwards, claim.backwards)
        if self.lanes.get(key) != lane:
            self.lanes[key] = lane
            self.moves[member] = self.moves.get(member, 0) + 1

    def see_lanes(self, now_s: float) -> None:
        """A round takes as long as many steps: as long as lanes come on, nobody waits for its seal in vain."""
        num_moves = sum(self.moves.values())
        if num_moves != self._num_moves:
            self._num_moves, self.lanes_moved_s = num_moves, now_s

    # --- speeds ----------------------------------------------------------------------------------------------------

    def computed(self, member: Member, compute_s: float, *, backward: bool) -> None:
        """A receipt said how long an item took."""
        if not 0 < compute_s < 1e6:
            return
        speed = self._speeds.setdefault(member, Speed())
        if backward:
            speed.backward_s = _mixed(speed.backward_s, compute_s)
        else:
            speed.forward_s = _mixed(speed.forward_s, compute_s)

    def progressed(self, member: Member, now_s: float) -> None:
        """It finished an item: what waits in its queue behind that one isn't late yet."""
        self._progress_s[member] = self.store.work_s(now_s)

    def since_progress_s(self, member: Member, now_s: float) -> float:
        """Seconds since it last finished an item; infinite if it hasn't yet."""
        if member not in self._progress_s:
            return float("inf")
        return max(0.0, self.store.work_s(now_s) - self._progress_s[member])

    def speed(self, member: Member) -> Speed:
        return self._speeds.get(member, Speed())

    def item_s(self, member: Member) -> float | None:
        """Seconds of one item, forward and backward, as far as they are known; None if neither is."""
        speed = self.speed(member)
        if speed.forward_s is None and speed.backward_s is None:
            return None
        return (speed.forward_s or 0.0) + (speed.backward_s or 0.0)

    # --- store and actions -----------------------------------------------------------------------------------------

    def blob_confirmed(self, address: str) -> None:
        self.blobs.add(address)
        self.unconfirmed.pop(address, None)

    def not_confirmed(self, address: str, member: Member, now_s: float) -> None:
        """The store doesn't have what a member says it put there, or can't be asked."""
        if len(self.unconfirmed) < MAX_UNCONFIRMED:
            self.unconfirmed.setdefault(address, (member, now_s))

    def done(self, action: Hashable) -> None:
        """The shell has completed the action, or has given it up: it may be asked for again."""
        self.started.discard(action)
        self.probed.add(action)

    def failed(self, action: Hashable) -> None:
        """It couldn't be carried out, and says nothing of anybody: it may be asked for again."""
        self.started.discard(action)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else SPEED_MEMORY * old + (1 - SPEED_MEMORY) * new
