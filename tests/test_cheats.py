"""Each cheat of the benchmarks changes what it says and nothing else: in-process, against the production code it patches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cheat_cases import AT, liar_at
from model_cases import tiny_plan, tokens_of
from test_stage_executor import executors
from test_stage_merge import run_step

from benchmarks.cheats import CHEATS, Patches, lies_told
from benchmarks.cheats_merge import _other_root
from iota.entries import Before
from subnet.engine.stage_executor import ItemFailed, PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.model.plan import ModelPlan
from subnet.model.stage import prepare_torch
from subnet.numerics.examine import accept_slice
from subnet.numerics.slices import parse_slice
from subnet.protocol import messages as msg
from subnet.protocol import wire
from subnet.words import ItemKey

prepare_torch(1)

SEED_BYTES = b"\x05" * 32


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


@dataclass
class Work:
    """What two stages of one member make of step 1, each from the honest inputs."""

    forward: dict[tuple[int, int], bytes] = field(default_factory=dict)
    backward: dict[tuple[int, int], bytes] = field(default_factory=dict)
    loss: dict[tuple[int, int], int | None] = field(default_factory=dict)
    slices: dict[int, dict[int, bytes]] = field(default_factory=dict)
    fingerprints: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    merged: dict[int, dict[int, bytes]] = field(default_factory=dict)
    merges: dict[int, StageMerge] = field(default_factory=dict)

    def differs(self, other: Work) -> dict[str, set[int]]:
        """By kind of result: the stages at which something is another."""
        found: dict[str, set[int]] = {}
        for name in ("forward", "backward", "loss"):
            mine, theirs = getattr(self, name), getattr(other, name)
            found[name] = {stage for stage, m in mine if mine[stage, m] != theirs[stage, m]}
        for name in ("slices", "fingerprints", "merged"):
            mine, theirs = getattr(self, name), getattr(other, name)
            found[name] = {stage for stage in mine if mine[stage] != theirs[stage]}
        return {name: stages for name, stages in found.items() if stages}


def work_of(plan: ModelPlan, honest: Work | None) -> Work:
    """Two updates, then the third step's items, sums and merges. ``honest``: whose boundaries are the inputs."""
    stages = executors(plan)
    for step in (-1, 0):
        run_step(plan, [stages], step)
    made = Work()
    given = honest or made
    for m in range(plan.config.pipeline.microbatches):
        rows = tokens_of(700 + m)
        for stage, executor in enumerate(stages):
            x = given.forward[stage - 1, m] if stage else None
            done = executor.forward(ItemKey(AT, m, stage), x, rows, keep_graph=stage == 0)
            made.forward[stage, m] = bytes(done.output or b"")
        for stage in reversed(range(len(stages))):
            grad = given.backward[stage + 1, m] if stage == 0 else None
            x = given.forward[stage - 1, m] if stage else None
            back = stages[stage].backward(ItemKey(AT, m, stage), grad, x, rows, partial=PartialKey(AT, 1, 0, 0))
            made.backward[stage, m] = bytes(back.output or b"")
            made.loss[stage, m] = back.loss_bits
    for stage, executor in enumerate(stages):
        _sums_of(plan, executor, stage, made, given)
    return made


def _sums_of(plan: ModelPlan, executor: StageExecutor, stage: int, made: Work, given: Work) -> None:
    merge, partial = StageMerge(plan, stage, executor.state), executor.partials[PartialKey(AT, 1, 0, 0)]
    count = plan.config.pipeline.microbatches
    assert partial.microbatches == set(range(count))
    made.merges[stage] = merge
    made.slices[stage] = {index: bytes(one.data) for index, one in merge.slices(partial).items()}
    made.fingerprints[stage] = merge.partial_fingerprints(partial, SEED_BYTES, total_items=count)
    slices = given.slices[stage]
    sums = {index: merge.merge_partition(index, [(slices[index], count)], total_items=count) for index in slices}
    made.merged[stage] = {index: bytes(one.data) for index, one in sums.items()}


@pytest.fixture(scope="module")
def plan() -> ModelPlan:
    return tiny_plan((0, 2))


@pytest.fixture(scope="module")
def honest(plan: ModelPlan) -> Work:
    return work_of(plan, None)


def lied(
    cheat: str, stage: int, plan: ModelPlan, honest: Work, patches: Patches, directory: Path, **terms: Any
) -> Work:
    liar = liar_at(stage, cheat, directory, plan, **terms)
    Before(CHEATS[cheat].install).resolve()(liar, patches)
    return work_of(plan, honest)


ITEM_CHEATS = [
    ("wrong_forward", 0, {"forward", "slices", "fingerprints"}),
    ("wrong_forward", 1, {"backward", "loss", "slices", "fingerprints"}),
    ("wrong_backward", 0, {"slices", "fingerprints"}),
    ("wrong_backward", 1, {"backward"}),
    ("zero_gradient", 0, {"slices", "fingerprints"}),
    ("scaled_gradient", 1, {"slices", "fingerprints"}),
    ("stale_weights", 0, {"forward", "slices", "fingerprints"}),
    ("stale_weights", 1, {"backward", "loss", "slices", "fingerprints"}),
    ("replayed_output", 0, {"forward"}),
    ("replayed_output", 1, {"backward"}),
    ("sends_nan", 0, {"forward"}),
    ("no_work", 0, {"forward", "slices", "fingerprints"}),
    ("no_work", 1, {"backward", "loss", "slices", "fingerprints"}),
    ("wrong_loss", 1, {"loss"}),
    ("lying_partial", 0, {"slices", "fingerprints"}),
    ("inflated_maxima", 1, {"slices", "fingerprints"}),
    ("lying_fingerprint", 0, {"fingerprints"}),
    ("lying_owner", 0, {"merged"}),
    ("inflated_by_owner", 1, {"merged"}),
]


@pytest.mark.parametrize(("cheat", "stage", "changed"), ITEM_CHEATS, ids=lambda value: str(value))
def test_a_cheat_changes_what_it_says_and_nothing_else(
    cheat: str, stage: int, changed: set[str], plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path
) -> None:
    made = lied(cheat, stage, plan, honest, patches, tmp_path)
    assert made.differs(honest) == {name: {stage} for name in changed}
    told = lies_told(tmp_path)["liar"]
    assert {lie.step for lie in told} == {AT}
    assert {lie.stage for lie in told} == {stage}


def test_honest_work_is_the_same_twice(plan: ModelPlan, honest: Work) -> None:
    assert work_of(plan, honest).differs(honest) == {}


def test_a_share_of_the_items_is_lied_about(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    made = lied("replayed_output", 0, plan, honest, patches, tmp_path, share=0.5, seed=3)
    told = {lie.microbatch for lie in lies_told(tmp_path)["liar"]}
    assert 0 < len(told) < plan.config.pipeline.microbatches
    assert {m for (stage, m) in honest.forward if made.forward[stage, m] != honest.forward[stage, m]} == told


def test_a_lying_partial_is_off_by_one_number_and_its_fingerprint_fits(
    plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path
) -> None:
    made = lied("lying_partial", 0, plan, honest, patches, tmp_path)
    (index,) = [i for i, data in made.slices[0].items() if data != honest.slices[0][i]]
    merge, count = made.merges[0], plan.config.pipeline.microbatches
    partition, section = merge.find(index)
    values, _ = parse_slice(section, partition, made.slices[0][index], count)
    before, _ = parse_slice(section, partition, honest.slices[0][index], count)
    assert values is not None
    assert before is not None
    assert np.abs(values.astype(int) - before.astype(int)).sum() == 1
    told = merge.slice_fingerprint(index, made.slices[0][index], count, SEED_BYTES, total_items=count)
    assert told == made.fingerprints[0][index]


def test_inflated_maxima_leave_the_sums_alone(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    made = lied("inflated_maxima", 0, plan, honest, patches, tmp_path)
    count = plan.config.pipeline.microbatches
    for index, data in made.slices[0].items():
        partition, section = made.merges[0].find(index)
        values, maxima = parse_slice(section, partition, data, count)
        expected, before = parse_slice(section, partition, honest.slices[0][index], count)
        assert values is not None
        assert np.array_equal(values, expected)
        assert np.array_equal(maxima, before * 8)


def test_an_owners_lie_has_the_form_of_a_sum(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    """Else it would be refused for that, and the checks of the merge would never see it."""
    made = lied("lying_owner", 0, plan, honest, patches, tmp_path)
    count = plan.config.pipeline.microbatches
    for index, data in made.merged[0].items():
        partition, section = made.merges[0].find(index)
        bound, hash_ = section.item_bound // len(section.stages), wire.blob_hash(data)
        accept_slice(section, partition, data, count, hash=hash_, packed=False, item_bound=bound, calibration=False)


def test_false_failure_says_what_isnt_so(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    with pytest.raises(ItemFailed, match="not finite"):
        lied("false_failure", 1, plan, honest, patches, tmp_path)


def test_colluding_replicas_update_wrongly_and_alike(plan: ModelPlan, patches: Patches, tmp_path: Path) -> None:
    roots: list[list[str]] = []
    for name in ("honest", "one", "other"):
        mine = Patches()
        if name != "honest":
            (tmp_path / name).mkdir()
            Before(CHEATS["wrong_update"].install).resolve()(liar_at(0, "wrong_update", tmp_path / name, plan), mine)
        stages = executors(plan)
        for step in (-1, 0, 1):
            run_step(plan, [stages], step)
        roots.append([executor.state.stage_root() for executor in stages])
        mine.undo()
    assert roots[1] == roots[2]
    assert roots[0][0] != roots[1][0]
    assert roots[0][1] == roots[1][1]


def test_another_root_is_reported_than_the_state_has(plan: ModelPlan, tmp_path: Path) -> None:
    liar = liar_at(0, "wrong_root", tmp_path, plan)
    claim = msg.UpdatedClaim(AT, "ab" * 32)
    assert _other_root(liar, claim).root not in ("", claim.root)
    assert _other_root(liar, msg.UpdatedClaim(AT - 1, "ab" * 32)).root == "ab" * 32
    assert _other_root(liar, msg.CheckClaim(AT, 0, 1, True)) == msg.CheckClaim(AT, 0, 1, True)
