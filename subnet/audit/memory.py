"""Memory of a replay from shapes alone, so that a case too large for its budget is refused before anything of it is loaded.

The peak is what is always there plus the largest phase, as in :mod:`subnet.model.memory`; held against the resident memory of
the worker in ``tests/test_audit_memory.py``. No torch.
"""

from __future__ import annotations

from subnet.model.memory import (
    BYTES_PER_BLOCK_STEP,
    HEAP_SLACK,
    TORCH_OVERHEAD_BYTES,
    MemoryTerm,
    StageMemory,
    backward_work_bytes,
    boundary_bytes,
    graph_bytes,
    lane_bytes,
)
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import CHUNK_BYTES
from subnet.numerics.slices import slice_size

BOUNDARIES = 6
"""Boundary tensors of one item at once, as fp32: both inputs and outputs, and the copies they are hashed and checked from."""
GOLDEN_ARRAYS = 6
"""fp32 arrays of the golden task's weights: themselves, gradients, their sums twice, the work on them."""


def state_bytes(plan: ModelPlan, stage: int) -> int:
    """Bytes that a :class:`~subnet.engine.stage_state.StageState` takes."""
    delay, layout = plan.config.pipeline.update_delay, plan.layout
    total = 0
    for index in layout.stage_sections[stage]:
        section = layout.sections[index]
        total += section.num_elements * 4 * (3 + delay) + section.num_blocks * (4 * (2 + delay) + 2 * (1 + delay))
        if plan.config.precision.compute == "bf16":
            total += section.num_elements * 2 * (1 + delay)
    frozen = sum(spec.num_elements for spec in plan.stage_tensors[stage] if not plan.is_trainable(spec.name))
    return total + frozen * (4 if plan.config.precision.compute == "fp32" else 4 + 2 * (1 + delay))


def replay_memory(plan: ModelPlan, stage: int) -> StageMemory:
    """What the replay of a case of the stage takes beside its state, above the level after import.

    One item is worked on at a time, with its graph; of sums there are two, the partial's and that of all partials so far.
    """
    layout = plan.layout
    sections = [layout.sections[index] for index in layout.stage_sections[stage]]
    elements, blocks = sum(s.num_elements for s in sections), sum(s.num_blocks for s in sections)
    sizes = [
        slice_size(layout.sections[p.section], p, plan.config.num_items)
        for p in layout.groups[layout.group_of_stage[stage]].partitions
        if p.section in layout.stage_sections[stage]
    ]
    held = sum(spec.num_elements for spec in plan.stage_tensors[stage])
    per_sum = 4 * elements + BYTES_PER_BLOCK_STEP * blocks
    fp32 = 4 * plan.config.pipeline.microbatch_rows * plan.config.data.sequence_length * plan.hidden_size
    boundaries = BOUNDARIES * fp32 + 2 * boundary_bytes(plan)
    terms = (
        MemoryTerm("torch overhead", TORCH_OVERHEAD_BYTES),
        MemoryTerm("sealed partition", 3 * max(sizes), "state"),
        MemoryTerm("merged integers", per_sum, "state"),
        MemoryTerm("snapshot chunk", 2 * min(CHUNK_BYTES, 4 * held), "state"),
        MemoryTerm("golden task", GOLDEN_ARRAYS * 4 * _golden_elements(plan, stage), "golden"),
        MemoryTerm("gradients and work", backward_work_bytes(plan, stage), "golden"),
        MemoryTerm("graph", graph_bytes(plan, stage), "compute"),
        MemoryTerm("gradients and work", backward_work_bytes(plan, stage), "compute"),
        MemoryTerm("boundaries", boundaries, "compute"),
        MemoryTerm("sums", 2 * per_sum, "compute"),
        MemoryTerm("lane", lane_bytes(plan, stage), "compute"),
        MemoryTerm("sums", 2 * per_sum, "merge"),
        MemoryTerm("slices of a sum", sum(sizes), "merge"),
        MemoryTerm("merged partition", 2 * max(sizes), "merge"),
        MemoryTerm("merged integers", per_sum, "merge"),
    )
    bare = StageMemory(stage, terms)
    slack = int(HEAP_SLACK * (_peak(bare) + state_bytes(plan, stage)))
    return StageMemory(stage, (*terms, MemoryTerm("heap slack", slack)))


def replay_bytes(plan: ModelPlan, stage: int) -> int:
    """The peak of :func:`replay_memory`."""
    return _peak(replay_memory(plan, stage))


def _peak(memory: StageMemory) -> int:
    return memory.phase_bytes("always") + max(map(memory.phase_bytes, ("state", "golden", "compute", "merge")))


def _golden_elements(plan: ModelPlan, stage: int) -> int:
    """The stage cut down to one layer of each kind."""
    kinds = {_kind(plan, layer): layer for layer in reversed(plan.layers_of(stage))}
    dropped = (layer for layer in plan.layers_of(stage) if layer not in kinds.values())
    left_out = sum(spec.num_elements for layer in dropped for spec in plan.units.units[layer + 1])
    return sum(spec.num_elements for spec in plan.stage_tensors[stage]) - left_out


def _kind(plan: ModelPlan, layer: int) -> tuple[object, ...]:
    types = plan.model_config.get("layer_types")
    return (types[layer] if types else None, tuple(spec.shape for spec in plan.units.units[layer + 1]))
