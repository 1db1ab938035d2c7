"""What a coordinator has seen and a journal doesn't keep: who was heard when, how long something is awaited, speeds.

All of it is lost in a restart, and ages start anew: nobody is late because the coordinator was away. Its size is
bounded by the members and by the open step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from subnet.words import Member

SPEED_MEMORY = 0.7
"""Weight of what is known of a member's speed against its newest report."""

NEVER = -1e9


@dataclass
class Link:
    """A member's connection: when it was last heard, and whether it is suspect."""

    heard_s: float
    reset: bool = False
    probe_failed: bool = False


@dataclass
class Speed:
    """Seconds of one item, forward and backward apart; None while unknown."""

    forward_s: float | None = None
    backward_s: float | None = None


class Watch:
    """Volatile observations of one coordinator process."""

    def __init__(self) -> None:
        self._links: dict[Member, Link] = {}
        self._speeds: dict[Member, Speed] = {}
        self._since: dict[Hashable, float] = {}
        self._progress_s: dict[Member, float] = {}
        self._absent_since: dict[str, tuple[int, float]] = {}
        self._step: int | None = None
        self.blobs: set[str] = set()
        """Addresses that the store was seen to have."""
        self.started: set[Hashable] = set()
        """Actions that the shell is at."""
        self.probed: set[Hashable] = set()
        """Probes that have been answered."""
        self.missing: dict[tuple[int, int, int, bool], None] = {}
        """Reported missing boundaries: (step, microbatch, producing stage, backward), in order of report."""
        self.class_votes: dict[tuple[str, ...], set[str]] = {}
        """Hardware classes of would-be members, with the coldkeys that have them, while the run has none."""

    # --- members ---------------------------------------------------------------------------------------------------

    def heard(self, member: Member, now_s: float) -> None:
        """Any signed message of a member counts."""
        self._links[member] = Link(now_s)

    def reset(self, member: Member, now_s: float) -> None:
        """Its connection was reset: the shell should probe it."""
        self._links.setdefault(member, Link(now_s)).reset = True

    def probe_answered(self, member: Member, ok: bool, now_s: float) -> None:
        if ok:
            self.heard(member, now_s)
        else:
            self._links.setdefault(member, Link(now_s)).probe_failed = True

    def silent_for(self, member: Member, now_s: float) -> float:
        """Seconds since it was heard; a member never heard by this process counts from now on."""
        return now_s - self._links.setdefault(member, Link(now_s)).heard_s

    def is_lost(self, member: Member) -> bool:
        """Its connection was reset and a probe of it failed since it was last heard."""
        link = self._links.get(member)
        return link is not None and link.reset and link.probe_failed

    def absent_for(self, hotkey: str, absences: int, now_s: float) -> float:
        """Seconds since this hotkey's last absence was first seen; the first question starts the clock."""
        seen, since = self._absent_since.get(hotkey, (-1, now_s))
        if seen != absences:
            since = now_s
            self._absent_since[hotkey] = (absences, now_s)
        return now_s - since

    def keep_members(self, members: set[Member]) -> None:
        """Forgets whoever isn't there any more."""
        for known in (self._links, self._speeds, self._progress_s):
            for member in [k for k in known if k not in members]:
                del known[member]

    # --- ages ------------------------------------------------------------------------------------------------------

    def age(self, key: Hashable, now_s: float) -> float:
        """Seconds since this process first asked about the key at this step."""
        return now_s - self._since.setdefault(key, now_s)

    def is_timed(self, key: Hashable) -> bool:
        return key in self._since

    def restart_clock(self, key: Hashable, now_s: float) -> None:
        self._since[key] = now_s

    def clocks(self) -> list[tuple[Hashable, float]]:
        """Keys that are awaited, with when they were first asked for; oldest first."""
        return sorted(self._since.items(), key=lambda entry: entry[1])

    def at_step(self, step: int) -> None:
        """Forgets what belongs to an earlier step."""
        if step != self._step:
            self._step = step
            self._since.clear()
            self.missing.clear()
            self.blobs.clear()
            self.probed.clear()

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
        self._progress_s[member] = now_s

    def since_progress_s(self, member: Member, now_s: float) -> float:
        """Seconds since it last finished an item; infinite if it hasn't yet."""
        return now_s - self._progress_s[member] if member in self._progress_s else float("inf")

    def speed(self, member: Member) -> Speed:
        return self._speeds.get(member, Speed())

    # --- store and actions -----------------------------------------------------------------------------------------

    def blob_confirmed(self, address: str) -> None:
        self.blobs.add(address)

    def done(self, action: Hashable) -> None:
        """The shell has completed the action, or has given it up: it may be asked for again."""
        self.started.discard(action)
        self.probed.add(action)


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else SPEED_MEMORY * old + (1 - SPEED_MEMORY) * new
