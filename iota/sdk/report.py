"""What a run tells while it runs, and the reader that turns a validator's statuses into each step once, in order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from subnet.errors import NotFound, Refused
from subnet.protocol.api import RunStatus, RunSummary, StepView
from subnet.run.config import RunConfig
from subnet.run.schedule import learning_rate

_WINDOW_STEPS = 32
_MOST_STEPS = 100_000
OVER = ("finished",)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as its seal has it."""

    step: int
    """Updates made, this one included: 1 to ``steps``."""
    steps: int
    loss: float
    """Mean training loss of the step's tokens, in nats a token, with the weights before this update."""
    holdout_loss: float | None
    """Hold-out loss of the weights before this update, where the step evaluated them."""
    grad_norm: float
    """Global norm of the mean gradient before clipping."""
    learning_rate: float | None
    """None where the run's config isn't known (yet)."""
    tokens: int
    """Training tokens of the step."""
    seconds: float
    """From the seal of the step before to this one's."""

    @property
    def tokens_per_s(self) -> float:
        """Of this step."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class Evaluation:
    """The mean hold-out loss (nats a token) of the weights after ``step`` updates, as sealed."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@dataclass(frozen=True)
class Disruption:
    """Something went wrong in the fleet and was mended; it changes no bit of the result.

    ``kind``: gone, void, owner, late, mismatch, skipped, accused, rewound, leader.
    """

    kind: str
    text: str
    step: int
    """The step that was open when it was seen."""


_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r" is gone: (?!left)", "gone"),
        (r": work of .* void: ", "void"),
        (r"no longer owns partitions", "owner"),
        (r"an owner is late", "late"),
        (r"a check failed, tracing", "mismatch"),
        (r"microbatch \d+ skipped", "skipped"),
        (r" stands accused ", "accused"),
        (r"rewound to step ", "rewound"),
        (r"term (?!1 )\d+ led by ", "leader"),
    )
)


def disruption_of(line: str, step: int) -> Disruption | None:
    """What an event line of a status says went wrong, if it does."""
    kind = next((kind for pattern, kind in _KINDS if pattern.search(line)), None)
    return None if kind is None else Disruption(kind, line, step)


def new_lines(before: Sequence[str], now: Sequence[str]) -> Sequence[str]:
    """The lines of ``now`` that come behind those of ``before``; both are the end of one growing list."""
    for start in range(len(now) + 1):
        kept = len(now) - start
        if not kept or (kept <= len(before) and tuple(now[:kept]) == tuple(before[-kept:])):
            return now[kept:]
    return now


@dataclass
class Seen:
    """What one look at a run has brought."""

    summary: RunSummary
    items: list[StepReport | Evaluation | Disruption] = field(
        default_factory=lambda: list[StepReport | Evaluation | Disruption]()
    )
    """In the order of the steps they belong to."""
    over: bool = False


class Reader:
    """``look()`` again and again: every step comes once; after a rewind the steps that are done again come again."""

    def __init__(
        self,
        name: str,
        status: Callable[[int], RunStatus],
        runs: Callable[[], tuple[RunSummary, ...]],
        config: Callable[[], RunConfig | None],
    ) -> None:
        self._name, self._status, self._runs, self._config = name, status, runs, config
        self.last: StepReport | None = None
        self.evaluation: Evaluation | None = None
        self.over = False
        self._done = 0
        self._lines: tuple[str, ...] = ()

    def skip_to(self, step: int) -> None:
        """Steps up to the ``step``-th aren't reported."""
        self._done = max(self._done, step)

    def look(self) -> Seen:
        """Once now; raises what asking the validator raises, NotFound where it has no such run."""
        try:
            status = self._status(_WINDOW_STEPS)
        except Refused as refused:
            if refused.code != NotFound.code:
                raise
            return self._not_active()
        first = status.steps[0].step if status.steps else 0
        if first > self._done:
            status = self._status(min(_MOST_STEPS, max(0, status.summary.step) - self._done + _WINDOW_STEPS))
        seen = Seen(status.summary)
        self._take_lines(status, seen)
        self._take_steps(status.steps, status.summary.steps, seen)
        if status.summary.state in OVER:
            if status.final_holdout_loss is not None:
                self._evaluated(Evaluation(status.summary.step, status.final_holdout_loss), seen)
            self.over = seen.over = True
        return seen

    def _evaluated(self, evaluation: Evaluation, seen: Seen) -> None:
        self.evaluation = evaluation
        seen.items.append(evaluation)

    def _not_active(self) -> Seen:
        summary = next((run for run in self._runs() if run.name == self._name), None)
        if summary is None:
            raise NotFound(f"the validator has no run called {self._name!r}", hint="see swarm.runs()")
        self.over = summary.state in OVER
        return Seen(summary, over=self.over)

    def _take_lines(self, status: RunStatus, seen: Seen) -> None:
        for line in new_lines(self._lines, status.events):
            found = disruption_of(line, max(0, status.summary.step))
            if found is None or (status.summary.state in OVER and found.kind == "gone"):
                continue
            seen.items.append(found)
            if found.kind == "rewound":
                back = int(line.split("rewound to step ")[1].split(",")[0])
                self._done = min(self._done, max(0, back))
        self._lines = status.events

    def _take_steps(self, views: Sequence[StepView], steps: int, seen: Seen) -> None:
        config = self._config() if views else None
        for view in views:
            if view.step < self._done:
                continue
            rate = view.learning_rate
            if config is not None and (rate is None or config.lanes.on):
                rate = learning_rate(config, view.step * config.lanes.inner_steps)
            report = StepReport(
                view.step + 1, steps, view.loss, view.holdout_loss, view.norm, rate, view.tokens, view.seconds
            )
            if view.holdout_loss is not None:
                self._evaluated(Evaluation(view.step, view.holdout_loss), seen)
            seen.items.append(report)
            self.last, self._done = report, view.step + 1
