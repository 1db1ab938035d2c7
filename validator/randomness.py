"""What deciding needs of chance: unpredictable seeds, and a choice among equals. The shell passes ``SystemRandom``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Randomness(Protocol):
    """The part of :class:`random.Random` that is used."""

    def getrandbits(self, k: int, /) -> int: ...

    def choice(self, seq: Sequence[T], /) -> T: ...
