"""What this machine computes on: the device, how much of its memory, and the torch settings every process of a run shares."""

from __future__ import annotations

import torch

from subnet.errors import ConfigError
from subnet.model.stage import prepare_torch

__all__ = ["choose_device", "limit_memory", "memory_taken", "prepare_torch"]


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
