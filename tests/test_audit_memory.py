"""What a replay is said to need from shapes alone is what its worker takes: the budget that holds the estimate is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_cases import LiveRun, a_plan
from test_audit_bundle import bundle_at

from subnet.audit.memory import replay_bytes, replay_memory, state_bytes
from subnet.audit.process import AuditProcess
from subnet.errors import NotFound
from subnet.model.hardware_class import hardware_class
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.stage import prepare_torch
from subnet.run.config import (
    DataSection,
    ModelSection,
    ObjectiveSection,
    PipelineSection,
    RunConfig,
    RunSection,
)
from subnet.timing import Deadline

prepare_torch(1)

ALLOWANCE = 1.25
"""Resident memory differs by what the allocator and the libraries do."""


def seven_million() -> ModelPlan:
    model: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    run = RunConfig(
        run=RunSection(name="seven", seed=7, steps=4),
        model=ModelSection(config=model),
        data=DataSection(sequence_length=128),
        objective=ObjectiveSection(ce_chunk_tokens=256),
        pipeline=PipelineSection(stages=2, microbatches=3, microbatch_rows=4),
    )
    return plan_model(run, load_architecture(model), (0, 2))


def status_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


async def peak_bytes(bundle: Path, budget_bytes: int) -> int:
    """Of the worker above its level after import; the whole of the budget holds it."""
    supervisor = AuditProcess(budget_bytes)
    try:
        with pytest.raises(NotFound):
            await supervisor.run(bundle / "nowhere", Deadline.after(300))
        assert supervisor._worker is not None
        pid = supervisor._worker.process.pid
        base_bytes = status_bytes(pid, "VmRSS")
        found = await supervisor.run(bundle, Deadline.after(300))
        assert not any(partial.wrong for partial in found.partials)
        assert found.wrong_roots == ()
        assert supervisor._worker.process.pid == pid
        return status_bytes(pid, "VmHWM") - base_bytes
    finally:
        await supervisor.close()


@pytest.mark.parametrize("plan", [a_plan((0, 2)), seven_million()], ids=["tiny", "7M"])
async def test_a_worker_takes_what_its_budget_says(tmp_path: Path, plan: ModelPlan) -> None:
    live = LiveRun(plan, num_members=3).run(1)
    stage = plan.num_stages - 1
    case = msgspec.structs.replace(live.case(0, stage), hardware_class=hardware_class(plan))
    needed = state_bytes(plan, stage) + replay_bytes(plan, stage)
    found = await peak_bytes(bundle_at(tmp_path / "bundle", live, case), needed)
    assert found <= ALLOWANCE * needed
    assert found >= state_bytes(plan, stage)


def test_the_estimate_has_every_phase_and_grows_with_the_model() -> None:
    small, large = a_plan((0, 2)), seven_million()
    for plan in (small, large):
        for stage in range(plan.num_stages):
            memory = replay_memory(plan, stage)
            assert {term.phase for term in memory.terms} == {"always", "state", "golden", "compute", "merge"}
            assert replay_bytes(plan, stage) > memory.phase_bytes("compute") > 0
    assert replay_bytes(large, 1) > 2 * replay_bytes(small, 1)
    assert state_bytes(large, 1) > 100 * state_bytes(small, 1)
