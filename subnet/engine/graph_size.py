"""What a kept graph holds, measured on the first that is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subnet.model.chunk import ChunkGraph, ChunkInput
from subnet.model.stage import StageModule


def measured_forward(
    module: StageModule, given: ChunkInput, forward: Callable[[StageModule, ChunkInput], ChunkGraph], chunks: int
) -> tuple[ChunkGraph, int]:
    """A chunk's forward, and the bytes that the graphs of so many chunks hold (weights aside)."""
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
        graph = forward(module, given)
    count(graph.hidden_BLH)
    if graph.loss is not None:
        count(graph.loss.hidden_grad_BLH)
        count(graph.loss.head_grad_VH)
    shared = [t for t in (*(given.x or ()), given.tokens_BL, given.labels_BL) if t is not None]
    once = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in shared}
    per_chunk = sum(size for pointer, size in storages.items() if pointer not in once)
    return graph, per_chunk * chunks + sum(once.values())
