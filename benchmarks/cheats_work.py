"""Cheats about items: what a stage computes of a microbatch, or says that it has computed. Boundaries are plain fp32 here."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cheats import Liar, Patches
from subnet.engine.stage_executor import BackwardResult, ForwardResult, ItemFailed, PartialKey, StageExecutor
from subnet.engine.stage_state import StageState
from subnet.model.items import failure_hash
from subnet.model.stage import StageModule
from subnet.numerics.fixed_point import ItemStats
from subnet.words import CALIBRATION_STEP, ItemKey

Method = Callable[..., Any]
FACTOR, SCALE = 1.01, 1.05
"""By how much numbers that are passed on, and gradients, are wrong."""


def scaled_bytes(data: Any, factor: float) -> memoryview:
    """fp32 numbers times a factor, as bytes."""
    return memoryview((np.frombuffer(data, dtype=np.float32) * np.float32(factor)).tobytes())


def _lies_at(liar: Liar, item: ItemKey) -> bool:
    return liar.lies(item.step, item.microbatch, item.stage)


def wrong_forward(liar: Liar, patches: Patches) -> None:
    """The input is scaled, at the first stage the tokens are one place off."""

    def other(self: StageExecutor, item: ItemKey, x: Any, tokens: Any) -> tuple[Any, Any]:
        if not _lies_at(liar, item):
            return x, tokens
        if item.stage == 0:
            return x, None if tokens is None else np.roll(tokens, 1, axis=1)
        return None if x is None else scaled_bytes(x, FACTOR), tokens

    def forward(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, x: Any, tokens: Any, **named: Any) -> ForwardResult:
            x, tokens = other(self, item, x, tokens)
            return original(self, item, x, tokens, **named)

        return changed

    def backward(original: Method) -> Method:
        def changed(
            self: StageExecutor, item: ItemKey, grad: Any, x: Any = None, tokens: Any = None, **named: Any
        ) -> BackwardResult:
            x, tokens = other(self, item, x, tokens)  # where the graph wasn't kept it is the same lie again
            return original(self, item, grad, x, tokens, **named)

        return changed

    patches.put(StageExecutor, "forward", forward)
    patches.put(StageExecutor, "backward", backward)


def wrong_backward(liar: Liar, patches: Patches) -> None:
    """The gradient that comes in is scaled; the last stage, which has none, passes a scaled one on."""

    def backward(original: Method) -> Method:
        def changed(
            self: StageExecutor, item: ItemKey, grad: Any, x: Any = None, tokens: Any = None, **named: Any
        ) -> BackwardResult:
            lies = _lies_at(liar, item)
            if lies and grad is not None:
                grad = scaled_bytes(grad, FACTOR)
            result: BackwardResult = original(self, item, grad, x, tokens, **named)
            if lies and grad is None and result.output is not None:
                return dataclasses.replace(result, output=scaled_bytes(result.output, FACTOR))
            return result

        return changed

    patches.put(StageExecutor, "backward", backward)


def _other_gradients(liar: Liar, patches: Patches, other: Callable[[Tensor], Tensor]) -> None:
    def add(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, grads: dict[str, Tensor], key: PartialKey) -> ItemStats:
            if _lies_at(liar, item):
                grads = {name: other(grad) for name, grad in grads.items()}
            return original(self, item, grads, key)

        return changed

    patches.put(StageExecutor, "_add", add)


def zero_gradient(liar: Liar, patches: Patches) -> None:
    _other_gradients(liar, patches, torch.zeros_like)


def scaled_gradient(liar: Liar, patches: Patches) -> None:
    _other_gradients(liar, patches, lambda grad: grad * SCALE)


def stale_weights(liar: Liar, patches: Patches) -> None:
    """A copy of the weights is kept from before each update; items are computed with that."""
    kept: dict[int, StageModule] = {}

    def apply_step(original: Method) -> Method:
        def changed(self: StageState, step: int, merged: Any, **named: Any) -> None:
            if step != CALIBRATION_STEP:  # that changes no weight
                kept[id(self)] = copied_module(self)
            original(self, step, merged, **named)

        return changed

    def check_item(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey) -> StageModule:
            module = original(self, item)
            before = kept.get(id(self.state))
            return before if before is not None and _lies_at(liar, item) else module

        return changed

    patches.put(StageState, "apply_step", apply_step)
    patches.put(StageExecutor, "_check_item", check_item)


def copied_module(state: StageState) -> StageModule:
    """A module of its own with the weights as they are now."""
    held = {index: buffers.arrays["weight"] for index, buffers in state._buffers.items()}
    for index, buffers in state._buffers.items():
        buffers.arrays["weight"] = held[index].clone()
    try:
        module = state._bound_module()
    finally:
        for index, buffers in state._buffers.items():
            buffers.arrays["weight"] = held[index]
    module.refresh()
    return module


def replayed_output(liar: Liar, patches: Patches) -> None:
    """What was made of the last microbatch is sent for this one: forwards, at the last stage gradients."""
    _other_outputs(liar, patches, lambda output, before: before)


def sends_nan(liar: Liar, patches: Patches) -> None:
    def other(output: memoryview, before: memoryview) -> memoryview:
        values = np.frombuffer(output, dtype=np.float32).copy()
        values[0] = np.nan
        return memoryview(values.tobytes())

    _other_outputs(liar, patches, other)


def _other_outputs(liar: Liar, patches: Patches, other: Callable[[memoryview, memoryview], memoryview]) -> None:
    """``other`` is given what was computed, and what was computed last in this direction."""
    last: dict[bool, memoryview] = {}

    def changed_output(item: ItemKey, backward: bool, result: Any) -> Any:
        if result.output is None:
            return result
        before, last[backward] = last.get(backward), result.output
        if before is None or not _lies_at(liar, item):
            return result
        return dataclasses.replace(result, output=other(result.output, before))

    def forward(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, *args: Any, **named: Any) -> ForwardResult:
            return changed_output(item, False, original(self, item, *args, **named))

        return changed

    def backward(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, *args: Any, **named: Any) -> BackwardResult:
            result: BackwardResult = original(self, item, *args, **named)
            return changed_output(item, True, result) if self.plan.is_last(self.stage) else result

        return changed

    patches.put(StageExecutor, "forward", forward)
    patches.put(StageExecutor, "backward", backward)


def wrong_loss(liar: Liar, patches: Patches) -> None:
    """A tenth less than it was."""

    def backward(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, *args: Any, **named: Any) -> BackwardResult:
            result: BackwardResult = original(self, item, *args, **named)
            if result.loss_bits is None or not _lies_at(liar, item):
                return result
            (loss,) = struct.unpack("<f", struct.pack("<I", result.loss_bits))
            (bits,) = struct.unpack("<I", struct.pack("<f", 0.9 * loss))
            return dataclasses.replace(result, loss_bits=bits)

        return changed

    patches.put(StageExecutor, "backward", backward)


def false_failure(liar: Liar, patches: Patches) -> None:
    def backward(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, *args: Any, **named: Any) -> BackwardResult:
            if _lies_at(liar, item):
                raise ItemFailed(failure_hash(item, "loss"), f"{item}: the loss is not finite")
            return original(self, item, *args, **named)

        return changed

    patches.put(StageExecutor, "backward", backward)


def no_work(liar: Liar, patches: Patches) -> None:
    """Outputs are noise of the right form; the microbatch is booked in the sum without being added."""

    def noise(self: StageExecutor) -> memoryview:
        config = self.plan.config
        size = config.pipeline.microbatch_rows * config.data.sequence_length * self.plan.hidden_size
        return memoryview(np.random.default_rng().normal(0, 1e-3, size).astype(np.float32).tobytes())

    def forward(original: Method) -> Method:
        def changed(self: StageExecutor, item: ItemKey, *args: Any, **named: Any) -> ForwardResult:
            if self.plan.is_last(self.stage) or not _lies_at(liar, item):
                return original(self, item, *args, **named)
            return ForwardResult(noise(self), None, 1e-3)

        return changed

    def backward(original: Method) -> Method:
        def changed(
            self: StageExecutor, item: ItemKey, *args: Any, partial: PartialKey | None, **named: Any
        ) -> BackwardResult:
            if not _lies_at(liar, item):
                return original(self, item, *args, partial=partial, **named)
            self.drop_graph(item)
            added = partial is not None and named.get("admit", lambda: True)()
            if added and partial is not None:
                held = self.partials.setdefault(partial, self.partials.get(partial) or self._new_partial(partial))
                held.microbatches.add(item.microbatch)
                for one in held.sums.values():
                    one.num_items += 1
            output = None if self.plan.is_first(self.stage) else noise(self)
            (bits,) = struct.unpack("<I", struct.pack("<f", 5.0))
            loss_bits = bits if self.plan.is_last(self.stage) else None
            return BackwardResult(output, loss_bits, ItemStats(0) if added else None, 1e-3)

        return changed

    patches.put(StageExecutor, "forward", forward)
    patches.put(StageExecutor, "backward", backward)
