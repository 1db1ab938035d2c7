"""Golden tasks: one hash a stage that two machines share only if they compute the stage's arithmetic to the same bits.

A task runs one real chunk (real rows, length, widths, threads, precision) through the stage cut down to the first layer of
each kind: layers of a kind have equal shapes, so they run every kernel, with embedding, norm, head and loss where the
stage has them; then backward, and quantising with gradients of the real shapes. Inputs come from integers alone, since
random normals differ between instruction sets. Stages of the same make-up share one run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from subnet.model.chunk import ChunkInput, GradientSum, LossShape, backward_chunk, forward_chunk
from subnet.model.plan import ModelPlan
from subnet.model.registry import Architecture, load_architecture
from subnet.model.stage import Boundary, StageModule, StageSpec, make_stage, stage_spec
from subnet.numerics.fixed_point import PartialSum, exponents, update_scales
from subnet.numerics.layout import TensorSpec, build_layout
from subnet.numerics.muon import orthogonal
from subnet.numerics.optimizer import is_muons

_PIECE = 1 << 20


@dataclass(frozen=True)
class _Task:
    """A stage of one layer of each kind."""

    plan: ModelPlan
    spec: StageSpec
    tensors: tuple[TensorSpec, ...]
    device: torch.device


def hardware_class(plan: ModelPlan, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """The golden hash of each stage on this device, with this process's threads; call ``prepare_torch`` before."""
    done: dict[tuple[object, ...], str] = {}
    architecture = load_architecture(plan.model_config)
    hashes: list[str] = []
    for stage in range(plan.num_stages):
        spec = stage_spec(plan, stage)
        kinds = dict.fromkeys(_kind(plan, architecture, layer) for layer in spec.layers)
        make_up = (spec.is_first, spec.is_last, tuple(kinds))
        if make_up not in done:
            done[make_up] = golden_hash(plan, stage, device)
        hashes.append(done[make_up])
    return tuple(hashes)


def golden_hash(plan: ModelPlan, stage: int, device: torch.device | str = "cpu") -> str:
    """Run one stage's golden task."""
    whole = stage_spec(plan, stage)
    architecture = load_architecture(plan.model_config)
    kinds = {_kind(plan, architecture, layer): layer for layer in reversed(whole.layers)}
    spec = StageSpec(sorted(kinds.values()), whole.is_first, whole.is_last)
    dropped = {s.name for layer in whole.layers if layer not in spec.layers for s in plan.units.units[layer + 1]}
    tensors = tuple(s for s in plan.stage_tensors[stage] if s.name not in dropped)
    return _run(_Task(plan, spec, tensors, torch.device(device)))


def _kind(plan: ModelPlan, architecture: Architecture, layer: int) -> tuple[object, ...]:
    """Layers of one kind run the same kernels on the same shapes, forward and backward."""
    trained = tuple(plan.is_trainable(spec.name) for spec in plan.units.units[layer + 1])
    return (*architecture.layer_kind(layer), architecture.adapter_targets(layer, plan.config.trainable), trained)


def _run(task: _Task) -> str:
    plan = task.plan
    module = make_stage(
        load_architecture(plan.model_config),
        task.spec,
        plan.config.model.attention,
        compute=plan.config.precision.compute,
        trainable=plan.config.trainable,
    )
    weights = {spec.name: _weight(spec, salt).to(task.device) for salt, spec in enumerate(task.tensors)}
    module.bind(weights)
    given, grad = _inputs(task, module.architecture.num_routed)
    graph = forward_chunk(module, given, LossShape.of(plan), grad=True, loss_grad=True)
    summed = GradientSum()
    x_grad = backward_chunk(module, graph, grad, summed)
    hasher = blake3(b"iota/golden/1\0" + torch.__version__.encode())
    loss = graph.loss.loss if graph.loss is not None else None
    for tensor in (*graph.out, *(x_grad or ()), loss, *summed.grads.values()):
        if tensor is not None:
            _absorb(hasher, tensor)
    for tensor in (*_quantised(task, module, summed), *_orthogonal(task)):
        _absorb(hasher, tensor)
    return hasher.hexdigest()


def _orthogonal(task: _Task) -> list[Tensor]:
    """Muon's products of matrices, of each shape that there is."""
    settings = task.plan.config.optimizer
    trained = (spec for spec in task.tensors if task.plan.is_trainable(spec.name))
    shapes = sorted({(spec.shape[-2], spec.shape[-1]) for spec in trained if is_muons(spec, settings)})
    return [orthogonal(_fractions(shape, 23, 2.0**-20).to(task.device)) for shape in shapes]


def _quantised(task: _Task, module: StageModule, summed: GradientSum) -> list[Tensor]:
    """Scales from these gradients, and the gradients in whole numbers at these scales."""
    tied = task.plan.units.tied
    trained = tuple(spec for spec in task.tensors if task.plan.is_trainable(spec.name))
    own = tuple(spec for spec in trained if tied is None or spec.name != tied.name)
    shared = tied if tied is not None and len(own) != len(trained) else None
    layout = build_layout([own], tied=shared, qmax=task.plan.config.qmax)
    found: list[Tensor] = []
    for section in layout.sections:
        index_of = {span.spec.name: i for i, span in enumerate(section.tensors)}
        grads = [(index_of[leaf.tensor], summed.grads[leaf.name]) for leaf in module.bound if leaf.tensor in index_of]
        first = PartialSum(section, None, device=task.device)
        first.add_item(grads)
        blank = torch.zeros_like(first.maxima)
        decayed, limit = update_scales(section, blank, blank, first.maxima, first=True)
        scales = exponents(limit, section.leaf_qmax)
        second = PartialSum(section, scales, device=task.device)
        second.add_item(grads)
        found += [decayed, limit, second.values]
    return found


def _inputs(task: _Task, routed: int) -> tuple[ChunkInput, Boundary | None]:
    pipeline, length = task.plan.config.pipeline, task.plan.config.data.sequence_length
    rows = pipeline.microbatch_rows // pipeline.chunks
    shape = (rows, length, task.plan.hidden_size)
    tokens = (_integers(rows * (length + 1), 7).astype(np.int64) % task.plan.vocab_size).reshape(rows, length + 1)
    ids = torch.from_numpy(tokens).to(task.device)
    dialogues = task.plan.config.objective.kind == "sft"
    positions = torch.arange(length, device=task.device) % -(-length // 2)
    sums = _fractions((2, routed), 19, 2.0**-15).to(task.device) + 2.0 if routed else None
    given = ChunkInput(
        tokens_BL=ids[:, :-1] if task.spec.is_first else None,
        x=None if task.spec.is_first else Boundary(_fractions(shape, 11, 2.0**-15).to(task.device), sums),
        labels_BL=ids[:, 1:] if task.spec.is_last else None,
        positions_BL=positions.expand(rows, length) if dialogues else None,
    )
    if task.spec.is_last:
        return given, None
    return given, Boundary(_fractions(shape, 13, 2.0**-25).to(task.device), sums)


def _weight(spec: TensorSpec, salt: int) -> Tensor:
    if len(spec.shape) < 2:
        return _fractions(spec.shape, salt + 17, 2.0**-18) + (0.0 if spec.name.endswith("bias") else 1.0)
    return _fractions(spec.shape, salt + 17, 2.0**-20)


def _integers(count: int, salt: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Well-mixed 16-bit whole numbers, from 32-bit multiplications that wrap."""
    out = np.empty(count, dtype=np.uint32)
    for start in range(0, count, _PIECE):
        part = np.arange(start, min(count, start + _PIECE), dtype=np.uint32)
        part = (part + np.uint32(salt * 1_000_003 + 1)) * np.uint32(2_654_435_761)
        part ^= part >> np.uint32(15)
        out[start : start + len(part)] = (part * np.uint32(2_246_822_519)) >> np.uint32(16)
    return out


def _fractions(shape: tuple[int, ...], salt: int, unit: float) -> Tensor:
    """Numbers in [-32768, 32768) times a power of two: exact in fp32."""
    count = int(np.prod(shape))
    return torch.from_numpy((_integers(count, salt).astype(np.float32) - 32768.0) * np.float32(unit)).reshape(shape)


def _absorb(hasher: blake3, tensor: Tensor) -> None:
    hasher.update(tensor.detach().contiguous().cpu().numpy().data.cast("B"))
