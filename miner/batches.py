"""Many small requests as few: what is asked for while others are under way goes together in the next one, most urgent first.

The first goes at once, so nothing waits for company; under load each batch takes along all that came meanwhile. Every
asker gets its own answer or error.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from subnet.errors import Unreachable

Q = TypeVar("Q")
A = TypeVar("A")

Rank = tuple[int, ...]
"""Lower goes first."""


class Batches(Generic[Q, A]):
    """``work`` answers a batch: one answer (or error) for each question, in order, or one error for all.

    At most ``lanes`` batches are under way at once, of at most ``most`` questions each.
    """

    def __init__(
        self, work: Callable[[Sequence[Q]], Awaitable[Sequence[A | Exception]]], *, lanes: int, most: int
    ) -> None:
        self._work, self._lanes, self._most = work, lanes, most
        self._waiting: list[tuple[Rank, int, Q, asyncio.Future[A]]] = []
        self._order = itertools.count()
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    async def ask(self, what: Q, rank: Rank = ()) -> A:
        """The answer; how long it may take is up to ``work``."""
        if self._closed:
            raise Unreachable("shutting down")
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, next(self._order), what, future))
        self._start()
        return await future

    async def close(self) -> None:
        """Cancels what is under way and whoever waits for it."""
        self._closed = True
        for _, _, _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._lanes and not self._closed:
            batch: list[tuple[Q, asyncio.Future[A]]] = []
            while self._waiting and len(batch) < self._most:
                _, _, what, future = heapq.heappop(self._waiting)
                if not future.done():  # its asker has given up
                    batch.append((what, future))
            if batch:
                task = asyncio.create_task(self._run(batch), name="batch")
                self._running.add(task)
                task.add_done_callback(self._ended)

    async def _run(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._work([what for what, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  each asker gets it, and none else would know what to do about it
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        self._start()
