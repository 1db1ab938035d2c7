"""Books of runs that have finished, one file a run, so that what was earned in them still counts after a restart.

Written before the run is marked as finished; a file that can't be read costs its run's scores, never the validator's start.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import OutOfSpace
from subnet.score.book import RunBook
from subnet.store.disk import atomic_write
from validator.projection import SessionProjection
from validator.run_registry import RunRegistry
from validator.scoring import ScoreBook

NAME = "scores.msgpack"


def keep_book(directory: Path, book: RunBook) -> None:
    """Beside the journal of its run. A full disk costs the file, not the run."""
    try:
        atomic_write(directory / NAME, SessionProjection(book).dump())
    except (OSError, OutOfSpace) as error:
        logger.warning("the scores of {} aren't kept: {}", directory.name, error)


def load_books(registry: RunRegistry, scores: ScoreBook) -> None:
    """The books of all finished runs; that of the active one comes with its journal."""
    for entry in registry.entries.values():
        path = entry.directory / NAME
        if not entry.finished or not path.exists():
            continue
        try:
            SessionProjection(scores.begin(entry.stored.run_id)).load(path.read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("{} can't be read, what was earned in that run is forgotten: {}", path, error)
