"""What this machine computes on: the device, how much of its memory, and the torch settings every process of a run shares."""

from __future__ import annotations

from pathlib import Path

import torch

from subnet.errors import ConfigError
from subnet.model.stage import prepare_torch

__all__ = ["choose_device", "free_memory", "limit_memory", "memory_taken", "prepare_torch"]

CUDA_CONTEXT_BYTES = 512 << 20
"""What a second process takes of a CUDA device before it computes anything."""
_MEMINFO = Path("/proc/meminfo")
_UNKNOWN_BYTES = 1 << 62


def choose_device(wanted: str) -> str:
    """``auto``: CUDA where there is one; else the name is checked."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device = {wanted!r} is no device", hint="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device = {wanted!r}: this torch finds no CUDA device", hint="use --device auto or cpu")
    return wanted


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
