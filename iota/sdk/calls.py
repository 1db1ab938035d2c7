"""Blocking work that may be called from scripts, notebooks and asyncio alike: it runs in a thread without an event loop.

Whoever waits can be interrupted; the work itself ends by its own deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Calls:
    """``num_threads`` 1: the work of one owner, in order, always in the same thread."""

    def __init__(self, num_threads: int = 4) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="iota")

    def blocking(self, work: Callable[[], T]) -> T:
        """The result of ``work``; its error is raised here."""
        return self._threads.submit(work).result()

    async def waited(self, work: Callable[[], T]) -> T:
        """The same for asyncio; a cancelled wait leaves the work to its deadline."""
        return await asyncio.wrap_future(self._threads.submit(work))

    def close(self) -> None:
        """No more work; what is under way is waited for."""
        self._threads.shutdown(wait=True)
