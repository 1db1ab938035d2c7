"""Pause, resume and stop: whatever else happens, paused means no new step, stopped means a whole run of fewer steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import schedule_toy as toy
from lead_cases import FIRST, SECOND
from schedule_nodes import Bad, Coordinator, Crash
from schedule_sim import Sim

from subnet.errors import AuthFailed, InputError
from subnet.protocol.api import ControlRequest
from subnet.protocol.signing import Signer, sign_statement
from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply, fold
from subnet.run.control_event import ACTIONS, PAUSE, PURPOSE_CONTROL, RESUME, STOP, control_statement
from subnet.run.invariants import InvariantBroken
from subnet.run.state_codec import dump_state, load_state, state_bytes
from validator.decide_steps import decide_steps
from validator.follow_checks import WRONG, breaches
from validator.policy import Policy
from validator.run_control import RunOver, controlled
from validator.run_registry import RunEntry, StoredRun
from validator.watch import Watch


class Told(Coordinator):
    """Its run's owner says something now and then."""

    def tick(self, late: bool = False) -> None:
        if self.core.may_speak and self.state.finished is None and (action := self.sim.word(self.state)):
            self.sim.num_words += 1
            try:
                self.emit(ev.RunControlled(action, "submitter", self.sim.num_words, b""))
            except Crash:
                return
        super().tick(late)


class ControlledSim(Sim):
    """A schedule of up to six steps, paused, resumed and stopped at any moment, also by a restarted or another leader."""

    num_words = 0

    def _choose(self, lie: str) -> int:
        count = super()._choose(lie)
        self.num_steps = 6
        config = self.run_planned.config
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=6))
        self.run_planned = msgspec.structs.replace(self.run_planned, config=config)
        return count

    def new_coordinator(self, *arguments: Any) -> Coordinator:
        return Told(self, *arguments)

    def word(self, state: st.RunState) -> str:
        if not self.chaos:
            stops = state.next_step > 0 and state.stops_at is None and self.rng.random() < 0.02
            return RESUME if state.paused else STOP if stops else ""
        if self.rng.random() < 0.03:
            return self.rng.choice([PAUSE, RESUME, STOP] if state.next_step > 0 else [PAUSE, RESUME])
        return ""

    def audit_evaluation(self, step: int, evaluation: tuple[int, ...]) -> None:
        end = self.finished.step if self.finished is not None else None
        config, first = self.run_planned.config, self.num_microbatches
        items = range(first, first + (config.num_evaluation_items if config.evaluates_at(step, end) else 0))
        if list(evaluation) != self.reference.losses(step, step, frozenset(self.skipped), items):
            raise Bad("wrong evaluation")

    def run(self) -> ControlledSim:
        self._chaos()
        self._calm()
        self.audit()
        if self.finished is None:
            raise Bad("stuck")
        if not self.tainted:
            self.audit_evaluation(self.finished.step, self.finished.evaluation)
        return self


@pytest.mark.parametrize("delay", [0, 1])
def test_in_any_schedule_the_sums_are_right_and_the_run_ends_where_it_was_stopped(delay: int) -> None:
    ends: list[int] = []
    words = 0
    for seed in range(40):
        sim = ControlledSim(seed, delay=delay, checks_all=False)
        sim.run()
        state = sim.coordinator.state
        assert sim.finished is not None
        assert sim.finished.step == state.next_step == st.end_step(state), seed
        assert set(sim.steps) == set(range(-1, sim.finished.step)), seed
        assert not state.paused
        again = fold(sim.coordinator.journal)
        assert state_bytes(again) == state_bytes(state) == state_bytes(load_state(dump_state(state)))
        ends.append(sim.finished.step)
        words += sim.counts["RunControlled"]
    assert words > 40
    assert min(ends) < 6
    assert max(ends) == 6


def planned(num_steps: int = 5, **options: Any) -> st.RunState:
    state = st.new_state()
    for event in (
        toy.plan_run(1, 2, num_steps, **options),
        ev.TermStarted(1, "validator", "n"),
        ev.HardwareClassSet(("golden",), "operator"),
    ):
        apply(state, event)
    return state


def word(action: str, at: int) -> ev.RunControlled:
    return ev.RunControlled(action, "submitter", at, b"")


def next_planned(state: st.RunState) -> list[int]:
    decided = decide_steps(0.0, state, Watch(), Policy())
    return [d.what.step for d in decided if isinstance(d.what, ev.StepPlanned)]


def test_no_step_begins_while_a_run_is_paused() -> None:
    state = planned()
    assert next_planned(state) == [-1]
    apply(state, word(PAUSE, 1))
    assert next_planned(state) == []
    with pytest.raises(InvariantBroken, match="planned while the run is paused"):
        apply(state, ev.StepPlanned(-1, 2, 0, None))
    state = planned()
    for at, action in enumerate((PAUSE, PAUSE, RESUME), 1):
        apply(state, word(action, at))
    assert next_planned(state) == [-1]


def test_a_word_is_journaled_once_and_none_but_these_three() -> None:
    state = planned()
    apply(state, word(PAUSE, 5))
    with pytest.raises(InvariantBroken, match="comes after 5"):
        apply(state, word(RESUME, 5))
    with pytest.raises(InvariantBroken, match="no word about a run"):
        apply(planned(), word("explode", 1))


def test_a_stop_lets_a_paused_run_go_on_to_its_end_and_is_final() -> None:
    state = planned()
    apply(state, word(PAUSE, 1))
    apply(state, word(STOP, 2))
    assert (state.paused, st.end_step(state)) == (False, 1)  # at least one update
    apply(state, word(PAUSE, 3))
    assert (state.paused, st.end_step(state)) == (False, 1)
    assert next_planned(state) == [-1]


def test_windows_end_where_the_run_was_stopped() -> None:
    config = msgspec.structs.replace(planned(100).run.config)  # type: ignore[union-attr]
    size = config.audit.window_steps
    assert au.last_of(config, 0, 3) == min(size, 3) - 1
    assert au.num_windows(config, size + 1) == 2
    assert au.num_windows(config) == -(-100 // size)


# ---- whose word it is

RUN_ID = "toy"


def request(action: str, at: int, signer: Signer = FIRST, run_id: str = RUN_ID) -> ControlRequest:
    signature = sign_statement(signer, PURPOSE_CONTROL, control_statement(run_id, action, at))
    return ControlRequest(action, at, signature)


def entry() -> RunEntry:
    stored = StoredRun(RUN_ID, "name", 0, FIRST.hotkey, None)  # type: ignore[arg-type]
    return RunEntry(stored, None, None, None)  # type: ignore[arg-type]


def test_only_the_submitters_newer_word_is_taken() -> None:
    state = planned()
    for action in ACTIONS:
        assert controlled(entry(), state, FIRST.hotkey, request(action, 7)).action == action
    refused: list[tuple[str, ControlRequest, type[Exception]]] = [
        (SECOND.hotkey, request(PAUSE, 7, SECOND), AuthFailed),
        (FIRST.hotkey, request(PAUSE, 7, SECOND), AuthFailed),
        (FIRST.hotkey, request(PAUSE, 7, run_id="another"), AuthFailed),
        (FIRST.hotkey, msgspec.structs.replace(request(PAUSE, 7), action=STOP), AuthFailed),
        (FIRST.hotkey, request("explode", 7), InputError),
    ]
    for hotkey, asked, error in refused:
        with pytest.raises(error):
            controlled(entry(), state, hotkey, asked)
    apply(state, word(PAUSE, 7))
    with pytest.raises(InputError, match="older than"):
        controlled(entry(), state, FIRST.hotkey, request(RESUME, 7))
    apply(state, word(STOP, 8))
    with pytest.raises(RunOver, match="ends after 1 updates"):
        controlled(entry(), state, FIRST.hotkey, request(RESUME, 9))
    assert controlled(entry(), state, FIRST.hotkey, request(STOP, 9)).action == STOP


def test_a_follower_finds_a_word_that_its_owner_did_not_sign() -> None:
    state = st.new_state()
    apply(state, msgspec.structs.replace(toy.plan_run(1, 2, 5), submitter=FIRST.hotkey))
    good = request(STOP, 7)
    honest = ev.RunControlled(STOP, FIRST.hotkey, 7, good.signature)
    assert breaches(state, honest) == []
    for forged in (
        msgspec.structs.replace(honest, action=PAUSE),
        msgspec.structs.replace(honest, time_ns=8),
        msgspec.structs.replace(honest, by=SECOND.hotkey, signature=request(STOP, 7, SECOND).signature),
    ):
        assert [found.code for found in breaches(state, forged)] == ["control"]
    assert "control" in WRONG
