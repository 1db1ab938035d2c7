"""What a model config must be before it is trained here: one line for each mistake, naming the key and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers.activations import ACT2FN

from subnet.errors import ConfigError
from subnet.model.families import SLIDING, STATIC_ROPE, Family


def check_keys(model_config: Mapping[str, Any], config_class: Any, legacy: Sequence[str]) -> None:
    """A key that looks like a slip of a known one is an error; other unknown keys are a checkpoint's own notes."""
    known = sorted({*config_class().to_dict(), *config_class.attribute_map, *legacy})
    for key in model_config:
        near = [] if key in known else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            raise ConfigError(f"model.config.{key} is not a key of this model", hint=f"did you mean {near[0]}?")


def check_numbers(values: Mapping[str, Any]) -> None:
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


def check_config(family: Family, config: Any) -> None:
    """What the library accepts but a run that is exact to the bit can't use."""
    if config.attention_dropout:
        raise ConfigError(
            f"model.config.attention_dropout = {config.attention_dropout} is not allowed", hint="allowed: 0"
        )
    key = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    if getattr(config, key) not in ACT2FN:
        raise ConfigError(
            f"model.config.{key} = {getattr(config, key)!r} is not allowed",
            hint=f"allowed: {', '.join(sorted(ACT2FN))}",
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError("model.config.use_bidirectional_attention = True is not allowed", hint="allowed: false")
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            "model.config.quantization_config is not allowed: quantised weights can't be trained",
            hint="save the model dequantised, in bf16 or fp32, and without that key",
        )
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ConfigError(
            f"model.config.pad_token_id = {config.pad_token_id} is not allowed",
            hint=f"allowed: 0 to vocab_size - 1 = {config.vocab_size - 1}, or none",
        )
    _check_heads(config)
    _check_rope(family, config)
    _check_layer_types(family, config)
    if family.router:
        _check_experts(config)


def _check_heads(config: Any) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width % 2:
        raise ConfigError(f"model.config.head_dim = {width} is not allowed", hint="allowed: even numbers")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"model.config.num_key_value_heads = {config.num_key_value_heads} is not allowed",
            hint=f"allowed: divisors of num_attention_heads = {config.num_attention_heads}",
        )


def _check_rope(family: Family, config: Any) -> None:
    parameters = cast("dict[str, Any]", config.rope_parameters or {})
    for table in parameters.values() if family.rotary_by_layer else (parameters,):
        rope_type = (table or {}).get("rope_type", "default")
        if rope_type not in STATIC_ROPE:
            raise ConfigError(
                f"model.config.rope_parameters.rope_type = {rope_type!r} is not allowed",
                hint=f"allowed: {', '.join(STATIC_ROPE)} (others change with what was computed before)",
            )


def _check_layer_types(family: Family, config: Any) -> None:
    if family.masks != "by_layer":
        return
    kinds = [str(kind) for kind in config.layer_types]
    if SLIDING in kinds and not config.sliding_window:
        raise ConfigError(
            f"model.config.sliding_window = {config.sliding_window} is not allowed where layer_types has {SLIDING}",
            hint="a whole number above 0",
        )


def _check_experts(config: Any) -> None:
    experts, chosen = int(config.num_local_experts), int(config.num_experts_per_tok)
    if not 1 <= experts <= 4096:
        raise ConfigError(f"{experts} experts are not allowed", hint="allowed: 1 to 4096")
    if not 1 <= chosen <= experts:
        raise ConfigError(
            f"model.config.num_experts_per_tok = {chosen} is not allowed: a layer has {experts} experts",
            hint=f"allowed: 1 to {experts}",
        )
    if getattr(config, "router_jitter_noise", 0.0):
        raise ConfigError(
            f"model.config.router_jitter_noise = {config.router_jitter_noise} is not allowed", hint="allowed: 0"
        )
    groups = getattr(config, "n_group", None)
    if groups is None:
        return
    if experts % groups or experts // groups < 2:
        raise ConfigError(
            f"model.config.n_group = {groups} is not allowed", hint=f"groups of {experts} experts, 2 or more in each"
        )
    if not 1 <= config.topk_group <= groups or chosen > config.topk_group * (experts // groups):
        raise ConfigError(
            f"model.config.topk_group = {config.topk_group} is not allowed",
            hint=f"1 to n_group = {groups}, with num_experts_per_tok = {chosen} experts or more in them",
        )
