"""Runs that train a part of a tiny model, or on dialogues, in one process, and the reference of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.finetune_reference import FinetuneReference
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.token_bits import LEARNT, STARTS
from subnet.run.objective import ObjectiveSection
from subnet.run.trainable import TrainableSection
from tests.family_cases import CUTS, LENGTH, StagedRun, family_plan, streams

FULL = TrainableSection()
LORA = TrainableSection(kind="lora", targets=("q_proj", "v_proj", "o_proj"), rank=4, alpha=8.0)
SFT = ObjectiveSection(kind="sft", ce_chunk_tokens=16)


def tuned_plan(
    name: str,
    section: TrainableSection = FULL,
    cuts: tuple[int, ...] = CUTS,
    *,
    objective: ObjectiveSection | None = None,
    update_delay: int = 0,
    **kwargs: Any,
) -> ModelPlan:
    base = family_plan(name, cuts, **kwargs)
    config = msgspec.structs.replace(
        base.config,
        trainable=section,
        objective=objective or base.config.objective,
        pipeline=msgspec.structs.replace(base.config.pipeline, update_delay=update_delay),
    )
    return plan_model(config, load_architecture(base.model_config), cuts)


def dialogue_streams() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The streams of text as rows of dialogues: starts every few tokens, and of each the second half is learnt."""
    rng, found = np.random.default_rng(3), list[NDArray[np.uint32]]()
    for stream in streams():
        tokens = stream.astype(np.uint32)
        at = 0
        while at < len(tokens):
            size = int(rng.integers(2, LENGTH))
            size = min(size, LENGTH - at % LENGTH)
            tokens[at] |= STARTS
            tokens[at + 1 + size // 2 : at + size] |= np.uint32(LEARNT)
            at += size
        found.append(tokens)
    return found[0], found[1]


class TunedRun(StagedRun):
    """As :class:`StagedRun`, on dialogues where the run is on them."""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__(plan)
        if plan.config.objective.kind == "sft":
            self.tokens = dialogue_streams()[0]


def reference_of(plan: ModelPlan) -> FinetuneReference:
    given = dialogue_streams() if plan.config.objective.kind == "sft" else streams()
    return FinetuneReference(plan.config, dict(plan.model_config), *given, cuts=plan.cuts)
