"""What the owner of a run has derived from its records (work by hotkey, scores), as bytes that go with a copy of the fold.

A validator that starts from the copy knows what everyone earned before it, though the records are no longer here.
"""

from __future__ import annotations

import msgspec

from validator.scoring import Score, ScoreBook


class _Dump(msgspec.Struct, frozen=True, array_like=True):
    items_done: dict[str, int]
    pending_work: dict[int, dict[str, float]]
    scores: list[Score]


_decoder = msgspec.msgpack.Decoder(_Dump)


class SessionProjection:
    """Reads and fills the dictionaries and the book that it is given; implements ``coordinator.Projection``."""

    def __init__(
        self, items_done: dict[str, int], pending_work: dict[int, dict[str, float]], scores: ScoreBook
    ) -> None:
        self._items_done, self._pending_work, self._scores = items_done, pending_work, scores

    def dump(self) -> bytes:
        # Long before any seal nothing has decayed: the entries as they are.
        entries = list(self._scores.scores(0.0).values())
        return msgspec.msgpack.encode(_Dump(self._items_done, self._pending_work, entries))

    def load(self, data: bytes) -> None:
        """Into the empty dictionaries of a new session; of the book's entries the later one of each hotkey counts."""
        found = _decoder.decode(data)
        self._items_done |= found.items_done
        self._pending_work |= found.pending_work
        for score in found.scores:
            self._scores.restore(score)
