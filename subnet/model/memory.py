"""Memory of a miner by stage, from shapes alone: each term is named, its formula checked against autograd. No torch.

The peak is what is always there plus the larger of the two phases of a step, computing and merging. Formulas of saved
tensors are those of the library's Llama layer, checked against autograd in ``tests/test_plan.py``; other families' layers
are taken as a Llama layer of the same widths, experts as an MLP of the width that a token meets (estimates).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from subnet.model.families import num_experts, num_routed
from subnet.model.plan import ModelPlan
from subnet.numerics.codes import RAW, coded_size, planes_of
from subnet.numerics.layout import Section
from subnet.numerics.packing import packed_size
from subnet.numerics.slices import byte_width, sum_bits
from subnet.numerics.state_arrays import ARRAYS, LIMIT_BEFORE, SCALES, inner_kinds, state_kinds

TORCH_OVERHEAD_BYTES = 48 << 20
HEAP_SLACK = 0.25
"""What glibc's heap holds between activations beyond what is in use, as a share of the peak; measured, not derived."""
"""Kernels' scratch, thread stacks and the allocator's slack, above the level after import."""

AUDIT_WINDOW_STEPS = 8
"""Steps before the present one whose boundary blobs are kept, where the budgets allow it."""

BYTES_PER_BLOCK_STATE = 8
"""Decayed maximum and limit."""
BYTES_PER_BLOCK_STEP = 24
"""Exponent, scale, inverse, clip limit, maxima of the partial and of the merge."""

WAITING_INPUTS = 2
"""Boundary tensors that have arrived and aren't worked on yet."""


class Budgets(msgspec.Struct, frozen=True):
    """What bounds a miner's memory, and how many share its stage."""

    replicas: int = 1
    kept_steps: int = AUDIT_WINDOW_STEPS
    graph_memory_bytes: int = 4 << 30
    boundary_memory_bytes: int = 512 << 20
    lane_memory_bytes: int = 8 << 30


class MemoryTerm(msgspec.Struct, frozen=True):
    """``phase`` is ``always``, ``compute`` or ``merge``."""

    name: str
    size_bytes: int
    phase: str = "always"


class StageMemory(msgspec.Struct, frozen=True):
    stage: int
    terms: tuple[MemoryTerm, ...]

    def phase_bytes(self, phase: str) -> int:
        return sum(term.size_bytes for term in self.terms if term.phase == phase)

    @property
    def peak_bytes(self) -> int:
        return self.phase_bytes("always") + max(self.phase_bytes("compute"), self.phase_bytes("merge"))

    def size_of(self, name: str) -> int:
        return sum(term.size_bytes for term in self.terms if term.name == name)


class LayerWidths(msgspec.Struct, frozen=True):
    """Widths of a decoder layer, in elements a token."""

    hidden: int
    attention: int
    key_value: int
    intermediate: int
    heads: int

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> LayerWidths:
        hidden, heads = int(model_config["hidden_size"]), int(model_config["num_attention_heads"])
        groups = int(model_config.get("num_key_value_heads") or heads)
        head_dim = int(model_config.get("qk_head_dim") or model_config.get("head_dim") or hidden // heads)
        return cls(hidden, heads * head_dim, groups * head_dim, _met_width(model_config), heads)


def _met_width(model_config: Mapping[str, Any]) -> int:
    """Intermediate width that a token meets in the widest layer: of the experts, those that it is routed to."""
    width = int(model_config["intermediate_size"])
    if not num_experts(model_config):
        return width
    expert = int(model_config.get("moe_intermediate_size") or width)
    met = expert * (int(model_config["num_experts_per_tok"]) + int(model_config.get("n_shared_experts") or 0))
    return max(met, width) if "moe_intermediate_size" in model_config else met


def layer_saved_bytes(widths: LayerWidths, *, rows: int, length: int, compute: str, attention: str) -> int:
    """Bytes that autograd keeps of one decoder layer for a chunk's backward, its input among them.

    fp32 keeps, a token: per norm the input, its scaled copy and the flat matmul input (6 H in all), q, k, v and the
    attention's output, four times the MLP's width. Under autocast each matmul has a bf16 input copy of its own.
    ``eager`` keeps the probabilities and the repeated k and v.
    """
    h, a, k, i = widths.hidden, widths.attention, widths.key_value, widths.intermediate
    sdpa = attention == "sdpa"
    if compute == "fp32":
        attention_elements = 2 * a + 2 * k if sdpa else 4 * a
        per_token = 4 * (6 * h + attention_elements + 4 * i)
        per_token += 4 * widths.heads if sdpa else 4 * widths.heads * length
    else:
        attention_elements = 2 * a + 2 * k if sdpa else 4 * a
        per_token = 16 * h + 2 * (5 * h + attention_elements + 4 * i)
        per_token += 4 * widths.heads if sdpa else 6 * widths.heads * length
    return rows * length * (per_token + 8)


def bf16_copy_bytes(plan: ModelPlan, stage: int) -> int:
    """Copies of the matrices that linear layers read under bf16, made once per update."""
    if plan.config.precision.compute == "fp32":
        return 0
    layers = (plan.units.units[layer + 1] for layer in plan.layers_of(stage))
    linear = sum(spec.num_elements for unit in layers for spec in unit if len(spec.shape) > 1)
    return 2 * (linear + (plan.vocab_size * plan.hidden_size if plan.is_last(stage) else 0))


def graph_bytes(plan: ModelPlan, stage: int) -> int:
    """What one microbatch's forward keeps alive until its backward has ended."""
    config = plan.config
    chunks, length = config.pipeline.chunks, config.data.sequence_length
    rows, compute = config.pipeline.microbatch_rows // chunks, config.precision.compute
    widths = LayerWidths.of(plan.model_config)
    layer = layer_saved_bytes(widths, rows=rows, length=length, compute=compute, attention=config.model.attention)
    chunk = layer * len(plan.layers_of(stage)) + 4 * rows * length * widths.hidden  # and the stage's output
    if plan.is_first(stage):
        chunk += 8 * rows * length
    if plan.is_last(stage):
        chunk += rows * length * (8 * widths.hidden + 4)
    return chunks * chunk


def graphs_in_flight(plan: ModelPlan, stage: int) -> int:
    """Microbatches whose graphs are alive at once: the last stage goes back on the spot, each one before it waits."""
    if plan.is_last(stage):
        return 1
    lanes = plan.config.num_items if plan.config.lanes.on else 1
    return min(plan.num_stages - stage + 1, lanes * plan.config.pipeline.microbatches)


def backward_work_bytes(plan: ModelPlan, stage: int) -> int:
    """The most that one microbatch's backward needs beside its own graph, which it frees layer by layer.

    Three moments count: the loss (a piece's logits, their fp32 copy, log-softmax and gradient, with the head's
    gradient), the first layer (activation gradients, with the head's gradient), and the end (all weight gradients).
    """
    config, widths = plan.config, LayerWidths.of(plan.model_config)
    chunk_tokens = config.pipeline.microbatch_rows // config.pipeline.chunks * config.data.sequence_length
    gradients = 4 * _leaf_elements(plan, stage)
    element = 4 if config.precision.compute == "fp32" else 2
    layer = chunk_tokens * (element * 4 * widths.intermediate + 8 * widths.hidden)
    head = loss = 0
    if plan.is_last(stage):
        head = 4 * plan.vocab_size * plan.hidden_size if _trains_head(plan) else 0
        piece = min(config.objective.ce_chunk_tokens, chunk_tokens)
        copies = 3 if element == 4 else 4
        pieces = -(-chunk_tokens // piece)
        loss = 4 * copies * piece * plan.vocab_size + (head if pieces > 1 else 0) + 4 * chunk_tokens * widths.hidden
    freed = graph_bytes(plan, stage) // config.pipeline.chunks
    earlier = gradients if config.pipeline.chunks > 1 else 0
    return earlier + max(head + loss, head + layer, gradients + layer - freed)


def _trains_head(plan: ModelPlan) -> bool:
    return plan.is_trainable(plan.units.tied.name if plan.units.tied is not None else plan.canonical[-1].name)


def _leaf_elements(plan: ModelPlan, stage: int) -> int:
    """Elements of all gradients of a stage; a tied tensor held by a lone stage has two leaves."""
    trained = plan.trained_tensors[stage]
    tied = plan.units.tied
    twice = tied is not None and plan.num_stages == 1 and tied in trained
    return sum(spec.num_elements for spec in trained) + (tied.num_elements if twice and tied is not None else 0)


def moment_bytes(plan: ModelPlan, stage: int, kinds: Iterable[str]) -> int:
    """Bytes of these arrays of what the stage trains, weights and scales aside."""
    moments = [ARRAYS[kind] for kind in kinds if kind not in ("weight", *SCALES, LIMIT_BEFORE)]
    return sum(array.num_bytes(spec) for array in moments for spec in plan.trained_tensors[stage])


def lane_bytes(plan: ModelPlan, stage: int) -> int:
    """What one lane holds at a stage while it lives: its weights, their bf16 copies, moments, and a gradient; 0 without lanes.

    A lone stage with tied embeddings has them twice.
    """
    if not plan.config.lanes.on:
        return 0
    trained = sum(spec.num_elements for spec in plan.trained_tensors[stage])
    moments = moment_bytes(plan, stage, inner_kinds(plan.config))
    tied = plan.units.tied
    if tied is not None and plan.num_stages == 1 and tied in plan.trained_tensors[stage]:
        trained += tied.num_elements
        kinds = (ARRAYS[kind] for kind in inner_kinds(plan.config))
        moments += sum(array.num_bytes(tied) for array in kinds)
    return 8 * trained + moments + bf16_copy_bytes(plan, stage)


def lanes_at_once(plan: ModelPlan, stage: int, budgets: Budgets) -> int:
    """Lanes that one of the stage's replicas works at in turns, as many as its memory takes."""
    own = -(-plan.config.num_items // budgets.replicas)
    return min(own, max(1, budgets.lane_memory_bytes // max(1, lane_bytes(plan, stage))))


def _lane_terms(plan: ModelPlan, stage: int, num_lanes: int) -> tuple[MemoryTerm, ...]:
    """All lanes of a member may live at once; the buffers of one stay for the next round."""
    one = lane_bytes(plan, stage)
    return (MemoryTerm("lanes", num_lanes * one, "compute"), MemoryTerm("a lane's buffers", one, "merge"))


def slice_bytes(plan: ModelPlan, section: Section, num_items: int) -> int:
    """Bytes of a whole section's integer sums of ``num_items`` microbatches on the wire, with block maxima."""
    bits = sum_bits(num_items, section.item_bound)
    exact = plan.config.merge.packing == "bits"
    integers = packed_size(section.num_elements, bits) if exact else section.num_elements * byte_width(bits)
    return integers + 4 * section.num_blocks


def stage_slice_bytes(plan: ModelPlan, stage: int) -> int:
    """W: bytes of the merged gradient of all that a stage holds."""
    layout = plan.layout
    sections = (layout.sections[index] for index in layout.stage_sections[stage])
    return sum(slice_bytes(plan, section, plan.config.num_items) for section in sections)


def boundary_bytes(plan: ModelPlan) -> int:
    """One microbatch's hidden states in the run's code, as they are kept and sent."""
    pipeline = plan.config.pipeline
    states = coded_size(pipeline.boundary_code, _microbatch_tokens(plan), plan.hidden_size, pipeline.chunks)
    return states + routing_bytes(plan)


def routing_bytes(plan: ModelPlan) -> int:
    """What the router loss adds to a boundary: two numbers an expert and chunk."""
    return 4 * 2 * num_routed(plan.model_config) * plan.config.pipeline.chunks


def made_bytes(plan: ModelPlan, stage: int, replicas: int) -> int:
    """Boundaries that one of so many replicas makes in a step, and keeps for audits; with a whole number of microbatches."""
    directions = (not plan.is_first(stage)) + (not plan.is_last(stage))
    config = plan.config
    return directions * -(-config.num_items // replicas) * config.parts_per_item * boundary_bytes(plan)


def boundary_bytes_per_token(plan: ModelPlan) -> float:
    """One way, at one boundary."""
    return boundary_bytes(plan) / _microbatch_tokens(plan)


def boundary_parts(plan: ModelPlan) -> tuple[tuple[int, int], ...]:
    """(bytes, bytes of one number) of each part of a boundary, for :mod:`subnet.numerics.planes`."""
    pipeline = plan.config.pipeline
    parts = planes_of(pipeline.boundary_code, _microbatch_tokens(plan), plan.hidden_size, pipeline.chunks)
    routing = routing_bytes(plan)
    return (*parts, (routing, 4)) if routing else parts


def coding_bytes(plan: ModelPlan) -> int:
    """A microbatch's fp32 hidden states beside their coded form; a raw boundary is the tensor itself."""
    raw = plan.config.pipeline.boundary_code == RAW or plan.num_stages == 1
    return 0 if raw else 4 * _microbatch_tokens(plan) * plan.hidden_size


def _microbatch_tokens(plan: ModelPlan) -> int:
    return plan.config.pipeline.microbatch_rows * plan.config.data.sequence_length


TWICE_AHEAD = ("weights", "bf16 copies", "accumulator", "received boundaries")


def _terms_ahead(terms: tuple[MemoryTerm, ...], num_blocks: int) -> tuple[MemoryTerm, ...]:
    """What ``update_delay`` 1 adds: the state before's weights, and the sums and boundaries of a second open step.

    Merging and computing go on at the same time, so the smaller of the two phases counts in full.
    """
    twice = [
        MemoryTerm(f"{term.name} of the step ahead", term.size_bytes) for term in terms if term.name in TWICE_AHEAD
    ]
    scales = MemoryTerm("scales of the step ahead", (4 + BYTES_PER_BLOCK_STEP) * num_blocks)
    phases = [sum(term.size_bytes for term in terms if term.phase == phase) for phase in ("compute", "merge")]
    return (*twice, scales, MemoryTerm("merge beside compute", min(phases)))


def stage_memory(plan: ModelPlan, stage: int, budgets: Budgets | None = None) -> StageMemory:
    """What a miner that serves ``stage`` needs above its level after import."""
    given = budgets or Budgets()
    held = sum(spec.num_elements for spec in plan.stage_tensors[stage])
    elements = sum(spec.num_elements for spec in plan.trained_tensors[stage])
    blocks = sum(spec.num_blocks for spec in plan.trained_tensors[stage])
    packed = stage_slice_bytes(plan, stage)
    graph, in_flight = graph_bytes(plan, stage), graphs_in_flight(plan, stage)
    retained = max(graph, min(graph * in_flight, given.graph_memory_bytes))
    directions = (not plan.is_first(stage)) + (not plan.is_last(stage))
    own_items = -(-plan.config.num_items // given.replicas) * plan.config.parts_per_item
    own_lanes = lanes_at_once(plan, stage, given) if plan.config.lanes.on else 1
    step_blobs = directions * own_items * boundary_bytes(plan)
    blobs = max(step_blobs, min(step_blobs * (given.kept_steps + 1), given.boundary_memory_bytes))
    received = step_blobs
    if plan.config.lanes.on:  # of a round most lies on disk, whoever made it
        blobs, received = min(2 * step_blobs, given.boundary_memory_bytes), 0
        retained = max(graph, min(graph * in_flight * own_lanes, given.graph_memory_bytes))
    waiting = directions * WAITING_INPUTS * boundary_bytes(plan)
    terms: tuple[MemoryTerm, ...] = (
        MemoryTerm("weights", 4 * held),
        MemoryTerm("bf16 copies", bf16_copy_bytes(plan, stage)),
        MemoryTerm("moments", moment_bytes(plan, stage, state_kinds(plan.config))),
        MemoryTerm("scales", (BYTES_PER_BLOCK_STATE + BYTES_PER_BLOCK_STEP) * blocks),
        MemoryTerm("accumulator", 4 * elements),
        MemoryTerm("boundary blobs", blobs),
        MemoryTerm("received boundaries", received),
        MemoryTerm("torch overhead", TORCH_OVERHEAD_BYTES),
        MemoryTerm("retained graphs", retained, "compute"),
        MemoryTerm("gradients and work", backward_work_bytes(plan, stage), "compute"),
        MemoryTerm("waiting inputs", waiting, "compute"),
        MemoryTerm("coding", coding_bytes(plan), "compute"),
        MemoryTerm("merged integers", 4 * elements, "merge"),
        MemoryTerm("slices sent", packed, "merge"),
        MemoryTerm("slices received", packed if given.replicas > 1 else 0, "merge"),
        MemoryTerm("merged slices", packed, "merge"),
    )
    if plan.config.lanes.on:
        terms = (*terms, *_lane_terms(plan, stage, own_lanes))
    if plan.config.pipeline.update_delay:
        terms = (*terms, *_terms_ahead(terms, blocks))
    slack = int(HEAP_SLACK * StageMemory(stage, terms).peak_bytes)
    return StageMemory(stage, (*terms, MemoryTerm("heap slack", slack)))
