"""Slices that came before a manifest named them: held unadded, one of each sender and partition, within a byte budget.

Only who has leases of the open step may leave something here, and only for partitions that this member is about to own; so
what a stranger's slice can displace is its own. What is void, superseded or past is dropped, and so is what the next
manifest doesn't name. Nothing here is needed: who is named asks for what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from subnet.numerics.owners import owners_of
from subnet.run import state as st
from subnet.run.state import Merge, RunState
from subnet.words import Member

LIMIT_BYTES = 1 << 30
LIMIT_REFUSED = 4096
"""Hashes remembered of slices that found no room."""

Place = tuple[Member, int]


@dataclass(frozen=True)
class EarlySlice:
    step: int
    epoch: int
    """The sender's, when it came: a void since then makes it worthless."""
    hash: str
    data: memoryview


class EarlySlices:
    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[Place, EarlySlice] = {}
        self._refused: set[str] = set()
        self._manifest: tuple[int, int, int] | None = None
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def has(self, sender: Member, partition: int, hash_: str) -> bool:
        held = self._held.get((sender, partition))
        return held is not None and held.hash == hash_

    def was_refused(self, hash_: str) -> bool:
        """Whether it came and found no room: its sender won't send it again by itself."""
        return hash_ in self._refused

    def has_room(self, sender: Member, partition: int, size_bytes: int) -> bool:
        """What is there of the same sender and partition would go."""
        held = self._held.get((sender, partition))
        return self.size_bytes - (held.data.nbytes if held is not None else 0) + size_bytes <= self._limit_bytes

    def refuse(self, hash_: str) -> None:
        if len(self._refused) >= LIMIT_REFUSED:
            self._refused.clear()
        self._refused.add(hash_)

    def put(self, sender: Member, partition: int, held: EarlySlice) -> bool:
        """Instead of an earlier one of the same sender and partition; False where there is no room."""
        if not self.has_room(sender, partition, held.data.nbytes):
            self.refuse(held.hash)
            return False
        self._drop((sender, partition))
        self._held[sender, partition] = held
        self.size_bytes += held.data.nbytes
        return True

    def settle(self, state: RunState, group: int, me: Member) -> dict[str, memoryview]:
        """After the fold moved on: what the manifest names for partitions of mine; the rest goes with a new manifest."""
        work = state.work
        if work is None:
            self.clear()
            return {}
        for place, held in list(self._held.items()):
            sender = place[0]
            if (
                held.step != work.step
                or sender not in state.members
                or held.epoch != st.epoch(state, sender, held.step)
            ):
                self._drop(place)
        merge = work.merges[group]
        if merge.phase not in (st.REDUCING, st.REVEALED):
            return {}
        named: dict[str, memoryview] = {}
        for place, held in list(self._held.items()):
            if names(merge, place[0], place[1], held.hash) and me in owners_of(merge, place[1]):
                named[held.hash] = held.data
                self._drop(place)
        manifest = (work.step, group, merge.version)
        if manifest != self._manifest:
            self._manifest = manifest
            self.clear()
        return named

    def clear(self) -> None:
        self._held.clear()
        self.size_bytes = 0

    def end_step(self, step: int) -> None:
        """Nothing of ``step`` is wanted any more; of the next one something may be here."""
        for place in [place for place, held in self._held.items() if held.step <= step]:
            self._drop(place)
        self._refused.clear()

    def _drop(self, place: Place) -> None:
        held = self._held.pop(place, None)
        if held is not None:
            self.size_bytes -= held.data.nbytes


def names(merge: Merge, sender: Member, partition: int, hash_: str) -> bool:
    """Whether the manifest names this slice."""
    return any(entry.member == sender and (partition, hash_) in entry.hashes for entry in merge.entries)
