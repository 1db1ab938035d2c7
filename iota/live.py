"""What a run looks like while it runs: a live view on a terminal, at most one line a step elsewhere; it only reads."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from subnet.protocol.api import MemberView, RunStatus, StallView, StoreCosts
from subnet.protocol.audit_api import AuditCosts
from subnet.protocol.follow_api import FollowerStatus

BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60
_NUM_EVENTS = 6
_NUM_WAITS = 3


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The values as bars, averaged into at most ``width`` of them."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    if len(finite) > width:
        edges = [len(finite) * i // width for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in finite)


def headline(status: RunStatus) -> str:
    """One line: what a log or a narrow terminal gets."""
    summary = status.summary
    if not status.steps:
        waits = f" · waits for {summary.waiting_for}" if summary.waiting_for else ""
        if summary.stall is not None:
            waits = f" · {stalled(summary.stall)}"
        return f"{summary.name} · {summary.state}{waits} · {len(status.members)} members"
    last = status.steps[-1]
    parts = [f"step {last.step + 1}/{summary.steps}", f"loss {last.loss:.4f}"]
    if last.holdout_loss is not None:
        parts.append(f"hold-out {last.holdout_loss:.4f}")
    parts += [f"{status.tokens_per_s:,.0f} tokens/s", f"{len(status.members)} members"]
    if summary.stall is not None:
        parts.append(stalled(summary.stall))
    elif summary.state == "waiting" and summary.waiting_for:
        parts.append(f"waits for {summary.waiting_for}")
    return " · ".join(parts)


def stalled(stall: StallView) -> str:
    """Since when there is no progress, and the ones waited for longest."""
    longest = sorted(stall.waits, key=lambda wait: -wait.waited_s)
    shown = "; ".join(f"{wait.who}: {wait.what} ({wait.waited_s:.0f} s)" for wait in longest[:_NUM_WAITS])
    more = f" and {len(longest) - _NUM_WAITS} more" if len(longest) > _NUM_WAITS else ""
    return f"stalled, no seal for {stall.no_seal_s:.0f} s: waits for {shown or 'nothing known'}{more}"


def audits_line(audits: AuditCosts) -> str:
    """What is redone, and what that costs beside the work itself."""
    share = f"{audits.compute_s / audits.receipted_s:.1%} of the compute" if audits.receipted_s > 0 else "no work yet"
    twice = f", {audits.repeated} twice" if audits.repeated else ""
    cases = f" · {audits.cases} cases, {audits.convicted} convicted" if audits.cases else ""
    return (
        f"audits: {audits.done:,} done{twice}, {audits.open} open · {share} · {audits.read_bytes / 1e6:,.1f} MB read · "
        f"{audits.evidence_bytes / 1e6:,.1f} MB of evidence{cases}"
    )


def follower_lines(status: FollowerStatus) -> list[str]:
    """What a follower checked, redid and found; the first line whatever it found."""
    audits = status.own_audits
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in audits.items() if count) or "none yet"
    view = next((view for view in status.followed if view.run_id == status.summary.run_id), None)
    behind = "" if view is None else f" · {view.segments:,} segments, {view.to_redo} to redo, {view.behind_s:.0f} s old"
    lines = [f"follows: {status.journal_length:,} records checked{behind} · own audits: {counts}"]
    if view is not None and view.counted_to is not None:
        lines.append(f"nothing of this run counts behind record {view.counted_to}")
    if view is not None:
        lines += view.doubts
    lines += [f"{hotkey} signed two journals of {run} (record {number})" for hotkey, run, number in status.distrusted]
    if status.num_breaches:
        counted = ", ".join(f"{count} {code}" for code, count in sorted(status.num_breaches.items()))
        lines.append(f"its leader's breaches: {counted} (files in {status.proofs})")
    lines += [f"record {found.number}: {found.code}: {found.what}" for found in status.breaches[-_NUM_EVENTS:]]
    return lines


def store_line(store: StoreCosts, stored_bytes: int) -> str:
    """Requests and bytes of the run, and what they cost by the run file's prices."""
    used = store.own.plus(store.reported)
    return (
        f"store: {used.puts:,} puts · {used.gets:,} gets · {used.lists:,} lists · {used.bytes_up / 1e6:,.1f} MB up · "
        f"{used.bytes_down / 1e6:,.1f} MB down · ${store.usd:.4f} · {stored_bytes / 1e6:,.1f} MB held, "
        f"${store.usd_per_month:.4f} a month"
    )


def last_holdout(status: RunStatus) -> tuple[int, float] | None:
    """The newest evaluation: (updates before it, loss)."""
    if status.final_holdout_loss is not None:
        return status.summary.steps, status.final_holdout_loss
    found = ((view.step, view.holdout_loss) for view in reversed(status.steps) if view.holdout_loss is not None)
    return next(found, None)


def by_stage(members: Sequence[MemberView]) -> dict[int, list[MemberView]]:
    stages: dict[int, list[MemberView]] = defaultdict(list)
    for member in members:
        stages[member.stage].append(member)
    return dict(sorted(stages.items()))


def _member_table(status: RunStatus) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    for name, justify in (("stage", "right"), ("member", "left"), ("state", "left"), ("leases", "right"),
                          ("items", "right"), ("s/item", "right"), ("heard", "right")):  # fmt: skip
        table.add_column(name, justify=justify, header_style="dim")  # pyright: ignore[reportArgumentType]
    for stage, members in by_stage(status.members).items():
        for number, member in enumerate(members):
            pace = "" if member.seconds_per_item is None else f"{member.seconds_per_item:.3f}"
            quiet = member.heard_s_ago > 3
            table.add_row(
                str(stage) if number == 0 else "",
                f"{member.hotkey[:8]} #{member.incarnation.rpartition('#')[2]}",
                Text(_state(member, status), style="yellow" if quiet else ""),
                str(member.leases),
                str(member.items_done),
                pace,
                f"{member.heard_s_ago:.0f} s",
            )
    return table


def _state(member: MemberView, status: RunStatus) -> str:
    if member.heard_s_ago > 3:
        return "silent"
    if member.leases:
        return "working"
    return "ready" if member.ready_for_step >= status.summary.step else "catching up"


def render(status: RunStatus | None, notes: Sequence[str] = ()) -> RenderableType:
    """The whole view of one status."""
    if status is None:
        return Panel(Text("\n".join(notes) or "starting"), title="iota")
    summary = status.summary
    losses = [view.loss for view in status.steps if view.step >= 0]
    head = Table.grid(padding=(0, 2))
    head.add_row("step", f"{summary.step}/{summary.steps}", ProgressBar(summary.steps, max(0, summary.step), width=40))
    if losses:
        head.add_row("loss", f"{losses[-1]:.4f}", Text(sparkline(losses), style="cyan"))
    evaluation = last_holdout(status)
    if evaluation is not None:
        head.add_row("hold-out", f"{evaluation[1]:.4f}", Text(f"after {evaluation[0]} updates", style="dim"))
    counts = (
        f"{status.num_merges} merges · {status.num_voids} voids · {status.num_gone} gone · {status.num_joined} joined"
    )
    head.add_row("tokens/s", f"{status.tokens_per_s:,.0f}", Text(counts, style="dim"))
    parts: list[RenderableType] = [head, Text(""), _member_table(status), Text("")]
    if summary.stall is not None:
        parts.append(Text(stalled(summary.stall), style="bold red"))
        if summary.stall.dump:
            parts.append(Text(f"the validator's stacks: {summary.stall.dump}", style="dim"))
    elif summary.waiting_for:
        parts.append(Text(f"waits for {summary.waiting_for}", style="yellow"))
    if isinstance(status, FollowerStatus):
        first, *found = follower_lines(status)
        parts.append(Text(first, style="dim"))
        parts += [Text(line, style="bold red") for line in found]
    if status.audits is not None:
        parts.append(Text(audits_line(status.audits), style="dim"))
    if status.store is not None:
        parts.append(Text(store_line(status.store, status.store_bytes), style="dim"))
    if status.weights:
        parts.append(Text(f"weights: {status.weights}", style="dim"))
    parts += [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in status.events[-_NUM_EVENTS:]]
    parts += [Text(note, style="bold") for note in notes]
    return Panel(
        Group(*parts), title=f"{summary.name} · {summary.state}", subtitle=f"journal {status.journal_length:,}"
    )


class LiveView:
    """``show(status)`` as often as you like; ``say(text)`` for what happens beside the run."""

    def __init__(self, stream: TextIO | None = None, *, plain: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self.plain = not self._stream.isatty() if plain is None else plain
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self._notes: list[str] = []
        self._said: tuple[int, str, int] | None = None
        self._status: RunStatus | None = None

    def __enter__(self) -> LiveView:
        if not self.plain:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._notes = [*self._notes[-3:], text]
            self._live.update(render(self._status, self._notes))

    def show(self, status: RunStatus) -> None:
        self._status = status
        if self._live is not None:
            self._live.update(render(status, self._notes))
            return
        step = status.steps[-1].step if status.steps else -2
        said = (step, status.summary.state, 0 if status.steps else len(status.members))
        if said != self._said:
            self._said = said
            print(headline(status), file=self._stream, flush=True)


def watch(fetch: Callable[[], RunStatus | None], view: LiveView, sleep: Callable[[], None]) -> RunStatus | None:
    """Show what ``fetch`` gives until the run has finished."""
    while True:
        status = fetch()
        if status is not None:
            view.show(status)
            if status.summary.state == "finished":
                return status
        sleep()
