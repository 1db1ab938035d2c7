"""The baseline of the parity benchmark: plain PyTorch on the same data, from the same initial weights.

``torch.optim.AdamW``, gradients summed in fp32 by autograd over the microbatches, ``clip_grad_norm_``. With
``update_delay`` 1 each step's gradients are taken at the weights before the last update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rounding import cut_for
from benchmarks.setting import build_model, draw, holdout_rows, learning_rate, norm_start, training_rows
from subnet.run.config import RunConfig


class Plain:
    """A run in one process. Use: ``step(0)``, ``step(1)``, ...; ``holdout_loss()`` at any time."""

    def __init__(
        self,
        config: RunConfig,
        model_config: dict[str, Any],
        tokens: NDArray[Any],
        tokens_holdout: NDArray[Any],
        *,
        cuts: Sequence[int] = (0,),
    ) -> None:
        torch.set_num_threads(config.precision.num_threads)
        self.config, self.tokens, self.tokens_holdout = config, tokens, tokens_holdout
        self.model = build_model(config, model_config, tied=bool(model_config.get("tie_word_embeddings", False)))
        cut_for(config, self.model, cuts)
        self.parameters = dict(self.model.named_parameters())
        deviation = float(model_config.get("initializer_range", 0.02))
        for name, parameter in self.parameters.items():
            parameter.data = draw(name, tuple(parameter.shape), config.run.seed, deviation, norm_start(model_config))
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in self.parameters.values() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
        )
        self.before = [p.detach().clone() for p in self.parameters.values()] if config.pipeline.update_delay else []
        self.updates = 0

    def _exchange(self) -> None:
        """The weights before the last update take the place of the newest, or give it back."""
        for at, parameter in enumerate(self.parameters.values() if self.before else ()):
            self.before[at], parameter.data = parameter.data, self.before[at]

    def _loss(self, rows: NDArray[np.int64]) -> Tensor:
        tokens = torch.from_numpy(rows)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.precision.compute == "bf16"):
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].reshape(-1))

    def step(self, t: int) -> float:
        """Update ``t``; gives its mean loss."""
        microbatches = self.config.pipeline.microbatches
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, t)
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        self._exchange()
        for m in range(microbatches):
            loss = self._loss(training_rows(self.config, self.tokens, t, m))
            (loss / microbatches).backward()
            total += loss.item()
        self._exchange()
        for before, parameter in zip(self.before, self.parameters.values(), strict=False):
            before.copy_(parameter.data)
        if self.config.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        self.optimizer.step()
        self.updates = t + 1
        return total / microbatches

    def holdout_loss(self) -> float:
        with torch.no_grad():
            items = range(self.config.num_evaluation_items)
            losses = [self._loss(holdout_rows(self.config, self.tokens_holdout, item)).item() for item in items]
        return sum(losses) / len(losses) if losses else math.nan

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial.pt")
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "before": self.before,
        }
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for before, stored in zip(self.before, state["before"], strict=True):
            before.copy_(stored)
        self.updates = int(state["updates"])
