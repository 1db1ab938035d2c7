"""No microbatch's gradient is counted twice or not at all, whatever is said, by whom, how late, how often, and who dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from once_cases import Case, choices_of, first_failure

from miner import owed, owed_merges
from subnet.run import apply, invariants, merges, state, work
from subnet.run.events import Backwarded, Committed, Forwarded
from subnet.run.state import Item, RunState, StepWork
from subnet.words import Member
from validator import intake

NUM_CASES = int(os.environ.get("IOTA_ONCE_CASES", "400"))
"""Cases of the default suite; 25 a second on one core."""


@pytest.mark.parametrize("part", range(4))
@pytest.mark.timeout(3600)
def test_every_gradient_is_counted_once_in_many_interleavings(part: int) -> None:
    size = -(-NUM_CASES // 4)
    assert first_failure(range(part * size, (part + 1) * size)) is None


@pytest.mark.timeout(3600)
def test_every_gradient_is_counted_once_where_two_steps_are_open() -> None:
    assert first_failure(range(500_000, 500_000 + NUM_CASES // 8), delay=1) is None


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_gradient_is_counted_once_in_ten_thousand_interleavings() -> None:
    assert first_failure(range(1_000_000, 1_010_000)) is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(some.binary(min_size=100, max_size=600))
def test_every_gradient_is_counted_once_in_chosen_interleavings(choices: bytes) -> None:
    """As above, where a failure is made small."""
    Case(choices).run()


def test_the_cases_go_where_it_hurts() -> None:
    """A test of the test: before anything is calm, manifests are ordered anew, owners die, partials are void, terms begin."""
    seen = dict.fromkeys(
        ("ReduceOrdered", "Voided", "Gone", "NotAccumulated", "TermStarted", "StageSealed", "ReplayLeased"), 0
    )
    for seed in range(20):
        case = Case(choices_of(seed))
        for at in range(0, len(case.choices), 2):
            case.operate(case.choices[at], case.choices[at + 1])
        for kind in seen:
            seen[kind] += case.seen[kind]
    assert min(seen.values()) > 3, seen


# --- planted defects -----------------------------------------------------------------------------------------------


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def old_generation(patch: pytest.MonkeyPatch) -> None:
    """A receipt of an earlier generation counts; and members commit to what the fold shows, whatever they have."""

    def own_lease(
        st: RunState, member: Member, step: int, m: int, stage: int, generation: int
    ) -> Item | intake.Ignored:
        found = state.item(st, step, m, stage)
        if found is None or found.status not in (state.LIVE, state.REVOKING):
            return intake.Ignored("no lease")
        return found

    def leased_item(st: RunState, event: Backwarded | Forwarded) -> Item:
        return work.open_work(st, event.step).items[event.stage][event.microbatch]

    patch.setattr(intake, "_own_lease", own_lease)
    patch.setattr(work, "_leased_item", leased_item)
    patch.setattr(owed_merges, "sum_is", _always(True))


def kept_partial(patch: pytest.MonkeyPatch) -> None:
    """A void partial's sum lives on: its epoch stays."""
    real = work.void_partial

    def void_partial(st: RunState, open_step: StepWork, member: Member, *, again: bool = False) -> None:
        epoch = open_step.epochs.get(member, 0)
        real(st, open_step, member, again=again)
        open_step.epochs[member] = epoch

    patch.setattr(work, "void_partial", void_partial)
    patch.setattr(owed_merges, "sum_is", _always(True))


def unchecked_manifest(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether the m-sets of a manifest are disjoint and cover everything, nor which freeze they are for."""
    patch.setattr(intake, "commits_done_set", _always(True))
    patch.setattr(merges, "check_entries", _always(None))
    patch.setattr(invariants, "check_entries", _always(None))

    def apply_committed(st: RunState, event: Committed) -> None:
        merge = work.open_work(st, event.step).merges[event.group]
        merge.commitments[event.commitment.member] = event.commitment

    patch.setattr(apply, "apply_committed", apply_committed)


def handed_back(patch: pytest.MonkeyPatch) -> None:
    """A lease that was handed back is added under after all."""
    patch.setattr(owed, "stays_refused", _always(False))
    patch.setattr(owed_merges, "sum_is", _always(True))


PLANTED = [old_generation, kept_partial, unchecked_manifest, handed_back]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = (first_failure(range(seed, seed + 1)) for seed in range(300))
    assert any(failure is not None and "Miscounted: stage" in failure[1] for failure in found)
