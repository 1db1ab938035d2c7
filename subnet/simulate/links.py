"""Links in virtual time: each end of a transfer is a queue that empties at its rate; no bytes are moved.

What is small and urgent (boundaries) goes before what is large (slices, snapshots): it starts when the last urgent transfer
has gone, and what is large waits for as long as it takes. A transfer is over when the slower end has done its part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BYTES_PER_MBIT = 125_000.0


@dataclass
class Queue:
    """One direction of one link."""

    bytes_per_s: float
    urgent_free_s: float = 0.0
    bulk_free_s: float = 0.0
    num_bytes: dict[str, float] = field(default_factory=dict[str, float])
    """By kind."""

    def urgent(self, start_s: float, size: float, kind: str) -> tuple[float, float]:
        """(begin, end) of a transfer that goes before all bulk."""
        took_s = size / self.bytes_per_s
        begin_s = max(start_s, self.urgent_free_s)
        self.urgent_free_s = begin_s + took_s
        if self.bulk_free_s > begin_s:
            self.bulk_free_s += took_s
        self._count(kind, size)
        return begin_s, begin_s + took_s

    def bulk(self, start_s: float, size: float, kind: str) -> tuple[float, float]:
        """(begin, end) behind everything that is queued."""
        begin_s = max(start_s, self.bulk_free_s)
        self.bulk_free_s = begin_s + size / self.bytes_per_s
        self._count(kind, size)
        return begin_s, self.bulk_free_s

    def drop(self, now_s: float) -> None:
        """Whatever waits is lost with its process."""
        self.urgent_free_s = min(self.urgent_free_s, now_s)
        self.bulk_free_s = min(self.bulk_free_s, now_s)

    def _count(self, kind: str, size: float) -> None:
        self.num_bytes[kind] = self.num_bytes.get(kind, 0.0) + size


@dataclass
class Link:
    """Both directions; several GPUs may hold the same one."""

    up: Queue
    down: Queue
    one_way_s: float

    @classmethod
    def of(cls, up_mbit: float, down_mbit: float, rtt_ms: float) -> Link:
        return cls(Queue(up_mbit * BYTES_PER_MBIT), Queue(down_mbit * BYTES_PER_MBIT), rtt_ms / 2000)


def send(now_s: float, source: Link, target: Link, size: float, kind: str) -> float:
    """When an urgent transfer has arrived."""
    begin_s, sent_s = source.up.urgent(now_s, size, kind)
    travel_s = source.one_way_s + target.one_way_s
    if target is source:
        return max(now_s, begin_s)  # behind the same link: the local network costs nothing here
    _, got_s = target.down.urgent(begin_s + travel_s, size, kind)
    return max(sent_s + travel_s, got_s)


def put(now_s: float, source: Link, store: Link, size: float, kind: str) -> float:
    """When the store has it: one round trip for the grant's request itself, then the bytes."""
    begin_s, sent_s = source.up.bulk(now_s, size, kind)
    _, got_s = store.down.bulk(begin_s, size, kind)
    return max(sent_s, got_s) + 2 * (source.one_way_s + store.one_way_s)


def get(now_s: float, target: Link, store: Link, size: float, kind: str) -> float:
    """When it is here."""
    begin_s, sent_s = store.up.bulk(now_s, size, kind)
    _, got_s = target.down.bulk(begin_s, size, kind)
    return max(sent_s, got_s) + 2 * (target.one_way_s + store.one_way_s)
