"""Liars for tests: made in this process, with as much of a run's context as their lies ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.cheats import Liar, Terms
from subnet.model.plan import ModelPlan

AT = 1
"""The step that is lied about: its state differs from the one before."""


def context_of(plan: ModelPlan, stage: int = 0, hotkey: str = "liar") -> Any:
    signer, held = SimpleNamespace(hotkey=hotkey), SimpleNamespace(stage=stage)
    return SimpleNamespace(plan=plan, signer=signer, stage=held, run_state=None, member=None)


def liar_at(stage: int, cheat: str, directory: Path, plan: ModelPlan, **terms: Any) -> Liar:
    """One whose only stage is this."""
    liar = Liar(Terms(cheat=cheat, directory=str(directory), from_step=AT, slots=1, **terms))
    liar.take_part(context_of(plan, stage))
    (directory / "slot-0").write_text("liar")
    liar._role = stage
    return liar
