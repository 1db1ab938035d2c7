"""Golden tasks: the same hash again and again, one for each make-up of a stage, another when the arithmetic is another."""

from __future__ import annotations

import pytest
from model_cases import tiny_plan

from subnet.model.hardware_class import golden_hash, hardware_class
from subnet.model.stage import prepare_torch

prepare_torch(1)


@pytest.mark.parametrize("tied", [False, True])
def test_golden_tasks_are_deterministic(tied: bool) -> None:
    plan = tiny_plan((0, 1, 2, 3), tie_word_embeddings=tied)
    found = hardware_class(plan)
    assert found == hardware_class(plan)
    assert len(found) == 4
    assert found[1] == found[2] == golden_hash(plan, 2)
    assert len(set(found)) == 3


def test_golden_tasks_see_precision_shape_and_cut() -> None:
    whole = golden_hash(tiny_plan(), 0)
    assert whole != golden_hash(tiny_plan(compute="bf16"), 0)
    assert whole != golden_hash(tiny_plan(chunks=4), 0)
    assert whole != golden_hash(tiny_plan((0, 2)), 0)
    assert whole == golden_hash(tiny_plan(num_hidden_layers=6), 0)
