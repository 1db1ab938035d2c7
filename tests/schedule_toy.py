"""Toy arithmetic for the schedule test: whole numbers that depend on everything a real step depends on, and its reference.

A stage's state is one number. Gradients, boundaries and updates are hashes of it and of their inputs, so that any
microbatch lost, doubled, or computed from a wrong state changes every later number.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from subnet.run.config import (
    NO_AUDITS,
    AuditSection,
    EvaluationSection,
    LanesSection,
    MergeSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotSection,
)
from subnet.run.events import RunPlanned
from subnet.run.schedule import fp32_bits, norm_and_coefficient
from subnet.words import CALIBRATION_STEP, GroupShape

PRIME = (1 << 61) - 1
WIDTH = 2
Vector = tuple[int, ...]


@functools.lru_cache(1 << 18)
def h(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def name(value: object) -> str:
    """The content address of a toy value."""
    return f"{h('address', value):014x}"


@functools.lru_cache(1 << 16)
def gradient(w: int, x: int, g: int, stage: int, partition: int) -> Vector:
    return tuple(h("q", w, x, g, stage, partition, i) % 2047 - 1023 for i in range(WIDTH))


def merge(step: int, slices: Sequence[Vector]) -> Vector:
    if step == CALIBRATION_STEP:
        return tuple(max(abs(v) for v in column) for column in zip(*slices, strict=True))
    return tuple(sum(column) for column in zip(*slices, strict=True))


def accumulate(step: int, total: Vector | None, values: Vector) -> Vector:
    if total is None:
        return merge(step, [values])
    return merge(step, [total, values])


def fingerprint(values: Vector, seed: str, partition: int) -> tuple[int, ...]:
    return (sum(h("r", seed, partition, i) * v for i, v in enumerate(values)) % PRIME,)


def squares(step: int, values: Vector) -> str:
    return "0" if step == CALIBRATION_STEP else f"{sum(v * v for v in values) << 256:x}"


def token(step: int, m: int, num_microbatches: int, part: int = 0) -> int:
    if m >= num_microbatches:
        return h("holdout", m)
    return h("token", max(step, 0), m, part) if part else h("token", max(step, 0), m)


def forward(w: int, x: int, stage: int) -> int:
    return h("f", w, x, stage)


def backward(w: int, x: int, g: int, stage: int) -> int:
    return h("b", w, x, g, stage)


def loss_gradient(w: int, x: int) -> int:
    return h("dloss", w, x)


def loss_bits(w: int, x: int) -> int:
    return fp32_bits(1.0 + h("loss", w, x) % 4096 / 4096)


def updated(w: int, merged: Sequence[Vector], coefficient_bits: int) -> int:
    return h("u", w, tuple(merged), coefficient_bits)


def lane_start(w: int) -> int:
    """A lane's own weights, before its first inner step."""
    return h("lane", w)


def lane_gradient(w: int, x: int, g: int) -> int:
    return h("p", w, x, g)


def lane_part(w: int, gradients: Sequence[int]) -> int:
    """A lane's weights after an inner step, of its microbatches' gradients in order."""
    return h("inner", w, tuple(gradients))


def first_state(stage: int) -> int:
    return h("w", stage)


def plan_run(
    num_stages: int,
    num_microbatches: int,
    num_steps: int,
    *,
    tied: bool = False,
    evaluation_items: int = 0,
    evaluation_every: int = 0,
    snapshot_every: int = 50,
    even: bool = False,
    update_delay: int = 0,
    audit: AuditSection | None = None,
    lanes: int = 0,
    inner_steps: int = 1,
    owners: int = 1,
) -> RunPlanned:
    """A run whose stages hold two partitions each; tied: first and last stage are one group and share a third.

    ``even``: embedding and head cost nothing, so that all stages cost the same.
    """
    ends = 0.0 if even else 1.0
    config = RunConfig(
        run=RunSection(name="toy", steps=num_steps),
        model=ModelSection(config={"model_type": "llama"}),
        pipeline=PipelineSection(
            stages=num_stages, microbatches=num_microbatches, microbatch_rows=4, update_delay=update_delay
        ),
        snapshot=SnapshotSection(every_steps=snapshot_every),
        evaluation=EvaluationSection(rows=4 * evaluation_items, every_steps=evaluation_every),
        audit=audit or NO_AUDITS,
        merge=MergeSection(owners=owners),
        lanes=LanesSection(count=lanes, inner_steps=inner_steps) if lanes else LanesSection(),
    )
    groups = tuple(GroupShape((s,), ((s,), (s,))) for s in range(num_stages))
    if tied and num_stages > 1:
        last = num_stages - 1
        joint = GroupShape((0, last), ((0,), (0, last), (last,)))
        groups = (joint, *groups[1:last])
    return RunPlanned(
        run_id="toy",
        config=config,
        model_config={},
        unit_tensors=(),
        unit_flops_per_token=(ends, *(1.0,) * num_stages, ends),
        tied=None,
        cuts=tuple(range(num_stages)),
        groups=groups,
        data="data",
        snapshot="snapshot0",
        tokenizer="tokenizer",
        submitter="submitter",
    )


class Reference:
    """The run computed in one place, once the skipped microbatches are known."""

    def __init__(self, run: RunPlanned) -> None:
        self.run = run
        self._states: dict[object, list[int]] = {}

    def states(self, version: int, skipped: frozenset[tuple[int, int]]) -> list[int]:
        """The stages' states before update ``version``."""
        stages = range(len(self.run.cuts))
        if version == CALIBRATION_STEP:
            return [first_state(s) for s in stages]
        key = (version, frozenset(entry for entry in skipped if entry[0] < version))
        if key not in self._states:
            self._states[key] = self._update(version - 1, skipped)
        return self._states[key]

    def sums(self, step: int, skipped: frozenset[tuple[int, int]]) -> list[dict[int, Vector]]:
        """Merged vectors of each group, by partition."""
        w = self.states(self.version_of(step), skipped)
        parts: list[dict[int, list[Vector]]] = [{} for _ in self.run.groups]
        for m in self.counted(step, skipped):
            if self.run.config.lanes.on:
                x, g, at, _ = self.lane(w, step, m)
            else:
                x, g = self.boundaries(w, step, m)
                at = w
            for index, group in enumerate(self.run.groups):
                for p, holders in enumerate(group.partitions):
                    for s in holders:
                        parts[index].setdefault(p, []).append(gradient(at[s], x[s], g[s], s, p))
        return [{p: merge(step, slices) for p, slices in group.items()} for group in parts]

    def version_of(self, step: int) -> int:
        """The state whose gradients a step has, written out: the first two steps of a delayed run share theirs."""
        delayed = self.run.config.pipeline.update_delay
        return step - 1 if delayed and step > 0 else step

    def lane(self, w: Sequence[int], step: int, m: int) -> tuple[list[int], list[int], list[int], int]:
        """Inputs and gradients of a lane's last microbatch and its last weights, at each stage; bits of its last loss."""
        config, stages = self.run.config, range(len(w))
        at, x, g, bits = [lane_start(value) for value in w], [0] * len(w), [0] * len(w), 0
        for inner in range(config.lanes.inner_steps):
            gained: list[list[int]] = [[] for _ in w]
            for j in range(config.pipeline.microbatches):
                x, g = self.boundaries(at, step, m, inner * config.pipeline.microbatches + j + 1)
                bits = loss_bits(at[-1], x[-1])
                for s in stages:
                    gained[s].append(lane_gradient(at[s], x[s], g[s]))
            at = [lane_part(value, gradients) for value, gradients in zip(at, gained, strict=True)]
        return x, g, at, bits

    def counted(self, step: int, skipped: frozenset[tuple[int, int]]) -> list[int]:
        return [m for m in range(self.run.config.num_items) if (step, m) not in skipped]

    def boundaries(self, w: Sequence[int], step: int, m: int, part: int = 0) -> tuple[list[int], list[int]]:
        """Inputs of each stage, and the gradients of their outputs."""
        x = [token(step, m, self.run.config.num_items, part)]
        for s in range(len(w) - 1):
            x.append(forward(w[s], x[s], s))
        g = [0] * len(w)
        g[-1] = loss_gradient(w[-1], x[-1])
        for s in reversed(range(1, len(w))):
            g[s - 1] = backward(w[s], x[s], g[s], s)
        return x, g

    def losses(self, version: int, step: int, skipped: frozenset[tuple[int, int]], items: Sequence[int]) -> list[int]:
        """Of the state ``version``, for items of ``step``."""
        w = self.states(version, skipped)
        if self.run.config.lanes.on:
            lanes = self.run.config.num_items
            return [self.lane(w, step, m)[3] if m < lanes else self._loss(w, step, m) for m in items]
        return [self._loss(w, step, m) for m in items]

    def _loss(self, w: Sequence[int], step: int, m: int) -> int:
        return loss_bits(w[-1], self.boundaries(w, step, m)[0][-1])

    def coefficient(self, step: int, skipped: frozenset[tuple[int, int]]) -> int:
        if step == CALIBRATION_STEP:
            return 0
        total = sum(int(squares(step, v), 16) for group in self.sums(step, skipped) for v in group.values())
        return norm_and_coefficient(total, len(self.counted(step, skipped)), self.run.config.merged_clip_norm)[1]

    def _update(self, step: int, skipped: frozenset[tuple[int, int]]) -> list[int]:
        w, sums, coefficient = self.states(step, skipped), self.sums(step, skipped), self.coefficient(step, skipped)
        new = list(w)
        for index, group in enumerate(self.run.groups):
            for s in group.stages:
                held = [sums[index][p] for p, holders in enumerate(group.partitions) if s in holders]
                new[s] = updated(w[s], held, coefficient)
        return new
