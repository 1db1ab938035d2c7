"""Low-rank adapters beside a stage's linear layers, with the names and the arithmetic of ``peft``'s LoRA.

Which layers get one follows from names alone, as ``target_modules`` and ``layers_to_transform`` do it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from blake3 import blake3
from torch import Tensor, nn

from subnet.errors import ConfigError
from subnet.numerics.layout import TensorSpec
from subnet.run.trainable import LORA_A, LORA_B, TrainableSection, is_adapter


class LoraLinear(nn.Linear):
    """A linear layer and, beside it, two thin ones: their output, scaled, is added to its own."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float) -> None:
        super().__init__(base.in_features, base.out_features, bias="bias" in dict(base.named_parameters()))
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.scaling = scaling

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return super().forward(input) + self.lora_B(self.lora_A(input)) * self.scaling


def adapter_targets(section: TrainableSection | None, layer: int, linears: Sequence[str]) -> tuple[str, ...]:
    """Those of a layer's linear layers, by their names in it, that get an adapter."""
    if section is None or section.kind != "lora" or (section.layers and layer not in section.layers):
        return ()
    return tuple(
        name for name in linears if not section.targets or any(_matches(t, layer, name) for t in section.targets)
    )


def _matches(target: str, layer: int, name: str) -> bool:
    whole = f"model.layers.{layer}.{name}"
    return whole == target or whole.endswith(f".{target}")


def check_trainable(section: TrainableSection, linears: Mapping[int, Sequence[str]]) -> None:
    """Raises :class:`ConfigError` where the section names what the model hasn't; ``linears``: linear layers by layer."""
    beyond = [layer for layer in section.layers if layer not in linears]
    if beyond:
        raise ConfigError(
            f"trainable.layers names layer {beyond[0]}: the model has {len(linears)}", hint=f"0 to {len(linears) - 1}"
        )
    chosen = {layer: names for layer, names in linears.items() if not section.layers or layer in section.layers}
    for target in section.targets:
        if not any(_matches(target, layer, name) for layer, names in chosen.items() for name in names):
            there = dict.fromkeys(name for names in chosen.values() for name in names)
            raise ConfigError(
                f"trainable.targets: {target!r} matches no linear layer of the model",
                hint=f"there are {', '.join(there)}",
            )


def with_adapters(
    shapes: Sequence[tuple[str, tuple[int, ...]]], targets: Sequence[str], rank: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A layer's tensors with those of its adapters, each behind the tensors of the linear layer it is beside."""
    for index, (name, shape) in enumerate(shapes):
        yield name, shape
        owner = name.rpartition(".")[0]
        following = shapes[index + 1][0].rpartition(".")[0] if index + 1 < len(shapes) else ""
        if owner in targets and following != owner:
            weight = dict(shapes)[f"{owner}.weight"]
            yield owner + LORA_A, (rank, weight[1])
            yield owner + LORA_B, (weight[0], rank)


def add_adapters(layer: nn.Module, targets: Sequence[str], section: TrainableSection) -> None:
    """Put an adapter beside these linear layers of a decoder layer."""
    for name in targets:
        path, _, last = name.rpartition(".")
        owner, base = layer.get_submodule(path), layer.get_submodule(name)
        if not isinstance(base, nn.Linear):
            raise TypeError(f"{name} is no linear layer")
        setattr(owner, last, LoraLinear(base, section.rank, section.scaling))


def linear_names(layer: nn.Module) -> tuple[str, ...]:
    """The linear layers within a decoder layer, in its order."""
    return tuple(name for name, module in layer.named_modules() if type(module) is nn.Linear)


def initial_adapter(spec: TensorSpec, *, seed: int) -> Tensor:
    """An adapter's initial matrix, from a generator of its own: A uniform within 1 / sqrt(in), as ``peft`` draws it, B zero."""
    if not is_adapter(spec.name):
        raise ValueError(f"{spec.name} is no tensor of an adapter")
    if spec.name.endswith(LORA_B):
        return torch.zeros(spec.shape)
    digest = blake3(b"iota/init/1\0" + seed.to_bytes(8, "little") + spec.name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    bound = 1.0 / math.sqrt(spec.shape[1])
    return torch.empty(spec.shape).uniform_(-bound, bound, generator=generator)
