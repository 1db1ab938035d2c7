"""What this machine computes on: the device, how much of its memory, and the torch settings every process of a run shares."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from subnet.errors import ConfigError
from subnet.model.stage import prepare_torch

__all__ = [
    "choose_device",
    "free_memory",
    "give_memory_back",
    "gpu_number",
    "limit_memory",
    "matmul_flops",
    "memory_taken",
    "prepare_torch",
]

CUDA_CONTEXT_BYTES = 512 << 20
"""What a second process takes of a CUDA device before it computes anything."""
_MEMINFO = Path("/proc/meminfo")
_UNKNOWN_BYTES = 1 << 62


def choose_device(wanted: str) -> str:
    """``auto``: the CUDA device with most free memory where there is one; else the name is checked."""
    if wanted == "auto":
        return _freest() if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device = {wanted!r} is no device", hint="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device = {wanted!r}: this torch finds no CUDA device", hint="use --device auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        most = torch.cuda.device_count() - 1
        raise ConfigError(f"--device = {wanted!r}: there is no such device", hint=f"allowed: cuda:0 to cuda:{most}")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device = {wanted!r} is not allowed", hint="auto, cpu, cuda or cuda:N")
    return wanted


def _freest() -> str:
    """The CUDA device with most free memory; one alone isn't asked, since asking takes a context."""
    count = torch.cuda.device_count()
    if count == 1:
        return "cuda"
    free_bytes = [torch.cuda.mem_get_info(number)[0] for number in range(count)]
    return f"cuda:{free_bytes.index(max(free_bytes))}"


def limit_memory(device: str, limit_bytes: int | None) -> None:
    """Never take more of a CUDA device than this; on the CPU the limit bounds the retained graphs (see the settings)."""
    found = torch.device(device)
    if limit_bytes is None or found.type != "cuda":
        return
    total_bytes = torch.cuda.get_device_properties(found).total_memory
    if limit_bytes > total_bytes:
        raise ConfigError(f"--limit.vram = {limit_bytes}, the device has {total_bytes} bytes", hint="a smaller one")
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, found)


def memory_taken(device: str) -> int:
    """The most that this process has taken of a CUDA device so far; 0 for the CPU."""
    found = torch.device(device)
    return torch.cuda.max_memory_reserved(found) if found.type == "cuda" else 0


def free_memory(device: str, limit_bytes: int | None = None) -> int:
    """Bytes that a second process could take now without pushing this one out; ``limit_bytes``: of both on a CUDA device."""
    found = torch.device(device)
    if found.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(found)[0]
        if limit_bytes is not None:
            free_bytes = min(free_bytes, limit_bytes - torch.cuda.memory_reserved(found))
        return max(0, free_bytes - CUDA_CONTEXT_BYTES)
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return _UNKNOWN_BYTES  # another system: nobody knows
    kib = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(next(kib, _UNKNOWN_BYTES >> 10)) << 10


def gpu_number(wanted: str) -> int | None:
    """Which CUDA device a miner with this ``--device`` uses; None: the processor."""
    device = torch.device(choose_device(wanted))
    return (device.index or 0) if device.type == "cuda" else None


def give_memory_back() -> None:
    """What a turn that has ended left in caches; a CUDA context of half a gigabyte stays with the process."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def matmul_flops(
    name: str, kind: str, *, seconds: float, size: int = 0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP/s of a square matrix product in ``fp32`` or ``bf16``, the best of those done in the time.

    ``size``: of its sides; 0: 4096 on a card, 512 on a processor.
    """
    where = torch.device(name)
    size = size or (4096 if where.type == "cuda" else 512)
    one = torch.ones(size, size, device=where, dtype=torch.float32 if kind == "fp32" else torch.bfloat16)

    def once() -> float:
        began = clock()
        torch.mm(one, one)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return clock() - began

    once()  # the first pays for the library's start
    best, until = once(), clock() + seconds
    while clock() < until:
        best = min(best, once())
    return 2.0 * size**3 / best
