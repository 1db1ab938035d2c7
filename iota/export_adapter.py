"""What a run with adapters exports: a directory that ``peft`` loads, or weights that the adapters have been added into."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from subnet.model.checkpoints import new_directory, write_beside
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture
from subnet.numerics.layout import TensorSpec
from subnet.run.trainable import LORA_A, LORA_B, is_adapter

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What ``peft`` puts before the names of the model it wraps."""

Read = Callable[[TensorSpec], Tensor]


def adapter_specs(plan: ModelPlan) -> tuple[TensorSpec, ...]:
    """The adapters' tensors, in canonical order."""
    return tuple(spec for spec in plan.canonical if is_adapter(spec.name))


def base_specs(plan: ModelPlan) -> tuple[TensorSpec, ...]:
    """All others: the tensors of the model itself."""
    return tuple(spec for spec in plan.canonical if not is_adapter(spec.name))


def merged_tensor(plan: ModelPlan, spec: TensorSpec, read: Read) -> Tensor:
    """A tensor of the model with its adapter added in: W + B A · alpha / rank, in fp32."""
    weight, owner = read(spec), spec.name.removesuffix(".weight")
    pair = {found.name: found for found in adapter_specs(plan)}
    if owner + LORA_A not in pair or not spec.name.endswith(".weight"):
        return weight
    return weight + (read(pair[owner + LORA_B]) @ read(pair[owner + LORA_A])) * plan.config.trainable.scaling


def write_adapter(
    directory: Path,
    plan: ModelPlan,
    read: Read,
    *,
    tokenizer: Path | None = None,
    carried: Mapping[str, bytes] | None = None,
    card: str = "",
) -> None:
    """Write the adapters so that ``peft.PeftModel.from_pretrained(base, directory)`` loads them; whole or not at all."""
    with new_directory(directory) as staging:
        tensors = {_PREFIX + spec.name: read(spec).detach().cpu().contiguous() for spec in adapter_specs(plan)}
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        described = json.dumps(adapter_config(plan), indent=2, sort_keys=True)
        (staging / CONFIG_FILE).write_text(described + "\n")
        write_beside(staging, plan.model_config, tokenizer=tokenizer, carried=carried, card=card)


def adapter_config(plan: ModelPlan) -> dict[str, object]:
    """``adapter_config.json``, in the terms of ``peft``."""
    section, architecture = plan.config.trainable, load_architecture(plan.model_config)
    layers = range(architecture.num_layers)
    names = dict.fromkeys(name for layer in layers for name in architecture.adapter_targets(layer, section))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": plan.config.model.pretrained or "",
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(names),
        "layers_to_transform": list(section.layers) or None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
