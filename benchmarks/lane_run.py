"""One run of the lanes benchmark: the project's own lanes, sums, scales and outer step in one process, in one stage.

What is not the run's arithmetic: the inner AdamW is torch's fused one (equal to a part in a million, three times faster),
and three things that runs don't have: moments that are kept from round to round, the largest elements alone, and what was
not sent being added to the next round's pseudo-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.setting import holdout_rows, lane_rows, training_rows
from subnet.engine.lane import Lane
from subnet.engine.stage_state import MergedSection, StageState
from subnet.model.checkpoints import initial_weights
from subnet.model.chunk import ChunkInput, GradientSum, LossShape, backward_chunk, forward_chunk
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.snapshots import decode_manifest
from subnet.model.stage import StageModule, prepare_torch
from subnet.numerics.fixed_point import PartialSum, add_item_to_sections, power_of_two
from subnet.numerics.layout import Section, block_lengths
from subnet.numerics.packing import packed_size
from subnet.numerics.slices import sum_bits
from subnet.run.config import RunConfig
from subnet.run.schedule import AS_FILED, Terms, bits_fp32, fp32_bits, inner_scalars, step_scalars
from subnet.words import CALIBRATION_STEP, ItemKey

Tokens = NDArray[Any]
Moments = dict[str, Tensor]


@dataclass(frozen=True)
class Variant:
    """``inner_steps`` 1: a merge each step."""

    name: str
    inner_steps: int
    qmax: int = 0
    """Of one lane's integers; 0: the run's choice."""
    keep: bool = False
    """A lane's moments outlive the round."""
    share: float = 1.0
    """Of each tensor's elements, the largest, that are sent."""
    feedback: bool = False
    """What was not sent is added to the next pseudo-gradient."""
    outer: tuple[float, float] = (0.7, 0.9)
    """Learning rate and momentum."""

    @property
    def is_sync(self) -> bool:
        return self.inner_steps == 1


class FastLane(Lane):
    """A lane with torch's AdamW, whose moments may be brought along."""

    def prepare(self) -> None:
        """Its tensors as torch's optimizer wants them; once."""
        settings = self.config.optimizer
        self.parameters = {leaf.name: nn.Parameter(leaf.master, requires_grad=True) for leaf in self.module.bound}
        groups = [
            {"params": [p for p in self.parameters.values() if (p.ndim >= 2) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True
        )
        self.kept: dict[int, dict[Tensor, Moments]] = {}
        """By lane: the optimizer's state at the end of the last round."""
        self.keeps = False

    def begin(self, item: ItemKey, terms: Terms) -> None:
        super().begin(item, terms)
        self.optimizer.state.clear()
        for parameter, state in self.kept.get(item.microbatch, {}).items():
            self.optimizer.state[parameter] = state

    def moments(self) -> dict[int, dict[str, Moments]]:
        """What is kept, by lane and tensor."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        return {lane: {names[p]: dict(state) for p, state in kept.items()} for lane, kept in self.kept.items()}

    def set_moments(self, moments: dict[int, dict[str, Moments]]) -> None:
        self.kept = {
            lane: {self.parameters[name]: state for name, state in kept.items()} for lane, kept in moments.items()
        }

    def end(self) -> None:
        """The moments are remembered, if they are to be."""
        if self.keeps and self.item.step != CALIBRATION_STEP:
            self.kept[self.item.microbatch] = dict(self.optimizer.state)

    def _update(self, inner_step: int) -> None:
        rate = bits_fp32(inner_scalars(self.config, self.item.step, inner_step, AS_FILED).lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        each = self.config.pipeline.microbatches
        for name, gradient in self.gradients().items():
            self.parameters[name].grad = gradient if each == 1 else gradient.div_(each)
        self.optimizer.step()


@dataclass
class Round:
    """What a step or round was: ``lane_bytes`` and ``merged_bytes`` are what a lane sends and gets of the merge."""

    loss: float
    lane_bytes: float
    merged_bytes: float


class LaneRun:
    """A run of a variant. Use: ``calibrate()``, then ``step(0)``, ...; ``holdout_loss()`` at any time."""

    def __init__(self, config: RunConfig, variant: Variant, tokens: Tokens, tokens_holdout: Tokens) -> None:
        prepare_torch(config.precision.num_threads)
        self.config, self.variant = config, variant
        self.tokens, self.tokens_holdout = tokens, tokens_holdout
        model_config = config.model.config or {}
        self.plan: ModelPlan = plan_model(config, load_architecture(model_config), (0,))
        self.state = StageState(self.plan, 0)
        self.state.load_weights(initial_weights(self.plan))
        self._shape = LossShape.of(self.plan)
        (self.section,) = self.state.sections
        self.places = [(index, span.spec.name) for index, span in enumerate(self.section.tensors)]
        self._sums: PartialSum | None = None
        self.residual: dict[int, Tensor] = {}
        """By lane: what it hasn't sent yet."""
        self._lane: FastLane | None = None
        if not variant.is_sync:
            self._lane = FastLane(self.state, {self.section.index: self.places})
            self._lane.prepare()
            self._lane.keeps = variant.keep

    @property
    def updates(self) -> int:
        return self.state.num_updates

    def calibrate(self) -> None:
        self._advance(CALIBRATION_STEP)

    def step(self, t: int) -> Round:
        """Step or round ``t``."""
        return self._advance(t)

    def _gradient(self, module: StageModule, rows: NDArray[np.int64]) -> tuple[dict[str, Tensor], float]:
        tokens = torch.from_numpy(rows)
        summed, loss = GradientSum(), 0.0
        for chunk in tokens.split(len(rows) // self.config.pipeline.chunks):
            given = ChunkInput(tokens_BL=chunk[:, :-1], labels_BL=chunk[:, 1:])
            graph = forward_chunk(module, given, self._shape, grad=True, loss_grad=True)
            backward_chunk(module, graph, None, summed)
            loss += graph.loss.loss.item() if graph.loss is not None else 0.0
        return summed.grads, loss

    def _items(self, t: int) -> list[float]:
        """All items of a step into the sum; their losses."""
        assert self._sums is not None
        losses: list[float] = []
        for item in range(self.config.num_items):
            if self._lane is None:
                grads, loss = self._gradient(self.state.module, training_rows(self.config, self.tokens, t, item))
            else:
                grads, loss = self._run_lane(self._lane, t, item)
            add_item_to_sections([(self._sums, [(index, grads[leaf]) for index, leaf in self.places])])
            losses.append(loss)
        return losses

    def _run_lane(self, lane: FastLane, t: int, number: int) -> tuple[Mapping[str, Tensor], float]:
        lane.begin(ItemKey(t, number, 0), AS_FILED)
        losses: list[float] = []
        for part in range(1, self.config.parts_per_item + 1):
            grads, loss = self._gradient(lane.module, lane_rows(self.config, self.tokens, t, number, part))
            lane.add_part(grads, fp32_bits(loss))
            losses.append(loss)
        lane.end()
        changed = lane.pseudo_gradient()
        if self.variant.feedback or self.variant.share < 1:
            self._choose(changed, t, number)
        return changed, sum(losses) / len(losses)

    def _choose(self, changed: dict[str, Tensor], t: int, number: int) -> None:
        """The pseudo-gradient with what was left before; all but the largest elements stay behind, in place."""
        left = self.residual.setdefault(number, torch.zeros(self.section.num_elements))
        scale = self._scale()
        for index, leaf in self.places:
            span = self.section.tensors[index]
            at = slice(span.element_start, span.element_start + span.num_elements)
            flat = changed[leaf].view(-1)
            if self.variant.feedback and t != CALIBRATION_STEP:
                flat.add_(left[at])
                left[at] = flat
            if self.variant.share < 1:
                count = max(1, math.ceil(self.variant.share * len(flat)))
                least = flat.abs().kthvalue(len(flat) - count + 1).values
                flat.masked_fill_(flat.abs() < least, 0.0)
            if self.variant.feedback and scale is not None:
                qmax = self.section.leaf_qmax
                left[at] -= (flat / scale[at]).round_().clamp_(-qmax, qmax).mul_(scale[at])

    def _scale(self) -> Tensor | None:
        exponents = self.state.exponents(self.section.index)
        if exponents is None:
            return None
        lengths = torch.from_numpy(block_lengths(self.section).astype(np.int64))
        return torch.repeat_interleave(power_of_two(exponents), lengths)

    def _advance(self, t: int) -> Round:
        exponents = self.state.exponents(self.section.index)
        if self._sums is None or exponents is None:
            self._sums = PartialSum(self.section, exponents)
        self._sums.reset(exponents)
        losses = self._items(t)
        values = None if exponents is None else self._sums.values
        merged = {self.section.index: MergedSection(values, self._sums.maxima)}
        if values is None or exponents is None:
            self.state.apply_step(t, merged)
            return Round(sum(losses) / len(losses), 0.0, 0.0)
        count = len(losses)
        coefficient = fp32_bits(self._clip(values, count) / count)
        sent, got = self._bytes(self.section, values)
        self.state.apply_step(t, merged, coefficient_bits=coefficient, scalars=step_scalars(self.config, t))
        return Round(sum(losses) / count, sent, got)

    def _clip(self, values: Tensor, count: int) -> float:
        bound, scale = self.config.merged_clip_norm, self._scale()
        if not bound or scale is None:
            return 1.0
        norm = float(torch.linalg.vector_norm((values * scale).double())) / count
        return min(1.0, bound / (norm + 1e-6))

    def _bytes(self, section: Section, values: Tensor) -> tuple[float, float]:
        """Packed bytes of one item's slice and of the merged sum, block maxima with them.

        Where few elements are sent: the entropy of which ones, and their integers.
        """
        size, maxima = section.num_elements, 4 * section.num_blocks
        widths = [sum_bits(count, section.item_bound) for count in (1, self.config.num_items)]
        if self.variant.share == 1:
            one, whole = (packed_size(size, bits) + maxima for bits in widths)
            return one, whole
        dense = (self.variant.share, int(values.count_nonzero()) / size)
        one, whole = (size * (_entropy(p) + p * bits) / 8 + maxima for p, bits in zip(dense, widths, strict=True))
        return one, whole

    def holdout_loss(self) -> float:
        """Mean over the evaluation's items."""
        losses: list[float] = []
        with torch.no_grad():
            for item in range(self.config.num_evaluation_items):
                rows = torch.from_numpy(holdout_rows(self.config, self.tokens_holdout, item))
                given = ChunkInput(tokens_BL=rows[:, :-1], labels_BL=rows[:, 1:])
                graph = forward_chunk(self.state.module, given, self._shape, grad=False, loss_grad=False)
                losses.append(graph.loss.loss.item() if graph.loss is not None else math.nan)
        return sum(losses) / len(losses)

    # state in and out

    def save(self, path: Path) -> None:
        blobs: dict[str, bytes] = {}
        manifest = self.state.snapshot(lambda blob, data: blobs.update({blob: bytes(data)}))
        kept = {} if self._lane is None else self._lane.moments()
        partial = path.with_suffix(".partial")
        torch.save({"manifest": manifest.encode(), "blobs": blobs, "residual": self.residual, "kept": kept}, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        stored = torch.load(path, weights_only=True)
        self.state.load(decode_manifest(stored["manifest"]), lambda ref: stored["blobs"][ref.hash])
        self.residual = stored["residual"]
        if self._lane is not None:
            self._lane.set_moments(stored["kept"])


def _entropy(share: float) -> float:
    """Bits an element of knowing which ones are of so large a share."""
    if not 0 < share < 1:
        return 0.0
    return -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
