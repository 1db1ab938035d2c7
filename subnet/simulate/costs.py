"""What a stage's work costs a GPU: seconds of a forward, a backward, a merge's passes over memory; bytes of what it moves.

Compute is FLOPs of the units over ``tflops * mfu``; passes over memory are bytes over the memory's bandwidth, with the number
of bytes an element written out below (they follow the arithmetic of docs/arithmetic.md; eager torch touches memory more often
than a fused kernel would, hence ``EAGER``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from subnet.model.memory import (
    BYTES_PER_BLOCK_STATE,
    Budgets,
    boundary_bytes,
    graph_bytes,
    slice_bytes,
    stage_memory,
)
from subnet.model.plan import ModelPlan
from subnet.numerics.layout import Group
from subnet.simulate.presets import Preset

FORWARD_SHARE = 1 / 3
"""Of forward and backward together, by FLOPs."""
EAGER = 2.0
ADD_BYTES = 20
"""Quantise one microbatch's gradient and add it: read 4, scale and round 8, read and write the sum 8."""
COMMIT_BYTES = 8
"""Pack and hash the slices: read 4, write and hash about 4."""
REDUCE_BYTES = 6
"""Unpack a slice and add it, for each contributor: read 2, add 4."""
FINGERPRINT_BYTES = 12
"""Three passes of exact dots over 4 bytes."""
UPDATE_BYTES = 40
"""AdamW from elementary operations: weight, two moments, gradient, read and written, and the bf16 copies."""
STATE_BYTES = 12
"""Weight and two moments."""


class StageCosts:
    """Of one cut model. Seconds are for one GPU of the given kind."""

    def __init__(self, plan: ModelPlan, unit_s: Sequence[float] | None = None) -> None:
        """``unit_s``: measured seconds of a microbatch by unit; then a GPU's rate is relative to where that was measured."""
        self.plan, self.unit_s = plan, unit_s
        config = plan.config
        self.tokens = config.pipeline.microbatch_rows * config.data.sequence_length
        """Of a microbatch."""
        self.num_stages = plan.num_stages
        self.boundary_bytes = boundary_bytes(plan)
        self.params = [sum(spec.num_elements for spec in held) for held in plan.trained_tensors]
        self.blocks = [sum(spec.num_blocks for spec in held) for held in plan.trained_tensors]
        self.graph_bytes = [graph_bytes(plan, stage) for stage in range(plan.num_stages)]
        self._slices: dict[tuple[int, int], list[float]] = {}

    @cached_property
    def stage_flops(self) -> list[float]:
        """Of a microbatch, forward and backward."""
        flops = self.plan.units.unit_flops_per_token
        return [self.tokens * sum(flops[unit] for unit in held) for held in self.plan.stage_units]

    @property
    def flops_per_step(self) -> float:
        return sum(self.stage_flops) * self.plan.config.pipeline.microbatches

    def item_s(self, stage: int, gpu: Preset) -> float:
        """Forward and backward of one microbatch, without what adding it costs."""
        if self.unit_s is not None:
            return sum(self.unit_s[unit] for unit in self.plan.stage_units[stage]) / (gpu.tflops * gpu.mfu)
        return self.stage_flops[stage] / (gpu.tflops * gpu.mfu * 1e12)

    def pass_s(self, stage: int, gpu: Preset, bytes_per_element: float, share: float = 1.0) -> float:
        """Going once over a stage's elements (or a share of them)."""
        return EAGER * bytes_per_element * self.params[stage] * share / (gpu.bandwidth_gb_s * 1e9)

    def state_bytes(self, stage: int) -> int:
        """A snapshot of the stage."""
        return STATE_BYTES * self.params[stage] + BYTES_PER_BLOCK_STATE * self.blocks[stage]

    def peak_bytes(self, stage: int, replicas: int, graph_memory_bytes: int) -> int:
        return stage_memory(
            self.plan, stage, Budgets(replicas=replicas, graph_memory_bytes=graph_memory_bytes)
        ).peak_bytes

    def partition_bytes(self, group: Group, num_items: int, *, calibration: bool) -> list[float]:
        """Bytes on the wire of each partition's slice in a sum of so many microbatches."""
        key = (group.index, -1 if calibration else num_items)
        if key not in self._slices:
            sections = self.plan.layout.sections
            whole = {
                s: 4.0 * sections[s].num_blocks if calibration else slice_bytes(self.plan, sections[s], num_items)
                for s in group.sections
            }
            self._slices[key] = [
                whole[p.section] * p.num_elements / max(1, sections[p.section].num_elements) for p in group.partitions
            ]
        return self._slices[key]
