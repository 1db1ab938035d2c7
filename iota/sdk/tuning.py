"""Fine-tuning in the words of a trainer: answers of dialogues as the objective, adapters or some layers as what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class SFT(msgspec.Struct, frozen=True, kw_only=True):
    """Supervised fine-tuning: of dialogues (:meth:`iota.Data.from_dialogues`) the answers are learnt.

    Sizes as for :class:`iota.Pretrain`. With ``packing`` several dialogues share a row, none seeing another.
    """

    seq_len: int = 512
    batch_items: int = 8
    item_rows: int = 4
    packing: bool = True

    def tables(self) -> dict[str, dict[str, Any]]:
        """By section of the run file."""
        return {
            "data": {"sequence_length": self.seq_len},
            "pipeline": {"microbatches": self.batch_items, "microbatch_rows": self.item_rows},
            "objective": {"kind": "sft", "packing": self.packing},
        }


class LoRA(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters beside linear layers, as ``peft`` has them; everything else is frozen.

    ``targets``: names of linear layers or their ends (``target_modules``); none: all. ``layers``: decoder layers that get
    adapters; none: all. The adapter's output is multiplied by ``alpha / rank``.
    """

    targets: Sequence[str] = ()
    rank: int = 8
    alpha: float = 16.0
    layers: Sequence[int] = ()

    def section(self) -> dict[str, Any]:
        """``[trainable]``."""
        named = {"targets": list(self.targets), "layers": list(self.layers)}
        return {"kind": "lora", "rank": self.rank, "alpha": self.alpha, **named}


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """Only some decoder layers are trained, and what ``also`` names of ``embedding``, ``norm`` and ``head``."""

    layers: Sequence[int]
    also: Sequence[str] = ()

    def section(self) -> dict[str, Any]:
        """``[trainable]``."""
        return {"kind": "layers", "layers": list(self.layers), "also": list(self.also)}
