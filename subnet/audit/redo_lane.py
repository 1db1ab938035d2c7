"""A lane's stage done again, part after part from the recorded inputs, by the executor that members use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from subnet.audit.case import ItemCase, RedoneItem
from subnet.audit.shadow import Blobs, Buffer
from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.errors import InputError
from subnet.model.items import ItemFailed, failure_hash
from subnet.protocol.parts import decode_parts, parts_hash
from subnet.words import ItemKey


@dataclass(frozen=True)
class LaneSource:
    """``check`` raises :class:`ItemFailed` for an input that nobody can have computed with."""

    blobs: Blobs
    tokens: Callable[..., NDArray[np.integer]]
    check: Callable[[ItemKey, Buffer | None, str, bool], None]
    num_parts: int


def redo_lane(
    executor: StageExecutor, source: LaneSource, item: ItemKey, given: ItemCase, key: PartialKey
) -> tuple[RedoneItem, float]:
    """What really comes of it, outputs as the hash of their parts' list, and its seconds of compute; the pseudo-gradient is
    added to the partial with the last part, or (:class:`ItemFailed`) not at all."""
    is_first, is_last = executor.plan.is_first(item.stage), executor.plan.is_last(item.stage)
    inputs, gradients = _parts_of(source, item, given.x), _parts_of(source, item, given.gradient)
    forwards, backwards = list[str](), list[str]()
    loss_bits, compute_s = None, 0.0
    for part in range(1, source.num_parts + 1):
        x = source.blobs(inputs[part - 1]) if inputs else None
        gradient = source.blobs(gradients[part - 1]) if gradients else None
        rows = source.tokens(item, part) if is_first or is_last else None
        source.check(item, x, "input", is_first)
        source.check(item, gradient, "gradient", is_last)
        if not is_last:
            made = executor.forward(item, x, rows, keep_graph=True, part=part)
            forwards.append(_hash(made.output))
            compute_s += made.compute_s
        back = executor.backward(item, gradient, x, rows, partial=key, part=part)
        compute_s += back.compute_s
        loss_bits = back.loss_bits
        if not is_first:
            backwards.append(_hash(back.output))
    forward = parts_hash(forwards) if forwards else ""
    backward = parts_hash(backwards) if backwards else ""
    return RedoneItem(given.microbatch, forward, backward, loss_bits), compute_s


def _parts_of(source: LaneSource, item: ItemKey, named: str) -> tuple[str, ...]:
    """Hashes of the parts of an input; none at an end of the pipeline."""
    if not named:
        return ()
    try:
        return decode_parts(source.blobs(named), source.num_parts)
    except InputError as error:
        raise ItemFailed(failure_hash(item, "list"), f"{item}: {error.reason}") from None


def _hash(data: memoryview | None) -> str:
    return blake3(data).hexdigest() if data is not None else ""
