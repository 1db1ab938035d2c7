"""With an index, which is told of every event, the coordinator decides exactly what it decides by looking at everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from random_run import Differ, RandomRun

from subnet.run import events as ev
from subnet.run import state as st
from validator.index import RunIndex
from validator.watch import Watch


def watches() -> list[Watch]:
    plain, indexed = Watch(), Watch()
    indexed.index = RunIndex()
    return [plain, indexed]


@settings(max_examples=25, deadline=None)
@given(
    seed=some.integers(0, 10**6),
    shape=some.sampled_from([(1, 3, 3), (3, 6, 8), (4, 9, 14), (6, 5, 10)]),
    tied=some.booleans(),
    evaluation=some.sampled_from([0, 2]),
)
def test_decides_the_same(seed: int, shape: tuple[int, int, int], tied: bool, evaluation: int) -> None:
    stages, microbatches, members = shape
    options = {"tied": tied, "evaluation_items": evaluation, "evaluation_every": 2, "snapshot_every": 2}
    run = RandomRun(seed, stages, microbatches, watches(), **options)
    run.play(120, members)
    assert run.num_decisions > 20


def test_random_runs_seal_steps_and_lose_members() -> None:
    """So that the test above compares something."""
    kinds: set[type] = set()
    for seed in range(6):
        run = RandomRun(seed, 3, 6, watches(), evaluation_items=2, evaluation_every=2, snapshot_every=2)
        run.play(200, 8)
        kinds |= {type(event) for event in run.events}
    assert {ev.StepSealed, ev.StageSealed, ev.Revoking, ev.Gone, ev.Voided, ev.ItemFailed, ev.Leased} <= kinds


def test_an_index_that_is_not_told_of_a_lease_is_noticed() -> None:
    """The comparison can fail."""

    class Deaf(RunIndex):
        def note(self, state: st.RunState, event: ev.AnyEvent) -> None:
            super().note(
                state, ev.SnapshotOrdered(0, 0, next(iter(state.members))) if isinstance(event, ev.Leased) else event
            )

    plain, deaf = Watch(), Watch()
    deaf.index = Deaf()
    with pytest.raises(Differ):
        RandomRun(1, 3, 6, [plain, deaf]).play(120, 8)
