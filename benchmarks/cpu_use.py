"""CPU seconds of the processes that this one has started, and theirs: from the kernel, user and system time together."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def descendants_cpu_s(pid: int | None = None) -> float:
    """Of all that live now below ``pid`` (this process): itself left out."""
    children: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        number = int(entry.name)
        children[int(fields[1])].append(number)
        used[number] = (int(fields[11]) + int(fields[12])) / _TICKS
    total, waiting = 0.0, list(children[pid or os.getpid()])
    while waiting:
        number = waiting.pop()
        total += used.get(number, 0.0)
        waiting += children[number]
    return total
