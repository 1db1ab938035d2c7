"""Which links to peers get their boundaries packed: slow ones, where packing takes less time than it saves; it loses nothing.

A link's speed is what its queue took in while something waited for it, so bursts that the kernel buffers look fast and go
unpacked. The speed of packing and what it saves are measured on the boundaries themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_SAVED = 0.03
"""Share of the bytes that packing must save."""
START_BELOW, STOP_ABOVE = 0.25, 1.0
"""A link starts to be packed where packing takes this part of the time it saves, and stops where it takes all of it."""
MEASURE_AGAIN_AFTER = 512
"""Boundaries sent unpacked, all links together, after which one is packed to see what it would save by now."""
MIN_WINDOW_BYTES, MIN_WINDOW_S = 1 << 20, 0.25
"""A link's speed is taken over at least so many bytes or so much time with something to send."""
MIN_BODY_BYTES = 4 << 10
KEEP = 0.7
"""What a new measurement leaves of the old."""


@dataclass
class PackingGain:
    """What packing does to this member's boundaries."""

    bytes_per_s: float = 0.0
    saved: float = 0.0
    """Share of the bytes."""
    unpacked: int = MEASURE_AGAIN_AFTER
    """Boundaries sent unpacked since the last measurement."""

    def note(self, size_bytes: int, packed_bytes: int, seconds: float) -> None:
        speed, saved = size_bytes / max(seconds, 1e-9), 1.0 - packed_bytes / size_bytes
        known = self.bytes_per_s > 0
        self.bytes_per_s = KEEP * self.bytes_per_s + (1 - KEEP) * speed if known else speed
        self.saved = KEEP * self.saved + (1 - KEEP) * saved if known else saved
        self.unpacked = 0

    @property
    def break_even_bytes_per_s(self) -> float:
        """Below this speed of a link packing takes less time than it saves."""
        return self.bytes_per_s * self.saved if self.saved >= MIN_SAVED else 0.0


@dataclass
class Link:
    """The way to one peer: how fast it takes bytes, and whether they are packed."""

    packs: bool = False
    bytes_per_s: float = 0.0
    """0: not known yet."""
    _waiting: int = 0
    _busy_since_s: float = 0.0
    _busy_s: float = 0.0
    _bytes: int = 0

    def begin(self, now_s: float) -> None:
        """A frame is handed to the transport."""
        if not self._waiting:
            self._busy_since_s = now_s
        self._waiting += 1

    def end(self, now_s: float, sent_bytes: int) -> None:
        """It was taken; ``sent_bytes`` 0: it failed."""
        self._waiting -= 1
        self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s
        self._bytes += sent_bytes
        if self._bytes >= MIN_WINDOW_BYTES or (self._bytes and self._busy_s >= MIN_WINDOW_S):
            speed = self._bytes / max(self._busy_s, 1e-6)
            self.bytes_per_s = KEEP * self.bytes_per_s + (1 - KEEP) * speed if self.bytes_per_s else speed
            self._busy_s, self._bytes = 0.0, 0

    def decide(self, gain: PackingGain) -> bool:
        """Whether the next boundary is packed; changes its mind only where it clearly pays."""
        even = gain.break_even_bytes_per_s
        if self.bytes_per_s and even:
            if self.bytes_per_s < START_BELOW * even:
                self.packs = True
            elif self.bytes_per_s > STOP_ABOVE * even:
                self.packs = False
        elif not even:
            self.packs = False
        return self.packs


@dataclass
class LinkPacking:
    """All links of one member."""

    gain: PackingGain = field(default_factory=PackingGain)
    links: dict[str, Link] = field(default_factory=dict[str, Link])
    """By the peer's hotkey."""

    def link(self, hotkey: str) -> Link:
        return self.links.setdefault(hotkey, Link())

    def packs(self, hotkey: str, size_bytes: int) -> bool:
        """Whether a boundary of this size is packed on its way to the peer, if only to measure what that does."""
        if size_bytes < MIN_BODY_BYTES:
            return False
        if self.link(hotkey).decide(self.gain):
            return True
        if self.gain.unpacked >= MEASURE_AGAIN_AFTER:
            self.gain.unpacked = 0
            return True
        self.gain.unpacked += 1
        return False
