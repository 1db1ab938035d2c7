"""The owner's words, at any moment: paused means no new step, stopped a whole run of fewer steps, a rollback the steps again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import schedule_toy as toy
from lead_cases import FIRST, SECOND
from schedule_nodes import Bad, Coordinator, Crash
from schedule_sim import Sim

from subnet.audit.check import _on_schedule  # pyright: ignore[reportPrivateUsage]
from subnet.errors import AuthFailed, InputError
from subnet.protocol.api import ControlRequest
from subnet.protocol.signing import Signer, sign_statement
from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply, fold
from subnet.run.control import objection, still_follows
from subnet.run.control_event import (
    ACTIONS,
    EXTEND,
    PAUSE,
    PURPOSE_CONTROL,
    RESUME,
    ROLLBACK,
    SET_LR,
    STOP,
    control_statement,
)
from subnet.run.invariants import InvariantBroken
from subnet.run.schedule import Terms, step_scalars, terms_of
from subnet.run.state_codec import dump_state, load_state, state_bytes
from validator.decide_cases import decide_rewind
from validator.decide_steps import decide_steps
from validator.follow_checks import WRONG, breaches
from validator.policy import Policy
from validator.run_control import RunOver, controlled
from validator.run_registry import RunEntry, StoredRun
from validator.watch import Watch


class Told(Coordinator):
    """Its run's owner says something now and then."""

    def tick(self, late: bool = False) -> None:
        if self.core.may_speak and self.state.finished is None and (said := self.sim.word(self.state)):
            self.sim.num_words += 1
            action, _, argument = said.partition(" ")
            self.sim.said[action] += 1
            try:
                self.emit(ev.RunControlled(action, "submitter", self.sim.num_words, b"", argument))
            except Crash:
                return
        super().tick(late)


class ControlledSim(Sim):
    """A schedule of up to six steps, paused, resumed and stopped at any moment, also by a restarted or another leader."""

    num_words = 0

    def _choose(self, lie: str) -> int:
        self.said, self.given_up = Counter[str](), set[tuple[int, int]]()
        count = super()._choose(lie)
        self.num_steps, self.poison = 6, None  # what is skipped is one for all branches of the reference
        config = self.run_planned.config
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=6))
        self.run_planned = msgspec.structs.replace(self.run_planned, config=config)
        return count

    def new_coordinator(self, *arguments: Any) -> Coordinator:
        return Told(self, *arguments)

    def word(self, state: st.RunState) -> str:
        if not self.chaos and state.paused:
            return RESUME
        if self.rng.random() >= 0.04:
            return ""
        back, end = self.rng.randint(0, 6), self.rng.randint(1, 7)
        words = [PAUSE, RESUME] if self.chaos else []
        if state.next_step > 0:
            words += [f"{SET_LR} factor 0.5", f"{EXTEND} {end}", *[f"{ROLLBACK} {back}"] * 2]
            words += [STOP] if self.chaos or self.rng.random() < 0.2 else []
        word = self.rng.choice(words) if words else ""
        action, _, argument = word.partition(" ")
        return word if word and self.said[action] < 4 and objection(state, action, argument) is None else ""

    def logged(self, records: tuple[ev.Record, ...]) -> None:
        for record in records:
            if isinstance(record.event, ev.Rewound):
                self._rewound(record.event)
            else:
                super().logged((record,))

    def has_effect(self, state: st.RunState, step: int) -> bool:
        """Who hasn't heard of a rollback yet is on the branch that was given up, where the seal had its effect."""
        return super().has_effect(state, step) or (state.audits.branch, step) in self.given_up

    def _rewound(self, event: ev.Rewound) -> None:
        step = event.step
        self.given_up |= {(event.branch - 1, at) for at in self.steps if at >= step}
        self.steps = {at: sealed for at, sealed in self.steps.items() if at < step}
        self.seals = {key: hashes for key, hashes in self.seals.items() if key[0] < step}
        self.audits = [seal for seal in self.audits if seal.step < step]
        self.skipped = {entry for entry in self.skipped if entry[0] < step}

    def audit_evaluation(self, step: int, evaluation: tuple[int, ...]) -> None:
        end = self.finished.step if self.finished is not None else 1_000_000  # what is sealed is before it
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
    words = Counter[str]()
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
        check_words(sim.coordinator.journal)
        ends.append(sim.finished.step)
        words += sim.said
    assert min(words[action] for action in ACTIONS) > 2, words
    assert min(ends) < 6
    assert max(ends) >= 6


def check_words(journal: list[ev.Record]) -> None:
    """Scalars are those of the words before them, on their branch; a rollback is done where it was wanted, by the next events."""
    state = st.new_state()
    for record in journal:
        event = record.event
        if isinstance(event, ev.StepPlanned) and event.scalars is not None:
            terms = terms_of(state.terms, event.step)
            assert event.scalars == step_scalars(st.config(state), event.step, terms)
            assert state.rollback_to is None
        if isinstance(event, ev.Rewound):
            assert event.owner
            assert event.step <= state.next_step
        apply(state, event)
        if isinstance(event, ev.Rewound):
            assert (state.next_step, state.rollback_to) == (event.step, None)
            assert all(terms.first_step <= event.step for terms in state.terms)


def planned(num_steps: int = 5, **options: Any) -> st.RunState:
    state = st.new_state()
    for event in (
        toy.plan_run(1, 2, num_steps, **options),
        ev.TermStarted(1, "validator", "n"),
        ev.HardwareClassSet(("golden",), "operator"),
    ):
        apply(state, event)
    return state


def word(action: str, at: int, argument: str = "") -> ev.RunControlled:
    return ev.RunControlled(action, "submitter", at, b"", argument)


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


def test_a_word_is_journaled_once_and_none_but_these() -> None:
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


def test_a_learning_rate_holds_from_the_first_step_that_is_not_planned() -> None:
    state = planned()
    apply(state, ev.StepPlanned(-1, 2, 0, None))
    apply(state, word(SET_LR, 1, "factor 0.5"))
    assert state.terms == [Terms(first_step=0, lr_factor=0.5)]
    state.next_step = 3
    apply(state, word(SET_LR, 2, "value 0.25"))
    apply(state, word(EXTEND, 3, "9"))
    assert state.terms[-1] == Terms(first_step=4, steps=9, lr_factor=0.5, lr_value=0.25, end=9)
    assert st.end_step(state) == 9
    apply(state, word(EXTEND, 4, "12 keep"))
    assert state.terms[-1].steps == 9
    apply(state, word(SET_LR, 5, "factor 1"))
    assert state.terms[-1] == Terms(first_step=4, steps=9, end=12)
    assert terms_of(state.terms, 3).lr_factor == 0.5


@pytest.mark.parametrize(
    ("action", "argument", "said", "over"),
    [
        (SET_LR, "", "no learning rate", False),
        (SET_LR, "factor -1", "no learning rate", False),
        (SET_LR, "factor nan", "no learning rate", False),
        (SET_LR, "factor 1_0", "no learning rate", False),
        (SET_LR, "value 11", "learning rate of 11", False),
        (SET_LR, "factor 1e9", "learning rate of", False),
        (EXTEND, "many", "no number of steps", False),
        (EXTEND, "9 squeeze", "no number of steps", False),
        (EXTEND, "3", "can't end after 3", False),
        (EXTEND, "99999999", "can't end after", False),
        (ROLLBACK, "-1", "no step", False),
        (ROLLBACK, "5", "made 4 updates", False),
        (PAUSE, "now", "takes no argument", False),
        (SET_LR, "value " + "1" * 80, "characters", False),
    ],
)
def test_what_cannot_be_followed_says_why(action: str, argument: str, said: str, over: bool) -> None:
    state = planned()
    state.next_step = 4
    found = objection(state, action, argument)
    assert found is not None
    assert said in found.reason
    assert found.hint
    assert found.over is over
    with pytest.raises(InvariantBroken):
        apply(state, word(action, 1, argument))


def test_words_that_come_too_late() -> None:
    state = planned()
    state.next_step = 5
    for action, argument in ((SET_LR, "factor 2"), (EXTEND, "9")):
        found = objection(state, action, argument)
        assert found is not None
        assert found.over, "all steps are sealed"
    found = objection(state, ROLLBACK, "3")
    assert found is not None
    assert "leads back to step 5" in found.reason
    state.next_step, state.sealed = 2, {step: st.StepLog(None, 2, 0, ()) for step in range(-1, 2)}
    apply(state, word(ROLLBACK, 7, "1"))
    assert (state.rollback_to, state.paused) == (1, True)
    assert objection(state, SET_LR, "factor 2") is not None
    assert not still_follows(state, word(PAUSE, 7))
    assert still_follows(state, word(PAUSE, 8))


def test_a_rollback_is_the_next_thing_that_happens_and_forgets_later_words() -> None:
    state = planned()
    state.next_step, state.sealed = 3, {step: st.StepLog(None, 2, 0, ()) for step in range(-1, 3)}
    state.terms = [Terms(first_step=1, lr_factor=0.5), Terms(first_step=3, end=9)]
    apply(state, word(ROLLBACK, 1, "2"))
    decided = decide_rewind(state, Watch())
    assert [d.what for d in decided] == [ev.Rewound(2, 1, 0, owner=True)]
    with pytest.raises(InvariantBroken, match="owner wants the run at 2"):
        apply(msgspec.structs.replace(state), ev.Rewound(1, 1, 0, owner=True))
    with pytest.raises(InvariantBroken, match="without rewinds"):
        apply(msgspec.structs.replace(state), ev.Rewound(2, 1, 0))
    apply(state, decided[0].what)  # type: ignore[arg-type]
    assert (state.next_step, state.paused, state.rollback_to) == (2, True, None)
    assert state.terms == [Terms(first_step=1, lr_factor=0.5)]
    assert st.end_step(state) == 5
    assert next_planned(state) == []


def test_windows_end_where_the_run_was_stopped() -> None:
    config = msgspec.structs.replace(planned(100).run.config)  # type: ignore[union-attr]
    size = config.audit.window_steps
    assert au.last_of(config, 0, 3) == min(size, 3) - 1
    assert au.num_windows(config, size + 1) == 2
    assert au.num_windows(config) == -(-100 // size)


def test_an_audit_takes_scalars_by_the_words_that_its_case_names() -> None:
    config = st.config(planned(20))
    plan = SimpleNamespace(config=config)
    said = (Terms(first_step=5, lr_factor=0.5),)
    for step, terms in ((4, Terms()), (5, said[0])):
        told = step_scalars(config, step, terms)
        assert _on_schedule(plan, step, told, said)  # type: ignore[arg-type]
        assert _on_schedule(plan, step, told, ()) is (step < 5)  # type: ignore[arg-type]


# ---- whose word it is

RUN_ID = "toy"


ARGUMENTS = {SET_LR: "factor 0.5", EXTEND: "9", ROLLBACK: "0"}


def request(
    action: str, at: int, signer: Signer = FIRST, run_id: str = RUN_ID, argument: str | None = None
) -> ControlRequest:
    said = ARGUMENTS.get(action, "") if argument is None else argument
    signature = sign_statement(signer, PURPOSE_CONTROL, control_statement(run_id, action, at, said))
    return ControlRequest(action, at, signature, said)


def entry() -> RunEntry:
    stored = StoredRun(RUN_ID, "name", 0, FIRST.hotkey, None)  # type: ignore[arg-type]
    return RunEntry(stored, None, None, None)  # type: ignore[arg-type]


def test_only_the_submitters_newer_word_is_taken() -> None:
    state = planned()
    state.next_step = 0
    for action in ACTIONS:
        assert controlled(entry(), state, FIRST.hotkey, request(action, 7)).action == action
    refused: list[tuple[str, ControlRequest, type[Exception]]] = [
        (SECOND.hotkey, request(PAUSE, 7, SECOND), AuthFailed),
        (FIRST.hotkey, request(PAUSE, 7, SECOND), AuthFailed),
        (FIRST.hotkey, request(PAUSE, 7, run_id="another"), AuthFailed),
        (FIRST.hotkey, msgspec.structs.replace(request(PAUSE, 7), action=STOP), AuthFailed),
        (FIRST.hotkey, msgspec.structs.replace(request(SET_LR, 7), argument="factor 2"), AuthFailed),
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
    good, rate = request(STOP, 7), request(SET_LR, 7)
    honest = ev.RunControlled(STOP, FIRST.hotkey, 7, good.signature)
    changed = ev.RunControlled(SET_LR, FIRST.hotkey, 7, rate.signature, rate.argument)
    assert breaches(state, honest) == breaches(state, changed) == []
    for forged in (
        msgspec.structs.replace(honest, action=PAUSE),
        msgspec.structs.replace(honest, time_ns=8),
        msgspec.structs.replace(changed, argument="factor 2"),
        msgspec.structs.replace(honest, by=SECOND.hotkey, signature=request(STOP, 7, SECOND).signature),
    ):
        assert [found.code for found in breaches(state, forged)] == ["control"]
    assert "control" in WRONG
