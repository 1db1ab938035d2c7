"""A lane at one stage in one round: its own weights and moments, from the state's weights to the pseudo-gradient.

`docs/arithmetic.md` §14. Parts (microbatches) of the lane are added in order; the last of an inner step updates the lane's
weights. Nothing of it outlives the round: the same parts from the same state give the same bits on any member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subnet.engine.stage_state import StageState
from subnet.errors import InputError
from subnet.model.stage import build_stage
from subnet.numerics.layout import Section, TensorSpan
from subnet.numerics.optimizer import update_
from subnet.numerics.state_arrays import ARRAYS, inner_kinds
from subnet.run.schedule import AS_FILED, Terms, bits_fp32, fp32_bits, inner_scalars
from subnet.words import ItemKey

_DTYPES = {"f4": torch.float32, "i1": torch.int8, "u1": torch.uint8}


@dataclass(frozen=True)
class _Copy:
    """One leaf of every tensor of a section: a stage that holds both leaves of tied embeddings has two copies."""

    section: Section
    leaves: tuple[str, ...]
    """By tensor."""
    arrays: dict[str, Tensor]
    gradient: Tensor
    no_exponents: Tensor

    def view(self, flat: Tensor, span: TensorSpan) -> Tensor:
        return flat[span.element_start : span.element_start + span.num_elements]


class Lane:
    """Buffers of one lane-stage and where in the round it is. Not locked: one thread computes."""

    def __init__(self, state: StageState, places: Mapping[int, list[tuple[int, str]]]) -> None:
        """``places``: by section (index of the tensor, leaf) of every gradient of the stage."""
        self.state, self.config = state, state.plan.config
        self.item = ItemKey(0, 0, state.stage)
        self.next_part = 1
        """The part whose backward is due."""
        self._losses: list[float] = []
        self._terms = AS_FILED
        self._copies = [copy for section in state.sections for copy in self._copies_of(section, places[section.index])]
        self.module = build_stage(state.plan, state.stage)
        weights = {spec.name: state.weight(spec.name) for spec in state.specs}
        for copy in self._copies:
            for leaf, span in zip(copy.leaves, copy.section.tensors, strict=True):
                weights[leaf] = copy.view(copy.arrays["weight"], span).view(span.spec.shape)
        self.module.bind(weights)

    def _copies_of(self, section: Section, places: list[tuple[int, str]]) -> list[_Copy]:
        leaves: dict[int, list[str]] = {index: [] for index in range(len(section.tensors))}
        for index, leaf in places:
            leaves[index].append(leaf)
        return [
            _Copy(
                section,
                tuple(leaves[index][number] for index in leaves),
                {kind: self._empty(section, kind) for kind in ("weight", *inner_kinds(self.config))},
                self._empty(section, "weight"),
                torch.zeros(section.num_blocks, dtype=torch.int16, device=self.state.device),
            )
            for number in range(len(leaves[0]) if leaves else 0)
        ]

    def _empty(self, section: Section, kind: str) -> Tensor:
        array = ARRAYS[kind]
        size = section.num_blocks if array.per_block else section.num_elements
        return torch.zeros(size, dtype=_DTYPES[array.dtype], device=self.state.device)

    @property
    def size_bytes(self) -> int:
        """Weights, moments and the gradient's sum."""
        held = [tensor for copy in self._copies for tensor in (*copy.arrays.values(), copy.gradient)]
        return sum(tensor.nbytes for tensor in held)

    @property
    def num_parts(self) -> int:
        return self.config.parts_per_item

    @property
    def ended(self) -> bool:
        """Whether every part is in: the weights are those after the last inner step."""
        return self.next_part > self.num_parts

    def begin(self, item: ItemKey, terms: Terms) -> None:
        """The lane ``item`` of a round starts from the state's weights, with moments of zero."""
        self.item, self._terms, self.next_part = item, terms, 1
        self._losses.clear()
        with torch.no_grad():
            for copy in self._copies:
                for kind, buffer in copy.arrays.items():
                    if kind != "weight":
                        buffer.zero_()
                for span in copy.section.tensors:
                    copy.view(copy.arrays["weight"], span).copy_(self.state.weight(span.spec.name).reshape(-1))
        self.module.refresh()

    def check_forward(self, part: int) -> None:
        """Raises unless the part is of the present inner step, whose weights these are."""
        each = self.config.pipeline.microbatches
        first = (self.next_part - 1) // each * each + 1
        if not first <= part < first + each:
            raise InputError(
                f"part {part} of {self.item} is not of the present inner step: it has parts {first} to {first + each - 1}",
                hint="send the backwards of the inner step before",
            )

    def check_backward(self, part: int) -> None:
        """Raises unless the part is the next: gradients are added in order."""
        if part != self.next_part:
            raise InputError(f"{self.item} waits for the backward of part {self.next_part}, not {part}")

    def add_part(self, grads: Mapping[str, Tensor], loss_bits: int | None) -> int | None:
        """Take the next part's gradients (by leaf); with the last part of an inner step the weights are updated.

        Returns the loss to report at the last stage: the part's, and with the last part the lane's, as fp32 bits of the
        parts' mean (fp64, in order).
        """
        each = self.config.pipeline.microbatches
        inner_step, number = divmod(self.next_part - 1, each)
        with torch.no_grad():
            for copy in self._copies:
                for leaf, span in zip(copy.leaves, copy.section.tensors, strict=True):
                    total, grad = copy.view(copy.gradient, span), grads[leaf].reshape(-1)
                    total.add_(grad) if number else total.copy_(grad)
        if loss_bits is not None:
            self._losses.append(bits_fp32(loss_bits))
        if number == each - 1:
            self._update(inner_step)
        self.next_part += 1
        if self.ended and self._losses:
            return fp32_bits(sum(self._losses) / len(self._losses))
        return loss_bits

    def _update(self, inner_step: int) -> None:
        each = self.config.pipeline.microbatches
        scalars = inner_scalars(self.config, self.item.step, inner_step, self._terms)
        for copy in self._copies:
            if self.config.lanes.inner_clip_norm:
                clip_tensors_(copy.section, copy.gradient, each, self.config.lanes.inner_clip_norm)
            update_(
                copy.section,
                copy.arrays,
                copy.gradient,
                copy.no_exponents,
                fp32_bits(1 / each),
                scalars,
                self.config.optimizer,
            )
        self.module.refresh()

    def gradients(self) -> dict[str, Tensor]:
        """By leaf the sum of the inner step's gradients so far: views of the buffer."""
        return {
            leaf: copy.view(copy.gradient, span).view(span.spec.shape)
            for copy in self._copies
            for leaf, span in zip(copy.leaves, copy.section.tensors, strict=True)
        }

    def pseudo_gradient(self) -> dict[str, Tensor]:
        """By leaf what the round changed: the state's weights less the lane's. It is in the buffer of the gradient's sum."""
        with torch.no_grad():
            for copy in self._copies:
                for span in copy.section.tensors:
                    before = self.state.weight(span.spec.name).reshape(-1)
                    after = copy.view(copy.arrays["weight"], span)
                    torch.sub(before, after, out=copy.view(copy.gradient, span))
        return self.gradients()


class Lanes:
    """The lanes that live at a stage; the buffers of one that ended serve the next."""

    def __init__(self, state: StageState, places: Mapping[int, list[tuple[int, str]]]) -> None:
        self.live: dict[ItemKey, Lane] = {}
        self._state, self._places = state, places
        self._spare: Lane | None = None

    def of(self, item: ItemKey, part: int, terms: Terms) -> Lane:
        """The lane of the item, begun if it hasn't; raises InputError for a part that it doesn't have, or not yet."""
        config = self._state.plan.config
        if not 1 <= part <= config.parts_per_item:
            raise InputError(f"part {part} of {item} is not one of its 1 to {config.parts_per_item}")
        lane = self.live.get(item)
        if lane is not None:
            return lane
        if part > config.pipeline.microbatches:
            raise InputError(f"{item} has not begun: it waits for the backward of part 1, not {part}")
        lane, self._spare = self._spare or Lane(self._state, self._places), None
        lane.begin(item, terms)
        self.live[item] = lane
        return lane

    def end(self, item: ItemKey) -> None:
        """Forget the lane, if it lives."""
        self._spare = self.live.pop(item, self._spare)

    def next_part(self, item: ItemKey) -> int:
        """The part whose backward is due."""
        return self.live[item].next_part if item in self.live else 1

    @property
    def size_bytes(self) -> int:
        """Of one lane; 0 before there was one."""
        lane = next(iter(self.live.values()), self._spare)
        return 0 if lane is None else lane.size_bytes


def clip_tensors_(section: Section, gradient: Tensor, divisor: int, clip_norm: float) -> None:
    """Scale each tensor of the flat ``gradient`` down to this norm of gradient / ``divisor``, in place.

    A tensor alone decides, so no other stage is asked and cuts don't matter; the norm is torch's, of a copy in fp64.
    """
    for span in section.tensors:
        view = gradient[span.element_start : span.element_start + span.num_elements]
        norm = float(torch.linalg.vector_norm(view.double())) / divisor
        if norm > clip_norm:
            factor = bits_fp32(fp32_bits(clip_norm / (norm + 1e-6)))
            view.mul_(torch.tensor(factor, dtype=torch.float32, device=view.device))
