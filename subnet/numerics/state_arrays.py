"""The arrays of a tensor's state: what an optimizer keeps beside the weights, in the order in which a leaf hashes them.

An optimizer is the list of its arrays (:func:`state_kinds`) and an update of them (:mod:`subnet.numerics.optimizer`). Whoever
stores, hashes, loads or counts a state reads this table, so a new optimizer is new rows here. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from subnet.run.config import RunConfig
from subnet.words import TensorSpec


class StateArray(msgspec.Struct, frozen=True):
    """One array of a tensor, row-major: a number for each element, or (``per_block``) for each of its blocks."""

    kind: str
    dtype: str = "f4"
    """``f4`` (little-endian fp32), ``i1`` or ``u1``."""
    per_block: bool = False

    def num_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the array of this tensor."""
        return int(self.dtype[1:]) * (spec.num_blocks if self.per_block else spec.num_elements)


LIMIT_BEFORE = "limit_before"
"""With ``update_delay`` 1: the limits of the state before, whose scales the next merged gradient has."""

OUTER_MOMENTUM = "outer_momentum"
"""With lanes: Nesterov's, of the merged pseudo-gradients."""

ARRAYS: dict[str, StateArray] = {
    array.kind: array
    for array in (
        StateArray("weight"),
        StateArray("exp_avg"),
        StateArray("exp_avg_sq"),
        StateArray("exp_avg_code", "i1"),
        StateArray("exp_avg_scale", per_block=True),
        StateArray("exp_avg_sq_code", "u1"),
        StateArray("exp_avg_sq_scale", per_block=True),
        StateArray(OUTER_MOMENTUM),
        StateArray("decayed", per_block=True),
        StateArray("limit", per_block=True),
        StateArray(LIMIT_BEFORE, per_block=True),
    )
}
"""All there are, in hashing order. A new one changes no root of a run that doesn't have it."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's; Muon has its momentum in the first, and the second is zero for the matrices that it updates."""
MOMENTS_8BIT = ("exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale")
SCALES = ("decayed", "limit")


def state_kinds(config: RunConfig) -> tuple[str, ...]:
    """The arrays of every tensor's state in this run, in hashing order.

    With lanes the optimizer's own are not among them: every lane begins a round with zeros (:func:`inner_kinds`).
    """
    moments = (OUTER_MOMENTUM,) if config.lanes.on else inner_kinds(config)
    behind = (LIMIT_BEFORE,) if config.pipeline.update_delay else ()
    return ("weight", *moments, *SCALES, *behind)


def inner_kinds(config: RunConfig) -> tuple[str, ...]:
    """What the optimizer keeps of a tensor beside its weights: in the state, or with lanes in a lane while it lives."""
    return MOMENTS_8BIT if config.optimizer.state_bits == 8 else MOMENTS


def ordered(kinds: Iterable[str]) -> tuple[str, ...]:
    """The known ones of these, each once, in hashing order."""
    named = set(kinds)
    return tuple(kind for kind in ARRAYS if kind in named)
