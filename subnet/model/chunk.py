"""Forward and backward of one chunk at one stage: the compute that executors, golden tasks and re-executions share.

Gradients of chunks add in fp32 in chunk order, as ``p.grad += g`` would; nothing is left in a parameter's ``grad``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from subnet.model.plan import ModelPlan
from subnet.model.stage import Boundary, Leaf, LossResult, StageModule


@dataclass(frozen=True)
class ChunkInput:
    """What a stage needs of a chunk: tokens at the first stage, a boundary elsewhere, labels at the last."""

    tokens_BL: Tensor | None = None
    x: Boundary | None = None
    labels_BL: Tensor | None = None
    positions_BL: Tensor | None = None
    """Within each dialogue, where several share a row; None: each row is one text."""
    num_labels: int | None = None
    """What the summed loss is divided by, where it isn't the number of the microbatch's tokens."""


@dataclass(frozen=True)
class LossShape:
    """``divisor`` of a chunk's summed loss, and tokens of a piece of logits."""

    divisor: int
    piece_tokens: int

    @staticmethod
    def of(plan: ModelPlan) -> LossShape:
        tokens = plan.config.pipeline.microbatch_rows * plan.config.data.sequence_length
        return LossShape(tokens, plan.config.objective.ce_chunk_tokens)


@dataclass
class ChunkGraph:
    """A forward's result; with gradients wanted, the graph behind it."""

    x: Boundary | None
    out: Boundary
    loss: LossResult | None

    @property
    def hidden_BLH(self) -> Tensor:
        return self.out.hidden_BLH


@dataclass
class GradientSum:
    """Parameter gradients by leaf, added chunk by chunk in fp32."""

    grads: dict[str, Tensor] = field(default_factory=dict)

    def collect(self, leaves: tuple[Leaf, ...], head_grad_VH: Tensor | None) -> None:
        """Take the chunk's gradients out of the parameters (the head's from the loss) and add them."""
        for leaf in leaves:
            if leaf.frozen:
                continue
            grad = leaf.parameter.grad if leaf.name != "lm_head.weight" else head_grad_VH
            leaf.parameter.grad = None
            if not leaf.trained:
                grad = torch.zeros_like(leaf.master)
            if grad is None:
                raise RuntimeError(f"{leaf.name} got no gradient")
            seen = self.grads.get(leaf.name)
            if seen is None:
                self.grads[leaf.name] = grad.float()
            else:
                seen.add_(grad)


def forward_chunk(
    module: StageModule, given: ChunkInput, shape: LossShape, *, grad: bool, loss_grad: bool
) -> ChunkGraph:
    """Hidden states out and, at the last stage, the chunk's loss.

    ``grad``: build the graph. ``loss_grad``: at the last stage also differentiate the loss, which backward needs.
    The router loss is part of what is trained, not of what is reported of the hold-out (no ``grad``).
    """
    x = given.x
    if x is not None and grad:
        routing = None if x.routing_2E is None else x.routing_2E.detach().requires_grad_(True)
        x = Boundary(x.hidden_BLH.detach().requires_grad_(True), routing)
    source = Boundary(given.tokens_BL) if x is None and given.tokens_BL is not None else x
    if source is None:
        raise RuntimeError("a chunk needs tokens or hidden states")
    with torch.set_grad_enabled(grad):
        out = module.through(source, given.positions_BL)
    loss: LossResult | None = None
    if module.spec.is_last:
        if given.labels_BL is None:
            raise RuntimeError("the last stage needs labels")
        loss = module.chunk_loss(
            out.hidden_BLH,
            given.labels_BL,
            divisor=given.num_labels or shape.divisor,
            num_tokens=shape.divisor,
            piece_tokens=shape.piece_tokens,
            want_grad=grad and loss_grad,
            routing_2E=out.routing_2E if grad else None,
        )
    return ChunkGraph(x, out, loss)


def backward_chunk(module: StageModule, graph: ChunkGraph, grad: Boundary | None, into: GradientSum) -> Boundary | None:
    """Add the chunk's parameter gradients to ``into``; returns the gradient of its input (None at the first stage)."""
    head_grad_VH = None
    if graph.loss is not None:
        if graph.loss.hidden_grad_BLH is None:
            raise RuntimeError("the loss was not differentiated")
        grad = Boundary(graph.loss.hidden_grad_BLH, graph.loss.routing_grad_2E)
        head_grad_VH = graph.loss.head_grad_VH
    if grad is None:
        raise RuntimeError("a stage before the last needs the gradient of its output")
    try:
        roots, grads = [graph.out.hidden_BLH], [grad.hidden_BLH]
        if graph.out.routing_2E is not None and grad.routing_2E is not None and graph.out.routing_2E.requires_grad:
            roots.append(graph.out.routing_2E)
            grads.append(grad.routing_2E)
        torch.autograd.backward(roots, grads)
        into.collect(module.bound, head_grad_VH)
    finally:
        for leaf in module.bound:
            leaf.parameter.grad = None
    if graph.x is None:
        return None
    x, routing_2E = graph.x
    if x.grad is None:
        raise RuntimeError("the input got no gradient")
    return Boundary(x.grad, None if routing_2E is None else routing_2E.grad)
