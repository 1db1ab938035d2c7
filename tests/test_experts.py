"""The benchmark of experts: both models do the same work a token; its short form is the reference to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import experts
from benchmarks.experts_load import ExpertLoad, draw
from subnet.model.registry import load_architecture


@pytest.mark.parametrize("shape", [experts.Shape(), experts.QUICK])
def test_a_token_meets_as_many_parameters_in_both(shape: experts.Shape) -> None:
    units = {kind: load_architecture(shape.model(kind)).units(shape.sequence_length) for kind in ("moe", "dense")}
    idle = shape.layers * (shape.experts - shape.chosen) * 3 * shape.hidden * shape.expert_width
    routers = shape.layers * shape.experts * shape.hidden
    assert units["moe"].num_parameters - idle - routers == units["dense"].num_parameters
    if shape == experts.Shape():
        assert 29e6 < units["moe"].num_parameters < 32e6


def test_shares_are_drawn_and_their_extremes_named(tmp_path: Path) -> None:
    even, skewed = ExpertLoad(0, ((1.0, 1.0), (1.0, 1.0))), ExpertLoad(4, ((1.9, 0.1), (1.2, 0.8)))
    assert (skewed.busiest, skewed.idlest) == (1.9, 0.1)
    draw(tmp_path / "x.png", (even, skewed), {"mixture": ((0, 5.0), (4, 4.0))}, 1000)
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_short_form_is_the_reference_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experts.main(["--quick", "--out", str(tmp_path)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["figures"]["num_different"] == 0
    assert (tmp_path / "experts.png").exists()
