"""The simulator: the same seed gives the same bytes, every microbatch is in a sum once, churn loses no tokens, bad files say so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from iota.simulate import model_of, simulate
from iota.simulate_world import Stuck, World
from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan
from subnet.run import invariants
from subnet.run import state as st
from subnet.run.config import DataSection as Data
from subnet.run.config import ModelSection, PipelineSection, RunConfig, RunSection
from subnet.run.state_codec import state_bytes
from subnet.simulate import links
from subnet.simulate.fleet import Fleet, load_fleet, parse_fleet
from subnet.simulate.legacy import LegacySettings
from subnet.simulate.links import Link
from subnet.simulate.presets import PRESETS

NODE = 'kind = "custom"\nmemory_gb = 8\ntflops = 0.05\nbandwidth_gb_s = 10\nmfu = 1.0\n'


def model(*, stages: int = 3, tied: bool = True, **pipeline: Any) -> ModelPlan:
    settings: dict[str, Any] = {"stages": stages, "microbatch_rows": 2, "microbatches": 8, **pipeline}
    config = RunConfig(
        run=RunSection(name="small", steps=10),
        model=ModelSection(
            config={
                "model_type": "llama",
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 6,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "tie_word_embeddings": tied,
            }
        ),
        data=Data(sequence_length=64),
        pipeline=PipelineSection(**settings),
    )
    return model_of(config)


def fleet(count: int = 6, more: str = "", rest: str = "") -> Fleet:
    return parse_fleet(f"[[group]]\n{NODE}count = {count}\n{more}\n{rest}")


CHURN = "mtbf_hours = 0.003\noutage_s = 8\nleave_share = 0.2\nrtt_ms = 40\n"
OUTAGES = "[store]\nmtbf_hours = 0.02\noutage_s = 20\n[validator]\nmtbf_hours = 0.01\noutage_s = 8\n"


def test_the_same_seed_gives_the_same_report_to_the_byte() -> None:
    def report(seed: int) -> bytes:
        found = simulate(model(), fleet(6, CHURN), num_steps=8, seed=seed, legacy=LegacySettings(epochs=3))
        return msgspec.json.encode(msgspec.structs.replace(found, here=None))

    assert report(3) == report(3)
    assert report(3) != report(4)


@pytest.mark.parametrize("seed", range(4))
def test_churn_loses_no_microbatch_and_no_token(seed: int) -> None:
    num_steps = 12
    world = World(model(), fleet(6, CHURN, OUTAGES), num_steps=num_steps, seed=seed).run()
    assert world.faults.happened, "nothing failed, so nothing was shown"
    figures = world.tally.figures()
    config = world.plan.config
    assert figures.items_counted == (num_steps + 1) * config.pipeline.microbatches  # and those of calibration
    assert [step.tokens for step in figures.each_step] == [config.tokens_per_step] * num_steps
    assert world.state.finished is not None
    invariants.check(world.state)


def test_a_calm_run_deals_every_item_once_and_accounts_for_all_time() -> None:
    world = World(model(), fleet(), num_steps=5).run()
    figures = world.tally.figures()
    num_items = world.tally.counts["Backwarded"]
    assert num_items == 6 * 8 * 3
    assert (figures.redone_items, figures.time_share["lost"]) == (0, 0)
    assert sum(figures.time_share.values()) == pytest.approx(1.0)
    spent_s = sum(sum(node.spent_s.values()) for node in world.nodes)
    assert spent_s == pytest.approx(len(world.nodes) * world.now_s)
    useful = world.costs.flops_per_step * figures.steps / figures.seconds / world.fleet.peak_flops
    assert figures.mfu == pytest.approx(useful)


def test_untied_models_coded_boundaries_overlapped_steps_and_boundaries_by_the_store() -> None:
    for plan in (
        model(tied=False, boundary_code="int8"),
        model(update_delay=1),
        model(boundaries="store"),
        model(stages=1),
    ):
        world = World(plan, fleet(), num_steps=4).run()
        assert world.tally.figures().items_counted == 5 * 8
    assert world.tally.figures().bytes_per_step.get("boundaries", 0) == 0  # a single stage sends none


def test_members_that_nobody_can_reach_work_through_the_store() -> None:
    straight = World(model(), fleet(6), num_steps=4).run().tally.figures()
    relayed = World(model(), fleet(6, "reachable = false\n"), num_steps=4).run().tally.figures()
    # a store boundary goes up once and comes down once
    assert relayed.bytes_per_step["boundaries"] == pytest.approx(2 * straight.bytes_per_step["boundaries"], rel=0.1)
    assert relayed.step_s > straight.step_s


def test_faster_links_and_more_gpus_help_and_faults_cost() -> None:
    slow = simulate(model(), fleet(6, "up_mbit = 20\ndown_mbit = 20\n"), num_steps=4).figures
    fast = simulate(model(), fleet(6), num_steps=4).figures
    assert fast.tokens_per_s > 1.5 * slow.tokens_per_s
    assert slow.time_share["input"] + slow.time_share["merge"] > fast.time_share["input"] + fast.time_share["merge"]
    report = simulate(model(), fleet(6, CHURN), num_steps=10, seed=1)
    assert report.calm is not None
    assert report.cost_of_churn > 0


def test_the_state_is_what_the_real_fold_says() -> None:
    world = World(model(), fleet(4), num_steps=2, seed=5).run()
    again = World(model(), fleet(4), num_steps=2, seed=5).run()
    assert state_bytes(world.state) == state_bytes(again.state)
    assert st.num_stages(world.state) == 3


def test_a_fleet_that_can_never_go_on_is_said_to_be_stuck() -> None:
    never = "mtbf_hours = 0.0002\noutage_s = 100000\n"
    with pytest.raises(Stuck, match="no step in"):
        World(model(), fleet(3, never), num_steps=2, patience_s=300).run()


def test_too_few_gpus_and_no_steps_are_one_line() -> None:
    with pytest.raises(ConfigError, match="2 GPUs can't serve 3 stages"):
        simulate(model(), fleet(2), num_steps=2)
    with pytest.raises(ConfigError, match="--steps 0"):
        simulate(model(), fleet(3), num_steps=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "group"),
        ("[group]\nkind = 'a10'\n", r"write \[\[group\]\]"),
        ("[[group]]\nkind = 'rtx9999'\n", "rtx9999"),
        ("[[group]]\nkind = 'custom'\n", "memory_gb/tflops"),
        ("[[group]]\nkind = 'a10'\ncount = 0\n", "count = 0"),
        ("[[group]]\nkind = 'a10'\ncount = 'two'\n", "int"),
        ("[[group]]\nkind = 'a10'\nup_mbit = -1\n", "up_mbit = -1"),
        ("[[group]]\nkind = 'a10'\nup_mbit = nan\n", "up_mbit = nan"),
        ("[[group]]\nkind = 'a10'\nmfu = 1.5\n", "mfu = 1.5"),
        ("[[group]]\nkind = 'a10'\nkill_share = 0.8\nleave_share = 0.5\n", "together at most 1"),
        ("[[group]]\nkind = 'a10'\nmtbf_hours = inf\n", "mtbf_hours = inf"),
        ("[[group]]\nkind = 'a10'\nspeed = 3\n", "speed"),
        ("[[group]]\nkind = 'a10'\ncount = 20000\n[[group]]\nkind = 'a10'\n", "20001"),
        ("[store]\nrtt_ms = -1\n[[group]]\nkind = 'a10'\n", "store.rtt_ms = -1"),
        ("kind = = 3", "not TOML"),
    ],
)
def test_bad_fleet_files_are_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        parse_fleet(text)
    assert "\n" not in str(found.value)
    assert found.value.hint


def test_fleet_files_that_are_shipped_load_and_presets_are_sane() -> None:
    from pathlib import Path

    files = sorted(Path("examples/fleets").glob("*.toml"))
    assert len(files) >= 3
    for file in files:
        assert load_fleet(file).num_gpus > 0
    with pytest.raises(ConfigError, match="does not exist"):
        load_fleet("examples/fleets/none.toml")
    for name, preset in PRESETS.items():
        assert 0 < preset.mfu <= 1, name
        assert min(preset.memory_gb / 16, preset.tflops / 10, preset.bandwidth_gb_s / 400) >= 1, name
        assert preset.usd_per_hour > 0, name


def test_urgent_transfers_go_before_bulk_which_loses_no_bytes() -> None:
    a, b = Link.of(8, 8, 20), Link.of(8, 8, 20)  # a million bytes a second
    _, bulk_s = a.up.bulk(0.0, 10e6, "slices")
    assert bulk_s == pytest.approx(10.0)
    assert links.send(1.0, a, b, 1e6, "boundaries") == pytest.approx(1.0 + 1.0 + 0.02)
    assert links.send(1.0, a, b, 1e6, "boundaries") == pytest.approx(1.0 + 2.0 + 0.02)  # one after the other
    assert a.up.bulk_free_s == pytest.approx(12.0)
    assert a.up.num_bytes == {"slices": 10e6, "boundaries": 2e6}
    assert links.send(5.0, a, a, 1e6, "boundaries") == 5.0  # behind one link
