"""Each breach is found where a journal was doctored, and none where it wasn't."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from follow_cases import journal_of
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.state import RunState, new_state
from subnet.words import Member
from validator.follow_checks import WRONG, breaches

replace = msgspec.structs.replace
SEED = 5


def told(seed: int = SEED, **options: object) -> Iterator[tuple[RunState, ev.AnyEvent]]:
    """Each event with the state before it."""
    state = new_state()
    for record in journal_of(seed, **options):
        yield state, record.event
        apply(state, record.event)


def codes(change: Callable[[ev.AnyEvent], ev.AnyEvent], kind: type[ev.AnyEvent], nth: int = 1) -> set[str]:
    """What is found when the nth event of this kind is told otherwise."""
    seen = 0
    for state, event in told():
        if isinstance(event, kind):
            seen += 1
            if seen == nth:
                assert breaches(state, event) == []
                return {found.code for found in breaches(state, change(event))}
    raise AssertionError(f"no {nth} {kind.__name__} in the journal")


@given(seed=st.integers(0, 400), kind=st.sampled_from(["", "takeover", "rivals", "void", "stale", "delayed"]))
@settings(max_examples=25, deadline=None)
def test_nothing_is_found_in_honest_journals(seed: int, kind: str) -> None:
    """Of calm and wild schedules: takeovers, rivals, voids, liars that were traced, merges that overlap the next step."""
    options: dict[str, object] = {"delay": 1} if kind == "delayed" else {"profile": kind}
    for state, event in told(seed, **options):
        assert breaches(state, event) == []


# --- steps ---------------------------------------------------------------------------------------------------------

SCALARS = [
    "lr",
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "epsilon",
    "bias_correction1",
    "bias_correction2",
]


@pytest.mark.parametrize("field", [*SCALARS, "decay"])
def test_a_scalar_of_another_schedule(field: str) -> None:
    def change(event):
        return replace(event, scalars=replace(event.scalars, **{field: getattr(event.scalars, field) ^ 1}))

    assert codes(change, ev.StepPlanned, 2) == {"scalars"}


def test_scalars_that_are_left_out_or_do_not_belong() -> None:
    assert codes(lambda event: replace(event, scalars=None), ev.StepPlanned, 2) == {"scalars"}
    other = next(event.scalars for _, event in told() if isinstance(event, ev.StepPlanned) and event.scalars)
    assert codes(lambda event: replace(event, scalars=other), ev.StepPlanned, 1) == {"scalars"}
    assert codes(lambda e: replace(e, scalars=replace(e.scalars, decays=not e.scalars.decays)), ev.StepPlanned, 2) == {
        "scalars"
    }


def test_an_evaluation_that_the_run_file_does_not_name() -> None:
    assert codes(lambda e: replace(e, num_evaluation=e.num_evaluation + 1), ev.StepPlanned, 2) == {"evaluation"}


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("norm_bits", "norm"),
        ("coefficient_bits", "coefficient"),
        ("loss_bits", "loss"),
        ("num_counted", "num_counted"),
        ("tokens", "tokens"),
    ],
)
def test_a_step_that_is_sealed_with_other_numbers(field: str, code: str) -> None:
    assert codes(lambda e: replace(e, **{field: getattr(e, field) + 1}), ev.StepSealed, 2) == {code}
    assert (code in WRONG) == (code not in ("loss", "tokens"))


def test_hold_out_losses_that_nobody_reported() -> None:
    assert codes(lambda e: replace(e, evaluation=(*e.evaluation, 7)), ev.StepSealed, 2) == {"evaluation"}
    assert codes(lambda e: replace(e, evaluation=(*e.evaluation, 7)), ev.RunFinished) == {"evaluation"}


def test_a_seal_before_the_snapshots_that_are_due() -> None:
    """A state without the last snapshot, and the seal or the end that should have waited for it."""
    found: set[str] = set()
    for seed in range(40):
        for state, event in told(seed):
            due = isinstance(event, ev.StepSealed | ev.RunFinished) and state.snapshots.get(0)
            if due and state.snapshots[0][-1].step == state.next_step:
                kept, state.snapshots = state.snapshots, {}
                found |= {f"{type(event).__name__} {f.code}" for f in breaches(state, event)}
                state.snapshots = kept
        if len(found) == 2:
            break
    assert found == {"StepSealed snapshots", "RunFinished snapshots"}


# --- merges --------------------------------------------------------------------------------------------------------


def entries(change: Callable[[list], list]) -> set[str]:
    return codes(lambda event: replace(event, entries=tuple(change(list(event.entries)))), ev.StageSealed, 2)


def test_a_microbatch_that_is_missing() -> None:
    assert "coverage" in entries(lambda e: [replace(e[0], microbatches=e[0].microbatches[1:]), *e[1:]])
    assert "coverage" in entries(lambda e: e[1:])


def test_a_microbatch_that_is_there_twice() -> None:
    first = lambda e: replace(e[0], microbatches=(*e[0].microbatches, e[0].microbatches[0]))  # noqa: E731
    assert "coverage" in entries(lambda e: [first(e), *e[1:]])
    assert "coverage" in entries(lambda e: [*e, e[0]])


def test_a_microbatch_that_does_not_count() -> None:
    assert "coverage" in entries(lambda e: [replace(e[0], microbatches=(*e[0].microbatches, 999)), *e[1:]])


def test_an_entry_of_another_stage() -> None:
    assert "coverage" in entries(lambda e: [*e, replace(e[0], stage=e[0].stage + 7)])


def test_work_that_is_credited_to_somebody_else() -> None:
    stranger = Member("stranger", 1, 99)
    assert entries(lambda e: [replace(e[0], member=stranger), *e[1:]]) == {"credit"}
    assert "credit" not in WRONG


def test_squares_that_are_not_the_partitions_own() -> None:
    assert codes(lambda e: replace(e, squares=f"{int(e.squares, 16) + 1:x}"), ev.StageSealed, 2) == {"squares"}


def test_a_stage_that_is_called_checked() -> None:
    assert codes(lambda e: replace(e, unchecked_stages=(*e.unchecked_stages, 77)), ev.StageSealed, 2) == {
        "unchecked_stages"
    }


@pytest.mark.parametrize("how", ["refused", "missing", "nobody"])
def test_a_seal_that_was_not_checked(how: str) -> None:
    for state, event in told():
        if isinstance(event, ev.StageSealed) and event.step >= 0:
            checks = state.work.merges[event.group].checks
            if how == "refused":
                checks[next(iter(checks))] = False
            elif how == "missing":
                del checks[next(iter(checks))]
            else:
                checks.clear()
            found = {f.code for f in breaches(state, event)}
            assert found == {"unchecked"}
            return
    raise AssertionError("no seal")
