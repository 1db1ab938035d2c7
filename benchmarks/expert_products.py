"""Experts under bf16 in the reference: their matrices are rounded to bf16, as linear layers' are by autocast.

The library's product of experts isn't among what autocast casts; with weights in bf16 it rounds its input as well.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import moe


@contextmanager
def experts_rounded(on: bool) -> Generator[None]:
    """Within the block the library's experts are multiplied in bf16; gradients come back to the fp32 weights."""
    library: Any = moe
    plain = library._grouped_mm

    def rounded(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return plain(input, weight.to(torch.bfloat16), offs)

    library._grouped_mm = rounded if on else plain
    try:
        yield
    finally:
        library._grouped_mm = plain
