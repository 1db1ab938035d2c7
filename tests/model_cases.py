"""Tiny models and a plain `transformers` reference that shares no code with the stage builder."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    MergeSection,
    ModelSection,
    ObjectiveSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)

gc.freeze()  # the libraries' objects live for ever: collecting after each test needn't look at them

SEQUENCE, ROWS, CHUNKS, PIECE = 16, 4, 2, 12


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        **changes,
    }


def tiny_plan(
    cuts: tuple[int, ...] = (0,),
    *,
    compute: str = "fp32",
    attention: str = "sdpa",
    chunks: int = CHUNKS,
    code: str = "raw",
    update_delay: int = 0,
    **changes: Any,
) -> ModelPlan:
    model_config = tiny_config(**changes)
    run = RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name="tiny", seed=7, steps=4),
        model=ModelSection(config=model_config, attention=attention),
        data=DataSection(sequence_length=SEQUENCE),
        objective=ObjectiveSection(ce_chunk_tokens=PIECE),
        pipeline=PipelineSection(
            stages=len(cuts),
            microbatches=4,
            microbatch_rows=ROWS,
            chunks=chunks,
            boundary_code=code,
            update_delay=update_delay,
        ),
        precision=PrecisionSection(compute=compute),
        merge=MergeSection(),
    )
    return plan_model(run, load_architecture(model_config), cuts)


def tokens_of(seed: int, *, vocab: int = 97, rows: int = ROWS) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocab, size=(rows, SEQUENCE + 1), dtype=np.int64)


@dataclass
class PlainResult:
    loss: float
    grads: dict[str, torch.Tensor]
    boundaries: dict[int, torch.Tensor]
    boundary_grads: dict[int, torch.Tensor]


def plain_model(plan: ModelPlan, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """The whole model with the head as a parameter of its own, so that tied leaves have gradients of their own."""
    config = LlamaConfig(**{k: v for k, v in plan.model_config.items() if k != "tie_word_embeddings"})
    config._attn_implementation = plan.config.model.attention
    model = LlamaForCausalLM(config)
    state = {name: weights.get(name, weights["model.embed_tokens.weight"]) for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    return model.eval()


def plain_microbatch(plan: ModelPlan, model: LlamaForCausalLM, rows: np.ndarray) -> PlainResult:
    """Loss, gradients and what crosses each layer's border, as the arithmetic page says."""
    pipeline = plan.config.pipeline
    model.zero_grad(set_to_none=True)
    tokens = torch.from_numpy(rows)
    kept: dict[int, list[torch.Tensor]] = {i: [] for i in range(plan.units.num_layers)}

    def keep(index: int):
        def hook(_module: object, args: tuple[torch.Tensor, ...]) -> None:
            if args[0].requires_grad:
                args[0].retain_grad()
            kept[index].append(args[0])

        return hook

    hooks = [layer.register_forward_pre_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    losses = []
    for chunk in tokens.split(pipeline.microbatch_rows // pipeline.chunks):
        bf16 = plan.config.precision.compute == "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False) if bf16 else nullcontext():
            hidden = model.model(input_ids=chunk[:, :-1]).last_hidden_state.reshape(-1, plan.hidden_size)
            labels = chunk[:, 1:].reshape(-1)
            total = None
            for piece, targets in zip(
                hidden.split(plan.config.objective.ce_chunk_tokens),
                labels.split(plan.config.objective.ce_chunk_tokens),
                strict=True,
            ):
                part = functional.cross_entropy(model.lm_head(piece).float(), targets, reduction="sum")
                total = part if total is None else total + part
            loss = total / torch.tensor(float(pipeline.microbatch_rows * SEQUENCE))
        loss.backward()
        losses.append(loss.detach())
    for hook in hooks:
        hook.remove()
    whole = losses[0]
    for loss in losses[1:]:
        whole = whole + loss
    return PlainResult(
        loss=whole.item(),
        grads={name: p.grad.clone() for name, p in model.named_parameters()},
        boundaries={i: torch.cat([x.detach() for x in xs]) for i, xs in kept.items()},
        boundary_grads={i: torch.cat([x.grad for x in xs]) for i, xs in kept.items()},
    )
