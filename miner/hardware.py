"""What this machine computes on: the device, its name, and the torch settings every process of a run shares."""

from __future__ import annotations

import torch

from subnet.errors import ConfigError
from subnet.model.stage import prepare_torch

__all__ = ["choose_device", "prepare_torch"]


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
