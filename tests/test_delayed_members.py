"""A member with two open steps: an update ends the one, leaves sums and graphs of the other, and keeps the weights it needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from join_cases import NUM_STEPS, Miner, StoredBlobs, TrainedRun, joined, trained_run
from model_cases import tokens_of

from miner.local_view import BoundaryKey
from miner.member_items import ItemWork
from miner.owes import ApplySeal, Compute, Restore
from subnet.errors import InputError
from subnet.run import state as st
from subnet.words import ItemKey


@pytest.fixture(scope="module")
def trained() -> TrainedRun:
    return trained_run(update_delay=1)


@pytest.fixture
async def miner(trained: TrainedRun, tmp_path: Path) -> AsyncIterator[Miner]:
    trained.state.members.clear()
    trained.state.next_step = NUM_STEPS
    run = TrainedRun(
        trained.state, StoredBlobs(dict(trained.store.there)), trained.plan, trained.roots, trained.log_blobs
    )
    made = Miner(run, tmp_path, joined(run.state, "me", 1))
    yield made
    await made.close()


async def up_to(miner: Miner, version: int) -> None:
    """Restored, and this many updates of the log applied."""
    point = st.restore_point(miner.run.state, 0)
    await miner.states.restore(Restore(0, point.version, point.manifest, point.whole))
    while miner.context.local.version != version:
        assert miner.context.local.version is not None
        await miner.states.apply_seal(ApplySeal(miner.context.local.version))


async def test_a_joiner_ends_with_both_states(miner: Miner) -> None:
    await miner.catch_up()
    local, executor = miner.context.local, miner.context.held_stage().executor
    assert miner.root == miner.run.roots[NUM_STEPS]
    assert (local.version, local.version_before) == (NUM_STEPS, NUM_STEPS - 1)
    for step, there in ((NUM_STEPS - 1, False), (NUM_STEPS, True), (NUM_STEPS + 1, True), (NUM_STEPS + 2, False)):
        assert local.computes(miner.run.plan.config.version_of(step)) == there
        item = ItemKey(step, 0, 0)
        if there:
            executor.forward(item, None, tokens_of(1), keep_graph=False)
        else:
            with pytest.raises(InputError, match="needs the state before update"):
                executor.forward(item, None, tokens_of(1), keep_graph=False)


async def test_an_update_leaves_the_step_ahead_alone(miner: Miner) -> None:
    await up_to(miner, 2)
    context = miner.context
    executor, local = context.held_stage().executor, context.local
    for step in (2, 3):  # the one that is merged, and the one ahead
        executor.backward(ItemKey(step, 0, 0), None, None, tokens_of(step), partial=context.partial_key(step, 0))
        local.added[step, 0, 0] = 1
        local.boundaries[BoundaryKey(step, 0, 0, False)] = "hash"
    executor.forward(ItemKey(3, 1, 0), None, tokens_of(7), keep_graph=True)
    executor.forward(ItemKey(2, 1, 0), None, tokens_of(7), keep_graph=True)
    assert len(executor.retained) == 2
    await miner.states.apply_seal(ApplySeal(2))
    assert miner.root == miner.run.roots[3]
    assert [key.step for key in executor.partials] == [3]
    assert [item.step for item in executor.retained] == [3]
    assert list(local.added) == [(3, 0, 0)]
    assert [key.step for key in local.boundaries] == [3]
    key = context.partial_key(3, 0)
    executor.backward(ItemKey(3, 1, 0), None, None, None, partial=key)
    assert executor.partials[key].microbatches == {0, 1}


async def test_an_update_that_fails_half_way_ends_the_incarnation_with_its_sums(
    miner: Miner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await up_to(miner, 2)
    context = miner.context
    stage = context.held_stage()
    stage.executor.backward(ItemKey(3, 0, 0), None, None, tokens_of(1), partial=context.partial_key(3, 0))
    context.local.added[3, 0, 0] = 1

    def fails(*_: object, **__: object) -> None:
        stage.state.intact = False
        raise RuntimeError("out of memory")

    monkeypatch.setattr(stage.state, "apply_step", fails)
    with pytest.raises(RuntimeError):
        await miner.states.apply_seal(ApplySeal(2))
    assert context.local.version is None
    assert context.member is None, "a new incarnation: what was added is dealt again"
    assert not context.local.added


async def test_a_saved_state_is_used_only_if_it_comes_through_the_state_before(miner: Miner) -> None:
    states, owe = miner.states, Restore(0, -1, "manifest", True)
    for step, goes_on in ((NUM_STEPS, False), (NUM_STEPS - 1, True), (1, True), (0, False)):
        saved = SimpleNamespace(step=step, root=miner.run.roots[step], branch=0)
        assert states._goes_on(saved, owe) == goes_on  # type: ignore[arg-type]


async def test_a_forward_waits_for_graphs_of_both_steps(miner: Miner) -> None:
    """At a lone stage two may be under way; the same microbatch of another step is another item."""
    await miner.catch_up()
    items, executor = ItemWork(miner.context), miner.context.held_stage().executor
    executor.forward(ItemKey(NUM_STEPS, 0, 0), None, tokens_of(1), keep_graph=True)
    ahead = Compute(NUM_STEPS + 1, 0, 0, backward=False, generation=1)
    assert not items.held_back(ahead)
    miner.context.local.jobs.add(Compute(NUM_STEPS + 1, 1, 0, backward=False, generation=1))
    assert items.held_back(ahead)
    assert not items.held_back(Compute(NUM_STEPS, 0, 0, backward=False, generation=1)), "it is begun"
