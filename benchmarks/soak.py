"""An hour in which about a third of the rounds is disturbed: memory, descriptors and disk of every process stay flat.

4 stages, 8 miners, faults that end no process (pause, slow, partition, corrupt, store outage), so that what a failed round
leaves behind would add up. Every 5 s each process's resident memory and open descriptors are read from the kernel, and the
bytes under the store's and the miners' directories are added up. A line is fitted to each process's memory after the first
third. Samples go to ``benchmarks/out/soak/samples.ndjson``; a picture of them is drawn beside it.

    python -m benchmarks.soak                  # 60 minutes
    python -m benchmarks.soak --minutes 20
    python -m benchmarks.soak --quick          # under a minute, no limits on slopes
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from benchmarks.churn import churn_config
from benchmarks.corpus import OUT
from iota.chaos.journal import ChaosJournal, Entry, read_journal
from iota.chaos.plan import Kind, make_plan
from iota.chaos.run import ChaosOptions, storm
from iota.chaos.swarm import ChaosSwarm, OwnGround
from iota.chaos.verdict import ChaosResult, Demands, false_evictions
from iota.swarm import SwarmOptions
from subnet.protocol.api import RunStatus

DIRECTORY = OUT / "soak"
MINERS, ENDLESS = 8, 1_000_000
KINDS = (Kind.PAUSE, Kind.SLOW, Kind.PARTITION, Kind.CORRUPT, Kind.STORE_OUTAGE)
SAMPLE_S = 5.0
MTBF_S = 4.0
"""Steps take about a second, and a disruption disturbs one or two of them."""
SLOPE_SHARE_PER_H = 0.05
DISK_BYTES = 2 << 30
NEW_DESCRIPTORS = 16


class Sample(msgspec.Struct, frozen=True):
    """``seconds`` since the first; MiB of resident memory and open descriptors by process; bytes on disk by directory."""

    seconds: float
    step: int
    memory_mib: dict[str, float]
    descriptors: dict[str, int]
    disk_bytes: dict[str, int]


def tree_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue  # deleted between the listing and the look
    return total


def of_process(pid: int) -> tuple[float, int] | None:
    """(resident MiB, open descriptors), None for a process that has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None


class Sampler:
    def __init__(self, swarm: ChaosSwarm, path: Path) -> None:
        self._swarm, self._path = swarm, path
        self._began = self._last = time.monotonic()
        self.samples: list[Sample] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    def take(self, status: RunStatus) -> None:
        now = time.monotonic()
        if self.samples and now - self._last < SAMPLE_S:
            return
        self._last = now
        found = {
            name: of_process(child.pid)
            for name, child in self._swarm.parent.children.items()
            if child.running and child.pid is not None
        }
        seen = {name: each for name, each in found.items() if each is not None}
        sample = Sample(
            now - self._began,
            status.summary.step,
            {name: each[0] for name, each in seen.items()},
            {name: each[1] for name, each in seen.items()},
            {name: tree_bytes(self._swarm.directory / name) for name in ("store", "miners", "validator")},
        )
        self.samples.append(sample)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")


def slopes(samples: list[Sample]) -> dict[str, float]:
    """Change of memory an hour as a share of its median, by process, after the first third of the time."""
    late = [sample for sample in samples if sample.seconds >= samples[-1].seconds / 3]
    found: dict[str, float] = {}
    for name in late[-1].memory_mib:
        points = [(sample.seconds, sample.memory_mib[name]) for sample in late if name in sample.memory_mib]
        if len(points) >= 3:
            seconds, memory = np.array(points).T
            found[name] = float(np.polyfit(seconds, memory, 1)[0] * 3600 / np.median(memory))
    return found


def new_descriptors(samples: list[Sample]) -> dict[str, int]:
    """How many more a process has in the last third than in the middle one, by the medians."""
    thirds = [samples[len(samples) * i // 3 : len(samples) * (i + 1) // 3] for i in range(3)]

    def usual(part: Iterable[Sample], name: str) -> float:
        return median([sample.descriptors[name] for sample in part if name in sample.descriptors] or [0])

    return {name: round(usual(thirds[2], name) - usual(thirds[1], name)) for name in samples[-1].descriptors}


def longest_stall_with_store_s(samples: list[Sample], entries: Iterable[Entry]) -> float:
    """The longest time between two steps, less what of it the store was away or refused: nothing can be sealed then.

    A store that is only slow counts as there. From the samples, so good to ``SAMPLE_S``.
    """
    began: dict[int | None, float] = {}
    outages: list[tuple[float, float]] = []
    start = 0.0
    for entry in entries:
        start = start or (entry.time if entry.what == "started" else 0.0)
        if entry.kind != Kind.STORE_OUTAGE:
            continue
        if entry.what == "began" and not entry.outcome.startswith("slow"):
            began[entry.number] = entry.time
        elif entry.what == "ended" and entry.number in began:
            outages.append((began.pop(entry.number) - start, entry.time - start))
    longest, since = 0.0, samples[0]
    for sample in samples[1:]:
        if sample.step != since.step:
            away = sum(max(0.0, min(b, sample.seconds) - max(a, since.seconds)) for a, b in outages)
            longest, since = max(longest, sample.seconds - since.seconds - away), sample
    return longest


def draw(samples: list[Sample], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    figure, (memory, descriptors, disk) = pyplot.subplots(1, 3, figsize=(13, 3.8), dpi=120)
    try:
        for name in sorted(samples[-1].memory_mib):
            nan = float("nan")
            memory.plot(minutes, [sample.memory_mib.get(name, nan) for sample in samples], linewidth=1, label=name)
            descriptors.plot(minutes, [sample.descriptors.get(name, nan) for sample in samples], linewidth=1)
        for name in samples[-1].disk_bytes:
            disk.plot(minutes, [sample.disk_bytes[name] / 1e6 for sample in samples], linewidth=1.4, label=name)
        for axes, title in ((memory, "resident MiB"), (descriptors, "open descriptors"), (disk, "MB on disk")):
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xlabel("minutes")
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", linewidth=0.4, color="#dddddd")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        memory.legend(frameon=False, fontsize=6, ncol=2)
        disk.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        pyplot.close(figure)


def soak(minutes: float) -> tuple[ChaosResult, list[Sample]]:
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(parents=True)
    plan = make_plan(1, minutes * 60, MTBF_S, KINDS)
    swarm = ChaosSwarm(DIRECTORY / "swarm", churn_config(ENDLESS), MINERS, SwarmOptions(measure_costs=False))
    options = ChaosOptions(until_finished=False, poll_s=1.0)
    with ChaosJournal(DIRECTORY / "chaos.ndjson") as journal, swarm:
        sampler = Sampler(swarm, DIRECTORY / "samples.ndjson")
        result = storm(
            OwnGround(swarm),
            plan,
            journal,
            lambda: swarm.status(20),
            options,
            minutes * 60 + 600,
            on_status=sampler.take,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    shutil.rmtree(DIRECTORY / "swarm", ignore_errors=True)
    return result, sampler.samples


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args(arguments)
    minutes = 0.4 if options.quick else options.minutes
    result, samples = soak(minutes)
    draw(samples, DIRECTORY / "soak.png")
    steps = samples[-1].step
    rises = slopes(samples)
    figures = {
        "minutes": round(samples[-1].seconds / 60, 1),
        "steps": steps,
        "num_disruptions": sum(done.happened for done in result.done),
        "memory_share_per_h": {name: round(rise, 4) for name, rise in rises.items()},
        "largest_memory_share_per_h": max(rises.values(), default=0.0),
        "most_new_descriptors": max(new_descriptors(samples).values()),
        "most_disk_bytes": max(max(sample.disk_bytes.values()) for sample in samples),
        "longest_stall_s": max((stall.seconds for stall in result.stalls), default=0.0),
        "longest_stall_with_store_s": longest_stall_with_store_s(samples, read_journal(DIRECTORY / "chaos.ndjson")),
        "false_evictions": len(false_evictions(result, Demands())),
        "num_died": len(result.died),
    }
    limits = {
        "largest_memory_share_per_h": SLOPE_SHARE_PER_H,
        "most_new_descriptors": NEW_DESCRIPTORS,
        "most_disk_bytes": DISK_BYTES,
        "longest_stall_with_store_s": 60.0,
        "false_evictions": 0,
        "num_died": 0,
    }
    if options.quick:
        limits.pop("largest_memory_share_per_h")
    ok = not result.error and steps > 0 and all(figures[name] <= limit for name, limit in limits.items())
    print(json.dumps({"name": "soak", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
