"""What the owner of a run has derived from its records (who earned what), as bytes that go with a copy of the fold.

A validator that starts from the copy knows what everyone earned before it, though the records are no longer here.
"""

from __future__ import annotations

from loguru import logger

from subnet.errors import Corrupt
from subnet.score.book import RunBook


class SessionProjection:
    """Dumps and fills the book that it is given; implements ``coordinator.Projection``."""

    def __init__(self, book: RunBook) -> None:
        self._book = book
        self.lost = False
        """What is in the copy can't be used: the book has to be made anew (:func:`validator.score_files.recount`)."""

    def dump(self) -> bytes:
        return self._book.dump()

    def load(self, data: bytes) -> None:
        """Into the empty book of a new session."""
        try:
            self._book.load(data)
        except Corrupt as error:
            logger.warning("the scores in the copy of the run aren't used: {}", error)
            self.lost = True
