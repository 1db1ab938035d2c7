"""One at a time, the most urgent first: whose turn it is on a worker that audits share."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """``async with turns.take(urgency)``: of those who wait the one with the least ``urgency`` goes on, then who came first."""

    def __init__(self) -> None:
        self._busy = False
        self._serial = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def take(self, urgency: int) -> AsyncGenerator[None]:
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._serial += 1
            heapq.heappush(self._waiting, (urgency, self._serial, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was given to us as we were cancelled
                raise
        self._busy = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
