"""Forward and backward of one chunk at one stage: the compute that executors, golden tasks and re-executions share.

Gradients of chunks add in fp32 in chunk order, as ``p.grad += g`` would; nothing is left in a parameter's ``grad``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from subnet.model.plan import ModelPlan
from subnet.model.stage import Leaf, LossResult, StageModule


@dataclass(frozen=True)
class ChunkInput:
    """What a stage needs of a chunk: tokens at the first stage, hidden states elsewhere, labels at the last."""

    tokens_BL: Tensor | None = None
    x_BLH: Tensor | None = None
    labels_BL: Tensor | None = None


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

    x_BLH: Tensor | None
    hidden_BLH: Tensor
    loss: LossResult | None


@dataclass
class GradientSum:
    """Parameter gradients by leaf, added chunk by chunk in fp32."""

    grads: dict[str, Tensor] = field(default_factory=dict)

    def collect(self, leaves: tuple[Leaf, ...], head_grad_VH: Tensor | None) -> None:
        """Take the chunk's gradients out of the parameters (the head's from the loss) and add them."""
        for leaf in leaves:
            grad = leaf.parameter.grad if leaf.name != "lm_head.weight" else head_grad_VH
            leaf.parameter.grad = None
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
    """
    x = given.x_BLH
    if x is not None and grad:
        x = x.detach().requires_grad_(True)
    source = given.tokens_BL if x is None else x
    if source is None:
        raise RuntimeError("a chunk needs tokens or hidden states")
    with torch.set_grad_enabled(grad):
        hidden_BLH: Tensor = module(source)
    loss: LossResult | None = None
    if module.spec.is_last:
        if given.labels_BL is None:
            raise RuntimeError("the last stage needs labels")
        loss = module.chunk_loss(
            hidden_BLH,
            given.labels_BL,
            divisor=shape.divisor,
            piece_tokens=shape.piece_tokens,
            want_grad=grad and loss_grad,
        )
    return ChunkGraph(x, hidden_BLH, loss)


def backward_chunk(module: StageModule, graph: ChunkGraph, grad_BLH: Tensor | None, into: GradientSum) -> Tensor | None:
    """Add the chunk's parameter gradients to ``into``; returns the gradient of its input (None at the first stage)."""
    head_grad_VH = None
    if graph.loss is not None:
        grad_BLH, head_grad_VH = graph.loss.hidden_grad_BLH, graph.loss.head_grad_VH
    if grad_BLH is None:
        raise RuntimeError("a stage before the last needs the gradient of its output")
    try:
        torch.autograd.backward(graph.hidden_BLH, grad_BLH)
        into.collect(module.bound, head_grad_VH)
    finally:
        for leaf in module.bound:
            leaf.parameter.grad = None
    return None if graph.x_BLH is None else graph.x_BLH.grad
