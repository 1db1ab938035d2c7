"""The architectures that may be trained: a config dict in, a checked :class:`Architecture` or a ConfigError out.

Only model code of the installed ``transformers`` is ever run; a family is a row of :mod:`subnet.model.families`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from subnet.errors import ConfigError
from subnet.model.adapters import adapter_targets, check_trainable, linear_names, with_adapters
from subnet.model.config_checks import check_config, check_keys, check_numbers
from subnet.model.families import FAMILIES, FULL, Family, FamilyParts, is_sparse, num_experts, num_routed
from subnet.model.own_code import MODULES
from subnet.model.plan import ModelPlan, ModelUnits, check_cuts
from subnet.numerics.layout import TensorSpec
from subnet.run.config import RunConfig
from subnet.run.trainable import TrainableSection

EMBEDDING_NAME = "model.embed_tokens.weight"
NORM_NAME = "model.norm.weight"
HEAD_NAME = "lm_head.weight"

_FOREIGN_KEYS = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "attn_implementation",
    "experts_implementation",
)
_LEGACY_KEYS = ("rope_theta", "rope_scaling", "model_type", "architectures", *_FOREIGN_KEYS)

LayerShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names within a layer and shapes, in the library's order: parameters, and the buffers that a checkpoint holds."""


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

    @property
    def logit_softcap(self) -> float | None:
        """The head's logits are softly capped at this magnitude."""
        cap = getattr(self.config, "final_logit_softcapping", None)
        return None if cap is None else float(cap)

    @cached_property
    def num_routed(self) -> int:
        """Experts of the router loss; 0 without one."""
        return num_routed(self.model_config)

    @property
    def router_loss_coefficient(self) -> float:
        return float(self.config.router_aux_loss_coef) if self.num_routed else 0.0

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts."""
        return sum(self.is_sparse(layer) for layer in range(self.num_layers))

    def is_sparse(self, layer: int) -> bool:
        return bool(self.family.router) and is_sparse(self.model_config, layer)

    def attention_of(self, layer: int) -> str:
        """The kind of attention of a layer: a key of its mask, and of its rotary table where there are several."""
        if self.family.masks != "by_layer":
            return FULL
        return str(self.config.layer_types[layer])

    def layer_kind(self, layer: int) -> tuple[str, bool]:
        """Layers of one kind run the same kernels on the same shapes."""
        return self.attention_of(layer), self.is_sparse(layer)

    def layer_shapes(self, layer: int) -> LayerShapes:
        """Tensors of a layer."""
        return self._makes[self.is_sparse(layer)][0]

    def linears(self, layer: int) -> tuple[str, ...]:
        """Linear layers within a decoder layer: what can have an adapter."""
        return self._makes[self.is_sparse(layer)][1]

    def adapter_targets(self, layer: int, trainable: TrainableSection | None) -> tuple[str, ...]:
        """Those that have one in a run with this section."""
        return adapter_targets(trainable, layer, self.linears(layer))

    @cached_property
    def _makes(self) -> dict[bool, tuple[LayerShapes, tuple[str, ...]]]:
        """Tensors and linear layers of a layer, without experts and with them."""
        found: dict[bool, tuple[LayerShapes, tuple[str, ...]]] = {}
        for layer in range(self.num_layers):
            if self.is_sparse(layer) in found:
                continue
            with torch.device("meta"):
                built = self.parts.decoder_layer(self.config, layer)
            shapes = tuple((name, tuple(t.shape)) for name, t in built.state_dict().items())
            found[self.is_sparse(layer)] = shapes, linear_names(built)
        return found

    def units(self, sequence_length: int, trainable: TrainableSection | None = None) -> ModelUnits:
        """Embedding, layers and head with their tensors, and the adapters of a run that trains them.

        FLOPs are those of training everything at this sequence length.
        """
        embedding = TensorSpec(EMBEDDING_NAME, (self.vocab_size, self.hidden_size), True)
        norm = TensorSpec(NORM_NAME, (self.hidden_size,), False)
        head = TensorSpec(HEAD_NAME, (self.vocab_size, self.hidden_size), True)
        layers = tuple(
            tuple(
                TensorSpec(f"model.layers.{i}.{name}", shape, _by_expert(name, shape))
                for name, shape in with_adapters(
                    self.layer_shapes(i), self.adapter_targets(i, trainable), 1 if trainable is None else trainable.rank
                )
            )
            for i in range(self.num_layers)
        )
        return ModelUnits(
            units=((embedding,), *layers, (norm,) if self.tied else (norm, head)),
            unit_flops_per_token=(
                6.0 * self.hidden_size,
                *(self._layer_flops(layer, sequence_length) for layer in range(self.num_layers)),
                6.0 * self.hidden_size * self.vocab_size,
            ),
            tied=embedding if self.tied else None,
        )

    def _layer_flops(self, layer: int, sequence_length: int) -> float:
        """A token's, forward and backward; of the experts those that it is routed to."""
        matmul = 0.0
        for name, shape in self.layer_shapes(layer):
            if len(shape) == 3:
                matmul += prod(shape) * int(self.config.num_experts_per_tok) / num_experts(self.model_config)
            elif len(shape) == 2 and not _by_expert(name, shape):
                matmul += prod(shape)
        attention = sequence_length * self.config.num_attention_heads * attention_width(self.config)
        return 6.0 * (matmul + attention)  # causal scores and values: half of 2 · L · width each, forward


def _by_expert(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a matrix has a row for each expert; 3-D tensors are blocked by expert anyway."""
    return len(shape) == 2 and ".experts." in name


def attention_width(config: Any) -> float:
    """Mean width of a head's queries and values."""
    if getattr(config, "qk_head_dim", None):
        return (config.qk_head_dim + config.v_head_dim) / 2
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def load_architecture(model_config: Mapping[str, Any]) -> Architecture:
    """Raises :class:`ConfigError` naming the key where the config can't be trained here."""
    model_type = model_config.get("model_type")
    if model_type == MODULES:
        from subnet.model.sequence import load_sequence  # it is built on this module

        return load_sequence(model_config)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"model.config.model_type = {model_type!r} is not in the table of families",
            hint=f"allowed: {', '.join(sorted(FAMILIES))}; docs/models.md says how to add one",
        )
    config_class = family.load().config
    check_keys(model_config, config_class, _LEGACY_KEYS)
    values = {k: v for k, v in model_config.items() if k not in ("model_type", *_FOREIGN_KEYS)}
    check_numbers(values)
    try:
        config = config_class(**values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ConfigError(
            f"model.config is not a {model_type} config: {reason}",
            hint=f"what {config_class.__name__} takes is allowed",
        ) from error
    check_config(family, config)
    return Architecture(family, config)


def plan_model(run: RunConfig, architecture: Architecture, cuts: tuple[int, ...]) -> ModelPlan:
    """The run's plan; checks that model, data and pipeline fit each other."""
    check_run(run, architecture)
    check_cuts(cuts, architecture.num_layers)
    units = architecture.units(run.data.sequence_length, run.trainable)
    return ModelPlan(config=run, model_config=architecture.model_config, units=units, cuts=cuts)


def check_run(run: RunConfig, architecture: Architecture) -> None:
    """Raises :class:`ConfigError` where run and model don't fit."""
    longest = int(architecture.config.max_position_embeddings)
    if run.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length = {run.data.sequence_length} is not allowed",
            hint=f"allowed: at most model.config.max_position_embeddings = {longest}",
        )
    family, attention = architecture.family, run.model.attention
    if attention not in family.attentions:
        raise ConfigError(
            f"model.attention = {attention!r} is not allowed for {family.model_type}: the library has none for it",
            hint=f"set model.attention = {family.attentions[0]!r}",
        )
    if family.model_type == MODULES and (run.objective.kind == "sft" or run.trainable.kind == "lora"):
        what = "objective.kind = 'sft'" if run.objective.kind == "sft" else "trainable.kind = 'lora'"
        raise ConfigError(f"{what} is not allowed with model.modules", hint="a model of transformers can have it")
    check_trainable(run.trainable, {layer: architecture.linears(layer) for layer in range(architecture.num_layers)})
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
