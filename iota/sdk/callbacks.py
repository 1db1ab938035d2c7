"""Callbacks as trainers have them: what is called while a run is iterated or waited for, in the caller's thread.

An error in a callback is the caller's: it ends the iteration, never the run.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subnet.errors import ConfigError

if TYPE_CHECKING:
    from iota.sdk.report import Disruption, Evaluation, StepReport
    from iota.sdk.run import Run


class Callback:
    """Override what you need; every method may be left as it is."""

    def on_prepare(self, text: str) -> None:
        """Before there is a run: the submission says what it does (data, tokenizer, upload)."""

    def on_run_begin(self, run: Run) -> None:
        """Once, when the run is first looked at."""

    def on_step_end(self, run: Run, report: StepReport) -> None:
        """After each step, in order; several at once where they came between two looks."""

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        """After each evaluation on the hold-out text."""

    def on_disruption(self, run: Run, disruption: Disruption) -> None:
        """A miner died, its work was void, and the like: nothing is lost by it."""

    def on_run_end(self, run: Run) -> None:
        """Once, when the run has finished."""

    def on_detach(self, run: Run) -> None:
        """The caller stops looking (Ctrl-C, ``break`` out of a loop, an error); the run goes on."""


class ProgressBar(Callback):
    """A bar with step, loss, hold-out loss and tokens per second, on a terminal or in a notebook."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._holdout = ""

    def on_prepare(self, text: str) -> None:
        self._print(text)

    def on_run_begin(self, run: Run) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(run.name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[said]}"))
        self._task = self._bar.add_task(run.name, total=None, said="")
        self._bar.start()

    def on_step_end(self, run: Run, report: StepReport) -> None:
        if self._bar is not None:
            said = f"loss {report.loss:.4f}{self._holdout} · {report.tokens_per_s:,.0f} tokens/s"
            self._bar.update(self._task, completed=report.step, total=report.steps, said=said)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self._holdout = f" · hold-out {evaluation.loss:.4f}"

    def on_disruption(self, run: Run, disruption: Disruption) -> None:
        self._print(disruption.text)

    def on_run_end(self, run: Run) -> None:
        self._stop()

    def on_detach(self, run: Run) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)


def step_scalars(report: StepReport) -> dict[str, float]:
    """The names under which the writers keep a step's figures."""
    found = {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/tokens_per_s": report.tokens_per_s,
    }
    return found if report.learning_rate is None else {**found, "train/learning_rate": report.learning_rate}


class TensorBoard(Callback):
    """Scalars by step and disruptions as text; needs the package ``tensorboard`` (``pip install "iota-open[sdk]"``)."""

    def __init__(self, directory: str | Path = "runs") -> None:
        self.directory = Path(directory)
        self._writer: Any = None

    def on_run_begin(self, run: Run) -> None:
        try:
            tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = tensorboard.SummaryWriter(str(self.directory / run.name))

    def on_step_end(self, run: Run, report: StepReport) -> None:
        for name, value in step_scalars(report).items():
            self._writer.add_scalar(name, value, report.step)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self._writer.add_scalar("holdout/loss", evaluation.loss, evaluation.step)

    def on_disruption(self, run: Run, disruption: Disruption) -> None:
        self._writer.add_text("disruptions", disruption.text, disruption.step)

    def on_run_end(self, run: Run) -> None:
        self._close()

    def on_detach(self, run: Run) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class WandB(Callback):
    """A Weights & Biases run; ``mode="offline"`` keeps it on disk. Needs the package ``wandb``.

    ``init``: more arguments of ``wandb.init``, for example ``entity`` or ``tags``.
    """

    def __init__(
        self, project: str = "iota", *, mode: str | None = None, directory: str | Path = ".", **init: Any
    ) -> None:
        self._arguments: dict[str, Any] = {"project": project, "mode": mode, "dir": str(directory), **init}
        self._run: Any = None

    def on_run_begin(self, run: Run) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise _missing("wandb") from error
        Path(self._arguments["dir"]).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(**{"name": run.name, "config": run.settings(), **self._arguments})

    def on_step_end(self, run: Run, report: StepReport) -> None:
        self._run.log(step_scalars(report), step=report.step)

    def on_evaluate(self, run: Run, evaluation: Evaluation) -> None:
        self._run.log({"holdout/loss": evaluation.loss, "holdout/step": evaluation.step})

    def on_run_end(self, run: Run) -> None:
        self._finish()

    def on_detach(self, run: Run) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._run is not None:
            running, self._run = self._run, None
            running.finish()


def _missing(package: str) -> ConfigError:
    return ConfigError(f"the package {package} isn't installed", hint=f'pip install {package}, or "iota-open[sdk]"')


class Together:
    """Calls each of several callbacks, in order; ``begin`` and the end only once."""

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        self._callbacks = callbacks
        self._begun = False

    def prepare(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_prepare(text)

    def begin(self, run: Run) -> None:
        if not self._begun:
            self._begun = True
            for callback in self._callbacks:
                callback.on_run_begin(run)

    def step(self, run: Run, report: StepReport) -> None:
        for callback in self._callbacks:
            callback.on_step_end(run, report)

    def evaluate(self, run: Run, evaluation: Evaluation) -> None:
        for callback in self._callbacks:
            callback.on_evaluate(run, evaluation)

    def disruption(self, run: Run, disruption: Disruption) -> None:
        for callback in self._callbacks:
            callback.on_disruption(run, disruption)

    def end(self, run: Run) -> None:
        if self._begun:
            self._begun = False
            for callback in self._callbacks:
                callback.on_run_end(run)

    def detach(self, run: Run) -> None:
        if self._begun:
            self._begun = False
            for callback in self._callbacks:
                callback.on_detach(run)
