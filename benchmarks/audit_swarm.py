"""Small swarms with audits for benchmarks: their config, a run to its end, and what came of it as a plain table.

A run that stalls or isn't finished in time is a result as well (``finished`` False, with the reason); one that never began isn't.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.audit_facts import facts_of, surviving_lies
from benchmarks.cheats import chosen_liars, lies_told
from benchmarks.determinism import prepared, reference_of, trained_root
from benchmarks.run_log import has_run
from benchmarks.swarms import run_swarm
from iota.entries import Before
from iota.prepare import PreparedData
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import IotaError
from subnet.net.client import SignedClient
from subnet.protocol.api import RunStatus
from subnet.run.config import (
    AuditSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    SnapshotSection,
)
from subnet.score.api import ScoreList
from subnet.timing import Deadline

DEFAULT_RATE = 0.02
SCORES_S, POLL_S = 10.0, 0.25


def default_audits(**more: Any) -> AuditSection:
    """A run file's defaults, or what they are to be where they say off."""
    found = AuditSection()
    if not found.on:
        found = AuditSection(rate=DEFAULT_RATE, before_seal="probation")
    return msgspec.structs.replace(found, **more)


@dataclass(frozen=True)
class Shape:
    """How much there is to compute."""

    hidden: int
    rows: int
    sequence_length: int
    layers_per_stage: int = 1


TINY, SMALL = Shape(32, 2, 32), Shape(128, 4, 128, 2)
"""Nearly nothing, so that what is exchanged decides; and so much that it doesn't."""


@cache
def book() -> tuple[PreparedData, Path]:
    """The prepared book, made once in this process."""
    return prepared()


def audited_config(
    name: str,
    audit: AuditSection,
    *,
    stages: int = 2,
    steps: int = 40,
    microbatches: int = 8,
    snapshot_steps: int = 10,
    seed: int = 7,
    shape: Shape = TINY,
) -> RunConfig:
    """A small untied model in fp32 on the prepared book."""
    _, data = book()
    model = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": max(2, stages) * shape.layers_per_stage,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return RunConfig(
        run=RunSection(name=name, seed=seed, steps=steps),
        model=ModelSection(config=model),
        data=DataSection(sources=(str(data),), sequence_length=shape.sequence_length),
        schedule=ScheduleSection(warmup_steps=5),
        pipeline=PipelineSection(stages=stages, microbatches=microbatches, microbatch_rows=shape.rows),
        snapshot=SnapshotSection(every_steps=snapshot_steps),
        evaluation=EvaluationSection(rows=4),
        audit=audit,
    )


def reference_end(config: RunConfig) -> dict[str, Any]:
    """Root and hold-out loss of the run in one process: what every fleet has to arrive at."""
    data, directory = book()
    reference = reference_of(config, data, directory)
    root = trained_root(reference, config.run.steps)
    return {"root": root, "holdout": reference.holdout_loss()}


def reference_root(config: RunConfig) -> str:
    return reference_end(config)["root"]


@dataclass
class Plan:
    """A run with liars in it. ``during`` is called with each status: to add, kill and restart miners."""

    config: RunConfig
    miners: int
    before: Mapping[int, Before] = field(default_factory=dict)
    notes: Path | None = None
    """Where the cheating processes note their lies; emptied first."""
    during: Callable[[LocalSwarm, RunStatus], None] = lambda swarm, status: None
    swarm_class: type[LocalSwarm] = LocalSwarm
    limit_s: float = 900.0
    options: SwarmOptions = field(default_factory=lambda: SwarmOptions(measure_costs=False, device="cpu"))


def run_audited(directory: Path, plan: Plan) -> dict[str, Any]:
    """The run's facts (:mod:`benchmarks.audit_facts`) and: finished, why, root, seconds, hotkeys, liars, scores, losses."""
    if plan.notes is not None:
        shutil.rmtree(plan.notes, ignore_errors=True)
        plan.notes.mkdir(parents=True)
    began_s, last = time.monotonic(), _Last()

    def on_status(swarm: LocalSwarm, status: RunStatus, now_s: float) -> None:
        last.take(swarm, status)
        if status.summary.state != "finished":
            plan.during(swarm, status)

    options = replace(plan.options, before_miners=dict(plan.before))
    finished, why, root = True, "", ""
    try:
        result = run_swarm(
            directory,
            plan.config,
            plan.miners,
            options=options,
            limit_s=plan.limit_s,
            on_status=on_status,
            swarm_class=plan.swarm_class,
            poll_s=POLL_S,
        )
        root = result.root
    except (IotaError, RuntimeError) as error:
        if not has_run(directory / "store"):
            raise  # the swarm never came to it: that says nothing of audits
        finished, why = False, str(error)
    lies = lies_told(plan.notes) if plan.notes is not None else {}
    facts = facts_of(directory / "store")
    return {
        **facts,
        "finished": finished,
        "why": why,
        "root": root,
        "seconds": time.monotonic() - began_s,
        **last.table(),
        "liars": sorted({*chosen_liars(plan.notes), *lies}) if plan.notes is not None else [],
        "lies": {hotkey: [len(told), told[0].step, told[0].time_ns] for hotkey, told in lies.items() if told},
        "surviving": surviving_lies(directory / "store", lies),
    }


@dataclass
class _Last:
    """What was last seen of a swarm; scores while there are any, at the end once more."""

    hotkeys: dict[int, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    status: RunStatus | None = None

    def take(self, swarm: LocalSwarm, status: RunStatus) -> None:
        self.status = status
        for number in range(swarm.num_miners):
            if number not in self.hotkeys:
                self.hotkeys[number] = swarm.miner_hotkey(number)
        if status.summary.state == "finished":
            self.scores = scores_of(swarm.validator_url)

    def table(self) -> dict[str, Any]:
        status = self.status
        costs = None if status is None or status.audits is None else msgspec.to_builtins(status.audits)
        return {
            "hotkeys": {str(number): hotkey for number, hotkey in self.hotkeys.items()},
            "scores": self.scores,
            "holdout": None if status is None else status.final_holdout_loss,
            "costs": costs,
            "store": None if status is None or status.store is None else msgspec.to_builtins(status.store),
        }


def scores_of(url: str) -> dict[str, float]:
    """Everybody's share, as the validator at ``url`` says it."""

    async def ask() -> ScoreList:
        async with SignedClient(url) as client:
            deadline = Deadline.after(SCORES_S)
            return await client.request("GET", "/v1/scores", None, ScoreList, deadline=deadline, signed=False)

    return {score.hotkey: score.total for score in asyncio.run(ask()).scores}


def share_of_honest(made: dict[str, Any], hotkey: str) -> float | None:
    """A hotkey's score over the mean of the honest ones'."""
    honest = [made["scores"].get(other, 0.0) for other in made["hotkeys"].values() if other not in made["liars"]]
    mean = sum(honest) / len(honest) if honest else 0.0
    return made["scores"].get(hotkey, 0.0) / mean if mean > 0 else None
