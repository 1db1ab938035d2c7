"""Forward and backward of microbatches at one stage: the same bits whether a graph was kept or the work is redone.

One compute thread calls this; there is no locking and no waiting. A microbatch is added to a partial as a whole or not
at all. Hold-out items (``microbatch >= M``) run without gradients and may be non-finite: their loss is a report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subnet.engine.stage_state import StageState
from subnet.errors import InputError, IotaError
from subnet.model.chunk import ChunkGraph, ChunkInput, GradientSum, LossShape, backward_chunk, forward_chunk
from subnet.model.items import (
    Buffer,
    ItemFailed,
    ItemShape,
    boundary_bytes,
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
    stats: ItemStats | None
    """None for a replay, which adds nothing."""
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
        self._graphs: dict[ItemKey, list[ChunkGraph]] = {}
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

    @property
    def retained_bytes(self) -> int:
        return len(self._graphs) * (self.item_graph_bytes or 0)

    @property
    def retained(self) -> tuple[ItemKey, ...]:
        """Items whose graph waits for its backward."""
        return tuple(self._graphs)

    def can_retain(self) -> bool:
        """Whether one more graph fits the budget; the first is always tried, and measured."""
        if self.item_graph_bytes is None:
            return self.graph_budget_bytes > 0
        return self.retained_bytes + self.item_graph_bytes <= self.graph_budget_bytes

    def drop_graph(self, item: ItemKey) -> None:
        self._graphs.pop(item, None)

    def drop_graphs(self, up_to: int | None = None) -> None:
        """All of them, or those of steps up to this one."""
        for item in [item for item in self._graphs if up_to is None or item.step <= up_to]:
            del self._graphs[item]

    def drop_partial(self, key: PartialKey) -> None:
        """Forget an accumulator; its memory is used again."""
        partial = self.partials.pop(key, None)
        if partial is not None and not self._spare:
            self._spare.append(partial.sums)

    def forward(
        self, item: ItemKey, x: Buffer | None, tokens: NDArray[np.integer] | None, *, keep_graph: bool
    ) -> ForwardResult:
        """Hidden states out, or the loss. The graph is kept if asked for and if the budget allows it.

        ``tokens`` (rows, L + 1) are needed at the first and last stage; labels of -100 don't count.
        """
        began = self._clock.now_s()
        module = self._check_item(item)
        training = self._is_training(item)
        inputs = self._inputs(x, tokens, check_finite=training)
        keep = keep_graph and training and self.can_retain()
        graphs: list[ChunkGraph] = []
        losses: list[Tensor] = []
        hidden: list[Boundary] = []
        with failing(item):
            for number, given in enumerate(inputs):
                # Training items always run with gradients on: some kernels are chosen by whether they are wanted.
                if keep and self.item_graph_bytes is None and number == 0:
                    graph = self._measured(module, given)
                else:
                    graph = self._forward_chunk(module, given, training=training, loss_grad=keep)
                hidden.append(graph.out.detach())
                if graph.loss is not None:
                    losses.append(graph.loss.loss)
                if keep:
                    graphs.append(graph)
                del graph
            output = None if self._is_last else boundary_bytes(hidden)
            loss_bits = sum_bits(losses) if self._is_last else None
            if training:
                check_finite(item, output, loss_bits)
            output = self._shape.coded(output)
        if keep:
            self._graphs[item] = graphs
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
    ) -> BackwardResult:
        """Gradient of the input out; parameter gradients into the partial, as a whole or (raising) not at all.

        Uses the kept graph, else computes the forward again from ``x`` and ``tokens``. ``partial`` None: a replay.
        ``admit`` is asked right before the addition; if it says no, nothing is added (``stats`` is None).
        """
        began = self._clock.now_s()
        module = self._check_item(item)
        if not self._is_training(item):
            raise InputError(f"{item} is a hold-out item: it has no backward")
        self._check_partial(item, partial)
        grads: Sequence[Boundary | None] = [None] * self._chunks
        if not self._is_last:
            grads = self._shape.boundary(grad, self.state.device, "gradient")
        kept = self._graphs.pop(item, None)
        inputs = self._inputs(x, tokens, check_finite=True) if kept is None else []
        summed, losses, out = GradientSum(), list[Tensor](), list[Boundary]()
        with failing(item):
            for number in range(self._chunks):
                if kept is None:
                    graph = self._forward_chunk(module, inputs[number], training=True, loss_grad=True)
                else:
                    graph, kept[number] = kept[number], ChunkGraph(None, Boundary(torch.empty(0)), None)
                x_grad = backward_chunk(module, graph, grads[number], summed)
                if graph.loss is not None:
                    losses.append(graph.loss.loss)
                if x_grad is not None:
                    out.append(x_grad)
                del graph
            output = None if self._is_first else boundary_bytes(out)
            loss_bits = sum_bits(losses) if self._is_last else None
            check_finite(item, output, loss_bits)
            output = self._shape.coded(output)
        stats: ItemStats | None = None
        if partial is None:
            check_gradients(item, summed.grads)
        elif admit():
            stats = self._add(item, summed.grads, partial)
        return BackwardResult(output, loss_bits, stats, self._clock.now_s() - began)

    def _is_training(self, item: ItemKey) -> bool:
        return item.microbatch < self.plan.config.num_items

    def _check_item(self, item: ItemKey) -> StageModule:
        """The module with the weights that the item is computed from; graphs whose weights are gone are dropped."""
        if item.stage != self.stage:
            raise InputError(f"{item} is not of stage {self.stage}")
        version_of = self.plan.config.version_of
        version = version_of(item.step) if self._is_training(item) else item.step
        module = self.state.module_at(version)
        for stale in [key for key in self._graphs if not self.state.holds(version_of(key.step))]:
            del self._graphs[stale]
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

    def _measured(self, module: StageModule, given: ChunkInput) -> ChunkGraph:
        """A chunk's forward that also finds out what its graph holds (weights aside)."""
        weights = {leaf.parameter.untyped_storage().data_ptr() for leaf in module.bound}
        storages: dict[int, int] = {}

        def count(held: Tensor | None) -> None:
            if held is not None and held.untyped_storage().data_ptr() not in weights:
                storages[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()

        def pack(saved: Tensor) -> Tensor:
            count(saved)
            return saved.detach()

        def unpack(saved: Tensor) -> Tensor:
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            graph = self._forward_chunk(module, given, training=True, loss_grad=True)
        count(graph.hidden_BLH)
        if graph.loss is not None:
            count(graph.loss.hidden_grad_BLH)
            count(graph.loss.head_grad_VH)
        shared = [t for t in (*(given.x or ()), given.tokens_BL, given.labels_BL) if t is not None]
        once = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in shared}
        per_chunk = sum(size for pointer, size in storages.items() if pointer not in once)
        self.item_graph_bytes = per_chunk * self._chunks + sum(once.values())
        return graph

    def _inputs(self, x: Buffer | None, tokens: NDArray[np.integer] | None, *, check_finite: bool) -> list[ChunkInput]:
        ids: Sequence[Tensor | None] = [None] * self._chunks
        if self._is_first or self._is_last:
            ids = self._shape.tokens(tokens, self.state.device, is_first=self._is_first)
        hidden: Sequence[Boundary | None] = [None] * self._chunks
        if not self._is_first:
            hidden = self._shape.boundary(x, self.state.device, "input", finite=check_finite)
        return [
            ChunkInput(
                tokens_BL=t[:, :-1] if t is not None and self._is_first else None,
                x=h,
                labels_BL=t[:, 1:] if t is not None and self._is_last else None,
            )
            for t, h in zip(ids, hidden, strict=True)
        ]

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
