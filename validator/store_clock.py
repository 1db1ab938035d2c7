"""Time as far as answers can be expected: it stands still while the store is away or full, and for a while after.

Members owe much that needs the store: merged partitions, checks, slices, snapshots; and what is journaled behind a seal
leaves only once the log store has the seal. So nobody is late while the store is away. Whether a member lives is another
matter: heartbeats don't need the store. Pure: the times are given.
"""

from __future__ import annotations

import math

GRACE_S = 20.0
"""After the store is back: members wait up to ten seconds between two tries, and repeat what they said after eight."""


class StoreClock:
    """``trouble``: what is wrong with the store now, in words; empty while it is well."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.trouble = ""
        self._grace_s = grace_s
        self._well_s: float | None = None
        self._since_s: float | None = None
        self._until_s = -math.inf
        self._held_s = 0.0

    def answered(self, now_s: float) -> None:
        """The store is well."""
        self._settle(now_s)
        self._well_s = now_s
        if self.trouble:
            self.trouble = ""
            self._until_s = now_s + self._grace_s

    def failed(self, trouble: str, now_s: float) -> None:
        """The store is away or full; it may have been since it was last seen well."""
        self._settle(now_s)
        self.trouble = trouble
        if self._since_s is None:
            since_s = now_s if self._well_s is None else self._well_s
            self._since_s = max(since_s, self._until_s)
        self._until_s = math.inf

    def work_s(self, now_s: float) -> float:
        """``now_s`` less all the time that nobody could be expected to answer; it may step back when trouble is seen."""
        if self._since_s is None:
            return now_s - self._held_s
        return now_s - self._held_s - max(0.0, min(now_s, self._until_s) - self._since_s)

    def _settle(self, now_s: float) -> None:
        if self._since_s is not None and now_s >= self._until_s:
            self._held_s += self._until_s - self._since_s
            self._since_s = None
