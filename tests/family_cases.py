"""A tiny model of every family, and a run of it in one process by the engine's own executors, cut into stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.setting import training_rows
from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.model.checkpoints import initial_weights
from subnet.model.families import FAMILIES
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.numerics.roots import run_root
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)
from subnet.run.schedule import norm_and_coefficient, step_scalars
from subnet.words import CALIBRATION_STEP, ItemKey

VOCAB, LENGTH = 64, 12
CUTS = (0, 1, 3)
_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOWED = {"sliding_window": 6}
_ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.05}
_BY_LAYER = {"layer_types": ["sliding_attention", "full_attention"] * 2, **_WINDOWED}
_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": _WINDOWED,
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "tie_word_embeddings": True, **_WINDOWED},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, **_BY_LAYER},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **_BY_LAYER},
    "mixtral": {"num_local_experts": 4, **_ROUTED},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1], **_ROUTED},
    "olmoe": {"num_experts": 4, **_ROUTED},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8, **_ROUTED, **_BY_LAYER},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
    },
}
NAMES = tuple(FAMILIES)
ROUTED = tuple(name for name, family in FAMILIES.items() if family.router_loss)


def family_config(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name, **_DENSE, **_SPECIAL.get(name, {}), **changes}


def family_plan(
    name: str,
    cuts: tuple[int, ...] = CUTS,
    *,
    compute: str = "fp32",
    chunks: int = 2,
    code: str = "raw",
    steps: int = 50,
    **changes: Any,
) -> ModelPlan:
    architecture = load_architecture(family_config(name, **changes))
    run = RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name="family", seed=5, steps=steps),
        model=ModelSection(config=architecture.model_config, attention=architecture.family.attentions[0]),
        data=DataSection(sequence_length=LENGTH),
        objective=ObjectiveSection(ce_chunk_tokens=16),
        optimizer=OptimizerSection(learning_rate=3e-3),
        pipeline=PipelineSection(
            stages=len(cuts), microbatches=2, microbatch_rows=4, chunks=chunks, boundary_code=code
        ),
        precision=PrecisionSection(compute=compute),
    )
    return plan_model(run, architecture, cuts)


def streams() -> tuple[np.ndarray, np.ndarray]:
    """Tokens with something to learn: each follows from the one before, most of the time."""
    rng = np.random.default_rng(0)
    out = [0]
    for noise in rng.integers(0, VOCAB, 6000):
        out.append(int(noise) if noise % 5 == 0 else (out[-1] * 5 + 3) % VOCAB)
    tokens = np.array(out, np.uint16)
    return tokens[:5000], tokens[5000:]


class StagedRun:
    """Every stage of a run with one member each, in one process: forward, backward, merge and update as members do."""

    def __init__(self, plan: ModelPlan, *, graph_budget_bytes: int = 1 << 30) -> None:
        self.plan, self.tokens = plan, streams()[0]
        self.stages: list[StageExecutor] = []
        for stage in range(plan.num_stages):
            state = StageState(plan, stage)
            state.load_weights(initial_weights(plan, plan.stage_tensors[stage]))
            self.stages.append(StageExecutor(plan, stage, state, graph_budget_bytes=graph_budget_bytes))

    def item(self, step: int, microbatch: int) -> tuple[list[bytes], float]:
        """A microbatch there and back; gives what crossed the boundaries, in order, and the loss."""
        rows = training_rows(self.plan.config, self.tokens, step, microbatch)
        key, crossed, inputs = PartialKey(step, 1, 0, 0), list[bytes](), list[Any]([None])
        loss = 0
        for executor in self.stages:
            done = executor.forward(ItemKey(step, microbatch, executor.stage), inputs[-1], rows, keep_graph=True)
            inputs.append(done.output)
            loss = done.loss_bits or 0
        grad: Any = None
        for executor in reversed(self.stages):
            item = ItemKey(step, microbatch, executor.stage)
            grad = executor.backward(item, grad, inputs[executor.stage], rows, partial=key).output
            crossed.append(bytes(grad or b""))
        return [*(bytes(data) for data in inputs[1:-1]), *crossed], float(np.uint32(loss).view(np.float32))

    def step(self, step: int) -> list[float]:
        """All microbatches, the merge and the update; gives the losses."""
        counted = self.plan.config.pipeline.microbatches
        losses = [self.item(step, microbatch)[1] for microbatch in range(counted)]
        key, merged, squares = PartialKey(step, 1, 0, 0), dict[tuple[int, int], bytes](), 0
        for group in self.plan.layout.groups:
            found: dict[int, list[Any]] = {}
            merges = [StageMerge(self.plan, stage, self.stages[stage].state) for stage in group.stages]
            for stage, merge in zip(group.stages, merges, strict=True):
                for index, made in merge.slices(self.stages[stage].partials[key]).items():
                    found.setdefault(index, []).append((made.data, made.num_items))
            for index, slices in found.items():
                owner = next(merge for merge in merges if index in merge.partitions)
                done = owner.merge_partition(index, slices, total_items=counted)
                merged[group.index, index], squares = bytes(done.data), squares + done.squares
        _, coefficient = norm_and_coefficient(squares, counted, self.plan.config.optimizer.clip_norm)
        for executor in self.stages:
            merge = StageMerge(self.plan, executor.stage, executor.state)
            mine = {index: merged[merge.group, index] for index in merge.partitions}
            sections = merge.merged_sections(mine, total_items=counted)
            if step == CALIBRATION_STEP:
                executor.state.apply_step(step, sections)
            else:
                scalars = step_scalars(self.plan.config, step)
                executor.state.apply_step(step, sections, coefficient_bits=coefficient, scalars=scalars)
            executor.drop_partial(key)
        return losses

    def root(self) -> str:
        leaves: dict[str, bytes] = {}
        for executor in self.stages:
            for name, leaf in executor.state.leaves():
                assert leaves.setdefault(name, leaf) == leaf
        return run_root(self.stages[0].state.num_updates, [leaves[s.name] for s in self.plan.canonical]).hex()

    def weights(self) -> dict[str, Any]:
        """The newest weights by name."""
        return {
            spec.name: executor.state.weight(spec.name) for executor in self.stages for spec in executor.state.specs
        }
