"""Waits for a merge grow with the bytes that the busiest link has to move, by the journal alone; slow links finish their step."""

from __future__ import annotations

import msgspec
import pytest
from test_simulate import NODE

from iota.simulate import model_of
from iota.simulate_world import World
from subnet.errors import ConfigError
from subnet.model.memory import boundary_bytes as real_boundary_bytes
from subnet.model.memory import stage_slice_bytes
from subnet.model.plan import ModelPlan
from subnet.run.config import DataSection, MergeSection, ModelSection, PipelineSection, RunConfig, RunSection
from subnet.run.events import RunPlanned
from subnet.simulate.fleet import parse_fleet
from subnet.timing import carrying_s
from subnet.words import Commitment, Member
from validator.merge_waits import PartitionSize, boundary_bytes, partition_sizes, reduced_bytes, slice_bytes
from validator.run_registry import group_shapes

A, B, C = (Member(name, 1, number) for number, name in enumerate("abc", 1))


def config_of(slowest_mbit: float, *, tied: bool = True, stages: int = 2, packing: str = "bits") -> RunConfig:
    return RunConfig(
        run=RunSection(name="small", steps=10),
        model=ModelSection(
            config={
                "model_type": "llama",
                "vocab_size": 512,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "tie_word_embeddings": tied,
            }
        ),
        data=DataSection(sequence_length=64),
        pipeline=PipelineSection(stages=stages, microbatch_rows=2, microbatches=8),
        merge=MergeSection(packing=packing, slowest_mbit=slowest_mbit),
    )


def planned(plan: ModelPlan) -> RunPlanned:
    return RunPlanned(
        run_id="r",
        config=plan.config,
        model_config=dict(plan.model_config),
        unit_tensors=plan.units.units,
        unit_flops_per_token=plan.units.unit_flops_per_token,
        tied=plan.units.tied,
        cuts=plan.cuts,
        groups=group_shapes(plan.layout),
        data="",
        snapshot="",
        tokenizer="",
        submitter="",
    )


def test_a_wait_is_its_base_and_its_bytes_over_the_link() -> None:
    assert carrying_s(20, 0, 20) == 20
    assert carrying_s(20, 2_500_000, 20) == pytest.approx(21)
    assert carrying_s(20, 2_500_000, 10) == pytest.approx(22)


@pytest.mark.parametrize("packing", ["bits", "bytes"])
@pytest.mark.parametrize(("tied", "stages"), [(True, 3), (False, 3), (True, 1)])
def test_sizes_from_the_journal_are_those_of_the_real_layout(tied: bool, stages: int, packing: str) -> None:
    plan = model_of(config_of(20, tied=tied, stages=stages, packing=packing))
    run = planned(plan)
    sizes = partition_sizes(run)
    for group, found in zip(plan.layout.groups, sizes, strict=True):
        assert len(found) == len(group.partitions)
        elements = sum(p.num_elements for p in group.partitions)
        assert sum(size.num_elements for size in found) == pytest.approx(elements)
        assert sum(size.num_blocks for size in found) == pytest.approx(sum(p.num_blocks for p in group.partitions))
    if not tied:
        for stage in range(stages):
            mine = sum(
                slice_bytes(size, plan.config, plan.config.num_items, calibration=False) for size in sizes[stage]
            )
            assert mine == pytest.approx(stage_slice_bytes(plan, stage), rel=1e-3)
    assert boundary_bytes(run) == real_boundary_bytes(plan)


def test_the_busiest_sender_and_receiver_count() -> None:
    config = config_of(20)
    sizes = (PartitionSize(1024, 1), PartitionSize(1024, 1))
    entries = tuple(Commitment(k, 0, (m,), ((0, "x"), (1, "y"))) for m, k in enumerate((A, B, C)))

    def size(num_items: int) -> float:
        return slice_bytes(sizes[0], config, num_items, calibration=False)

    one = reduced_bytes(config, sizes, entries, ((A,), (A,)), calibration=False)
    assert one == max(2 * size(1), 2 * size(8)) + 4 * size(1)  # A gets four slices, and publishes two sums
    two = reduced_bytes(config, sizes, entries, ((A,), (B,)), calibration=False)
    assert two == size(1) + size(8) + 2 * size(1)
    alone = reduced_bytes(config, sizes, (entries[0],), ((A,), (A,)), calibration=False)
    assert alone == 2 * size(8)
    both = reduced_bytes(config, sizes, entries, ((A, B), (B, A)), calibration=False)
    assert both == 2 * size(1) + 2 * size(8) + 4 * size(1)  # A sends two slices and two sums, and gets four slices
    maxima = reduced_bytes(config, sizes, entries, ((A,), (B,)), calibration=True)
    assert maxima == (4 + 4) + 2 * 4  # four bytes a block


@pytest.mark.parametrize("mbit", [0, -1, float("nan"), 1e9])
def test_impossible_links_are_refused(mbit: float) -> None:
    with pytest.raises(ConfigError, match="slowest_mbit"):
        MergeSection(slowest_mbit=mbit)


def test_over_slow_links_a_merge_finishes_that_constant_waits_would_do_again_and_again() -> None:
    fleet = parse_fleet(f"[[group]]\n{NODE}count = 4\nup_mbit = 0.4\ndown_mbit = 0.4\n")

    def world(slowest_mbit: float) -> World:
        plan = model_of(config_of(slowest_mbit))
        return World(plan, fleet, num_steps=2, seed=1, patience_s=3600.0).run()

    constant, growing = world(1e6), world(0.4)
    assert constant.tally.counts["OwnerFailed"] > 10
    undone = ("OwnerFailed", "StoreRouted", "Voided", "Gone", "Revoking")
    assert {kind: growing.tally.counts[kind] for kind in undone} == dict.fromkeys(undone, 0)
    assert growing.tally.counts["ReduceOrdered"] == 3  # one joint group: calibration and two steps
    assert growing.tally.figures().step_s < 0.7 * constant.tally.figures().step_s


def test_the_run_file_says_the_link() -> None:
    again = msgspec.toml.decode(
        b"[run]\nname = 'x'\n[model]\npretrained = 'x'\n[merge]\nslowest_mbit = 50\n", type=RunConfig
    )
    assert again.merge.slowest_mbit == 50
