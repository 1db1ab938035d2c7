"""``iota plan --fleet`` and the legacy model: the formula agrees with the simulator, unequal GPUs get unequal shares, it fits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from iota.plan_estimate import estimate, makespan
from iota.plan_fleet import propose, speed_cuts
from iota.plan_fleet_text import render
from iota.simulate import model_of
from iota.simulate_world import World
from subnet.errors import ConfigError
from subnet.model.registry import load_architecture
from subnet.run.config import (
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet, parse_fleet
from subnet.simulate.legacy import LegacySettings, simulate_legacy

AGREES = 0.15
"""What docs/simulate.md says of the formula on a calm fleet whose merges end before the coordinator's deadlines."""
STORE = "[store]\nup_mbit = 1000000\ndown_mbit = 1000000\nrtt_ms = 10\n"


def run_config(**pipeline: Any) -> RunConfig:
    """A billion parameters."""
    settings: dict[str, Any] = {"stages": 4, "microbatches": 32, "microbatch_rows": 2, **pipeline}
    return RunConfig(
        run=RunSection(name="billion", steps=10),
        model=ModelSection(
            config={
                "model_type": "llama",
                "vocab_size": 32000,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 22,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "max_position_embeddings": 2048,
            }
        ),
        data=DataSection(sequence_length=2048),
        pipeline=PipelineSection(**settings),
        evaluation=EvaluationSection(rows=0),
        precision=PrecisionSection(compute="bf16"),
    )


def gpus(count: int, kind: str = "rtx4090", mbit: int = 10_000, rtt_ms: int = 1, more: str = "") -> str:
    link = f"up_mbit = {mbit}\ndown_mbit = {mbit}\nrtt_ms = {rtt_ms}\n"
    return f'[[group]]\nkind = "{kind}"\ncount = {count}\n{link}{more}\n'


def placed(world: World) -> list[dict[int, int]]:
    """Who serves what in the simulated run."""
    served: list[dict[int, int]] = [{} for _ in range(world.costs.num_stages)]
    for node in world.nodes:
        group = world.fleet.group.index(node.group)
        served[node.stage][group] = served[node.stage].get(group, 0) + 1
    return served


@pytest.mark.parametrize(
    ("pipeline", "fleet"),
    [
        ({}, gpus(12)),
        ({}, gpus(4)),
        ({}, gpus(12, more="graph_memory_gb = 64")),
        ({}, gpus(8) + gpus(4, "rtx3090")),
        ({"boundary_code": "int8"}, gpus(12, mbit=1000, rtt_ms=30)),
        ({"boundaries": "store"}, gpus(12)),
        ({"update_delay": 1}, gpus(12, mbit=2000, rtt_ms=20)),
    ],
    ids=["fast", "single", "graphs", "mixed", "coded-slow", "by-store", "overlapped"],
)
def test_the_formula_agrees_with_the_simulator_on_a_calm_fleet(pipeline: dict[str, Any], fleet: str) -> None:
    world = World(model_of(run_config(**pipeline)), parse_fleet(STORE + fleet), num_steps=4).run()
    steps = world.tally.figures().each_step
    simulated_s = (steps[-1].sealed_s - steps[0].sealed_s) / (len(steps) - 1)
    estimated_s = estimate(world.costs, world.fleet, placed(world)).step_s
    assert estimated_s == pytest.approx(simulated_s, rel=AGREES)


def test_makespan_is_the_least_time_in_which_whole_items_fit() -> None:
    assert makespan([(1.0, 1)], 5) == 5
    assert makespan([(1.0, 2)], 5) == 3
    assert makespan([(1.0, 1), (2.0, 1)], 4) == pytest.approx(3.0)
    assert makespan([(1.0, 1), (2.0, 1)], 3) == pytest.approx(2.0)


def test_a_proposal_fits_says_why_and_what_would_help() -> None:
    config = run_config()
    architecture = load_architecture(config.model.config or {})
    fleet = parse_fleet(STORE + gpus(8, mbit=200, rtt_ms=30) + gpus(4, "rtx3090", mbit=200, rtt_ms=30))
    found = propose(config, architecture, fleet)
    assert sum(sum(stage.gpus.values()) for stage in found.each_stage) + sum(found.unused.values()) == 12
    assert all(stage.memory_bytes < stage.smallest_memory_gb * 1e9 for stage in found.each_stage)
    assert sum(stage.layers for stage in found.each_stage) == 22
    assert found.packing == "bits"  # links are slow: each byte counts
    assert found.boundary_code == "int8"
    assert found.why
    factors = [help.factor for help in found.helps]
    assert factors == sorted(factors, reverse=True)
    assert any("links" in help.change for help in found.helps)
    assert found.tokens_per_s == pytest.approx(config.tokens_per_step / found.times.step_s)
    assert render(found, fleet)
    assert msgspec.json.encode(found) == msgspec.json.encode(propose(config, architecture, fleet))


def test_a_stage_gets_layers_by_what_its_gpus_can_do() -> None:
    assert speed_cuts([0.0, *[1.0] * 9, 0.0], [1.0, 2.0]) == (0, 3)
    assert speed_cuts([0.0, *[1.0] * 4, 0.0], [1.0, 1.0, 1.0, 1.0]) == (0, 1, 2, 3)
    assert speed_cuts([0.0, 1.0, 0.0], [1.0, 1.0]) is None
    config = run_config(stages=2)
    fleet = parse_fleet(STORE + gpus(1, "rtx3090", more="memory_gb = 48") + gpus(1, more="memory_gb = 48"))
    found = propose(config, load_architecture(config.model.config or {}), fleet, stages=2)
    assert found.unequal_cuts != found.cuts
    assert found.unequal_factor > 1.1
    slow = next(stage.stage for stage in found.each_stage if "rtx3090" in stage.gpus)
    layers = (found.unequal_cuts[1], 22 - found.unequal_cuts[1])
    assert layers[slow] < layers[1 - slow]


def test_a_model_that_fits_nowhere_is_one_line() -> None:
    config = run_config()
    fleet = parse_fleet(gpus(2, more="graph_memory_gb = 0.5\nmemory_gb = 2"))
    with pytest.raises(ConfigError, match="the largest GPU has 2 GB") as found:
        propose(config, load_architecture(config.model.config or {}), fleet)
    assert found.value.hint


def legacy(fleet: Fleet, **settings: Any) -> Any:
    return simulate_legacy(StageCosts(model_of(run_config())), fleet, LegacySettings(epochs=6, **settings), seed=2)


def test_the_legacy_model_counts_what_its_sources_say() -> None:
    calm = legacy(parse_fleet(STORE + gpus(12, mbit=400)))
    costs = StageCosts(model_of(run_config()))
    assert calm.down_bytes_per_miner == pytest.approx(3 * 2 * max(costs.params))
    assert calm.faults == 0
    # W up, 2 W and W down, one after the other, at 50 million bytes a second
    assert calm.merge_s > 4 * 2 * max(costs.params) / 50e6
    longer = legacy(parse_fleet(STORE + gpus(12, mbit=400)), min_batches=40)
    assert longer.merge_s == pytest.approx(calm.merge_s)
    assert longer.tokens_per_s > calm.tokens_per_s
    churned = legacy(parse_fleet(STORE + gpus(12, mbit=400, more="mtbf_hours = 0.5\noutage_s = 60")), min_batches=40)
    assert churned.faults > 0
    assert churned.discarded_share > longer.discarded_share
    assert churned.tokens_per_s < longer.tokens_per_s
    straight = legacy(parse_fleet(STORE + gpus(12, mbit=400)), activations="straight")
    assert straight.tokens_per_s > calm.tokens_per_s


def test_bad_legacy_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match="allowed: store, straight"):
        LegacySettings(activations="pigeon")
    with pytest.raises(ConfigError, match="min_batches = 0"):
        LegacySettings(min_batches=0)
