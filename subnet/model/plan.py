"""A run's model as plain structs: units, cuts, stages and canonical order, the same for everyone, without torch.

A *unit* is what can't be cut: the embedding, one decoder layer, or the head (final norm and ``lm_head``). ``cuts[s]``
is the first layer of stage s; the first stage also has the embedding, the last one norm and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from subnet.errors import ConfigError
from subnet.numerics.layout import RunLayout, TensorSpec, build_layout
from subnet.run.config import RunConfig
from subnet.run.trainable import trains


class ModelUnits(msgspec.Struct, frozen=True, array_like=True):
    """Tensors and cost of [embedding, layer 0, ..., head], in canonical order.

    ``tied`` is the embedding's tensor when the head shares it; the head unit then lists only the norm.
    """

    units: tuple[tuple[TensorSpec, ...], ...]
    unit_flops_per_token: tuple[float, ...]
    """Forward and backward, without recomputation."""
    tied: TensorSpec | None

    @property
    def num_layers(self) -> int:
        return len(self.units) - 2

    @property
    def unit_parameters(self) -> tuple[int, ...]:
        """Parameters of each unit; a tied tensor counts at the embedding alone."""
        return tuple(sum(spec.num_elements for spec in unit) for unit in self.units)

    @property
    def num_parameters(self) -> int:
        return sum(self.unit_parameters)


def check_cuts(cuts: tuple[int, ...], num_layers: int) -> None:
    """Raises :class:`ConfigError` unless the cuts give every stage at least one layer."""
    if len(cuts) > num_layers:
        raise ConfigError(
            f"pipeline.stages = {len(cuts)} is not allowed: the model has {num_layers} layers",
            hint=f"allowed: 1 to {num_layers}",
        )
    rising = all(a < b for a, b in zip(cuts, (*cuts[1:], num_layers), strict=False))
    if not cuts or cuts[0] != 0 or not rising:
        raise ConfigError(
            f"cuts = {cuts} don't divide {num_layers} layers", hint="they start at 0 and each stage needs a layer"
        )


@dataclass(frozen=True)
class ModelPlan:
    """What a run computes and where it is cut; everything a member or the coordinator derives is derived from this."""

    config: RunConfig
    model_config: Mapping[str, Any]
    units: ModelUnits
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        check_cuts(self.cuts, self.units.num_layers)
        if self.config.trainable.kind == "full":
            return
        for stage in range(self.num_stages):
            if not any(self.is_trainable(spec.name) for spec in self.stage_tensors[stage]):
                layers = self.layers_of(stage)
                raise ConfigError(
                    f"[trainable] trains nothing of stage {stage} (layers {layers[0]} to {layers[-1]})",
                    hint="name layers of every stage, or use fewer pipeline.stages",
                )

    @property
    def num_stages(self) -> int:
        return len(self.cuts)

    @property
    def hidden_size(self) -> int:
        return self.units.units[0][0].shape[1]

    @property
    def vocab_size(self) -> int:
        return self.units.units[0][0].shape[0]

    def is_trainable(self, name: str) -> bool:
        """Whether a tensor is trained; those that aren't have no gradient, no scales and no moments."""
        return trains(self.config.trainable, name, tied=self.units.tied is not None)

    @property
    def num_trained(self) -> int:
        """Parameters that are trained; a tied tensor counts once."""
        return sum(spec.num_elements for spec in self.canonical if self.is_trainable(spec.name))

    def needs_tokens(self, stage: int) -> bool:
        """Whether a stage reads tokens: the first and the last do, and where dialogues share rows every one."""
        return self.is_first(stage) or self.is_last(stage) or self.config.objective.kind == "sft"

    def layers_of(self, stage: int) -> range:
        return range(self.cuts[stage], (*self.cuts[1:], self.units.num_layers)[stage])

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    @cached_property
    def canonical(self) -> tuple[TensorSpec, ...]:
        """Every entry of the canonical list: tied tensors once, at the embedding."""
        return tuple(spec for unit in self.units.units for spec in unit)

    @cached_property
    def stage_units(self) -> tuple[tuple[int, ...], ...]:
        """Indexes of the units of each stage, in order."""
        last = self.units.num_layers + 1
        return tuple(
            (
                *((0,) if self.is_first(s) else ()),
                *(layer + 1 for layer in self.layers_of(s)),
                *((last,) if self.is_last(s) else ()),
            )
            for s in range(self.num_stages)
        )

    @cached_property
    def stage_tensors(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Tensors each stage holds, in canonical order; a tied tensor is with the first and with the last stage."""
        held: list[tuple[TensorSpec, ...]] = []
        for stage, units in enumerate(self.stage_units):
            own = tuple(spec for unit in units for spec in self.units.units[unit])
            tied = self.units.tied
            if tied is not None and self.is_last(stage) and tied not in own:
                own = (tied, *own)
            held.append(own)
        return tuple(held)

    @cached_property
    def stage_of_tensor(self) -> dict[str, int]:
        """First stage that holds each tensor, by name."""
        owners: dict[str, int] = {}
        for stage, tensors in enumerate(self.stage_tensors):
            for spec in tensors:
                owners.setdefault(spec.name, stage)
        return owners

    @cached_property
    def trained_tensors(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Of :attr:`stage_tensors` those that are trained."""
        return tuple(tuple(spec for spec in held if self.is_trainable(spec.name)) for held in self.stage_tensors)

    @cached_property
    def layout(self) -> RunLayout:
        """Of all that is trained."""
        tied = self.units.tied if self.units.tied is not None and self.is_trainable(self.units.tied.name) else None
        own = [tuple(spec for spec in held if tied is None or spec.name != tied.name) for held in self.trained_tensors]
        return build_layout(own, tied=tied, qmax=self.config.qmax)
