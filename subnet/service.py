"""A process of named tasks that starts together, stops in a known order, and never outlives the failure of one.

Order of a shutdown, after SIGTERM, SIGINT or :meth:`Service.stop`:

1. ``stopping`` is set; the tasks still run;
2. the ``on_stop`` steps run in the order of their registration (hand leases back, flush), all within ``grace_s``;
3. the tasks are cancelled and awaited;
4. the ``on_close`` steps run in reverse order of registration (last opened, first closed), all within ``close_s``
   (a late one still gets a moment).

A task that fails, or a forever-task that returns, skips 1 and 2: the others are cancelled, everything is closed, and
the failure is raised. A failing step never keeps the later ones from running; its error is raised at the end.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from types import FrameType

from subnet.errors import IotaError
from subnet.timing import TIMEOUTS, Deadline

Step = Callable[[], Awaitable[None]]
Handler = signal.Handlers | Callable[[int, FrameType | None], object] | int | None
_MOMENT_S = 0.2


class TaskEnded(IotaError):
    """A task that should run forever returned."""

    code = "task_ended"


class Service:
    def __init__(
        self, name: str, *, grace_s: float = TIMEOUTS.shutdown_grace_s, close_s: float = TIMEOUTS.shutdown_grace_s
    ) -> None:
        self.name = name
        self.stopping = asyncio.Event()
        self.stop_reason = ""
        self._grace_s = grace_s
        self._close_s = close_s
        self._forever: list[tuple[str, Step]] = []
        self._on_stop: list[tuple[str, Step]] = []
        self._on_close: list[tuple[str, Step]] = []

    def forever(self, name: str, task: Step) -> None:
        """``task`` runs until the service stops; returning is an error."""
        self._forever.append((name, task))

    def on_stop(self, name: str, step: Step) -> None:
        self._on_stop.append((name, step))

    def on_close(self, name: str, step: Step) -> None:
        self._on_close.append((name, step))

    def stop(self, reason: str = "asked to") -> None:
        if not self.stopping.is_set():
            self.stop_reason = reason
            self.stopping.set()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Run until stopped; raises the failure of a task or step (several: an ``ExceptionGroup``)."""
        restore = self._install_signals() if handle_signals else []
        errors: list[Exception] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._run_forever(name, task), name=f"{self.name}.{name}")
                    for name, task in self._forever
                ]
                group.create_task(self._supervise(tasks, errors), name=f"{self.name}.supervise")
        except* Exception as failures:  # noqa: BLE001 - raised below, after everything is closed
            errors.extend(failures.exceptions)
        finally:
            deadline = Deadline.after(self._close_s)
            for name, step in reversed(self._on_close):
                errors.extend(await self._run_step(name, step, deadline))
            loop = asyncio.get_running_loop()
            for number, handler in restore:
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{self.name}: several failures", errors)

    async def _run_forever(self, name: str, task: Step) -> None:
        await task()
        raise TaskEnded(f"{self.name}: task {name} ended, though it should run until the service stops")

    async def _supervise(self, tasks: list[asyncio.Task[None]], errors: list[Exception]) -> None:
        await self.stopping.wait()
        deadline = Deadline.after(self._grace_s)
        for name, step in self._on_stop:
            errors.extend(await self._run_step(name, step, deadline))
        for task in tasks:
            task.cancel(self.stop_reason)

    async def _run_step(self, name: str, step: Step, deadline: Deadline) -> list[Exception]:
        try:
            async with Deadline.after(max(_MOMENT_S, deadline.remaining_s())).limit(f"{self.name}: {name}"):
                await step()
        except Exception as error:  # noqa: BLE001 - raised by run(), after the other steps
            return [error]
        return []

    def _install_signals(self) -> list[tuple[int, Handler]]:
        loop = asyncio.get_running_loop()
        previous = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
        for number, _ in previous:
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        return [(int(number), handler) for number, handler in previous]
