"""Measured cost of a model's units on the real chunk shape: what the planner cuts by. Bounded in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from subnet.model.registry import Architecture
from subnet.model.stage import StageModule, StageSpec, make_stage, prepare_torch
from subnet.run.config import RunConfig

_REPEATS = 3


def measure_unit_costs(
    config: RunConfig, architecture: Architecture, *, budget_s: float = 20.0, device: str = "cpu"
) -> list[float]:
    """Forward and backward seconds of a chunk for [embedding, layer 0, ..., head]: each the median of three.

    Sets the process's thread count to the run's. A unit whose first run has used its share of ``budget_s`` isn't
    repeated; layers of one kind are measured once.
    """
    prepare_torch(config.precision.num_threads)
    rows, length = config.pipeline.microbatch_rows // config.pipeline.chunks, config.data.sequence_length
    target, hidden = torch.device(device), architecture.hidden_size
    generator = torch.Generator().manual_seed(0)

    kinds = {architecture.layer_kind(i): i for i in reversed(range(architecture.num_layers))}

    def module(spec: StageSpec) -> StageModule:
        built = make_stage(architecture, spec, config.model.attention, compute=config.precision.compute)
        held = built.state_dict()
        shapes = {name: held[name.removeprefix("model.")].shape for name, _ in built.leaf_names()}
        built.bind(
            {
                entry: torch.empty(shapes[name]).normal_(0.0, 0.02, generator=generator).to(target)
                for name, entry in built.leaf_names()
            }
        )
        return built

    tokens_BL = torch.randint(0, architecture.vocab_size, (rows, length), generator=generator).to(target)
    states_BLH = torch.randn(rows, length, hidden, generator=generator).to(target)
    gradient_BLH = torch.full_like(states_BLH, 1e-3)

    def through(part: StageModule, x: torch.Tensor) -> None:
        wanted = [*([x] if x.requires_grad else []), *part.parameters()]
        torch.autograd.grad(part(x), wanted, grad_outputs=gradient_BLH)

    def layer_step(layer: StageModule) -> Callable[[], None]:
        return lambda: through(layer, states_BLH.detach().requires_grad_())

    def head_step() -> None:
        x = states_BLH.detach().requires_grad_()
        y = head(x)
        loss = head.chunk_loss(
            y, tokens_BL, divisor=rows * length, piece_tokens=config.objective.ce_chunk_tokens, want_grad=True
        )
        norm = [p for name, p in head.named_parameters() if not name.startswith("lm_head")]
        torch.autograd.grad(y, [x, *norm], grad_outputs=loss.hidden_grad_BLH)

    embedding = module(StageSpec(range(0), True, False))
    layers = {kind: module(StageSpec([index], False, False)) for kind, index in kinds.items()}
    head = module(StageSpec(range(0), False, True))
    share_s = budget_s / (2 + len(layers))
    first_s = _median_s(lambda: through(embedding, tokens_BL), share_s, target)
    layers_s = {kind: _median_s(layer_step(layer), share_s, target) for kind, layer in layers.items()}
    last_s = _median_s(head_step, share_s, target)
    return [first_s, *(layers_s[architecture.layer_kind(i)] for i in range(architecture.num_layers)), last_s]


def _median_s(work: Callable[[], None], budget_s: float, device: torch.device) -> float:
    spent: list[float] = []
    begun = time.perf_counter()
    while len(spent) <= _REPEATS:  # the first run warms up
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - start)
        if time.perf_counter() - begun > budget_s:
            break
    return statistics.median(spent[1:] or spent)
