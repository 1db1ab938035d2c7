"""NVIDIA's management library through its own Python module: what a card says of itself, and who else computes on it.

A card's number is CUDA's where all cards are seen in the order of their buses; ``CUDA_VISIBLE_DEVICES`` is followed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

BUSY_PERCENT = 10
"""A program that draws windows uses less."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """None: this card doesn't say."""

    name: str
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    used_bytes: int | None
    total_bytes: int | None
    use: float | None
    clock_mhz: float | None


def nvml() -> Any:
    """The module, initialised; None where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def card_of(number: int, library: Any = None) -> Card | None:
    """What card ``number`` says; None where there is no driver or no such card. Takes some milliseconds."""
    module: Any = library or nvml()
    handle = _handle(module, number)
    if handle is None:
        return None

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except module.NVMLError:
            return None

    memory = ask(lambda: module.nvmlDeviceGetMemoryInfo(handle))
    milliwatt = ask(lambda: module.nvmlDeviceGetPowerUsage(handle))
    limit = ask(lambda: module.nvmlDeviceGetEnforcedPowerLimit(handle))
    rates = ask(lambda: module.nvmlDeviceGetUtilizationRates(handle))
    return Card(
        name=str(ask(lambda: module.nvmlDeviceGetName(handle)) or f"GPU {number}"),
        temperature_c=ask(lambda: module.nvmlDeviceGetTemperature(handle, module.NVML_TEMPERATURE_GPU)),
        power_w=None if milliwatt is None else milliwatt / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        use=None if rates is None else rates.gpu / 100,
        clock_mhz=ask(lambda: module.nvmlDeviceGetClockInfo(handle, module.NVML_CLOCK_SM)),
    )


def others_on_gpu(number: int, ours: set[int], library: Any = None) -> str | None:
    """Name of a process that isn't of ``ours`` and computes on the card, "" for none; None where it can't be told.

    In a container the driver's process ids are the host's: where our own isn't among them, nothing follows.
    """
    module: Any = library or nvml()
    handle = _handle(module, number)
    if handle is None:
        return None
    try:
        pids = {int(process.pid) for process in module.nvmlDeviceGetComputeRunningProcesses(handle)}
    except module.NVMLError:
        return None
    try:
        samples = module.nvmlDeviceGetProcessUtilization(handle, 0)
        pids |= {int(sample.pid) for sample in samples if sample.smUtil >= BUSY_PERCENT}
    except module.NVMLError:
        samples = []  # not every card keeps them: those that compute are known all the same
    others = sorted(pid for pid in pids - ours if _alive(pid))
    return f"process {others[0]}" if others else ""


def count_cards() -> int:
    module = nvml()
    return 0 if module is None else int(module.nvmlDeviceGetCount())


def _handle(module: Any, number: int) -> Any:
    if module is None:
        return None
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    try:
        if visible and number < len(visible) and not visible[number].isdigit():
            return module.nvmlDeviceGetHandleByUUID(visible[number])
        return module.nvmlDeviceGetHandleByIndex(int(visible[number]) if number < len(visible) else number)
    except module.NVMLError:
        return None


def _alive(pid: int) -> bool:
    """A host's process that this container doesn't see says nothing."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
