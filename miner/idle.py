"""``--idle.only``: work only while the machine is otherwise idle. A pure rule with hysteresis, and what it looks at.

It leaves at once when a person is there or something else computes on the GPU, and when other programs had the processors
for ``BUSY_FOR_S``; it begins when all of that has been quiet for ``after_s``. What a system doesn't tell counts as quiet.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
from loguru import logger

from miner.idle_rule import IdleRule
from miner.nvml import others_on_gpu
from subnet.timing import SYSTEM_CLOCK

LOOK_EVERY_S = 2.0
BUSY_FOR_S = 10.0
"""Shorter bursts of other programs don't stop it."""
INPUT_S = 30.0
"""Somebody who typed or moved something so long ago is still there."""
QUIET_SHARE = 0.5
"""Of the load that stops it: so much others may have while it waits to begin."""
PROCESS_NAME = "iota-miner"
"""Miners know each other by it, so that the one on the next GPU is no reason to stop."""
_TERMINALS = re.compile(r"(pts/\d+|tty\d+)")
_DESKTOPS = (
    ("org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core", "org.gnome.Mutter.IdleMonitor", "GetIdletime"),
    ("org.freedesktop.ScreenSaver", "/org/freedesktop/ScreenSaver", "org.freedesktop.ScreenSaver", "GetSessionIdleTime"),
)  # fmt: skip
"""Who knows of mouse and keyboard under GNOME and KDE; both answer in milliseconds."""


class Sight(msgspec.Struct, frozen=True):
    """One look at the machine; None: can't be told here."""

    load: float | None
    """Share of all processors that is used by what isn't a miner of this user."""
    gpu: str | None = None
    """Who else computes on the GPU; "" nobody."""
    input_s: float | None = None
    """Seconds since somebody typed or moved something."""


class Idle:
    """The rule over time: :meth:`step` with each look; ``rests`` says why it doesn't work, "" while it does."""

    def __init__(self, rule: IdleRule, now_s: float) -> None:
        self._rule = rule
        self._busy_since_s: float | None = None
        self._quiet_since_s = now_s
        self.rests = "the machine to have been idle for a while" if rule.only else ""

    def step(self, now_s: float, sight: Sight) -> str:
        """Why it rests from now on, or ""."""
        if not self._rule.only:
            return ""
        busy = self._why_busy(sight, self._rule.load * (QUIET_SHARE if self.rests else 1.0))
        if busy:
            self._quiet_since_s = now_s
            self._busy_since_s = now_s if self._busy_since_s is None else self._busy_since_s
        else:
            self._busy_since_s = None
        if not self.rests:
            at_once = busy and not busy.startswith("other programs")
            if busy and (at_once or now_s - (self._busy_since_s or now_s) >= BUSY_FOR_S):
                self.rests = _waits(busy, self._rule.after_s)
        elif busy:
            self.rests = _waits(busy, self._rule.after_s)
        elif now_s - self._quiet_since_s >= self._rule.after_s:
            self.rests = ""
        else:
            left_s = self._rule.after_s - (now_s - self._quiet_since_s)
            self.rests = f"the machine to stay idle for {left_s:.0f} s more"
        return self.rests

    def _why_busy(self, sight: Sight, limit: float) -> str:
        if sight.input_s is not None and sight.input_s < INPUT_S:
            return "somebody is at the keyboard"
        if sight.gpu:
            return f"{sight.gpu} uses the GPU"
        if sight.load is not None and sight.load > limit:
            return f"other programs use {sight.load:.0%} of the processors"
        return ""


def _waits(busy: str, after_s: float) -> str:
    return f"the machine to be idle for {after_s:.0f} s: {busy}"


class Looker:
    """Reads the machine; blocks for some milliseconds. ``gpu``: index of the CUDA device that the miner uses, or None."""

    def __init__(self, gpu: int | None, devices: Path = Path("/dev")) -> None:
        self._gpu, self._devices = gpu, devices
        self._last: tuple[float, float, dict[int, float]] | None = None
        self._desktop = shutil.which("busctl") is not None

    def look(self) -> Sight:
        ours = own_processes()
        gpu = "" if self._gpu is None else others_on_gpu(self._gpu, set(ours))  # without a card nobody is on it
        waits = [seconds for seconds in (self._terminal_s(), self._desktop_s()) if seconds is not None]
        return Sight(self._load(ours), gpu, min(waits, default=None))

    def _load(self, ours: dict[int, float]) -> float | None:
        """Since the last look."""
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
        now = time.monotonic(), busy_s, ours
        last, self._last = self._last, now
        if last is None or now[0] - last[0] < 0.1:
            return None
        own_s = sum(max(0.0, spent - last[2].get(pid, spent)) for pid, spent in ours.items())
        share = (busy_s - last[1] - own_s) / (now[0] - last[0]) / (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, share))

    def _terminal_s(self) -> float | None:
        """By when a terminal was read from last, as `w` does it."""
        seen: list[float] = []
        for path in (*self._devices.glob("pts/*"), *self._devices.glob("tty[0-9]*")):
            if _TERMINALS.fullmatch(str(path.relative_to(self._devices))):
                try:
                    seen.append(path.stat().st_atime)
                except OSError:  # closed meanwhile
                    continue
        return max(0.0, time.time() - max(seen)) if seen else None

    def _desktop_s(self) -> float | None:
        if not self._desktop:
            return None
        found: list[float] = []
        for name, path, interface, method in _DESKTOPS:
            command = ["busctl", "--user", "call", name, path, interface, method]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=1.0, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            said = re.fullmatch(r"[tu] (\d+)\s*", done.stdout)
            if done.returncode == 0 and said is not None:
                found.append(int(said[1]) / 1000)
        self._desktop = bool(found)  # a session without a desktop has none later either
        return min(found, default=None)


def name_process() -> None:
    """So that other miners of this user know this one; where a process can't name itself, they don't."""
    try:
        Path("/proc/self/comm").write_text(PROCESS_NAME, encoding="ascii")
    except OSError:
        return


def own_processes() -> dict[int, float]:
    """This user's miners and what they have started: processor seconds by process id."""
    own_uid = os.getuid() if hasattr(os, "getuid") else None
    parents: dict[int, int] = {}
    found: dict[int, psutil.Process] = {}
    ours = {os.getpid()}
    for process in psutil.process_iter(["pid", "ppid", "name", "uids"]):
        info = process.info
        parents[info["pid"]], found[info["pid"]] = info["ppid"] or 0, process
        if info["name"] == PROCESS_NAME and info["uids"] is not None and info["uids"].real == own_uid:
            ours.add(info["pid"])
    spent: dict[int, float] = {}
    for pid, process in found.items():
        if ours.isdisjoint(_line_of(pid, parents)):
            continue
        try:
            times = process.cpu_times()
        except psutil.Error:  # ended, or not ours to ask
            continue
        spent[pid] = times.user + times.system
    return spent


def _line_of(pid: int, parents: dict[int, int]) -> set[int]:
    line: set[int] = set()
    while pid and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line


async def watch_idle(
    rule: IdleRule, look: Callable[[], Sight], rests: Callable[[str], Awaitable[None]], every_s: float = LOOK_EVERY_S
) -> None:
    """For ever: tells ``rests`` why the miner has to rest, or "", with every look."""
    idle, said = Idle(rule, SYSTEM_CLOCK.now_s()), False
    while True:
        sight = await asyncio.to_thread(look)
        why = idle.step(SYSTEM_CLOCK.now_s(), sight)
        if not said:
            said = True
            logger.info("works only while the machine is idle; {}", told(sight))
        await rests(why)
        await asyncio.sleep(every_s)


def told(sight: Sight) -> str:
    """Which of the three can be told on this machine."""
    names = (("user input", sight.input_s), ("others on the GPU", sight.gpu))
    can = ["load of other programs", *(name for name, value in names if value is not None)]
    cannot = [name for name, value in names if value is None]
    return f"looked at: {', '.join(can)}" + (f"; can't be told here: {', '.join(cannot)}" if cannot else "")
