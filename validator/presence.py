"""Whether the coordinator's process itself is there: a clock that stands still while it doesn't run, and a dump when it hangs.

A coordinator that was stopped, swapped out or busy for long has heard nobody meanwhile, and that is nobody's fault: all
its ages are by :class:`PresentClock`. :class:`LoopWatchdog` looks at the event loop from a thread of its own.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from loguru import logger

from subnet.allocator import give_back
from subnet.errors import IotaError
from subnet.store.disk import atomic_write
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock

TICK_S = 0.1
ABSENT_S = 0.5
"""A gap between two looks at the clock that is no ordinary turn of the loop; looked at it is every ``TICK_S``."""
SAY_ABSENT_S = 2.0
MAX_DUMPS = 8
GC_THRESHOLDS = (50_000, 20, 1_000)
"""The collector looks at everything that lives only when it is told to (:func:`collect_forever`)."""
COLLECT_EVERY_S = 300.0


class PresentClock:
    """Monotonic seconds less those in which nobody looked: of each longer gap only ``absent_s`` counts.

    ``absent``: whether nothing can be acknowledged now; nobody's clock runs then either. To be used from the event loop
    alone, and often (:meth:`tick_forever`).
    """

    def __init__(self, clock: Clock, absent_s: float = ABSENT_S, *, absent: Callable[[], bool] = lambda: False) -> None:
        self._clock, self._absent_s, self._absent = clock, absent_s, absent
        self._seen_s = clock.now_s()
        self.away_s = 0.0
        """All the time that doesn't count."""

    def now_s(self) -> float:
        real_s = self._clock.now_s()
        gap_s = real_s - self._seen_s
        self._seen_s = real_s
        if self._absent():
            self.away_s += gap_s
        elif gap_s > self._absent_s:
            self.away_s += gap_s - self._absent_s
            if gap_s > SAY_ABSENT_S:
                logger.warning("the validator stood still for {:.1f} s; nobody's clock ran meanwhile", gap_s)
        return real_s - self.away_s

    def wall_ns(self) -> int:
        return self._clock.wall_ns()

    async def tick_forever(self) -> None:
        while True:
            self.now_s()
            await asyncio.sleep(TICK_S)


async def collect_forever() -> None:
    """A whole collection stops the loop for as long as it takes to look at each item of the open step: so it is rare."""
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        gc.collect()
        give_back()


class Dumps:
    """Writes at most ``most`` files ``stall-1.txt``, ... into a directory; then no more."""

    def __init__(self, directory: Path, most: int = MAX_DUMPS) -> None:
        self._directory, self._most = directory, most
        self._lock = threading.Lock()
        self._number = len(list(directory.glob("stall-*.txt"))) if directory.is_dir() else 0

    def write(self, text: str) -> Path | None:
        """The file, or None when there are enough or it can't be written: a dump is no reason to fail."""
        with self._lock:
            if self._number >= self._most:
                return None
            self._number += 1
            path = self._directory / f"stall-{self._number}.txt"
        try:
            atomic_write(path, text.encode(), durable=False)
        except (OSError, IotaError) as error:
            logger.warning("stacks not written to {}: {}", path, error)
            return None
        return path


def thread_stacks() -> str:
    """Where every Python thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
        # without the lines themselves: the library would keep the text of every file it has quoted from
        lines = [_place(inner) for inner, _ in traceback.walk_stack(frame)]
        parts.append(f"--- thread {names.get(ident, ident)}\n" + "".join(reversed(lines)))
    return "\n".join(parts)


def task_stacks() -> str:
    """Where every task of the running loop waits."""
    parts: list[str] = []
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        parts.append(f"--- task {task.get_name()}\n" + "".join(_place(frame) for frame in task.get_stack()))
    return "\n".join(parts)


def _place(frame: FrameType) -> str:
    return f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}\n"


class LoopWatchdog:
    """While it is entered: a loop that doesn't turn for ``limit_s`` has its threads' stacks dumped, once each time."""

    def __init__(
        self,
        dumps: Dumps,
        limit_s: float = TIMEOUTS.loop_blocked_s,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_blocked: Callable[[float], None] = lambda blocked_s: None,
    ) -> None:
        self._dumps, self._limit_s, self._clock, self._on_blocked = dumps, limit_s, clock, on_blocked
        self._turned_s = clock.now_s()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_forever, name="loop-watchdog", daemon=True)

    def __enter__(self) -> LoopWatchdog:
        self._turned_s = self._clock.now_s()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def turn_forever(self) -> None:
        """The loop's part."""
        while True:
            self._turned_s = self._clock.now_s()
            await asyncio.sleep(TICK_S)

    def _look_forever(self) -> None:
        look_s, said_s = self._limit_s / 4, 0.0
        before_s = self._clock.now_s()
        while not self._stop.wait(look_s):
            now_s = self._clock.now_s()
            slept_s, before_s = now_s - before_s, now_s
            if slept_s > self._limit_s:
                continue  # this thread was stopped too: the whole process was, and will turn in a moment
            turned_s = self._turned_s
            blocked_s = now_s - turned_s
            if blocked_s < self._limit_s or said_s == turned_s:
                continue
            said_s = turned_s
            path = self._dumps.write(f"the event loop hasn't turned for {blocked_s:.1f} s\n\n{thread_stacks()}")
            logger.warning("the validator's event loop hasn't turned for {:.1f} s; stacks: {}", blocked_s, path)
            self._on_blocked(blocked_s)
