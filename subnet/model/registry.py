"""The architectures that may be trained: a config dict in, a checked :class:`Architecture` or a ConfigError out.

Only model code of the installed ``transformers`` is ever run; a family is added by a line in ``FAMILIES``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN

from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan, ModelUnits, check_cuts
from subnet.numerics.layout import TensorSpec
from subnet.run.config import RunConfig

EMBEDDING_NAME = "model.embed_tokens.weight"
NORM_NAME = "model.norm.weight"
HEAD_NAME = "lm_head.weight"

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_FOREIGN_KEYS = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "attn_implementation")
_LEGACY_KEYS = ("rope_theta", "rope_scaling", "model_type", "architectures", *_FOREIGN_KEYS)


@dataclass(frozen=True)
class FamilyParts:
    """The library's own classes a stage is built from."""

    config: Any
    decoder_layer: Any
    norm: Any
    rotary_embedding: Any


@dataclass(frozen=True)
class Family:
    """One row of the table: how a model type's parts are found, which settings are refused, its causal-LM class."""

    model_type: str
    causal_lm: str
    load: Callable[[], FamilyParts]


def _llama() -> FamilyParts:
    from transformers.models.llama import configuration_llama, modeling_llama

    return FamilyParts(
        config=configuration_llama.LlamaConfig,
        decoder_layer=modeling_llama.LlamaDecoderLayer,
        norm=modeling_llama.LlamaRMSNorm,
        rotary_embedding=modeling_llama.LlamaRotaryEmbedding,
    )


FAMILIES: Mapping[str, Family] = {
    "llama": Family(model_type="llama", causal_lm="LlamaForCausalLM", load=_llama),
}


@dataclass(frozen=True)
class Architecture:
    """A checked model: the library's config and what the run needs of it."""

    family: Family
    config: Any
    """The ``transformers`` config object."""

    @cached_property
    def parts(self) -> FamilyParts:
        return self.family.load()

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """The whole config as plain values; loading it again gives an equal architecture."""
        plain = json.loads(self.config.to_json_string(use_diff=False))
        for key in _FOREIGN_KEYS:
            plain.pop(key, None)
        plain["architectures"] = [self.family.causal_lm]
        return plain

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @cached_property
    def layer_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names within a layer and shapes, in the library's order."""
        with torch.device("meta"):
            layer = self.parts.decoder_layer(self.config, 0)
        return tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())

    def units(self, sequence_length: int) -> ModelUnits:
        """Embedding, layers and head with their tensors; FLOPs are those of training at this sequence length."""
        embedding = TensorSpec(EMBEDDING_NAME, (self.vocab_size, self.hidden_size), True)
        norm = TensorSpec(NORM_NAME, (self.hidden_size,), False)
        head = TensorSpec(HEAD_NAME, (self.vocab_size, self.hidden_size), True)
        layers = tuple(
            tuple(TensorSpec(f"model.layers.{i}.{name}", shape, False) for name, shape in self.layer_shapes)
            for i in range(self.num_layers)
        )
        matmul = sum(prod(shape) for _, shape in self.layer_shapes if len(shape) >= 2)
        attention = sequence_length * self.config.num_attention_heads * self.config.head_dim
        layer_flops = 6.0 * (matmul + attention)  # causal scores and values: half of 2 · L · width each, forward
        return ModelUnits(
            units=((embedding,), *layers, (norm,) if self.tied else (norm, head)),
            unit_flops_per_token=(
                6.0 * self.hidden_size,
                *[layer_flops] * self.num_layers,
                6.0 * self.hidden_size * self.vocab_size,
            ),
            tied=embedding if self.tied else None,
        )


def load_architecture(model_config: Mapping[str, Any]) -> Architecture:
    """Raises :class:`ConfigError` naming the key where the config can't be trained here."""
    model_type = model_config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"model.config.model_type = {model_type!r} is not allowed", hint=f"allowed: {', '.join(sorted(FAMILIES))}"
        )
    config_class = family.load().config
    _check_keys(model_config, config_class)
    values = {k: v for k, v in model_config.items() if k not in ("model_type", *_FOREIGN_KEYS)}
    _check_numbers(values)
    try:
        config = config_class(**values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ConfigError(f"model.config is not a {model_type} config: {reason}") from error
    _check_config(config)
    return Architecture(family, config)


def plan_model(run: RunConfig, architecture: Architecture, cuts: tuple[int, ...]) -> ModelPlan:
    """The run's plan; checks that model, data and pipeline fit each other."""
    check_run(run, architecture)
    check_cuts(cuts, architecture.num_layers)
    units = architecture.units(run.data.sequence_length)
    return ModelPlan(config=run, model_config=architecture.model_config, units=units, cuts=cuts)


def check_run(run: RunConfig, architecture: Architecture) -> None:
    """Raises :class:`ConfigError` where run and model don't fit."""
    longest = int(architecture.config.max_position_embeddings)
    if run.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length = {run.data.sequence_length} is not allowed",
            hint=f"allowed: at most model.config.max_position_embeddings = {longest}",
        )
    if run.pipeline.stages > architecture.num_layers:
        raise ConfigError(
            f"pipeline.stages = {run.pipeline.stages} is not allowed: the model has {architecture.num_layers} layers",
            hint=f"allowed: 1 to {architecture.num_layers}",
        )


def check_vocabulary(architecture: Architecture, tokenizer_size: int) -> None:
    """Raises :class:`ConfigError` where the tokenizer has tokens the model has no row for."""
    if tokenizer_size > architecture.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer_size} tokens, the model only {architecture.vocab_size}",
            hint=f"set model.config.vocab_size = {tokenizer_size} or more, or use a smaller tokenizer",
        )


def _check_keys(model_config: Mapping[str, Any], config_class: Any) -> None:
    """A key that looks like a slip of a known one is an error; other unknown keys are a checkpoint's own notes."""
    known = sorted({*config_class().to_dict(), *_LEGACY_KEYS})
    for key in model_config:
        near = [] if key in known else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            raise ConfigError(f"model.config.{key} is not a key of this model", hint=f"did you mean {near[0]}?")


def _check_numbers(values: Mapping[str, Any]) -> None:
    for key, least, most in (
        ("vocab_size", 2, 2**24),
        ("hidden_size", 2, 2**17),
        ("intermediate_size", 1, 2**20),
        ("num_hidden_layers", 1, 4096),
        ("num_attention_heads", 1, 2**14),
        ("num_key_value_heads", 1, 2**14),
        ("head_dim", 2, 2**14),
        ("max_position_embeddings", 8, 2**24),
    ):
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(
                f"model.config.{key} = {value!r} is not allowed", hint=f"allowed: a whole number, {least} to {most}"
            )
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    hidden = values.get("hidden_size")
    if hidden and heads and hidden % heads:
        raise ConfigError(
            f"model.config.hidden_size = {hidden} doesn't divide by num_attention_heads = {heads}",
            hint=f"nearest multiples: {hidden // heads * heads or heads}, {(hidden // heads + 1) * heads}",
        )
    if heads and groups and heads % groups:
        raise ConfigError(
            f"model.config.num_attention_heads = {heads} doesn't divide by num_key_value_heads = {groups}",
            hint="num_key_value_heads must be a divisor of num_attention_heads",
        )


def _check_config(config: Any) -> None:
    """What the library accepts but a run that is exact to the bit can't use."""
    if config.attention_dropout:
        raise ConfigError(
            f"model.config.attention_dropout = {config.attention_dropout} is not allowed", hint="allowed: 0"
        )
    if config.hidden_act not in ACT2FN:
        raise ConfigError(
            f"model.config.hidden_act = {config.hidden_act!r} is not allowed",
            hint=f"allowed: {', '.join(sorted(ACT2FN))}",
        )
    if config.head_dim % 2:
        raise ConfigError(f"model.config.head_dim = {config.head_dim} is not allowed", hint="allowed: even numbers")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"model.config.num_key_value_heads = {config.num_key_value_heads} is not allowed",
            hint=f"allowed: divisors of num_attention_heads = {config.num_attention_heads}",
        )
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _STATIC_ROPE:
        raise ConfigError(
            f"model.config.rope_parameters.rope_type = {rope_type!r} is not allowed",
            hint=f"allowed: {', '.join(_STATIC_ROPE)} (others change with what was computed before)",
        )
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ConfigError(
            f"model.config.pad_token_id = {config.pad_token_id} is not allowed",
            hint=f"allowed: 0 to vocab_size - 1 = {config.vocab_size - 1}, or none",
        )
