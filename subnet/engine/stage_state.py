"""A stage's whole state: weights, moments and scales in flat buffers, updated only by merged gradients.

An update either completes or marks the state broken; a broken state refuses everything until it is loaded again. So a
reader sees the state before the update or after it, never a mixture. With ``update_delay`` 1 an update writes into a
second set of weights, so that those before it stay as they were until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subnet.errors import HashMismatch, InputError
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import (
    BlobSink,
    BlobSource,
    SnapshotManifest,
    TensorEntry,
    check_manifest,
    fill_array,
    kinds_of,
    store_tensor,
)
from subnet.model.stage import StageModule, build_stage
from subnet.numerics.fixed_point import exponents, update_scales
from subnet.numerics.layout import Section, TensorSpan, TensorSpec
from subnet.numerics.optimizer import update_
from subnet.numerics.outer import nesterov_update_
from subnet.numerics.roots import leaf_hash, stage_root
from subnet.numerics.state_arrays import ARRAYS, LIMIT_BEFORE, state_kinds
from subnet.run.schedule import StepScalars
from subnet.words import CALIBRATION_STEP, BlobHash

_DTYPES = {"f4": torch.float32, "i1": torch.int8, "u1": torch.uint8}


@dataclass(frozen=True)
class MergedSection:
    """The step's merged gradient of a section: whole numbers (None in the calibrating step) and block maxima."""

    values: Tensor | None
    maxima: Tensor


@dataclass(frozen=True)
class _Buffers:
    section: Section
    arrays: dict[str, Tensor]
    """By kind; per element or per block."""


class StageState:
    """State of one stage on one device. Not locked: loads and updates belong to the thread that computes."""

    def __init__(self, plan: ModelPlan, stage: int, *, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        self.stage = stage
        self.device = torch.device(device)
        self.num_updates = 0
        self.intact = False
        """False before the first load and after an update that failed half-way."""
        self.version_before: int | None = None
        """The version whose weights are still there beside the newest ones."""
        self._delay = plan.config.pipeline.update_delay
        self._arrays = state_kinds(plan.config)
        self._buffers: dict[int, _Buffers] = {}
        self._where: dict[str, tuple[int, TensorSpan]] = {}
        self._exponents: dict[int, Tensor] | None = None
        self._exponents_before: dict[int, Tensor] | None = None
        """Of the state before: the step that comes next in the log was computed from it."""
        self._leaves: list[tuple[str, bytes]] | None = None
        self._specs = {spec.name: spec for spec in plan.stage_tensors[stage]}
        self._frozen: dict[str, Tensor] = {}
        """Weights that no update changes: their state is themselves."""
        self._frozen_leaves: dict[str, bytes] = {}
        for index in plan.layout.stage_sections[stage]:
            section = plan.layout.sections[index]
            self._buffers[index] = _Buffers(section, {kind: self._empty(section, kind) for kind in self._arrays})
            self._where.update({span.spec.name: (index, span) for span in section.tensors})
        for spec in self._specs.values():
            if spec.name not in self._where:
                self._frozen[spec.name] = torch.zeros(spec.num_elements, dtype=torch.float32, device=self.device)
        self.module: StageModule = self._bound_module()
        self._other: StageModule | None = None
        self._spare: dict[int, Tensor] = {}
        """By section, with ``update_delay`` 1: the weights of ``version_before``, which the next update overwrites."""
        if self._delay:
            for buffers in self._buffers.values():
                self._spare[buffers.section.index] = self._empty(buffers.section, "weight")
            self._swap_weights()
            self._other = self._bound_module()
            self._swap_weights()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The arrays of a tensor that make up its state: before calibration there are no scales of a state before."""
        calibrated = self._exponents is not None
        return self._arrays if calibrated else tuple(kind for kind in self._arrays if kind != LIMIT_BEFORE)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Those of a tensor: a frozen one has its weights only."""
        return ("weight",) if name in self._frozen else self.kinds

    def _bound_module(self) -> StageModule:
        module = build_stage(self.plan, self.stage)
        module.bind({name: self._view("weight", name).view(spec.shape) for name, spec in self._specs.items()})
        return module

    def _swap_weights(self) -> None:
        for index, buffers in self._buffers.items():
            buffers.arrays["weight"], self._spare[index] = self._spare[index], buffers.arrays["weight"]

    def _empty(self, section: Section, kind: str) -> Tensor:
        array = ARRAYS[kind]
        size = section.num_blocks if array.per_block else section.num_elements
        return torch.zeros(size, dtype=_DTYPES[array.dtype], device=self.device)

    def _view(self, kind: str, name: str) -> Tensor:
        if name in self._frozen:
            return self._frozen[name]
        index, span = self._where[name]
        flat = self._buffers[index].arrays[kind]
        if ARRAYS[kind].per_block:
            return flat[span.block_start : span.block_start + span.num_blocks]
        return flat[span.element_start : span.element_start + span.num_elements]

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors held, in canonical order."""
        return tuple(self._specs.values())

    @property
    def sections(self) -> tuple[Section, ...]:
        return tuple(buffers.section for buffers in self._buffers.values())

    @property
    def next_step(self) -> int:
        """The step that updates this state: -1 until scales are there, then the number of updates."""
        return CALIBRATION_STEP if self._exponents is None else self.num_updates

    def holds(self, version: int) -> bool:
        """Whether the weights after so many updates (-1: before calibration) are there."""
        return version == self.next_step or (version == self.version_before and self._other is not None)

    def module_at(self, version: int) -> StageModule | None:
        """The module with those weights, or None."""
        self._require_intact()
        if version == self.next_step:
            return self.module
        return self._other if version == self.version_before else None

    def exponents(self, section: int, step: int | None = None) -> Tensor | None:
        """Block exponents (int16) of the sums of ``step``: the one that updates this state, or with ``update_delay`` 1 the
        one behind it; None in the calibrating step.
        """
        self._require_intact()
        version = self.plan.config.version_of(self.next_step if step is None else step)
        if self._exponents is None:
            return None
        if version == self.num_updates:
            return self._exponents[section]
        if version == self.num_updates - 1 and self._exponents_before is not None:
            return self._exponents_before[section]
        raise InputError(
            f"the scales of state {version} are not those of state {self.num_updates}, nor the ones before"
        )

    def _require_intact(self) -> None:
        if not self.intact:
            raise InputError(
                f"the state of stage {self.stage} is not loaded or an update failed half-way", hint="load a snapshot"
            )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Initial state: these weights, no moments, no scales."""

        def fill(spec: TensorSpec, kind: str, target: Tensor) -> None:
            if kind == "weight":
                target.copy_(weights[spec.name].reshape(-1))
            else:
                target.zero_()

        self._load(0, fill)

    def load(self, manifest: SnapshotManifest, get: BlobSource) -> None:
        """State of a snapshot: every chunk is checked against its hash, every tensor against its leaf."""
        entries = check_manifest(manifest, self.specs)
        for name, entry in entries.items():
            wanted = ("weight",) if name in self._frozen else self._arrays
            if {*kinds_of(entry), LIMIT_BEFORE} != {*wanted, LIMIT_BEFORE}:
                raise InputError(
                    f"the snapshot's {name} is the state of another optimizer: {', '.join(kinds_of(entry))}"
                )

        def fill(spec: TensorSpec, kind: str, target: Tensor) -> None:
            host = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
            refs = entries[spec.name].arrays.get(kind, ())
            fill_array(refs, host.numpy().data, get, what=f"{spec.name}.{kind}")
            if host is not target:
                target.copy_(host)

        self._load(manifest.step, fill)
        for name, leaf in self.leaves():
            if leaf != entries[name].leaf:
                self.intact = False
                raise HashMismatch(f"the snapshot's arrays of {name} don't give its leaf")

    def _load(self, num_updates: int, fill: Callable[[TensorSpec, str, Tensor], None]) -> None:
        self.intact, self._leaves = False, None
        with torch.no_grad():
            self._frozen_leaves = {}
            for spec in self.specs:
                for kind in ("weight",) if spec.name in self._frozen else self._arrays:
                    fill(spec, kind, self._view(kind, spec.name))
        scaled = [bool((buffers.arrays["limit"] > 0).all()) for buffers in self._buffers.values()]
        if any(scaled) != all(scaled) or (num_updates and not all(scaled)):
            raise InputError("the snapshot has scales for some of its blocks only")
        self.num_updates, self.version_before = num_updates, None
        self._exponents = self._derive_exponents("limit") if all(scaled) else None
        self._exponents_before = None
        if self._delay and all(scaled):
            before = [bool((buffers.arrays[LIMIT_BEFORE] > 0).all()) for buffers in self._buffers.values()]
            if not all(before):
                raise InputError("the snapshot lacks the scales of the state before")
            self._exponents_before = self._derive_exponents(LIMIT_BEFORE)
        for module in (self.module, self._other):
            if module is not None:
                module.refresh(frozen=True)
        self.intact = True

    def _derive_exponents(self, kind: str) -> dict[int, Tensor]:
        return {
            index: exponents(buffers.arrays[kind], buffers.section.leaf_qmax)
            for index, buffers in self._buffers.items()
        }

    def apply_step(
        self,
        step: int,
        merged: Mapping[int, MergedSection],
        *,
        coefficient_bits: int = 0,
        scalars: StepScalars | None = None,
    ) -> None:
        """Update ``step`` from the merged gradient by section; step -1 only sets scales."""
        self._check_step(step, merged, scalars)
        scales = {index: self.exponents(index, step) for index in self._buffers}
        self.intact, self._leaves = False, None
        if self._other is not None and step != CALIBRATION_STEP:
            self._write_aside()
        with torch.no_grad():
            for index, buffers in self._buffers.items():
                arrays, given, exponents_used = buffers.arrays, merged[index], scales[index]
                if given.values is not None and scalars is not None and exponents_used is not None:
                    self._update(buffers, given.values, exponents_used, coefficient_bits, scalars)
                decayed, limit = update_scales(
                    buffers.section, arrays["decayed"], arrays["limit"], given.maxima, first=step == CALIBRATION_STEP
                )
                if self._delay:
                    arrays[LIMIT_BEFORE].copy_(limit if step == CALIBRATION_STEP else arrays["limit"])
                arrays["decayed"].copy_(decayed)
                arrays["limit"].copy_(limit)
        before, self._exponents = self._exponents, self._derive_exponents("limit")
        self._exponents_before = before or self._exponents
        self.num_updates = step + 1
        self.module.refresh()
        self.intact = True

    def _update(
        self, buffers: _Buffers, values: Tensor, exponents_used: Tensor, coefficient_bits: int, scalars: StepScalars
    ) -> None:
        """Of one section: the optimizer's, or with lanes the outer one."""
        section, arrays, config = buffers.section, buffers.arrays, self.plan.config
        if config.lanes.on:
            nesterov_update_(section, arrays, values, exponents_used, coefficient_bits, scalars)
        else:
            update_(section, arrays, values, exponents_used, coefficient_bits, scalars, config.optimizer)

    def _write_aside(self) -> None:
        """The update changes a copy: the weights before it are still computed with, and graphs of them are kept."""
        assert self._other is not None
        with torch.no_grad():
            for index, buffers in self._buffers.items():
                self._spare[index].copy_(buffers.arrays["weight"])
        self._swap_weights()
        self.module, self._other = self._other, self.module
        self.version_before = self.num_updates

    def _check_step(self, step: int, merged: Mapping[int, MergedSection], scalars: StepScalars | None) -> None:
        self._require_intact()
        if step != self.next_step:
            raise InputError(f"update {step} doesn't follow: this state waits for update {self.next_step}")
        if (scalars is None) != (step == CALIBRATION_STEP):
            raise InputError(f"update {step} {'needs' if scalars is None else 'takes no'} scalars")
        for index, buffers in self._buffers.items():
            given, section = merged.get(index), buffers.section
            if given is None or given.maxima.shape != (section.num_blocks,):
                raise InputError(f"the merged gradient of section {section.name} is missing or misshapen")
            has_values = given.values is not None and given.values.shape == (section.num_elements,)
            if has_values == (step == CALIBRATION_STEP):
                raise InputError(f"the merged sums of section {section.name} are missing or misshapen")

    def leaves(self) -> list[tuple[str, bytes]]:
        """Name and leaf hash of every tensor held, in canonical order."""
        self._require_intact()
        if self._leaves is None:
            self._leaves = [(name, self._frozen_leaves.get(name) or self._leaf(name)) for name in self._specs]
            self._frozen_leaves = {name: leaf for name, leaf in self._leaves if name in self._frozen}
        return list(self._leaves)

    def _leaf(self, name: str) -> bytes:
        return leaf_hash(name, self.spec(name).shape, *self.export_arrays(name).values())

    def stage_root(self) -> str:
        """Root of the stage's state, in hexadecimal."""
        return stage_root(self.num_updates, (leaf for _, leaf in self.leaves())).hex()

    def export_arrays(self, name: str) -> dict[str, memoryview]:
        """The tensor's arrays by kind, in the leaf's order; on a CPU views of the live state: use them at once."""
        self._require_intact()
        return {kind: self._view(kind, name).cpu().numpy().data.cast("B") for kind in self.kinds_of(name)}

    def snapshot(self, put: BlobSink, *, frozen: bool = True) -> SnapshotManifest:
        """Hand every chunk to ``put`` (which stores or copies it before it returns) and describe the state.

        Without ``frozen``, chunks of weights that no update changes are described only: they are those of snapshot 0.
        """
        return SnapshotManifest(self.num_updates, tuple(self._entries(put, frozen)))

    def _entries(self, put: BlobSink, frozen: bool) -> Iterator[TensorEntry]:
        def leave(blob: BlobHash, data: memoryview) -> None:
            pass

        for name, leaf in self.leaves():
            still = name in self._frozen
            sink = leave if still and not frozen else put
            yield store_tensor(self.spec(name), self.export_arrays(name), leaf, sink, frozen=still)

    def weight(self, name: str) -> Tensor:
        """A view of a tensor's weights in its own shape."""
        return self._view("weight", name).view(self.spec(name).shape)
