"""Where model families differ: the one table that the registry, the stage builder and the checkpoints read. No torch.

Every part of a model is a class of the installed ``transformers``; a row says which, and what its whole-model class does
around them (masks by layer, rotary tables by layer, router loss). ``docs/models.md`` says how a row is added.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Masks = Literal["causal", "window", "by_layer"]
"""``causal``: every layer sees all that is before it; ``window``: the last ``sliding_window`` positions where the config has
one; ``by_layer``: as ``layer_types`` of the config says."""

ExpertNames = Literal["", "each", "mixtral", "stacked"]
"""How the experts' matrices are named in Hugging Face directories: none, one by one, Mixtral's own names, or stacked."""

FULL, SLIDING = "full_attention", "sliding_attention"
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that don't depend on what was computed before."""


@dataclass(frozen=True)
class FamilyParts:
    """The library's own classes a stage is built from."""

    config: Any
    decoder_layer: Any
    norm: Any
    rotary_embedding: Any
    scaled_embedding: Any
    """An embedding that multiplies by a constant, or None."""


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    model_type: str
    prefix: str
    """What the library's classes begin with: ``LlamaDecoderLayer``, ``LlamaRMSNorm``, ..., ``LlamaForCausalLM``."""
    package: str = ""
    """The library's module under ``transformers.models``, where it isn't named as the model type is."""
    config_name: str = ""
    masks: Masks = "causal"
    rotary_by_layer: bool = False
    """Rotary tables of each kind of attention (``layer_types``)."""
    scaled_embedding: str = ""
    attentions: tuple[str, ...] = ("sdpa", "eager")
    """What ``model.attention`` may be; ``sdpa`` can't do soft-capped scores nor sinks."""
    norm_start: float = 1.0
    """Initial value of norm weights: 0 where the norm multiplies by 1 + weight."""
    router: str = ""
    """Path of the router in a layer with experts, or nothing."""
    router_loss: bool = False
    """Whether the library's causal LM adds a load-balancing loss (``output_router_logits``)."""
    expert_names: ExpertNames = ""
    notes: str = ""
    """What is special, for the table in ``docs/models.md``."""

    @property
    def causal_lm(self) -> str:
        return f"{self.prefix}ForCausalLM"

    def load(self) -> FamilyParts:
        """Imports the library's modules of the family."""
        name = self.package or self.model_type
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
        return FamilyParts(
            config=getattr(configuration, self.config_name or f"{self.prefix}Config"),
            decoder_layer=getattr(modeling, f"{self.prefix}DecoderLayer"),
            norm=getattr(modeling, f"{self.prefix}RMSNorm"),
            rotary_embedding=getattr(modeling, f"{self.prefix}RotaryEmbedding"),
            scaled_embedding=getattr(modeling, self.scaled_embedding) if self.scaled_embedding else None,
        )


_ROWS = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral", masks="window", notes="sliding window on every layer"),
    Family("qwen2", "Qwen2", masks="by_layer", notes="biased q, k, v; sliding layers"),
    Family("qwen3", "Qwen3", masks="by_layer", notes="norms of q and k; sliding layers"),
    Family(
        "gemma",
        "Gemma",
        scaled_embedding="GemmaTextScaledWordEmbedding",
        norm_start=0.0,
        notes="scaled embedding, norms around 1 + weight",
    ),
    Family(
        "gemma2",
        "Gemma2",
        masks="by_layer",
        scaled_embedding="Gemma2TextScaledWordEmbedding",
        attentions=("eager",),
        norm_start=0.0,
        notes="as Gemma; soft-capped scores and logits, sliding and global layers",
    ),
    Family(
        "gemma3_text",
        "Gemma3",
        package="gemma3",
        config_name="Gemma3TextConfig",
        masks="by_layer",
        rotary_by_layer=True,
        scaled_embedding="Gemma3TextScaledWordEmbedding",
        norm_start=0.0,
        notes="as Gemma; norms of q and k, sliding and global layers with a rotary base each; text only",
    ),
    Family(
        "mixtral",
        "Mixtral",
        masks="window",
        router="mlp.gate",
        router_loss=True,
        expert_names="mixtral",
        notes="experts, router loss",
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        masks="window",
        router="mlp.gate",
        router_loss=True,
        expert_names="each",
        notes="experts, router loss, dense layers between",
    ),
    Family(
        "olmoe",
        "Olmoe",
        router="mlp.gate",
        router_loss=True,
        expert_names="each",
        notes="experts, router loss, norms of q and k",
    ),
    Family(
        "gpt_oss",
        "GptOss",
        masks="by_layer",
        attentions=("eager",),
        router="mlp.router",
        router_loss=True,
        expert_names="stacked",
        notes="experts with biases, router loss, attention sinks, sliding and global layers, yarn",
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3",
        router="mlp.gate",
        expert_names="each",
        notes="latent attention, shared expert, dense layers first; the routing bias is state without a gradient",
    ),
)

FAMILIES: Mapping[str, Family] = {row.model_type: row for row in _ROWS}


def is_sparse(model_config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a family with experts has them; some families have dense layers too."""
    first = model_config.get("first_k_dense_replace") or 0
    dense = model_config.get("mlp_only_layers") or ()
    every = model_config.get("decoder_sparse_step") or 1
    return layer >= first and layer not in dense and (layer + 1) % every == 0


def num_experts(model_config: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 in a dense family."""
    family = FAMILIES.get(str(model_config.get("model_type")))
    if family is None or not family.router:
        return 0
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return int(next((model_config[name] for name in names if model_config.get(name) is not None), 0))


def num_routed(model_config: Mapping[str, Any]) -> int:
    """Experts whose counts and probabilities cross the boundaries: all of them where there is a router loss, else 0."""
    family = FAMILIES.get(str(model_config.get("model_type")))
    if family is None or not family.router_loss or not model_config.get("output_router_logits"):
        return 0
    return num_experts(model_config)
