"""Names of a store's write-once keys, sorted, in little memory: a journal's segments are many, and never go.

Names that end in a number of ten digits behind a slash, as segments do, cost 8 bytes each; others what a string costs.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

_DIGITS = 10


def _split(name: str) -> tuple[str, int] | None:
    head, number = name[:-_DIGITS], name[-_DIGITS:]
    return (head, int(number)) if head.endswith("/") and number.isascii() and number.isdigit() else None


class NameIndex:
    """A sorted set of names; nothing is ever removed. One thread at a time."""

    def __init__(self) -> None:
        self._plain: list[str] = []
        self._series: dict[str, array[int]] = {}
        self._heads: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, name: str) -> None:
        """A name that isn't there yet."""
        split = _split(name)
        if split is None:
            insort(self._plain, name)
        else:
            head, number = split
            if head not in self._series:
                self._series[head] = array("Q")
                insort(self._heads, head)
            insort(self._series[head], number)
        self._length += 1

    def __contains__(self, name: str) -> bool:
        split = _split(name)
        if split is None:
            at = bisect_left(self._plain, name)
            return at < len(self._plain) and self._plain[at] == name
        numbers = self._series.get(split[0], array("Q"))
        at = bisect_left(numbers, split[1])
        return at < len(numbers) and numbers[at] == split[1]

    def page(self, prefix: str, after: str, limit: int) -> list[str]:
        """At most ``limit`` names that begin with ``prefix`` and come behind ``after``, in order."""
        found: list[str] = []
        parts = [self._plain_from(prefix, after, limit)]
        parts += [self._series_from(head, prefix, after, limit) for head in self._heads if _meet(head, prefix)]
        for part in parts:
            found += part
        return sorted(found)[:limit]

    def _plain_from(self, prefix: str, after: str, limit: int) -> Iterator[str]:
        at = max(bisect_left(self._plain, prefix), bisect_right(self._plain, after))
        for name in self._plain[at : at + limit]:
            if not name.startswith(prefix):
                return
            yield name

    def _series_from(self, head: str, prefix: str, after: str, limit: int) -> Iterator[str]:
        numbers = self._series[head]
        at = bisect_right(numbers, after, key=lambda number: f"{head}{number:0{_DIGITS}d}")
        at = max(at, bisect_left(numbers, prefix, key=lambda number: f"{head}{number:0{_DIGITS}d}"))
        for number in numbers[at : at + limit]:
            name = f"{head}{number:0{_DIGITS}d}"
            if not name.startswith(prefix):
                return
            yield name


def _meet(head: str, prefix: str) -> bool:
    """Whether a name of the series may begin with ``prefix``."""
    return head.startswith(prefix) or prefix.startswith(head)
