"""A second writing of ``docs/arithmetic.md`` §14: lanes, whole tensors, one after the other, in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.entry import F32, Entry, scalar
from benchmarks.reference import Reference
from benchmarks.reference_optimizers import begin, update
from benchmarks.setting import lane_rows


class LaneReference(Reference):
    """A run with lanes; ``step(r)`` is round r. What :class:`Reference` calls a microbatch is a lane here."""

    @property
    def num_items(self) -> int:
        return self.config.lanes.count

    def _chosen_qmax(self) -> int:
        bits = self.config.lanes.pseudo_gradient_bits
        return super()._chosen_qmax() if bits == 16 else 2 ** (bits - 1) - 1

    def clip_norm(self) -> float:
        return 0.0

    def microbatch(self, t: int, m: int) -> float:
        """Leaves what lane ``m`` changed in ``.grad`` of the leaves and gives its mean loss."""
        config = self.config
        steps, each = config.lanes.inner_steps, config.pipeline.microbatches
        own = {leaf: self._own(entry) for entry in self.entries for leaf in entry.leaves}
        for leaf, entry in own.items():
            self.parameters[leaf].data = entry.weight
        first, losses = max(t, 0) * steps, list[float]()
        for h in range(steps):
            sums: dict[str, Tensor] = {}
            for j in range(each):
                losses.append(self._back_propagate(lane_rows(config, self.tokens, t, m, h * each + j + 1)))
                for leaf in own:
                    gradient = self._gradient(leaf)
                    sums[leaf] = sums[leaf] + gradient if j else gradient
            for leaf, entry in own.items():
                update(config, entry, self._clipped(sums[leaf], each) * scalar(1 / each), first + h, since=first)
        for entry in self.entries:
            for leaf in entry.leaves:
                self.parameters[leaf].data = entry.weight
                self.parameters[leaf].grad = entry.weight - own[leaf].weight
        total = 0.0
        for loss in losses:
            total += loss
        return float(F32(total / len(losses)))

    def _own(self, entry: Entry) -> Entry:
        """A lane's copy of a leaf, with moments of zero."""
        own = dataclasses.replace(entry, weight=entry.weight.clone(), codes={})
        begin(self.config, own)
        return own

    def _gradient(self, leaf: str) -> Tensor:
        gradient = self.parameters[leaf].grad
        return torch.zeros(self.parameters[leaf].shape) if gradient is None else gradient.clone()

    def _clipped(self, total: Tensor, each: int) -> Tensor:
        bound = self.config.lanes.inner_clip_norm
        norm = float(torch.linalg.vector_norm(total.double())) / each
        return total * scalar(bound / (norm + 1e-6)) if bound and norm > bound else total

    def _update(self, entry: Entry, gradient: Tensor, coefficient: float, t: int) -> None:
        settings = self.config.lanes
        g = gradient * scalar(coefficient / len(entry.leaves))
        momentum = scalar(settings.outer_momentum)
        entry.m.mul_(momentum).add_(g)
        ahead = g + entry.m * momentum
        entry.weight.sub_(ahead * scalar(settings.outer_learning_rate))

    def _arrays_of(self, entry: Entry) -> dict[str, NDArray[Any]]:
        return {
            "weight": entry.weight.numpy(),
            "outer_momentum": entry.m.numpy(),
            "decayed": entry.decayed,
            "limit": entry.limit,
        }
