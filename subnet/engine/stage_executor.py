"""Forward and backward of microbatches at one stage: the same bits whether a graph was kept or the work is redone.

One compute thread calls this; there is no locking and no waiting. An item is added to a partial as a whole or not at all.
Without lanes an item is a microbatch; with them it is a lane (:mod:`subnet.engine.lane`), of parts that come in order.
Hold-out items (``microbatch >= num_items``) run without gradients and may be non-finite: their loss is a report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subnet.engine.graph_size import measured_forward
from subnet.engine.lane import Lane, Lanes
from subnet.engine.stage_state import StageState
from subnet.errors import InputError, IotaError
from subnet.model.chunk import ChunkGraph, ChunkInput, GradientSum, LossShape, backward_chunk, forward_chunk
from subnet.model.device_copies import Outgoing
from subnet.model.items import (
    Buffer,
    ItemFailed,
    ItemShape,
    check_finite,
    check_gradients,
    exception_failure,
    failing,
    gradient_failure,
    sum_bits,
)
from subnet.model.plan import ModelPlan
from subnet.model.stage import Boundary, StageModule
from subnet.numerics.fixed_point import ItemStats, NonFiniteGradient, PartialSum, add_item_to_sections
from subnet.run.schedule import AS_FILED, Terms
from subnet.timing import SYSTEM_CLOCK, Clock
from subnet.words import CALIBRATION_STEP, ItemKey

__all__ = [
    "BackwardResult",
    "ForwardResult",
    "ItemFailed",
    "PartialBroken",
    "PartialKey",
    "StageExecutor",
    "StagePartial",
]


class PartialBroken(IotaError):
    """An addition was interrupted half-way: the partial is gone and must be reported void."""

    code = "partial_broken"


class PartialKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One accumulator: a step's partial under one incarnation (term, number) and epoch."""

    step: int
    term: int
    number: int
    epoch: int


@dataclass
class StagePartial:
    """Sums by section, over these microbatches."""

    key: PartialKey
    sums: dict[int, PartialSum]
    microbatches: set[int] = field(default_factory=set[int])
    num_clipped: int = 0


@dataclass(frozen=True)
class ForwardResult:
    output: memoryview | None
    """Hidden states (rows, L, H) in the run's code, or None at the last stage."""
    loss_bits: int | None
    """fp32 bits of the microbatch's mean loss, at the last stage."""
    compute_s: float


@dataclass(frozen=True)
class BackwardResult:
    output: memoryview | None
    """Gradient of the stage's input in the run's code, or None at the first stage."""
    loss_bits: int | None
    """fp32 bits of the microbatch's mean loss at the last stage; with a lane's last part those of the lane's mean loss."""
    stats: ItemStats | None
    """None for a replay, which adds nothing, and for a lane's parts before the last."""
    compute_s: float


class StageExecutor:
    """Works items of one stage on one device; see :meth:`forward` and :meth:`backward`."""

    def __init__(
        self,
        plan: ModelPlan,
        stage: int,
        state: StageState,
        *,
        graph_budget_bytes: int,
        fused: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.plan, self.stage, self.state = plan, stage, state
        self.graph_budget_bytes = graph_budget_bytes
        self.item_graph_bytes: int | None = None
        """Bytes that one item's graph holds, known after the first that was kept."""
        self.partials: dict[PartialKey, StagePartial] = {}
        self._graphs: dict[tuple[ItemKey, int], list[ChunkGraph]] = {}
        """By item and part."""
        self._spare: list[dict[int, PartialSum]] = []
        self._fused, self._clock = fused, clock
        self._is_first, self._is_last = plan.is_first(stage), plan.is_last(stage)
        self._shape = ItemShape.of(plan)
        self._chunks = self._shape.chunks
        self._loss_shape = LossShape.of(plan)
        self._places: dict[int, list[tuple[int, str]]] = {}
        """By section: (index of the tensor, leaf) of every gradient."""
        for section in state.sections:
            index_of = {span.spec.name: i for i, span in enumerate(section.tensors)}
            self._places[section.index] = [
                (index_of[leaf.tensor], leaf.name) for leaf in state.module.bound if leaf.tensor in index_of
            ]
        self._lanes = Lanes(state, self._places)
        self.terms: Terms = AS_FILED
        """What the run's owner has said of learning rates, in force where a lane begins."""

    @property
    def retained_bytes(self) -> int:
        return len(self._graphs) * (self.item_graph_bytes or 0)

    @property
    def retained(self) -> tuple[ItemKey, ...]:
        """Items with a graph that waits for its backward."""
        return tuple(dict.fromkeys(item for item, _ in self._graphs))

    @property
    def lanes(self) -> tuple[ItemKey, ...]:
        """Lanes that have begun and not ended."""
        return tuple(self._lanes.live)

    @property
    def lane_bytes(self) -> int:
        """What one lane that lives holds: weights, moments and a gradient (0 before the first has begun)."""
        return self._lanes.size_bytes

    def lane_next(self, item: ItemKey) -> int:
        """The part of the lane whose backward is due."""
        return self._lanes.next_part(item)

    def can_retain(self) -> bool:
        """Whether one more graph fits the budget; the first is always tried, and measured."""
        if self.item_graph_bytes is None:
            return self.graph_budget_bytes > 0
        return self.retained_bytes + self.item_graph_bytes <= self.graph_budget_bytes

    def drop_graph(self, item: ItemKey) -> None:
        """Of all its parts."""
        for key in [key for key in self._graphs if key[0] == item]:
            del self._graphs[key]

    def drop_graphs(self, up_to: int | None = None) -> None:
        """All of them, or those of steps up to this one."""
        for key in [key for key in self._graphs if up_to is None or key[0].step <= up_to]:
            del self._graphs[key]

    def drop_lane(self, item: ItemKey) -> None:
        """Forget a lane and its graphs: it begins anew with its first part."""
        self.drop_graph(item)
        self._lanes.end(item)

    def drop_lanes(self, up_to: int | None = None) -> None:
        """All of them, or those of rounds up to this one."""
        for item in [item for item in self._lanes.live if up_to is None or item.step <= up_to]:
            self.drop_lane(item)

    def drop_partial(self, key: PartialKey) -> None:
        """Forget an accumulator; its memory is used again."""
        partial = self.partials.pop(key, None)
        if partial is not None and not self._spare:
            self._spare.append(partial.sums)

    def forward(
        self, item: ItemKey, x: Buffer | None, tokens: NDArray[np.integer] | None, *, keep_graph: bool, part: int = 0
    ) -> ForwardResult:
        """Hidden states out, or the loss. The graph is kept if asked for and if the budget allows it.

        ``tokens`` (rows, L + 1) are needed at the first and last stage; labels of -100 don't count.
        ``part``: of a lane's item, 1 to ``parts_per_item``, one of the present inner step; 0 without lanes.
        """
        began = self._clock.now_s()
        module = self._check_item(item)
        training = self._is_training(item)
        lane = self._lane(item, part)
        if lane is not None:
            lane.check_forward(part)
            module = lane.module
        inputs = self._inputs(x, tokens, check_finite=training)
        keep = keep_graph and training and self.can_retain()
        graphs: list[ChunkGraph] = []
        losses: list[Tensor] = []
        hidden = Outgoing(self.state.device, wanted=not self._is_last)
        with self._failing(item):
            for number, given in enumerate(inputs):
                # Training items always run with gradients on: some kernels are chosen by whether they are wanted.
                if keep and self.item_graph_bytes is None and number == 0:
                    graph, self.item_graph_bytes = measured_forward(module, given, self._forward_training, self._chunks)
                else:
                    graph = self._forward_chunk(module, given, training=training, loss_grad=keep)
                hidden.append(graph.out.detach())
                if graph.loss is not None:
                    losses.append(graph.loss.loss)
                if keep:
                    graphs.append(graph)
                del graph
            output = hidden.data()
            loss_bits = sum_bits(losses) if self._is_last else None
            if training:
                check_finite(item, output, loss_bits)
            output = self._shape.coded(output)
        if keep:
            self._graphs[item, part] = graphs
        return ForwardResult(output, loss_bits, self._clock.now_s() - began)

    def backward(
        self,
        item: ItemKey,
        grad: Buffer | None,
        x: Buffer | None = None,
        tokens: NDArray[np.integer] | None = None,
        *,
        partial: PartialKey | None,
        admit: Callable[[], bool] = lambda: True,
        part: int = 0,
    ) -> BackwardResult:
        """Gradient of the input out; parameter gradients into the partial, as a whole or (raising) not at all.

        Uses the kept graph, else computes the forward again from ``x`` and ``tokens``. ``partial`` None: a replay.
        ``admit`` is asked right before the addition; if it says no, nothing is added (``stats`` is None).
        ``part``: of a lane's item, in order from 1; the last of an inner step updates the lane, the last of all adds
        its pseudo-gradient and ends it.
        """
        began = self._clock.now_s()
        module = self._check_item(item)
        if not self._is_training(item):
            raise InputError(f"{item} is a hold-out item: it has no backward")
        lane = self._lane(item, part)
        if lane is not None:
            lane.check_backward(part)
            module = lane.module
        self._check_partial(item, partial)
        grads: Sequence[Boundary | None] = [None] * self._chunks
        if not self._is_last:
            grads = self._shape.boundary(grad, self.state.device, "gradient")
        kept = self._graphs.pop((item, part), None)
        inputs = self._inputs(x, tokens, check_finite=True) if kept is None else []
        summed, losses = GradientSum(), list[Tensor]()
        out = Outgoing(self.state.device, wanted=not self._is_first)
        with self._failing(item):
            for number in range(self._chunks):
                if kept is None:
                    graph = self._forward_training(module, inputs[number])
                else:
                    graph, kept[number] = kept[number], ChunkGraph(None, Boundary(torch.empty(0)), None)
                x_grad = backward_chunk(module, graph, grads[number], summed)
                if graph.loss is not None:
                    losses.append(graph.loss.loss)
                if x_grad is not None:
                    out.append(x_grad)
                del graph
            output = out.data()
            loss_bits = sum_bits(losses) if self._is_last else None
            check_finite(item, output, loss_bits)
            output = self._shape.coded(output)
            if lane is not None:
                check_gradients(item, summed.grads)
                loss_bits = lane.add_part(summed.grads, loss_bits)
        if lane is not None and not lane.ended:
            return BackwardResult(output, loss_bits, None, self._clock.now_s() - began)
        stats: ItemStats | None = None
        try:
            whole = summed.grads if lane is None else lane.pseudo_gradient()
            if partial is None:
                check_gradients(item, whole)
            elif admit():
                stats = self._add(item, whole, partial)
        finally:
            if lane is not None:
                self.drop_lane(item)
        return BackwardResult(output, loss_bits, stats, self._clock.now_s() - began)

    @contextmanager
    def _failing(self, item: ItemKey) -> Generator[None]:
        """What fails in here fails the item as a whole: a lane that had begun is gone."""
        try:
            with failing(item):
                yield
        except ItemFailed:
            self.drop_lane(item)
            raise

    def _lane(self, item: ItemKey, part: int) -> Lane | None:
        """The lane that the part belongs to, begun if it hasn't; None for items that aren't lanes."""
        if not (self.plan.config.lanes.on and self._is_training(item)):
            if part:
                raise InputError(f"{item} has no parts: it is a whole microbatch")
            return None
        return self._lanes.of(item, part, self.terms)

    def _is_training(self, item: ItemKey) -> bool:
        return item.microbatch < self.plan.config.num_items

    def _check_item(self, item: ItemKey) -> StageModule:
        """The module with the weights that the item is computed from; graphs whose weights are gone are dropped."""
        if item.stage != self.stage:
            raise InputError(f"{item} is not of stage {self.stage}")
        version_of = self.plan.config.version_of
        version = version_of(item.step) if self._is_training(item) else item.step
        module = self.state.module_at(version)
        for stale in [key for key in self._graphs if not self.state.holds(version_of(key[0].step))]:
            del self._graphs[stale]
        for gone in [key for key in self._lanes.live if not self.state.holds(version_of(key.step))]:
            self.drop_lane(gone)
        if module is None:
            newest = self.state.next_step
            raise InputError(f"{item} needs the state before update {version}, this is before {newest}")
        return module

    def _check_partial(self, item: ItemKey, key: PartialKey | None) -> None:
        if key is None:
            return
        if key.step != item.step:
            raise InputError(f"{item} doesn't belong to a partial of step {key.step}")
        held = self.partials.get(key)
        if held is not None and item.microbatch in held.microbatches:
            raise InputError(f"{item} was already added to this partial")

    def _forward_chunk(self, module: StageModule, given: ChunkInput, *, training: bool, loss_grad: bool) -> ChunkGraph:
        return forward_chunk(module, given, self._loss_shape, grad=training, loss_grad=loss_grad)

    def _forward_training(self, module: StageModule, given: ChunkInput) -> ChunkGraph:
        return self._forward_chunk(module, given, training=True, loss_grad=True)

    def _inputs(self, x: Buffer | None, tokens: NDArray[np.integer] | None, *, check_finite: bool) -> list[ChunkInput]:
        device = self.state.device
        given = self._shape.inputs(tokens, device, is_first=self._is_first, is_last=self._is_last)
        if self._is_first:
            return given
        hidden = self._shape.boundary(x, device, "input", finite=check_finite)
        return [dataclasses.replace(part, x=states) for part, states in zip(given, hidden, strict=True)]

    def _add(self, item: ItemKey, grads: dict[str, Tensor], key: PartialKey) -> ItemStats:
        held = self.partials.get(key) or self._new_partial(key)
        parts = [
            (held.sums[section], [(index, grads[leaf]) for index, leaf in places])
            for section, places in self._places.items()
        ]
        try:
            stats = add_item_to_sections(parts, fused=self._fused)
        except NonFiniteGradient as error:
            raise gradient_failure(item, grads) from error
        except (RuntimeError, MemoryError) as error:
            if all(part.intact for part in held.sums.values()):
                raise exception_failure(item, error) from error
            self.partials.pop(key, None)
            raise PartialBroken(f"adding {item} was interrupted: {error}") from error
        self.partials[key] = held
        held.microbatches.add(item.microbatch)
        held.num_clipped += stats.num_clipped
        return stats

    def _new_partial(self, key: PartialKey) -> StagePartial:
        scales = {section.index: self.state.exponents(section.index, key.step) for section in self.state.sections}
        if key.step != CALIBRATION_STEP and self._spare:
            sums = self._spare.pop()
            for index, part in sums.items():
                part.reset(scales[index])
            return StagePartial(key, sums)
        device = self.state.device
        sums = {s.index: PartialSum(s, scales[s.index], device=device) for s in self.state.sections}
        return StagePartial(key, sums)
