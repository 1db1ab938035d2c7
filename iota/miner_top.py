"""``iota top --miner``: the miner's page on a terminal. It only reads."""

from __future__ import annotations

import time

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from iota.home.look import page_answer
from iota.plan import human_bytes
from miner.caps import Flow
from miner.log_tail import LogLine
from miner.page_view import MinerView
from miner.told import in_words
from subnet.errors import IotaError
from subnet.score.api import ScoreDetail

EVERY_S = 2.0
NUM_LINES = 8
COLOURS = {"working": "green", "waiting": "yellow", "joining": "yellow", "looking": "yellow", "resting": "cyan"}


def miner_top(port: int, *, once: bool = False) -> None:
    """Until Ctrl-C; a page that doesn't answer is waited for after the first answer."""
    view, lines = look(port)
    score = _score(port)
    if once:
        from rich.console import Console

        return Console().print(render(view, lines, score))
    with Live(render(view, lines, score), refresh_per_second=4) as live:
        turn = 0
        while True:
            time.sleep(EVERY_S)
            turn += 1
            try:
                view, lines = look(port)
                score = _score(port) if turn % 8 == 0 else score
                live.update(render(view, lines, score))
            except IotaError as error:
                live.update(Group(Text(f"not live: {error.reason}", style="red"), render(view, lines, score)))


def look(port: int) -> tuple[MinerView, tuple[LogLine, ...]]:
    view = msgspec.json.decode(page_answer(port, "/v1/miner"), type=MinerView)
    return view, msgspec.json.decode(page_answer(port, "/v1/miner/logs"), type=tuple[LogLine, ...])


def _score(port: int) -> ScoreDetail | None:
    try:
        return msgspec.json.decode(page_answer(port, "/v1/miner/score"), type=ScoreDetail)
    except IotaError:
        return None  # it follows no validator now


def render(view: MinerView, lines: tuple[LogLine, ...], score: ScoreDetail | None) -> RenderableType:
    head = Text.assemble(
        (f"miner {view.hotkey[:8]} ", "bold"),
        (view.state, COLOURS.get(view.state, "white")),
        f" · {view.validator or 'no validator'} · {view.device}",
    )
    parts: list[RenderableType] = [head]
    if view.waiting_for:
        parts.append(Text(f"waits for {view.waiting_for}", style="yellow"))
    if view.told is not None and view.told.code:
        parts.append(Text(in_words(view.told, view.time_s), style="yellow"))
    table = Table.grid(padding=(0, 2))
    for name, said in rows(view, score):
        table.add_row(Text(name, style="dim"), said)
    parts.append(table)
    parts += [
        Text(f"{_clock(line.time_s)} {line.text}", style="dim", overflow="ellipsis", no_wrap=True)
        for line in lines[-NUM_LINES:]
    ]
    return Group(*parts)


def rows(view: MinerView, score: ScoreDetail | None) -> list[tuple[str, str]]:
    """(what, value in words)."""
    found: list[tuple[str, str]] = []
    part, machine, speed = view.part, view.machine, view.speed
    if part is not None:
        stage = "not let in yet" if part.stage is None else f"stage {part.stage} of {part.num_stages}"
        found.append(("run", f"{part.run} · {stage} · step {part.step} of {part.steps}"))
        found.append(("work", f"{part.leases} items leased, {part.queued} being computed or queued"))
    if speed is not None:
        mfu = "" if speed.mfu is None else f" · MFU {speed.mfu:.1%} of {speed.peak_flops_per_s / 1e9:,.0f} GFLOP/s"
        found.append(("useful work", f"{speed.flops_per_s / 1e9:,.1f} GFLOP/s{mfu}"))
    if machine is not None:
        said = [
            None if machine.temperature_c is None else f"{machine.temperature_c:.0f} °C",
            None if machine.power_w is None else f"{machine.power_w:.0f} W",
            None if machine.use is None else f"{machine.use:.0%} in use",
            None if machine.clock_mhz is None else f"{machine.clock_mhz:.0f} MHz",
        ]
        missing = f" · not readable: {', '.join(machine.unreadable)}" if machine.unreadable else ""
        found.append(("machine", " · ".join([machine.name, *(one for one in said if one)]) + missing))
        if machine.memory_total_bytes is not None and machine.memory_used_bytes is not None:
            found.append(
                ("memory", f"{human_bytes(machine.memory_used_bytes)} of {human_bytes(machine.memory_total_bytes)}")
            )
    found += [("up", _flow(view.upload)), ("down", _flow(view.download))]
    found.append(("kept", " · ".join(f"{disk.what} {human_bytes(disk.used_bytes)}" for disk in view.disk) or "nothing"))
    found.append(("reach", view.reach))
    if score is not None and score.place:
        terms = " · ".join(f"{term.name} {term.value:.4g}" for term in score.terms)
        found.append(("score", f"place {score.place} of {score.num_scores}: {terms}"))
    return found


def _flow(flow: Flow) -> str:
    if flow.limit_bytes_per_s is None:
        return f"{human_bytes(flow.bytes)}, no cap"
    return f"{human_bytes(flow.bytes)}, cap {human_bytes(flow.limit_bytes_per_s)}/s, held up {flow.held_up_s:.1f} s"


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
