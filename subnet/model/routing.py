"""The load-balancing loss of routers, cut at the stages: the library's whole-model loss, to the bit.

The library's loss is a product of two sums over all layers: how often each expert was chosen, and its probabilities. Both
sums travel forward with the hidden states, in layer order, and the gradient of the second travels back.

Shape suffixes: N tokens of a chunk, E experts; ``_2E`` is the pair (chosen, probabilities).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def no_routing(num_experts: int, device: torch.device) -> Tensor:
    """The sums before the first layer."""
    return torch.zeros(2, num_experts, dtype=torch.float32, device=device)


def add_layers(routing_2E: Tensor, logits_NE: Sequence[Tensor], top_k: int) -> Tensor:
    """The sums after these layers, whose routers gave these logits; differentiable in the second row alone."""
    num_experts = routing_2E.shape[-1]
    chosen_E, probabilities_E = routing_2E[0].detach(), routing_2E[1]
    whole = torch.float32 if routing_2E.device.type == "cpu" else torch.int32  # what histc is deterministic with
    for layer_NE in logits_NE:
        weights_NE = torch.nn.functional.softmax(layer_NE, dim=-1)
        _, experts_NK = torch.topk(weights_NE, top_k, dim=-1)
        counts_E = torch.histc(experts_NK.reshape(-1).to(whole), bins=num_experts, min=0, max=num_experts)
        chosen_E = chosen_E + counts_E
        probabilities_E = probabilities_E + weights_NE.float().sum(dim=0)
    return torch.stack([chosen_E, probabilities_E])


def router_loss(routing_2E: Tensor, num_rows: int, factor: float) -> Tensor:
    """``factor`` times the library's loss; ``num_rows`` is tokens times layers with experts."""
    rows = float(num_rows)
    chosen_E, probabilities_E = routing_2E[0].detach() / rows, routing_2E[1] / rows
    return factor * (torch.sum(chosen_E * probabilities_E.unsqueeze(0)) * routing_2E.shape[-1])
