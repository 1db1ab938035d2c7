"""What a training run is, in the words of a trainer; each is a part of the run file and is checked as one.

A plain dict with a section's keys may stand for each of them, so whatever a run file can say can be said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from iota.sdk.tuning import SFT, Layers, LoRA
from subnet.errors import ConfigError
from subnet.run.config import RunConfig
from subnet.run.runfile import run_of_table

Section = Mapping[str, Any]


class Pretrain(msgspec.Struct, frozen=True, kw_only=True):
    """Next-token prediction on packed text.

    A step is ``batch_items`` items of ``item_rows`` rows of ``seq_len`` tokens. An item is what one miner computes at a
    time (a microbatch); the gradients of all items of a step are summed.
    """

    seq_len: int = 128
    batch_items: int = 8
    item_rows: int = 4

    def tables(self) -> dict[str, dict[str, Any]]:
        """By section of the run file."""
        return {
            "data": {"sequence_length": self.seq_len},
            "pipeline": {"microbatches": self.batch_items, "microbatch_rows": self.item_rows},
        }


class AdamW(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW with decoupled weight decay, not on norms and biases; ``clip_norm`` 0 switches clipping off.

    ``state_bits`` 8: moments in a byte each, which halves the state. ``decay_embeddings`` False: nor on the embedding.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    state_bits: int = 32
    decay_embeddings: bool = True

    def section(self) -> dict[str, Any]:
        """``[optimizer]``."""
        return {
            "kind": "adamw",
            "learning_rate": self.lr,
            "betas": list(self.betas),
            "epsilon": self.eps,
            "weight_decay": self.weight_decay,
            "clip_norm": self.clip_norm,
            "state_bits": self.state_bits,
            "decay_embeddings": self.decay_embeddings,
        }


class Muon(msgspec.Struct, frozen=True, kw_only=True):
    """Muon for hidden matrices and experts, AdamW with ``betas`` and ``eps`` for the rest; ``lr`` fits both."""

    lr: float = 1e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def section(self) -> dict[str, Any]:
        """``[optimizer]``."""
        plain = AdamW(
            lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, clip_norm=self.clip_norm
        )
        return {**plain.section(), "kind": "muon", "momentum": self.momentum}


class Cosine(msgspec.Struct, frozen=True, kw_only=True):
    """Linear warm-up, then half a cosine down to ``final_fraction`` of the learning rate at ``steps``."""

    steps: int = 100
    warmup_steps: int = 0
    final_fraction: float = 0.1

    def section(self) -> dict[str, Any]:
        """``[schedule]``."""
        return {"kind": "cosine", "warmup_steps": self.warmup_steps, "final_fraction": self.final_fraction}


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """Linear warm-up, then the same learning rate until ``steps``."""

    steps: int = 100
    warmup_steps: int = 0

    def section(self) -> dict[str, Any]:
        """``[schedule]``."""
        return {"kind": "constant", "warmup_steps": self.warmup_steps}


class Linear(msgspec.Struct, frozen=True, kw_only=True):
    """Linear warm-up, then straight down to ``final_fraction`` of the learning rate at ``steps``."""

    steps: int = 100
    warmup_steps: int = 0
    final_fraction: float = 0.1

    def section(self) -> dict[str, Any]:
        """``[schedule]``."""
        return {"kind": "linear", "warmup_steps": self.warmup_steps, "final_fraction": self.final_fraction}


class WSD(msgspec.Struct, frozen=True, kw_only=True):
    """Linear warm-up, a plateau, and a fall over the last ``decay_fraction`` of the steps, ``linear`` or ``sqrt`` (1 - sqrt)."""

    steps: int = 100
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    final_fraction: float = 0.0
    decay_shape: str = "linear"

    def section(self) -> dict[str, Any]:
        """``[schedule]``."""
        return {
            "kind": "wsd",
            "warmup_steps": self.warmup_steps,
            "decay_fraction": self.decay_fraction,
            "final_fraction": self.final_fraction,
            "decay_shape": self.decay_shape,
        }


Optimizer = AdamW | Muon
Schedule = Cosine | Linear | Constant | WSD


def make_config(
    *,
    name: str,
    seed: int,
    steps: int | None,
    stages: int,
    model: Section,
    data: Section,
    objective: Pretrain | SFT | Section,
    optimizer: Optimizer | Section,
    schedule: Schedule | Section,
    sections: Mapping[str, Section],
    trainable: LoRA | Layers | Section | None = None,
) -> RunConfig:
    """The run of these settings; ``sections`` come last and override. Raises ConfigError as for a run file."""
    wanted_steps = steps if steps is not None else getattr(schedule, "steps", None)
    if wanted_steps is None:
        raise ConfigError("the number of steps is missing", hint="give steps=..., or schedule=iota.Cosine(steps=...)")
    table: dict[str, dict[str, Any]] = {
        "run": {"name": name, "seed": seed, "steps": wanted_steps},
        "model": dict(model),
        "data": dict(data),
        "pipeline": {"stages": stages},
        "objective": {} if isinstance(objective, Pretrain | SFT) else dict(objective),
        "optimizer": optimizer.section() if isinstance(optimizer, Optimizer) else dict(optimizer),
        "schedule": schedule.section() if isinstance(schedule, Schedule) else dict(schedule),
    }
    if trainable is not None:
        table["trainable"] = trainable.section() if isinstance(trainable, LoRA | Layers) else dict(trainable)
    more = objective.tables() if isinstance(objective, Pretrain | SFT) else {}
    for section, values in (*more.items(), *sections.items()):
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{section} = {values!r} is not allowed", hint=f"{section} takes a section's keys: {section}={{...}}"
            )
        table.setdefault(section, {}).update(values)
    return run_of_table(table, Path.cwd())
