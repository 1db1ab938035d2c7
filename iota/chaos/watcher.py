"""Asks for a run's status in a thread of its own, so that a validator that says nothing holds nothing else up.

Keeps what a verdict needs: when each step was first seen, and each event line once, with the time it was first seen.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

from iota.remote import Remote
from subnet.errors import IotaError, NotFound, Refused, Unreachable
from subnet.protocol.api import RunStatus
from subnet.timing import Deadline

ASK_S = 5.0
"""A question that isn't answered by then is asked anew: who has started again shall be noticed soon."""
_JOIN_S = 30.0


def ask_status(url: str, run: str | None = None, steps: int = 20) -> RunStatus | None:
    """What a validator says of a run (None: the active one); None while it knows of none."""
    try:
        return Remote(url).status(Deadline.after(ASK_S), run=run, steps=steps)
    except Refused as refused:
        if refused.code != NotFound.code:
            raise
        return None


class EventLines:
    """Lines in the order in which they were first seen; windows of them overlap, and start anew with the validator."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str]] = []
        self._counts: Counter[str] = Counter()

    def take(self, wall_s: float, window: Sequence[str]) -> None:
        counts = Counter(window)
        for line in dict.fromkeys(window):
            for _ in range(counts[line] - self._counts[line]):
                self.seen.append((wall_s, line))
            self._counts[line] = max(self._counts[line], counts[line])


class StatusWatcher:
    """``fetch`` gives a status, None while there is none, or raises one of our errors while nobody answers."""

    def __init__(self, fetch: Callable[[], RunStatus | None], poll_s: float = 0.5) -> None:
        self._fetch, self._poll_s = fetch, poll_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._latest: RunStatus | None = None
        self._lines = EventLines()
        self._progress: list[tuple[float, int]] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.unanswered: str = ""
        """Why the last question got no answer; empty if it got one."""

    def __enter__(self) -> StatusWatcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive() and error is None:
            raise Unreachable("the question for the run's status doesn't end")

    def latest(self) -> RunStatus | None:
        """Raises what made the thread end, where it wasn't an error of ours."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._latest

    def events(self) -> list[tuple[float, str]]:
        """(wall time it was first seen, line)"""
        with self._lock:
            return list(self._lines.seen)

    def progress(self) -> list[tuple[float, int]]:
        """(wall time, steps sealed): the first sight of each number."""
        with self._lock:
            return list(self._progress)

    def take(self, status: RunStatus) -> None:
        wall_s = time.time()
        with self._lock:
            self._latest = status
            self._lines.take(wall_s, status.events)
            if not self._progress or status.summary.step > self._progress[-1][1]:
                self._progress.append((wall_s, status.summary.step))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                status = self._fetch()
                self.unanswered = ""
                if status is not None:
                    self.take(status)
            except IotaError as error:  # it is down, or paused, or cut off: that is what this is about
                self.unanswered = str(error)
            except Exception as error:  # noqa: BLE001 - raised by latest()
                with self._lock:
                    self._error = error
                return
            self._stop.wait(self._poll_s)
