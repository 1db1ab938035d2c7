"""One thread for all tensor work of a miner: jobs run one at a time, most urgent first, and never on the event loop.

The queue is bounded by what the node submits (its leases); ``drop`` removes queued jobs whose lease has ended.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

Priority = tuple[int, ...]
"""Lower runs first. By convention the first number is the class: see ``URGENT`` and its kin."""

URGENT = 0
"""Merge work: everybody waits for it."""
BACKWARD = 1
FORWARD = 2
REPLAY = 0
BACKGROUND = 9


@dataclass(order=True)
class _Job:
    priority: Priority
    order: int
    key: object = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: asyncio.Future[Any] = field(compare=False)


class ComputeThread:
    """Runs jobs by priority; ``busy_s`` sums the time spent in jobs, by kind (``kind_of`` the job's key)."""

    def __init__(
        self,
        name: str = "compute",
        on_start: Callable[[], None] | None = None,
        kind_of: Callable[[object], str] = lambda key: type(key).__name__,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._jobs: list[_Job] = []
        self._order = itertools.count()
        self._stopping = False
        self._on_start = on_start
        self.running: object | None = None
        self.busy_s: dict[str, float] = {}
        self.num_done: dict[str, int] = {}
        """Jobs that have ended, by kind."""
        self._kind_of = kind_of
        self._began_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, key: object, priority: Priority, work: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job; the future is resolved on the event loop."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._condition:
            heapq.heappush(self._jobs, _Job(priority, next(self._order), key, work, future))
            self._condition.notify()
        return future

    def drop(self, unwanted: Callable[[object], bool]) -> int:
        """Cancel queued jobs whose key is unwanted; the running one is left alone."""
        with self._condition:
            dropped = [job for job in self._jobs if unwanted(job.key)]
            if dropped:
                self._jobs = [job for job in self._jobs if not unwanted(job.key)]
                heapq.heapify(self._jobs)
        for job in dropped:
            job.future.cancel()
        return len(dropped)

    def time_by_kind(self) -> dict[str, float]:
        """Seconds since the thread began: by kind of job, and ``waiting`` with nothing to compute."""
        whole = time.perf_counter() - self._began_s
        kinds = {kind: round(spent, 3) for kind, spent in sorted(self.busy_s.items())}
        return {**kinds, "waiting": round(whole - sum(self.busy_s.values()), 3)}

    def restart_clock(self) -> None:
        """Count from now on."""
        self.busy_s.clear()
        self._began_s = time.perf_counter()

    def __len__(self) -> int:
        return len(self._jobs) + (self.running is not None)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Let the running job end and stop; True if the thread ended in time."""
        with self._condition:
            self._stopping = True
            jobs, self._jobs = self._jobs, []
            self._condition.notify()
        for job in jobs:
            job.future.cancel()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while True:
            with self._condition:
                while not self._jobs and not self._stopping:
                    self._condition.wait()
                if self._stopping:
                    return
                job = heapq.heappop(self._jobs)
                if job.future.cancelled():
                    continue  # whoever wanted it has gone on
                self.running = job.key
            started = time.perf_counter()
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job.work()
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the job
                failure = error
            spent = time.perf_counter() - started
            kind = self._kind_of(job.key)
            self.busy_s[kind] = self.busy_s.get(kind, 0.0) + spent
            self.num_done[kind] = self.num_done.get(kind, 0) + 1
            self.running = None
            try:
                self._loop.call_soon_threadsafe(_settle, job.future, result, failure)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _settle(future: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if future.cancelled():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
