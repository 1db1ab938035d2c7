"""One run as an object: iterate its steps, wait for it, ask for its losses, get its weights.

Every call may be made from a script, a notebook cell or (in a thread of your own) from asyncio; ``async for`` and ``await``
work too. The run itself is the validator's: this object can go away and be made again by :func:`iota.attach`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from iota.sdk.callbacks import Callback, Together
from iota.sdk.forking import forked_config, submit_fork
from iota.sdk.report import Disruption, Evaluation, Reader, Seen, StepReport
from iota.sdk.settings import Section
from iota.words import length_argument, rate_argument
from subnet.errors import ConfigError, DeadlinePassed, NotFound, Refused, Unreachable
from subnet.protocol.api import RunStatus, RunSummary
from subnet.protocol.wire import decode
from subnet.run.config import RunConfig
from subnet.timing import Deadline

if TYPE_CHECKING:
    from iota.export import Exported
    from iota.holdout import Holdout
    from iota.sdk.swarm import Swarm

CALL_S = 15.0
EXPORT_S = 3600.0
PATIENCE_S = 120.0
_RECENT_STEPS = 512
_ALL_STEPS = 100_000


class Run:
    """Made by :meth:`iota.Swarm.train`, :meth:`iota.Swarm.run` and :func:`iota.attach`."""

    def __init__(
        self, swarm: Swarm, name: str, callbacks: tuple[Callback, ...] = (), config: RunConfig | None = None
    ) -> None:
        self.swarm, self.name = swarm, name
        self._config = config
        self._together = Together(callbacks)
        self._reader = Reader(name, self._ask_status, self._ask_runs, self._known_config)
        self._pending: deque[StepReport | Evaluation | Disruption] = deque()
        self._looking = threading.Lock()
        self._models: dict[int, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"<iota.Run {self.name!r} at {self.swarm.url}>"

    # ---- watching

    def __iter__(self) -> Iterator[StepReport]:
        return self.reports()

    def __aiter__(self) -> AsyncGenerator[StepReport]:
        return self.reports_async()

    def __await__(self) -> Generator[Any, None, Run]:
        return self._finished().__await__()

    def reports(self, *, timeout_s: float | None = None, patience_s: float = PATIENCE_S) -> Generator[StepReport]:
        """Each step once, live, from the first this object hasn't given yet, until the run has finished.

        ``patience_s``: how long the validator may be out of reach; ``timeout_s``: how long all of it may take. Raises
        DeadlinePassed, Unreachable, NotFound where the validator has no such run, and what a local swarm's processes died of.
        """
        with _Iteration(self, timeout_s, patience_s) as iteration:
            while not iteration.over:
                self.swarm.calls.blocking(iteration.look)
                yield from iteration.taken()
                if not iteration.over:
                    time.sleep(self.swarm.poll_s)

    async def reports_async(
        self, *, timeout_s: float | None = None, patience_s: float = PATIENCE_S
    ) -> AsyncGenerator[StepReport]:
        """As :meth:`reports`, for ``async for``."""
        with _Iteration(self, timeout_s, patience_s) as iteration:
            while not iteration.over:
                await self.swarm.calls.waited(iteration.look)
                for report in iteration.taken():
                    yield report
                if not iteration.over:
                    await asyncio.sleep(self.swarm.poll_s)

    def wait(self, timeout_s: float | None = None) -> Run:
        """Until the run has finished, with its callbacks; this same object."""
        for _ in self.reports(timeout_s=timeout_s):
            pass
        return self

    async def _finished(self) -> Run:
        async for _ in self.reports_async():
            pass
        return self

    def skip_to(self, step: int) -> Run:
        """Report only steps after the ``step``-th: ``run.skip_to(run.status().summary.step)`` starts with what is new."""
        self._reader.skip_to(step)
        return self

    # ---- asking

    @property
    def last(self) -> StepReport | None:
        """The newest step that was seen; None before the first."""
        return self._reader.last

    def status(self, steps: int = 20) -> RunStatus:
        """What the validator says now: summary, members, the last ``steps`` steps. NotFound (refused) while queued."""
        return self.swarm.calls.blocking(lambda: self._ask_status(steps))

    def state(self) -> str:
        """queued, waiting (for miners), running, paused, stalled or finished."""
        return next((run.state for run in self.swarm.runs() if run.name == self.name), "unknown")

    def root(self) -> str:
        """The run root once it has finished: equal roots are equal weights, to the bit. NotFound before."""
        found = next((run.root for run in self.swarm.runs() if run.name == self.name), None)
        if not found:
            raise NotFound(f"run {self.name} has no root yet", hint="it has one when it has finished: run.wait()")
        return found

    def settings(self) -> dict[str, Any]:
        """Every key of the run file, by section, as plain values; empty where the run hasn't begun."""
        config = self.swarm.calls.blocking(self._known_config)
        return {} if config is None else msgspec.to_builtins(config)

    def evaluate(self) -> Evaluation:
        """The newest hold-out loss that the run has sealed; it computes nothing. NotFound before the first.

        How often there is one: ``evaluation={"every_steps": ...}`` of :meth:`iota.Swarm.train`.
        """
        return self.swarm.calls.blocking(self._evaluation)

    def _evaluation(self) -> Evaluation:
        try:
            for steps in (_RECENT_STEPS, _ALL_STEPS):
                status = self._ask_status(steps)
                if status.final_holdout_loss is not None:
                    return Evaluation(status.summary.step, status.final_holdout_loss)
                for view in reversed(status.steps):
                    if view.holdout_loss is not None:
                        return Evaluation(view.step, view.holdout_loss)
        except Refused as refused:
            if refused.code != NotFound.code:
                raise
            if self._reader.evaluation is not None:
                return self._reader.evaluation
        raise NotFound(
            f"run {self.name} has sealed no hold-out loss",
            hint='the first comes with its first step, more with evaluation={"every_steps": ...}',
        )

    def holdout(self) -> Holdout:
        """:meth:`evaluate`, and the loss of each source of the data where there are several (``holdout().sources``)."""

        def work() -> Holdout:
            from iota.holdout import newest_holdout

            return newest_holdout(self.swarm.remote(signed=True), self.name, Deadline.after(CALL_S))

        return self.swarm.calls.blocking(work)

    # ---- its owner's word

    def pause(self) -> RunSummary:
        """No new step begins; the open ones are finished and sealed. Miners stay. Only whoever submitted the run may say so.

        Raises Refused where the run isn't active, has finished or was stopped.
        """
        return self._control("pause")

    def resume(self) -> RunSummary:
        """Go on with a paused run."""
        return self._control("resume")

    def stop(self) -> RunSummary:
        """End the run after the steps that are open, for good: evaluated, stored and rooted like a run of so many steps."""
        return self._control("stop")

    def set_learning_rate(self, *, factor: float | None = None, value: float | None = None) -> RunSummary:
        """From the next step on that isn't planned yet: ``factor`` times the schedule (1 takes it back), or this ``value``."""
        return self._control("set-lr", rate_argument(factor, value))

    def extend(self, steps: int, *, keep_schedule: bool = False) -> RunSummary:
        """Let the run end after ``steps`` steps in all, more or fewer than now; the schedule is as long, or stays as it is."""
        return self._control("extend", length_argument(steps, keep_schedule=keep_schedule))

    def rollback(self, step: int) -> RunSummary:
        """Back to the state after ``step`` updates, on a new branch, with the settings of then; the run is paused there.

        Raises Refused where what is kept doesn't lead back so far (``snapshot={"keep_steps": ...}``).
        """
        return self._control("rollback", str(step))

    def fork(self, name: str, *, step: int | None = None, weights_only: bool = False, **sections: Section) -> Run:
        """A new run that begins with this one's state after ``step`` updates (None: the newest), these settings changed."""
        config = forked_config(self.settings(), name, sections)
        self.swarm.calls.blocking(lambda: submit_fork(self.swarm, self.name, config, step, weights_only, EXPORT_S))
        return self.swarm.run(name)

    def _control(self, action: str, argument: str = "") -> RunSummary:
        def work() -> RunSummary:
            return self.swarm.remote(signed=True).control(self.name, action, Deadline.after(CALL_S), argument)

        return self.swarm.calls.blocking(work)

    # ---- weights

    def export(
        self, directory: str | Path, *, step: int | None = None, merged: bool = False, timeout_s: float = EXPORT_S
    ) -> Exported:
        """Write the weights after ``step`` updates (None: the newest snapshot) as a Hugging Face directory, checked.

        Of a run that trains adapters it is theirs, for ``peft``; with ``merged`` the model with them added in. Raises
        NotFound where no snapshot of that step is stored, HashMismatch where one isn't what it should be.
        """
        return self.swarm.calls.blocking(lambda: self._export(Path(directory), step, timeout_s, merged=merged))

    def model(self, *, step: int | None = None, timeout_s: float = EXPORT_S) -> Any:
        """The causal language model of ``transformers`` with the weights of :meth:`export`, in fp32 on the CPU.

        Keeps the object of each step: asked twice it is fetched once.
        """
        return self.swarm.calls.blocking(lambda: self._loaded(step, timeout_s))[0]

    def tokenizer(self, *, timeout_s: float = EXPORT_S) -> Any:
        """The run's tokenizer, as one of ``transformers``."""
        return self.swarm.calls.blocking(lambda: self._loaded(None, timeout_s))[1]

    def sample(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 60,
        temperature: float = 0.8,
        top_k: int = 40,
        seed: int = 0,
        step: int | None = None,
        timeout_s: float = EXPORT_S,
    ) -> str:
        """The prompt continued here, on this machine, with the weights of the newest snapshot (or ``step``).

        ``temperature`` 0 takes the likeliest token each time. The generator of the caller's torch is left as it was.
        """

        def work() -> str:
            from iota.sdk.sampling import continued

            model, tokenizer = self._loaded(step, timeout_s)
            return continued(model, tokenizer, prompt, max_new_tokens, temperature, top_k, seed)

        return self.swarm.calls.blocking(work)

    # ---- how

    def _ask_status(self, steps: int) -> RunStatus:
        return self.swarm.remote().status(Deadline.after(CALL_S), run=self.name, steps=steps)

    def _ask_runs(self) -> tuple[RunSummary, ...]:
        return self.swarm.remote().runs(Deadline.after(CALL_S))

    def _known_config(self) -> RunConfig | None:
        if self._config is None:
            try:
                info = self.swarm.remote().export_info(self.name, None, Deadline.after(CALL_S))
            except Refused as refused:
                if refused.code != NotFound.code:
                    raise
                return None  # it hasn't begun, or has no snapshot yet
            self._config = decode(info.config, RunConfig, limit_bytes=1 << 20, what="the run's config")
        return self._config

    def _loaded(self, step: int | None, timeout_s: float) -> tuple[Any, Any]:
        deadline = Deadline.after(timeout_s)
        found = self._stored_step(step, deadline)
        if found not in self._models:
            from iota.sdk.sampling import load

            run_id = next(run.run_id for run in self._ask_runs() if run.name == self.name)
            directory = self.swarm.cache / "models" / run_id / f"step-{found}"
            if not directory.exists():
                config = self._known_config()
                lora = config is not None and config.trainable.kind == "lora"
                self._export(directory, found, deadline.remaining_s(), merged=lora)
            self._models[found] = load(directory)
        return self._models[found]

    def _stored_step(self, step: int | None, deadline: Deadline) -> int:
        try:
            return self.swarm.remote().export_info(self.name, step, deadline.sooner(CALL_S)).step
        except Refused as refused:
            if refused.code != NotFound.code or step is not None or "after -1 updates" not in refused.reason:
                raise
            raise NotFound(
                f"run {self.name} has stored no weights yet",
                hint='snapshots come with snapshot={"every_steps": ...} and at the end',
            ) from refused

    def _export(self, directory: Path, step: int | None, timeout_s: float, *, merged: bool = False) -> Exported:
        from iota.export import export_run

        deadline = Deadline.after(timeout_s)
        found = self._stored_step(step, deadline)
        return export_run(
            self.swarm.remote(signed=True), self.name, directory, step=found, merged=merged, deadline=deadline
        )

    # ---- for the iteration

    def look(self) -> Seen:
        """One look at the validator; what it brought waits to be taken."""
        with self._looking:  # a look that somebody stopped waiting for may still be under way
            seen = self._reader.look()
            self._pending.extend(seen.items)
        return seen

    @property
    def over(self) -> bool:
        """Whether the run has finished and all of it was taken."""
        return self._reader.over and not self._pending

    def taken(self) -> Generator[StepReport]:
        """What waits, told to the callbacks; the steps are given on."""
        while self._pending:
            item = self._pending.popleft()
            if isinstance(item, StepReport):
                self._together.step(self, item)
                yield item
            elif isinstance(item, Evaluation):
                self._together.evaluate(self, item)
            else:
                self._together.disruption(self, item)
        if self.over:
            self._together.end(self)

    @property
    def callbacks(self) -> Together:
        return self._together


class _Iteration:
    """One ``for`` over a run: its deadlines, its callbacks' begin and end, and what an interrupt prints."""

    def __init__(self, run: Run, timeout_s: float | None, patience_s: float) -> None:
        if patience_s <= 0:
            raise ConfigError(f"patience_s = {patience_s:g} is not allowed", hint="allowed: seconds above 0")
        self._run, self._timeout_s, self._patience_s = run, timeout_s, patience_s
        self._all = None if timeout_s is None else Deadline.after(timeout_s)
        self._heard = Deadline.after(patience_s)

    def __enter__(self) -> _Iteration:
        if not self.over:
            self._run.callbacks.begin(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.over:
            self._run.callbacks.detach(self._run)
        if kind is KeyboardInterrupt:
            print(self._run.swarm.detached_words(self._run.name), file=sys.stderr, flush=True)

    @property
    def over(self) -> bool:
        return self._run.over

    def look(self) -> None:
        """Ask once; a validator that can't be reached is asked again until the patience ends."""
        self._run.swarm.check()
        try:
            seen = self._run.look()
        except Unreachable:
            if self._heard.expired:
                raise
            return
        self._heard = Deadline.after(self._patience_s)
        if self._all is not None and self._all.expired and not seen.over:
            waits = f", waits for {seen.summary.waiting_for}" if seen.summary.waiting_for else ""
            raise DeadlinePassed(
                f"run {self._run.name} hasn't finished within {self._timeout_s:g} s:"
                f" {seen.summary.state} at step {seen.summary.step} of {seen.summary.steps}{waits}",
                hint="the run goes on; iterate again, or give more timeout_s",
            )

    def taken(self) -> Generator[StepReport]:
        return self._run.taken()
