"""The progress bars of ``transformers``, off while the SDK reads or writes a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Generator[None]:
    """As they were afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
