"""What an operator allows this miner: bytes per second up and down, memory of the device; what was used, what it cost.

The two rates hold for peers and store together. ``status.json`` in the miner's directory is always whole, and a line in the
log says it whenever a limit has held something up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from loguru import logger

from miner.settings import MinerSettings
from subnet.net.rate import RateLimit
from subnet.timing import SYSTEM_CLOCK

STATUS_EVERY_S = 10.0
SAY_EVERY = 6
"""Every so many statuses the log may have a line."""


class Flow(msgspec.Struct, frozen=True):
    """One direction; ``held_up_s``: time during which the limit made something wait."""

    bytes: int
    limit_bytes_per_s: float | None
    held_up_s: float


class CapsReport(msgspec.Struct, frozen=True):
    time_ns: int
    upload: Flow
    download: Flow
    device_memory_bytes: int
    """The most that was taken so far."""
    device_memory_limit_bytes: int | None
    reachable: bool
    reach: str


class Caps:
    def __init__(self, settings: MinerSettings) -> None:
        self.upload = RateLimit(settings.upload_bytes_per_s)
        self.download = RateLimit(settings.download_bytes_per_s)
        self.vram_bytes = settings.vram_bytes
        self.reachable, self.reach = True, "not asked yet"
        self._path = settings.directory.expanduser() / "status.json"
        self._said_s = 0.0

    def report(self, device_memory_bytes: int) -> CapsReport:
        return CapsReport(
            time_ns=SYSTEM_CLOCK.wall_ns(),
            upload=_flow(self.upload),
            download=_flow(self.download),
            device_memory_bytes=device_memory_bytes,
            device_memory_limit_bytes=self.vram_bytes,
            reachable=self.reachable,
            reach=self.reach,
        )

    async def keep_status(self, memory_bytes: Callable[[], int]) -> None:
        """For ever."""
        turn = 0
        while True:
            report = self.report(memory_bytes())
            try:
                await asyncio.to_thread(_write, self._path, report)
            except OSError as error:
                logger.warning("{} isn't written: {}", self._path, error)
            held_up_s = report.upload.held_up_s + report.download.held_up_s
            if turn % SAY_EVERY == 0 and held_up_s - self._said_s >= 1.0:
                self._said_s = held_up_s
                logger.info("limits: {}", line(report))
            turn += 1
            await asyncio.sleep(STATUS_EVERY_S)


def line(report: CapsReport) -> str:
    """All of it for the log."""
    memory = f"device memory {report.device_memory_bytes / 1e9:.2f} GB"
    if report.device_memory_limit_bytes is not None:
        memory += f" of {report.device_memory_limit_bytes / 1e9:.2f}"
    return f"up {_shown(report.upload)}, down {_shown(report.download)}, {memory}"


def _shown(flow: Flow) -> str:
    text = f"{flow.bytes / 1e6:.1f} MB"
    if flow.limit_bytes_per_s is None:
        return text
    return f"{text} (limit {flow.limit_bytes_per_s / 1e6:g} MB/s, held up {flow.held_up_s:.1f} s)"


def _flow(limit: RateLimit) -> Flow:
    return Flow(limit.used_bytes, limit.bytes_per_s, round(limit.waited_s, 3))


def _write(path: Path, report: CapsReport) -> None:
    temporary = path.with_suffix(".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    temporary.replace(path)
